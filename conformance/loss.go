package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

var lossTests = []test{
	{name: "BackendHangs", run: loses((*faults).hang), permit: true},
	{name: "BackendIsSilent", run: loses(plain(silence)), permit: true},
	{name: "BackendRefuses", run: loses(plain(refusal)), permit: true},
	{name: "RequestsAreLost", run: loses(plain(lostRequest)), permit: true},
	{name: "RepliesAreLost", run: loses(plain(lostReply)), permit: true},
	{name: "ErrReadsTheClock", run: errReadsTheClock, permit: true},
	{name: "LateReplyRevivesNobody", run: lateReplyRevivesNobody, permit: true},
	{name: "TakenAwayIsTold", run: takenAwayIsTold, permit: true},
	{name: "LostLeaseIsGivenBack", run: lostLeaseIsGivenBack, permit: true},
	{name: "ReleaseAfterLossIsQuick", run: releaseAfterLossIsQuick, permit: true},
	{name: "OthersOfTheClientLive", run: othersOfTheClientLive},
	{name: "ContextEnds", run: contextEnds, permit: true},
	{name: "SlowObserverDelaysNothing", run: slowObserverDelaysNothing},
	{name: "ServerPaused", run: pausedServerLoses, needs: []Need{Server}, permit: true},
	{name: "ServerKilled", run: killedServerLoses, needs: []Need{Server}, permit: true},
	{name: "ServerForgot", run: forgetfulServerLoses, needs: []Need{Server}, permit: true},
	{name: "WireCut", run: wireCut, needs: []Need{Wired}, permit: true},
	{name: "WireHoldsReplies", run: wireHoldsReplies, needs: []Need{Wired}, permit: true},
	{name: "WireResets", run: wireResets, needs: []Need{Wired}, permit: true},
}

func plain(make func() *fault) func(*faults) *fault {
	return func(*faults) *fault { return make() }
}

// loses tests that whatever becomes of the extensions, the holder of many leases is told in time by its own
// clock, and nobody else holds before.
func loses(extensions func(*faults) *fault) func(*T) {
	return func(t *T) {
		const leases = 10
		c, f := t.faulty()
		f.on(stepExtend, extensions(f))
		var all []*fencelock.Lease
		for i := range leases {
			all = append(all, t.lock(t.locker(c), fmt.Sprintf("%s/%d", t.key(), i), fencelock.TTL(t.short())))
		}
		first := f.owner()
		rival := t.driver()
		t.lostInTime(all...)
		r := t.request(t.key()+"/0", t.long())
		t.takesOver(rival, r, 2*t.short())
		for _, l := range all {
			t.is("Err after a loss", l.Err(), fencelock.ErrLost, "L2")
			t.is("Release after a loss", l.Release(t.Context()), fencelock.ErrNotHeld, "L3")
		}
		f.heal()
		t.passes(t.short(), func() {}) // what was on its way has been counted
		before := f.extensions(first)
		t.passes(t.short(), func() { t.is("Err after a loss", all[0].Err(), fencelock.ErrLost, "L3") })
		if n := f.extensions(first) - before; n > 0 {
			t.Fatalf("extensions of a lost lease: got %d, want 0 (L3)", n)
		}
	}
}

// errReadsTheClock: Err is right even where nobody waits for Done.
func errReadsTheClock(t *T) {
	c, f := t.faulty()
	f.on(stepExtend, f.hang())
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.short()))
	// A reading of Deadline is early by as long as the process was off the processor meanwhile.
	deadline := l.Deadline()
	for range 10 {
		if d := l.Deadline(); d.After(deadline) {
			deadline = d
		}
	}
	for {
		called := time.Now()
		err := l.Err()
		switch after := called.Sub(deadline); {
		case err == nil && after > time.Millisecond:
			t.Fatalf("Err %v after the deadline: got nil, want ErrLost (L2)", after)
		case err != nil && time.Since(deadline) < -time.Millisecond:
			t.Fatalf("Err %v before the deadline: got %v, want nil (L2)", -time.Since(deadline), err)
		case err != nil:
			t.is("Err after the deadline", err, fencelock.ErrLost, "L2")
			return
		}
	}
}

// lateReplyRevivesNobody: the server extended in time, but the answer came after the deadline.
func lateReplyRevivesNobody(t *T) {
	c, f := t.faulty(fencelock.WithRequestTimeout(t.long()))
	gate := make(chan struct{})
	x := f.on(stepExtend, lateReply(gate))
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.short()))
	t.await(x.hit, "a renewal", patience)
	t.lostInTime(l)
	deadline := l.Deadline()
	close(gate)
	t.passes(t.short(), func() {
		t.is("Err after an extension was answered too late", l.Err(), fencelock.ErrLost, "L3")
	})
	if moved := l.Deadline().Sub(deadline).Abs(); moved > time.Millisecond {
		t.Fatalf("Deadline after an extension was answered too late: got moved by %v, want not (L3)", moved)
	}
	t.is("Extend after a loss", l.Extend(t.Context(), t.long()), fencelock.ErrLost, "L3")
}

// takenAwayIsTold: the first answer that the owner is gone is a loss, long before the deadline, and there
// is no request for it after that.
func takenAwayIsTold(t *T) {
	c, f := t.faulty()
	other := t.driver()
	ttl := t.steady()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(ttl))
	owner := f.owner()
	t.give(other, owner, true, "of somebody else's lease", "L7")
	rival := t.request(t.key(), t.long())
	t.asked(other, rival, driver.Granted, "that was taken away", "L7")
	t.await(l.Done(), "Done of a lease that was taken away", ttl/3+slack+patience/4)
	if left := time.Until(l.Deadline()); left < 0 {
		t.Fatalf("Done of a lease that was taken away: got closed %v after its deadline, want at the first extension (L3)", -left)
	}
	t.is("Err of a lease that was taken away", l.Err(), fencelock.ErrLost, "L3")
	n := f.extensions(owner)
	t.is("Extend of a lease that was taken away", l.Extend(t.Context(), t.long()), fencelock.ErrLost, "L3")
	t.is("Release of a lease that was taken away", l.Release(t.Context()), fencelock.ErrNotHeld, "L4")
	t.passes(ttl, func() {})
	if more := f.extensions(owner) - n; more > 0 {
		t.Fatalf("extensions after the loss of a lease: got %d, want 0 (L3)", more)
	}
	t.asked(other, t.request(t.key(), t.long()), driver.Held, "by the one who took it away", "L4")

	// Without renewal Release finds out.
	l = t.lock(t.locker(c), t.key()+"/2", fencelock.TTL(t.long()), fencelock.NoRenew())
	t.give(other, f.owner(), true, "of somebody else's lease", "L7")
	t.is("Release of a lease that was taken away", l.Release(t.Context()), fencelock.ErrNotHeld, "L4")
	t.release(t.lock(t.locker(c), t.key()+"/2"))
}

// lostLeaseIsGivenBack: the server may think that the lost lease lives; it is told.
func lostLeaseIsGivenBack(t *T) {
	c, f := t.faulty()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.short()), fencelock.NoRenew())
	f.on(stepExtend, once(lostReply()))
	t.is("Extend whose reply is lost", l.Extend(t.Context(), t.long()), fencelock.ErrUncertain, "L8")
	t.lostInTime(l)
	t.takesOver(t.driver(), t.request(t.key(), t.long()), 0)
}

// releaseAfterLossIsQuick: there is nothing to wait for.
func releaseAfterLossIsQuick(t *T) {
	c, f := t.faulty(fencelock.WithRequestTimeout(patience))
	f.on(stepRelease, f.hang())
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.short()), fencelock.NoRenew())
	t.lostInTime(l)
	t.inTime("Release after a loss while the backend hangs", 100*time.Millisecond, "L2", func() {
		t.is("Release after a loss", l.Release(t.Context()), fencelock.ErrNotHeld, "L2")
	})
}

func othersOfTheClientLive(t *T) {
	c, f := t.faulty()
	other := t.driver()
	keep := t.lock(c, t.key()+"/keep", fencelock.TTL(t.steady()))
	l := t.lock(c, t.key(), fencelock.TTL(t.steady()))
	t.give(other, f.owner(), true, "of somebody else's lease", "L7")
	t.await(l.Done(), "Done of a lease that was taken away", t.steady()+patience)
	t.passes(t.steady(), func() { t.held(keep, "of another lease of a client that lost one") })
	t.release(keep)
}

func contextEnds(t *T) {
	c := t.client()
	take := func() *fencelock.Lease {
		return t.lock(t.locker(c), t.key(), fencelock.TTL(t.short()), fencelock.NoRenew())
	}
	l := take()
	ctx, cancel := l.Context(t.Context())
	defer cancel()
	t.lostInTime(l)
	t.await(ctx.Done(), "end of the context of a lost lease", patience)
	t.is("cause of the context of a lost lease", context.Cause(ctx), fencelock.ErrLost, "L2")
	ctx, cancel = l.Context(t.Context())
	defer cancel()
	t.is("cause of a context made after the loss", context.Cause(ctx), fencelock.ErrLost, "L2")

	l = t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.long())).lease(patience)
	ctx, cancel = l.Context(t.Context())
	defer cancel()
	parent, end := context.WithCancel(t.Context())
	ctx2, cancel2 := l.Context(parent)
	defer cancel2()
	end()
	t.await(ctx2.Done(), "end of the context of a lease whose parent ended", patience)
	t.held(l, "after a parent of its context ended")
	if err := ctx.Err(); err != nil {
		t.Fatalf("Err of the context of a held lease: got %v, want nil", err)
	}
	t.release(l)
	t.await(ctx.Done(), "end of the context of a released lease", patience)
	t.is("cause of the context of a released lease", context.Cause(ctx), fencelock.ErrReleased, "L2")
}

// slowObserverDelaysNothing: what a user does with an event, or when told of a loss, holds up no renewal
// and no other loss.
func slowObserverDelaysNothing(t *T) {
	stuck := make(chan struct{})
	c, f := t.faulty(fencelock.WithObserver(func(fencelock.Event) { <-stuck }))
	defer close(stuck)
	keep := t.lock(c, t.key()+"/keep", fencelock.TTL(t.steady()))
	l := t.lock(c, t.key()+"/first", fencelock.TTL(t.long()))
	first := f.owner()
	ctx, cancel := l.Context(t.Context())
	defer cancel()
	context.AfterFunc(ctx, func() { <-stuck })
	t.give(t.driver(), first, true, "of somebody else's lease", "L7")
	t.is("Extend of a lease that was taken away", l.Extend(t.Context(), t.long()), fencelock.ErrLost, "L3")
	t.lostInTime(t.lock(c, t.key()+"/second", fencelock.TTL(t.short()), fencelock.NoRenew()))
	t.passes(2*t.steady(), func() { t.held(keep, "while an observer is stuck") })
	t.release(keep)
}

// works checks that the client can lock, once whatever was in its way is over.
func (t *T) works(l fencelock.Locker, when string) {
	t.Helper()
	var lease *fencelock.Lease
	t.eventually(patience, func() (err error) {
		lease, err = l.TryLock(t.Context(), t.key()+"/works")
		if err != nil && !errors.Is(err, fencelock.ErrUnavailable) && !errors.Is(err, fencelock.ErrUncertain) {
			t.Fatalf("TryLock of a free lock %s: got %v, want a lease, or that the backend does not answer (L8)", when, err)
		}
		if err != nil {
			return fmt.Errorf("TryLock %s: got %v, want a lease", when, err)
		}
		return nil
	})
	t.release(lease)
}

func (t *T) serverDo(what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s the server: %v", what, err)
	}
}

// pausedServerLoses: the server stops where it is; connections stay open.
func pausedServerLoses(t *T) {
	c := t.client()
	var all []*fencelock.Lease
	for i := range 5 {
		all = append(all, t.lock(t.locker(c), fmt.Sprintf("%s/%d", t.key(), i), fencelock.TTL(t.steady())))
	}
	t.serverDo("pausing", t.Server.Pause())
	resume := func() { t.serverDo("resuming", t.Server.Resume()) }
	defer resume()
	t.lostInTime(all...)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	t.inTime("TryLock with a context of 100ms while the server is paused", 200*time.Millisecond, "L6", func() {
		_, err := t.locker(c).TryLock(ctx, t.key())
		// A client library that has to connect anew may give up a moment before the context ends; then
		// nothing was sent.
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, fencelock.ErrUnavailable) {
			t.Fatalf("TryLock while the server is paused: got %v, want the context's error or ErrUnavailable (L8)", orNil(err))
		}
	})
	t.inTime("Release after a loss while the server is paused", 100*time.Millisecond, "L2", func() {
		t.is("Release after a loss", all[0].Release(t.Context()), fencelock.ErrNotHeld, "L2")
	})
	resume()
	t.works(t.locker(c), "after the server goes on")
	for _, l := range all {
		t.is("Err of a lost lease after the server goes on", l.Err(), fencelock.ErrLost, "L3")
	}
}

// killedServerLoses: nobody listens any more.
func killedServerLoses(t *T) {
	c := t.client()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.steady()))
	t.serverDo("killing", t.Server.Kill())
	t.eventually(patience, func() error {
		// The first may still meet the connection as it breaks.
		lease, err := t.locker(c).TryLock(t.Context(), t.key()+"/2", fencelock.TTL(t.short()))
		if lease != nil || errors.Is(err, fencelock.ErrHeld) {
			t.Fatalf("TryLock while the server is down: got %v, %v, want ErrUnavailable (L8)", lease, orNil(err))
		}
		if !errors.Is(err, fencelock.ErrUnavailable) {
			return fmt.Errorf("TryLock while the server is down: got %v, want ErrUnavailable (L8)", orNil(err))
		}
		return nil
	})
	t.lostInTime(l)
	called := false
	err := fencelock.Do(t.Context(), t.locker(c), t.key(), func(context.Context, *fencelock.Lease) error {
		called = true
		return nil
	}, fencelock.WaitFor(100*time.Millisecond))
	if err == nil || called {
		t.Fatalf("Do while the server is down: got %v, function called: %v, want an error and no call (L8)", orNil(err), called)
	}
	t.serverDo("starting", t.Server.Start(t.Context()))
	t.works(t.locker(c), "after the server is back")
	t.is("Err of a lost lease after the server is back", l.Err(), fencelock.ErrLost, "L3")
}

// forgetfulServerLoses: the server comes back without its data, before the lease would have ended. The holder
// learns it from its next extension, and tokens rise all the same.
func forgetfulServerLoses(t *T) {
	c, rival := t.client(), t.locker(t.client())
	ttl := t.ttl(6 * time.Second)
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(ttl))
	t.serverDo("killing", t.Server.Kill())
	t.serverDo("starting", t.Server.StartEmpty(t.Context()))
	t.await(l.Done(), "Done of a lease that the server forgot", ttl)
	t.is("Err of a lease that the server forgot", l.Err(), fencelock.ErrLost, "L3")
	t.works(rival, "after the server is back")
	next := t.lock(rival, t.key())
	if next.Token() <= l.Token() {
		t.Fatalf("token after the server forgot the one before, %v: got %v, want more (T4)", l.Token(), next.Token())
	}
}

func (t *T) wired(opts ...fencelock.ClientOption) (*fencelock.Client, Wire) {
	t.Helper()
	d, w := t.Wired(t.TB)
	c := t.clientOn(d, opts...)
	t.Cleanup(func() { w.Pass(servers.Both) })
	return c, w
}

// wireCut: bytes vanish in both directions; no connection breaks.
func wireCut(t *T) {
	c, w := t.wired()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.steady()))
	w.Drop(servers.Both)
	t.lostInTime(l)
	r := t.request(t.key(), t.long())
	t.takesOver(t.driver(), r, t.steady())
	t.is("Release after a loss", l.Release(t.Context()), fencelock.ErrNotHeld, "L2")
	w.Pass(servers.Both)
	t.works(t.locker(c), "after the network is back")
	t.is("Extend after a loss", l.Extend(t.Context(), t.long()), fencelock.ErrLost, "L3")
	t.refused(t.locker(c), t.key(), "held by the one who took over", "L4")
}

// wireHoldsReplies: the server does what it is asked, but its replies come after the deadline.
func wireHoldsReplies(t *T) {
	c, w := t.wired()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.short()))
	w.Hold(servers.ToClient)
	t.lostInTime(l)
	w.Pass(servers.ToClient)
	t.works(t.locker(c), "after the network is back")
	t.is("Err of a lost lease after the late replies came", l.Err(), fencelock.ErrLost, "L3")
	t.takesOver(t.driver(), t.request(t.key(), t.long()), 2*t.short())
}

// wireResets: connections break, and new ones can be made: no reason to lose anything.
func wireResets(t *T) {
	c, w := t.wired()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.steady()))
	w.Reset()
	t.passes(t.steady(), func() { t.held(l, "after its connections were reset") })
	w.Reset()
	t.works(t.locker(c), "after its connections were reset")
	t.release(l)
}
