package conformance

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var lockAllTests = []test{
	{name: "AllOrNone", run: lockAllOrNone},
	{name: "OrderPreventsDeadlock", run: lockAllInOrder},
	{name: "RenewsWhileWaiting", run: lockAllRenewsWhileWaiting},
	{name: "LossEndsWait", run: lockAllLossEndsWait, needs: []Need{Listing}},
	{name: "EndOfWaitGivesBack", run: lockAllEndOfWaitGivesBack},
	{name: "LostReplyGivesBack", run: lockAllLostReplyGivesBack},
	{name: "FirstLossEndsAll", run: lockAllFirstLossEndsAll, needs: []Need{Listing}},
}

func (t *T) keys(parts ...string) []string {
	var all []string
	for _, p := range parts {
		all = append(all, t.key()+"/"+p)
	}
	return all
}

func lockAllOrNone(t *T) {
	c, rival := t.client(), t.client()
	s, err := c.LockAll(t.Context(), t.keys("b", "a", "c", "a", "b", "B"), fencelock.TTL(t.long()))
	if err != nil {
		t.Fatalf("LockAll of free locks: got %v, want a set", err)
	}
	want := t.keys("B", "a", "b", "c")
	var got []string
	tokens := make(map[fencelock.Token]bool)
	for _, l := range s.Leases() {
		got = append(got, l.Name())
		tokens[l.Token()] = true
		t.refused(rival, l.Name(), "of one of a set", "L1")
		if s.Lease(l.Name()) != l {
			t.Errorf("Lease(%q) of a set: got another, want the one of that name", l.Name())
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("names of a set: got %q, want %q: in byte order, each once", got, want)
	}
	if err := s.Release(t.Context()); err != nil {
		t.Fatalf("Release of a set: got %v, want nil", err)
	}
	if err := s.Release(t.Context()); err != nil {
		t.Fatalf("second Release of a set: got %v, want nil (L5)", err)
	}

	held := t.lock(rival, want[2])
	if s, err := c.TryLockAll(t.Context(), want, fencelock.TTL(t.long())); s != nil || !errors.Is(err, fencelock.ErrHeld) {
		t.Fatalf("TryLockAll with one of four held: got %v, %v, want ErrHeld (L1)", s, orNil(err))
	}
	for _, name := range want {
		if name != held.Name() {
			t.release(t.lock(rival, name))
		}
	}
	t.release(held)
}

// lockAllInOrder: those who name the same locks in other orders do not wait for each other for ever.
func lockAllInOrder(t *T) {
	// Whoever waits for the first in order holds none of the others, which stand before it in its list.
	c, f := t.faulty()
	names := t.keys("b", "a")
	give := t.holdFor(names[1])
	waits := t.lockAllLater(t.Context(), c, names, fencelock.TTL(t.long()))
	t.awaitReply(f, stepLock, 1)
	t.release(t.lock(t.client(), names[0], fencelock.TTL(t.long())))
	give()
	r := t.lockedAll(waits)
	if r.err != nil {
		t.Fatalf("LockAll of %q: got %v, want a set", names, r.err)
	}
	if err := r.set.Release(t.Context()); err != nil {
		t.Fatalf("Release of a set: got %v, want nil", err)
	}

	var all sync.WaitGroup
	orders := [][]string{t.keys("a", "b", "c"), t.keys("c", "b", "a"), t.keys("b", "a"), t.keys("c", "a")}
	for _, names := range orders {
		c := t.client()
		all.Go(func() {
			for range 8 {
				s, err := c.LockAll(t.Context(), names, fencelock.TTL(t.long()))
				if err != nil {
					t.Errorf("LockAll of %q: got %v, want a set", names, err)
					return
				}
				if err := s.Release(t.Context()); err != nil {
					t.Errorf("Release of a set: got %v, want nil", err)
				}
			}
		})
	}
	all.Wait()
}

type lockedAll struct {
	set *fencelock.LeaseSet
	err error
}

func (t *T) lockAllLater(ctx context.Context, c *fencelock.Client, names []string, opts ...fencelock.Option) chan lockedAll {
	result := make(chan lockedAll, 1)
	go func() {
		s, err := c.LockAll(ctx, names, opts...)
		result <- lockedAll{s, err}
	}()
	return result
}

func (t *T) lockedAll(result chan lockedAll) lockedAll {
	t.Helper()
	select {
	case r := <-result:
		return r
	case <-time.After(patience):
		t.Fatalf("LockAll: got no return within %v, want one", patience)
		return lockedAll{}
	}
}

// lockAllRenewsWhileWaiting: what is taken lives while the next is waited for, also without renewal afterwards.
func lockAllRenewsWhileWaiting(t *T) {
	for _, opts := range [][]fencelock.Option{{fencelock.TTL(t.steady())}, {fencelock.TTL(t.steady()), fencelock.NoRenew()}} {
		c, f := t.faulty()
		rival := t.client()
		names := t.keys("a", "b")
		held := t.lock(rival, names[1], fencelock.TTL(t.long()))
		result := t.lockAllLater(t.Context(), c, names, opts...)
		t.awaitReply(f, stepLock, 2)
		t.passes(t.steady()*3/2, func() { t.refused(rival, names[0], "of the first of a set, while the next is waited for", "L1") })
		t.release(held)
		r := t.lockedAll(result)
		if r.err != nil {
			t.Fatalf("LockAll: got %v, want a set", r.err)
		}
		if err := r.set.Err(); err != nil {
			t.Fatalf("Err of a set: got %v, want nil", err)
		}
		if len(opts) == 2 {
			t.lostInTime(r.set.Leases()...)
			continue
		}
		if err := r.set.Release(t.Context()); err != nil {
			t.Fatalf("Release of a set: got %v, want nil", err)
		}
	}
}

// lockAllLossEndsWait: there is no point in waiting for the rest.
func lockAllLossEndsWait(t *T) {
	c, f := t.faulty()
	names := t.keys("a", "b")
	give := func() func() {
		d := t.driver()
		r := t.request(names[1], t.long())
		t.asked(d, r, driver.Granted, "that is free", "L1")
		return func() { t.give(d, r.Owner, true, "of the holder", "L7") }
	}()
	result := t.lockAllLater(t.Context(), c, names, fencelock.TTL(t.steady()))
	t.awaitReply(f, stepExtend, 1)
	d := t.driver()
	l := t.list(d, driver.Name{Kind: driver.KindLock, Name: names[0]})
	for o := range l {
		t.give(d, o, true, "of somebody else's lease", "L7")
	}
	r := t.lockedAll(result)
	if r.set != nil {
		t.Fatalf("LockAll that lost its first lease: got a set, want ErrLost (L2)")
	}
	t.is("LockAll that lost its first lease", r.err, fencelock.ErrLost, "L2")
	give()
	for _, name := range names {
		t.release(t.lock(t.client(), name))
	}
}

func lockAllEndOfWaitGivesBack(t *T) {
	c, rival := t.client(), t.client()
	names := t.keys("a", "b", "c")
	held := t.lock(rival, names[2], fencelock.TTL(t.long()))
	s, err := c.LockAll(t.Context(), names, fencelock.TTL(t.long()), fencelock.WaitFor(time.Second))
	if s != nil {
		t.Fatalf("LockAll with WaitFor: got a set, want the end of the wait")
	}
	t.is("LockAll with WaitFor", err, context.DeadlineExceeded, "L6")
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(200*time.Millisecond, cancel)
	s, err = c.LockAll(ctx, names, fencelock.TTL(t.long()))
	if s != nil {
		t.Fatalf("LockAll that is cancelled: got a set, want the context's error")
	}
	t.is("LockAll that is cancelled", err, context.Canceled, "L6")
	t.release(held)
	for _, name := range names {
		t.release(t.lock(rival, name))
		t.nothingLeft(driver.Name{Kind: driver.KindLock, Name: name}, "after a LockAll that was cancelled")
	}
}

func lockAllLostReplyGivesBack(t *T) {
	c, f := t.faulty()
	names := t.keys("a", "b", "c")
	pass := &fault{times: 2}
	f.on(stepLock, pass)
	f.on(stepLock, once(lostReply()))
	s, err := c.LockAll(t.Context(), names, fencelock.TTL(t.long()))
	if s != nil {
		t.Fatalf("LockAll whose third reply is lost: got a set, want ErrUncertain (L8)")
	}
	t.is("LockAll whose third reply is lost", err, fencelock.ErrUncertain, "L8")
	for _, name := range names {
		t.takesBack(name, "a LockAll whose reply was lost")
	}
}

func lockAllFirstLossEndsAll(t *T) {
	c := t.client()
	s, err := c.LockAll(t.Context(), t.keys("a", "b"), fencelock.TTL(t.long()))
	if err != nil {
		t.Fatalf("LockAll of free locks: got %v, want a set", err)
	}
	ctx, cancel := s.Context(t.Context())
	defer cancel()
	deadline := s.Leases()[0].Deadline()
	for _, l := range s.Leases() {
		if l.Deadline().Before(deadline) {
			deadline = l.Deadline()
		}
	}
	if d := s.Deadline().Sub(deadline).Abs(); d > 10*time.Millisecond {
		t.Fatalf("Deadline of a set: got %v from the earliest of its leases, want that one", d)
	}
	second := s.Leases()[1]
	d := t.driver()
	for o := range t.list(d, driver.Name{Kind: driver.KindLock, Name: second.Name()}) {
		t.give(d, o, true, "of somebody else's lease", "L7")
	}
	t.is("Extend of a lease that was taken away", second.Extend(t.Context(), t.long()), fencelock.ErrLost, "L3")
	t.await(s.Done(), "Done of a set that lost one", patience)
	t.await(ctx.Done(), "end of the context of a set that lost one", patience)
	t.is("Err of a set that lost one", s.Err(), fencelock.ErrLost, "L2")
	t.is("cause of the context of a set that lost one", context.Cause(ctx), fencelock.ErrLost, "L2")
	t.is("Release of a set that lost one", s.Release(t.Context()), fencelock.ErrNotHeld, "L4")
	t.release(t.lock(t.client(), s.Leases()[0].Name()))
}
