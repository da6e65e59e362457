package conformance

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var leaksTests = []test{
	{name: "Goroutines", run: goroutinesEnd, alone: true},
	{name: "GoroutinesOfClients", run: goroutinesOfClientsEnd, alone: true},
	{name: "MemoryOfNames", run: namesAreForgotten, alone: true, limit: 2 * time.Minute},
	{name: "TheDeadLeaveNothing", run: theDeadLeaveNothing, permit: true, needs: []Need{Leftovers}},
	{name: "TheLivingLeaveNothing", run: theLivingLeaveNothing, permit: true, needs: []Need{Leftovers}},
	{name: "WhatIsHeldIsSeen", run: whatIsHeldIsSeen, permit: true, needs: []Need{Leftovers}},
}

// goroutinesBackTo checks that no more goroutines run than before.
func (t *T) goroutinesBackTo(before int, after string) {
	t.Helper()
	t.eventually(patience, func() error {
		if n := runtime.NumGoroutine(); n > before {
			return fmt.Errorf("goroutines %s: got %d, want %d as before (L7)\n%s", after, n, before, stacks())
		}
		return nil
	})
}

// goroutinesEnd: whatever became of a lease or a wait, the goroutines that served it end.
func goroutinesEnd(t *T) {
	c, f := t.faulty()
	rival := t.driver()
	use := func(rounds int) {
		for i := range rounds {
			key := fmt.Sprintf("%s/%d", t.key(), i%7)
			l := t.lock(c, key, fencelock.TTL(t.long()))
			switch i % 6 {
			case 0: // a wait that is cancelled
				ctx, cancel := context.WithCancel(t.Context())
				p := t.lockLater(ctx, c, key)
				cancel()
				p.wait(patience)
			case 1: // one that is served
				p := t.lockLater(t.Context(), c, key)
				t.release(l)
				l = p.lease(patience)
			case 2: // a lost reply
				f.on(stepLock, once(lostReply()))
				c.TryLock(t.Context(), key+"/lost")
			case 3: // watched
				_, cancel := l.Context(t.Context())
				defer cancel()
				l.Done()
			case 4: // taken away
				t.give(rival, f.owner(), true, "of somebody else's lease", "L7")
				l.Extend(t.Context(), t.long())
				continue
			}
			t.release(l)
		}
	}
	use(42) // connections and the like are made: every name has seen everything, wherever its server is
	t.awaitQuiet()
	before := runtime.NumGoroutine()
	use(120)
	t.goroutinesBackTo(before, "after 120 leases and waits of one client")
}

// awaitQuiet waits until the number of goroutines has not changed for some time.
func (t *T) awaitQuiet() {
	last, since := runtime.NumGoroutine(), time.Now()
	t.eventually(patience, func() error {
		if n := runtime.NumGoroutine(); n != last {
			last, since = n, time.Now()
		}
		if time.Since(since) < 300*time.Millisecond {
			return fmt.Errorf("goroutines: got their number changing, want it to settle")
		}
		return nil
	})
}

// goroutinesOfClientsEnd: Close ends them all, whatever was under way.
func goroutinesOfClientsEnd(t *T) {
	round := func(key string) {
		c, err := fencelock.New(t.Driver(t.TB), fencelock.WithObserver(func(fencelock.Event) {}))
		if err != nil {
			t.Fatalf("New: got %v, want a client", err)
		}
		t.lock(c, key)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		p := t.lockLater(ctx, c, key)
		line := t.lockLater(ctx, c, key+"/2", fencelock.Holder("me"))
		line.lease(patience)
		if err := c.Close(); err != nil {
			t.Errorf("Close: got %v, want nil", err)
		}
		p.wait(patience)
	}
	round(t.key() + "/warm")
	t.awaitQuiet()
	before := runtime.NumGoroutine()
	for i := range 5 {
		round(fmt.Sprintf("%s/%d", t.key(), i))
	}
	t.goroutinesBackTo(before, "after 5 clients were closed")
}

// namesAreForgotten: a client keeps nothing of a name it is done with.
func namesAreForgotten(t *T) {
	const names, at = 1000, 8
	c := t.client()
	use := func(round string) {
		var all sync.WaitGroup
		for i := range at {
			all.Go(func() {
				for j := range names / at {
					l, err := c.Lock(t.Context(), fmt.Sprintf("%s/%s/%d/%d", t.key(), round, i, j), fencelock.TTL(t.long()))
					if err != nil {
						t.Errorf("Lock of one of many names: got %v, want a lease", err)
						return
					}
					if err := l.Release(t.Context()); err != nil {
						t.Errorf("Release of one of many names: got %v, want nil", err)
					}
				}
			})
		}
		all.Wait()
	}
	objects := func() int {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int(m.HeapObjects)
	}
	use("warm")
	before := objects()
	use("measured")
	t.eventually(patience, func() error {
		if grown := objects() - before; grown > names/2 {
			return fmt.Errorf("objects in memory after %d names were locked and released: got %d more, want no more for each name (L7)", names, grown)
		}
		return nil
	})
}

// theDeadLeaveNothing: what nobody cleans up ends within a TTL.
func theDeadLeaveNothing(t *T) {
	d := t.driver()
	for i := range 3 {
		r := t.request(fmt.Sprintf("%s/%d", t.key(), i), t.short())
		t.asked(d, r, driver.Granted, "that is free", "L1")
		if has[driver.Queue](d) {
			t.asked(d, waiting(t.request(r.Name.Name, t.short()), t.short()), driver.Waiting, "that is held", "W4")
		}
	}
	t.passes(t.short(), func() {})
	for i := range 3 {
		n := t.name(fmt.Sprintf("%s/%d", t.key(), i))
		t.inTime("the end of what dead owners left", t.short()+slack, "L7", func() { t.nothingLeft(n, "after its owners died") })
	}
}

// theLivingLeaveNothing: they clean up at once, not by the TTL.
func theLivingLeaveNothing(t *T) {
	c, f := t.faulty()
	l := t.locker(c)
	for i := range 40 {
		lease := t.lock(l, t.key(), fencelock.TTL(t.long()))
		switch i % 4 {
		case 1:
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			l.Lock(ctx, t.key(), fencelock.TTL(t.long()))
			cancel()
		case 2:
			f.on(stepLock, once(lostReply()))
			l.Lock(t.Context(), t.key(), fencelock.TTL(t.long()))
		case 3:
			p := t.lockLater(t.Context(), l, t.key(), fencelock.TTL(t.long()))
			t.release(lease)
			lease = p.lease(patience)
		}
		t.release(lease)
		t.nothingLeft(t.name(t.key()), "after all was released")
	}
}

// whatIsHeldIsSeen: the harness looks at the right place, or all the tests that find nothing would prove
// nothing.
func whatIsHeldIsSeen(t *T) {
	d := t.driver()
	h := t.request(t.key(), t.long())
	t.asked(d, h, driver.Granted, "that is free", "L1")
	one := len(t.Leftovers(t.TB, h.Name))
	if one == 0 {
		t.Fatalf("left on the server while a lock is held: got nothing, want something: Backend.Leftovers does not see it")
	}
	if has[driver.Queue](d) {
		t.asked(d, waiting(t.request(t.key(), t.long()), t.long()), driver.Waiting, "that is held", "W4")
		if two := len(t.Leftovers(t.TB, h.Name)); two <= one {
			t.Fatalf("left on the server while a lock is held and waited for: got %d entries, want more than %d: Backend.Leftovers does not see the waiter", two, one)
		}
	}
	if other := t.Leftovers(t.TB, t.name(t.key()+"/other")); len(other) > 0 {
		t.Fatalf("left on the server of a free lock: got %q, want nothing: Backend.Leftovers takes one name for another", other)
	}
}
