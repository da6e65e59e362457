package conformance

import (
	"sync"
	"time"

	"github.com/fencelock/fencelock"
)

var reentrancyTests = []test{
	{name: "SharesOneLease", run: holderSharesOneLease},
	{name: "ExcludesOthers", run: holderExcludesOthers},
	{name: "LossIsShared", run: holderLossIsShared},
	{name: "ReleaseIsPerHandle", run: holderReleaseIsPerHandle},
	{name: "ManyAtOnce", run: holderManyAtOnce},
	{name: "WaitsForTheFirst", run: holderWaitsForTheFirst},
	{name: "FailureIsNotShared", run: holderFailureIsNotShared},
}

// holderSharesOneLease: one owner on the server, one token, one request; the last Release releases.
func holderSharesOneLease(t *T) {
	c, f := t.faulty()
	rival := t.client()
	var all []*fencelock.Lease
	for i := range 4 {
		take := c.Lock
		if i%2 == 1 {
			take = c.TryLock
		}
		l, err := take(t.Context(), t.key(), fencelock.Holder("me"), fencelock.TTL(t.long()))
		if err != nil {
			t.Fatalf("Lock number %d of one holder: got %v, want a lease", i+1, err)
		}
		all = append(all, l)
		if l.Token() != all[0].Token() || l.Deadline().Sub(all[0].Deadline()).Abs() > time.Second {
			t.Fatalf("lease number %d of one holder: got token %v, deadline %v, want %v, %v (T3)",
				i+1, l.Token(), l.Deadline(), all[0].Token(), all[0].Deadline())
		}
	}
	if n := f.count(stepLock); n != 1 {
		t.Fatalf("steps Lock for %d leases of one holder: got %d, want 1", len(all), n)
	}
	for i, l := range all {
		t.refused(rival, t.key(), "while a handle of the holder is left", "L1")
		if n := f.count(stepRelease); n != 0 {
			t.Fatalf("steps Release after %d of %d releases of one holder: got %d, want 0", i, len(all), n)
		}
		t.release(l)
		t.is("Err of a released handle", l.Err(), fencelock.ErrReleased, "L2")
		for _, left := range all[i+1:] {
			t.held(left, "of a handle whose holder released another one")
		}
	}
	if n := f.count(stepRelease); n != 1 {
		t.Fatalf("steps Release after the last release of one holder: got %d, want 1", n)
	}
	t.release(t.lock(rival, t.key()))
}

// holderExcludesOthers: another id, no id, and the same id in another client are others.
func holderExcludesOthers(t *T) {
	a, b := t.client(), t.client()
	me := fencelock.Holder("me")
	l := t.lock(a, t.key(), me)
	for what, try := range map[string]func() (*fencelock.Lease, error){
		"another holder":                func() (*fencelock.Lease, error) { return a.TryLock(t.Context(), t.key(), fencelock.Holder("you")) },
		"no holder":                     func() (*fencelock.Lease, error) { return a.TryLock(t.Context(), t.key()) },
		"the holder, in another client": func() (*fencelock.Lease, error) { return b.TryLock(t.Context(), t.key(), me) },
	} {
		if _, err := try(); err == nil {
			t.Fatalf("TryLock of %s: got a lease, want ErrHeld (L1)", what)
		} else {
			t.is("TryLock of "+what, err, fencelock.ErrHeld, "L1")
		}
	}
	t.release(t.lock(a, t.key()+"/other", me))
	t.release(l)
}

// holderLossIsShared: all handles are lost, and stay so; the next Lock starts afresh.
func holderLossIsShared(t *T) {
	a, b := t.client(), t.client()
	me := fencelock.Holder("me")
	first := t.lock(a, t.key(), me, fencelock.TTL(t.short()), fencelock.NoRenew())
	second := t.lock(a, t.key(), me)
	t.lostInTime(first, second)
	other := t.lockLater(t.Context(), b, t.key(), fencelock.TTL(t.long())).lease(patience)
	if _, err := a.TryLock(t.Context(), t.key(), me); err == nil {
		t.Fatalf("TryLock of a holder that lost the lock to another: got a lease, want ErrHeld (L1)")
	}
	t.release(other)
	third := t.lock(a, t.key(), me)
	if third.Token() <= other.Token() {
		t.Fatalf("token of a holder after a loss: got %v, want more than %v (T1)", third.Token(), other.Token())
	}
	for _, l := range []*fencelock.Lease{first, second} {
		t.is("Err of a lost handle after its holder locked again", l.Err(), fencelock.ErrLost, "L3")
		t.is("Release of a lost handle after its holder locked again", l.Release(t.Context()), fencelock.ErrNotHeld, "L4")
		t.is("Extend of a lost handle after its holder locked again", l.Extend(t.Context(), t.long()), fencelock.ErrLost, "L3")
	}
	t.refused(b, t.key(), "after lost handles were released", "L4")
	t.release(third)
}

// holderReleaseIsPerHandle: a handle counts once, however often it is released.
func holderReleaseIsPerHandle(t *T) {
	a, b := t.client(), t.client()
	me := fencelock.Holder("me")
	first, second := t.lock(a, t.key(), me), t.lock(a, t.key(), me)
	for range 3 {
		t.release(first)
	}
	t.refused(b, t.key(), "after one of two handles was released three times", "L1")
	t.is("Extend of a released handle", first.Extend(t.Context(), t.long()), fencelock.ErrReleased, "L3")
	if err := second.Extend(t.Context(), t.long()); err != nil {
		t.Fatalf("Extend of the other handle: got %v, want nil", err)
	}
	t.release(second)
	t.release(t.lock(b, t.key()))
}

func holderManyAtOnce(t *T) {
	c, f := t.faulty()
	const goroutines = 40
	var all sync.WaitGroup
	leases := make([]*fencelock.Lease, goroutines)
	for i := range goroutines {
		all.Go(func() {
			l, err := c.Lock(t.Context(), t.key(), fencelock.Holder("me"), fencelock.TTL(t.long()))
			if err != nil {
				t.Errorf("Lock of one of %d of a holder: got %v, want a lease", goroutines, err)
			}
			leases[i] = l
		})
	}
	all.Wait()
	if n := f.count(stepLock); n != 1 {
		t.Errorf("steps Lock for %d leases of one holder at once: got %d, want 1", goroutines, n)
	}
	for _, l := range leases {
		if l == nil || l.Token() != leases[0].Token() {
			t.Fatalf("leases of a holder: got different tokens, want one (T3)")
		}
		all.Go(func() {
			if err := l.Release(t.Context()); err != nil {
				t.Errorf("Release of one of %d of a holder: got %v, want nil", goroutines, err)
			}
		})
	}
	all.Wait()
	t.release(t.lock(t.client(), t.key()))
}

// holderWaitsForTheFirst: while one call of the holder waits for the lock, another waits with it.
func holderWaitsForTheFirst(t *T) {
	c, f := t.faulty()
	give := t.holdFor(t.key())
	me := fencelock.Holder("me")
	first := t.lockLater(t.Context(), c, t.key(), me, fencelock.TTL(t.long()))
	t.awaitReply(f, stepLock, 1)
	if _, err := c.TryLock(t.Context(), t.key(), me); err == nil {
		t.Fatalf("TryLock of a holder that waits: got a lease, want ErrHeld (L1)")
	} else {
		t.is("TryLock of a holder that waits", err, fencelock.ErrHeld, "L1")
	}
	second := t.lockLater(t.Context(), c, t.key(), me, fencelock.TTL(t.long()))
	give()
	a, b := first.lease(patience), second.lease(patience)
	if a.Token() != b.Token() {
		t.Fatalf("tokens of a holder that waited twice: got %v and %v, want one (T3)", a.Token(), b.Token())
	}
	t.release(a)
	t.refused(t.client(), t.key(), "while a handle of the holder is left", "L1")
	t.release(b)
	t.nothingLeft(t.name(t.key()), "after a holder that waited twice")
}

// holderFailureIsNotShared: if the first call fails, the others try themselves.
func holderFailureIsNotShared(t *T) {
	c, f := t.faulty()
	me := fencelock.Holder("me")
	gate := make(chan struct{})
	x := once(lostRequest())
	x.before = gate
	f.on(stepLock, x)
	first := t.lockLater(t.Context(), c, t.key(), me, fencelock.TTL(t.long()))
	t.await(x.came, "step Lock", patience)
	second := t.lockLater(t.Context(), c, t.key(), me, fencelock.TTL(t.long()))
	close(gate)
	_, err := first.wait(patience)
	t.is("Lock of a holder whose request is lost", err, fencelock.ErrUncertain, "L8")
	t.release(second.lease(patience))
}
