package conformance

import (
	"sync"
	"sync/atomic"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var exclusionTests = []test{
	{name: "StepRefusesRival", run: stepRefusesRival, permit: true},
	{name: "RivalIsRefused", run: rivalIsRefused, permit: true},
	{name: "SameClientIsRefused", run: sameClientIsRefused, permit: true},
	{name: "KindsAreApart", run: kindsAreApart, needs: []Need{Semaphores}},
	{name: "OneOfMany", run: oneOfMany, permit: true},
}

func stepRefusesRival(t *T) {
	a, b := t.driver(), t.driver()
	first := t.request(t.key(), t.long())
	t.asked(a, first, driver.Granted, "that is free", "L1")
	for range 3 {
		t.asked(b, t.request(t.key(), t.long()), driver.Held, "held by another connection", "L1")
		t.asked(a, t.request(t.key(), t.long()), driver.Held, "held by another owner of the same connection", "L1")
	}
	t.give(a, first.Owner, true, "of the holder", "L7")
	t.asked(b, t.request(t.key(), t.long()), driver.Granted, "just released", "L7")
}

func rivalIsRefused(t *T) {
	a, b := t.locker(t.client()), t.locker(t.client())
	l := t.lock(a, t.key())
	t.refused(b, t.key(), "while held", "L1")
	t.refused(b, t.key(), "while held, again", "L1")
	t.release(l)
	l = t.lock(b, t.key())
	t.refused(a, t.key(), "while held by the other client", "L1")
	t.release(l)
}

func sameClientIsRefused(t *T) {
	a := t.locker(t.client())
	l := t.lock(a, t.key())
	t.refused(a, t.key(), "of the holder's own client", "L1")
	t.release(l)
	t.release(t.lock(a, t.key()))
}

func kindsAreApart(t *T) {
	c := t.client()
	l := t.lock(c, t.key())
	p := t.lock(fencelock.Permits(c, 1), t.key())
	t.refused(c, t.key(), "of the lock beside a semaphore of the same name", "L1")
	t.refused(fencelock.Permits(c, 1), t.key(), "of the permit beside a lock of the same name", "S1")
	t.release(l)
	t.refused(fencelock.Permits(c, 1), t.key(), "of the permit after the lock of the same name was released", "S1")
	t.release(p)
}

// oneOfMany lets many try at the same moment.
func oneOfMany(t *T) {
	const clients, each, rounds = 4, 5, 5
	lockers := make([]fencelock.Locker, clients)
	for i := range lockers {
		lockers[i] = t.locker(t.client())
	}
	for range rounds {
		var got atomic.Pointer[fencelock.Lease]
		var all sync.WaitGroup
		start := make(chan struct{})
		for i := range clients * each {
			all.Go(func() {
				<-start
				l, err := lockers[i%clients].TryLock(t.Context(), t.key())
				switch {
				case err == nil && !got.CompareAndSwap(nil, l):
					t.Errorf("TryLock of %d at once: got a second lease, want one (L1)", clients*each)
				case err != nil:
					t.checkIs("TryLock of many at once", err, fencelock.ErrHeld, "L1")
				}
			})
		}
		close(start)
		all.Wait()
		l := got.Load()
		if l == nil {
			t.Fatalf("TryLock of %d at once on a free lock: got no lease, want one (W4)", clients*each)
		}
		t.release(l)
	}
}
