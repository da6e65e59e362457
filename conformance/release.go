package conformance

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var releaseTests = []test{
	{name: "StepReleasesOnce", run: stepReleasesOnce, permit: true},
	{name: "OnCancelledContext", run: releaseOnCancelledContext, permit: true},
	{name: "FreesAtOnce", run: releaseFreesAtOnce, permit: true},
	{name: "SecondSendsNothing", run: secondReleaseSendsNothing, permit: true},
	{name: "BeliefEndsBeforeItIsSent", run: beliefEndsBeforeReleaseIsSent, permit: true},
	{name: "AfterExpiry", run: releaseAfterExpiry, permit: true},
	{name: "Refused", run: releaseRefused, permit: true},
	{name: "ReplyLost", run: releaseReplyLost, permit: true},
	{name: "RequestLost", run: releaseRequestLost, permit: true},
	{name: "ReplyLostUntilExpiry", run: releaseReplyLostUntilExpiry, permit: true},
	{name: "BackendHangs", run: releaseWhileBackendHangs, permit: true},
	{name: "LostReleaseDelaysByOneTTL", run: lostReleaseDelaysByOneTTL, permit: true},
	{name: "AgainAndAgain", run: lockAgainAndAgain, permit: true},
}

func stepReleasesOnce(t *T) {
	a, b := t.driver(), t.driver()
	r := t.request(t.key(), t.long())
	t.give(a, r.Owner, false, "of an owner that never asked", "L5")
	t.asked(a, r, driver.Granted, "that is free", "L1")
	t.give(b, r.Owner, true, "by another connection", "L7")
	t.give(a, r.Owner, false, "again", "L5")
	t.nothingLeft(r.Name, "after Release")
	r = t.request(t.key(), t.long())
	t.asked(b, r, driver.Granted, "just released", "L7")
	t.give(b, r.Owner, true, "of the holder", "L7")
}

// releaseOnCancelledContext: the typical deferred Release runs when the context of the work has ended.
func releaseOnCancelledContext(t *T) {
	a, b := t.locker(t.client()), t.locker(t.client())
	ctx, cancel := context.WithCancel(t.Context())
	l, err := a.Lock(ctx, t.key(), fencelock.TTL(t.long()))
	if err != nil {
		t.Fatalf("Lock of a free lock: got %v, want a lease", err)
	}
	cancel()
	t.held(l, "after the context that was given to Lock has ended")
	if err := l.Release(ctx); err != nil {
		t.Fatalf("Release on a cancelled context: got %v, want nil (L6)", err)
	}
	t.release(t.lock(b, t.key()))

	l = t.lock(a, t.key(), fencelock.TTL(t.long()))
	past, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	if err := l.Release(past); err != nil {
		t.Fatalf("Release on a context whose deadline has passed: got %v, want nil (L6)", err)
	}
	t.release(t.lock(b, t.key()))
}

func releaseFreesAtOnce(t *T) {
	a, b := t.locker(t.client()), t.locker(t.client())
	for range 50 {
		l := t.lock(a, t.key(), fencelock.TTL(t.long()))
		t.release(l)
		t.is("Err after Release", l.Err(), fencelock.ErrReleased, "L2")
		select {
		case <-l.Done():
		default:
			t.Fatalf("Done after Release: got open, want closed (L2)")
		}
		t.release(t.lock(b, t.key(), fencelock.TTL(t.long())))
	}
	t.nothingLeft(t.name(t.key()), "after all was released")
}

func secondReleaseSendsNothing(t *T) {
	c, f := t.faulty()
	l := t.lock(t.locker(c), t.key())
	t.release(l)
	sent := f.requests()
	for range 3 {
		if err := l.Release(t.Context()); err != nil {
			t.Fatalf("second Release: got %v, want nil (L5)", err)
		}
	}
	t.is("Extend after Release", l.Extend(t.Context(), t.long()), fencelock.ErrReleased, "L3")
	if n := f.requests() - sent; n > 0 {
		t.Fatalf("requests for a lease after its Release returned nil: got %d, want 0 (L3)", n)
	}
}

// beliefEndsBeforeReleaseIsSent: nobody can be granted the lock while its holder still believes.
func beliefEndsBeforeReleaseIsSent(t *T) {
	c, f := t.faulty()
	for range 20 {
		l := t.lock(t.locker(c), t.key())
		gate := make(chan struct{})
		x := f.on(stepRelease, once(late(gate)))
		released := make(chan error, 1)
		go func() { released <- l.Release(t.Context()) }()
		t.await(x.came, "step Release", patience)
		t.is("Err when the release is sent", l.Err(), fencelock.ErrReleased, "L2")
		select {
		case <-l.Done():
		default:
			t.Fatalf("Done when the release is sent: got open, want closed (L2)")
		}
		close(gate)
		if err := <-released; err != nil {
			t.Fatalf("Release: got %v, want nil", err)
		}
	}
}

// releaseAfterExpiry: exclusivity may have been broken, and the caller hears it, at once.
func releaseAfterExpiry(t *T) {
	c := t.client()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.short()), fencelock.NoRenew())
	t.lostInTime(l)
	t.inTime("Release after expiry", 100*time.Millisecond, "L2", func() {
		t.is("Release after expiry", l.Release(t.Context()), fencelock.ErrNotHeld, "L8")
	})
	t.is("second Release after expiry", l.Release(t.Context()), fencelock.ErrNotHeld, "L8")
	t.is("Err after Release of an expired lease", l.Err(), fencelock.ErrLost, "L2")
	t.release(t.lockLater(t.Context(), t.locker(c), t.key()).lease(patience))
}

func releaseRefused(t *T) {
	c, f := t.faulty()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.long()))
	f.on(stepRelease, once(refusal()))
	err := l.Release(t.Context())
	t.is("Release that the server refuses", err, fencelock.ErrUnavailable, "L8")
	t.residue("Release that the server refuses", err, t.long())
	t.is("Err after a Release that the server refused", l.Err(), fencelock.ErrReleased, "L3")
	t.refused(t.locker(t.client()), t.key(), "after a Release that the server refused", "L8")
	t.release(l)
	t.release(t.lock(t.locker(t.client()), t.key()))
}

// residue checks that the error tells until when something may be left, at most one TTL from now.
func (t *T) residue(op string, err error, ttl time.Duration) {
	t.Helper()
	var e *fencelock.OpError
	if !errors.As(err, &e) || e.Until.IsZero() {
		t.Fatalf("%s: got %v without Until, want an *OpError that tells until when something may remain (L8)", op, err)
	}
	if left := time.Until(e.Until); left > ttl {
		t.Fatalf("%s: got Until %v ahead, want at most the TTL %v (L7)", op, left, ttl)
	}
}

// releaseReplyLost: the server freed the lock, and nobody knows. The repeated release finds nothing, before
// the deadline, so it was ours.
func releaseReplyLost(t *T) {
	c, f := t.faulty()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.long()))
	f.on(stepRelease, once(lostReply()))
	err := l.Release(t.Context())
	t.is("Release whose reply is lost", err, fencelock.ErrUncertain, "L8")
	t.residue("Release whose reply is lost", err, t.long())
	t.is("Err after a Release whose reply is lost", l.Err(), fencelock.ErrReleased, "L3")
	other := t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	if err := l.Release(t.Context()); err != nil {
		t.Fatalf("Release again after the reply was lost: got %v, want nil (L5)", err)
	}
	t.refused(t.locker(c), t.key(), "by the next holder after a repeated release", "L4")
	sent := f.requests()
	if err := l.Release(t.Context()); err != nil {
		t.Fatalf("Release after it returned nil: got %v, want nil (L5)", err)
	}
	if n := f.requests() - sent; n > 0 {
		t.Fatalf("requests for a lease after its Release returned nil: got %d, want 0 (L3)", n)
	}
	t.release(other)
}

func releaseRequestLost(t *T) {
	c, f := t.faulty()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.long()))
	f.on(stepRelease, once(lostRequest()))
	t.is("Release that is lost", l.Release(t.Context()), fencelock.ErrUncertain, "L8")
	t.refused(t.locker(t.client()), t.key(), "after a Release that was lost", "L8")
	t.release(l)
	t.release(t.lock(t.locker(t.client()), t.key()))
}

// releaseReplyLostUntilExpiry: after the deadline, an owner that is gone may have expired as well as been
// released.
func releaseReplyLostUntilExpiry(t *T) {
	c, f := t.faulty()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.short()), fencelock.NoRenew())
	f.on(stepRelease, once(lostReply()))
	t.is("Release whose reply is lost", l.Release(t.Context()), fencelock.ErrUncertain, "L8")
	t.passes(2*t.short(), func() {})
	err := l.Release(t.Context())
	t.is("Release again after the deadline", err, fencelock.ErrUncertain, "L5")
	if errors.Is(err, fencelock.ErrNotHeld) {
		t.Fatalf("Release again after the deadline: got %v, want not ErrNotHeld: it may have been ours to the end (L5)", err)
	}
}

// releaseWhileBackendHangs: Release has a bound of its own.
func releaseWhileBackendHangs(t *T) {
	const bound = time.Second
	c, f := t.faulty(fencelock.WithRequestTimeout(bound))
	for what, x := range map[string]*fault{"hangs": f.hang(), "is silent": silence()} {
		key := t.key() + "/" + what[:2]
		l := t.lock(t.locker(c), key, fencelock.TTL(t.long()))
		f.on(stepRelease, once(x))
		t.inTime("Release while the backend "+what, bound+50*time.Millisecond, "L6", func() {
			t.is("Release while the backend "+what, l.Release(context.Background()), fencelock.ErrUncertain, "L8")
		})
		t.release(l)
		t.release(t.lock(t.locker(t.client()), key))
	}
}

// lostReleaseDelaysByOneTTL: who does not try again delays the next one by no more than the TTL, also in the
// same process.
func lostReleaseDelaysByOneTTL(t *T) {
	c, f := t.faulty()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.short()*2))
	f.on(stepRelease, once(lostRequest()))
	t.is("Release that is lost", l.Release(t.Context()), fencelock.ErrUncertain, "L8")
	t.inTime("Lock after a release was lost", 2*t.short()+slack, "L7", func() {
		t.release(t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.short()*2)).lease(patience))
	})
}

func lockAgainAndAgain(t *T) {
	c := t.locker(t.client())
	var last fencelock.Token
	for i := range 200 {
		l, err := c.Lock(t.Context(), t.key(), fencelock.TTL(t.long()))
		if err != nil {
			t.Fatalf("Lock number %d of one client: got %v, want a lease", i, err)
		}
		if l.Token() <= last {
			t.Fatalf("token number %d: got %v after %v, want more (T1)", i, l.Token(), last)
		}
		last = l.Token()
		t.release(l)
	}
	t.nothingLeft(t.name(t.key()), fmt.Sprintf("after %v", last))
}
