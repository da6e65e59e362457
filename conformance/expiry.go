package conformance

import (
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var expiryTests = []test{
	{name: "StepLivesForItsTTL", run: stepLivesForItsTTL, permit: true},
	{name: "StepRepeatRenews", run: stepRepeatRenews, permit: true},
	{name: "StepExtendCountsFromNow", run: stepExtendCountsFromNow, permit: true},
	{name: "StepExtendNeverShortens", run: stepExtendNeverShortens, permit: true},
	{name: "StepExtendBringsNobodyBack", run: stepExtendBringsNobodyBack, permit: true},
	{name: "BeliefEndsBeforeTheLease", run: beliefEndsBeforeTheLease, permit: true},
	{name: "DeadHolderIsSucceeded", run: deadHolderIsSucceeded, permit: true},
	{name: "HolderWithLongTTLIsWaitedFor", run: holderWithLongTTLIsWaitedFor, permit: true},
}

// stepLivesForItsTTL: not shorter than was answered (L2), and not much longer (W3).
func stepLivesForItsTTL(t *T) {
	a, b := t.driver(), t.driver()
	r := t.request(t.key(), t.short())
	sent := time.Now()
	granted := t.asked(a, r, driver.Granted, "that is free", "L1")
	t.takesOver(b, t.request(t.key(), t.long()), r.TTL)
	if lived := time.Since(sent); lived < granted.TTL {
		t.Fatalf("lease of %v, TTL %v answered: got taken over %v after it was asked for, want not before the TTL (L2)", r.TTL, granted.TTL, lived)
	}
}

func stepRepeatRenews(t *T) {
	a, b := t.driver(), t.driver()
	r := t.request(t.key(), t.short())
	first := t.asked(a, r, driver.Granted, "that is free", "L1")
	r.TTL = 2 * t.short()
	sent := time.Now()
	second := t.asked(a, r, driver.Granted, "again, since the reply was lost", "L5")
	if second.Token != first.Token {
		t.Fatalf("repeated step for a %s: got token %v, want %v as before (T3)", r.Name.Kind, second.Token, first.Token)
	}
	t.takesOver(b, t.request(t.key(), t.long()), r.TTL)
	if lived := time.Since(sent); lived < max(r.TTL, second.TTL) {
		t.Fatalf("repeated step for %v, TTL %v answered: got taken over after %v, want not before that (L5)", r.TTL, second.TTL, lived)
	}
}

func stepExtendCountsFromNow(t *T) {
	a, b := t.driver(), t.driver()
	r := t.request(t.key(), t.short())
	granted := t.asked(a, r, driver.Granted, "that is free", "L1")
	sent := time.Now()
	x := t.extend(a, r.Owner, 2*t.short())
	if x.State != driver.Granted || x.Token != granted.Token || x.TTL <= 0 {
		t.Fatalf("step Extend of a holder with token %v: got %v, token %v, TTL %v, want granted, the same token, a TTL (T3)",
			granted.Token, x.State, x.Token, x.TTL)
	}
	t.takesOver(b, t.request(t.key(), t.long()), 2*t.short())
	if lived := time.Since(sent); lived < x.TTL {
		t.Fatalf("extension by %v, TTL %v answered: got taken over after %v, want not before the TTL (L2)", 2*t.short(), x.TTL, lived)
	}
}

// stepExtendNeverShortens: neither an extension nor a repeated request ends a lease earlier (L4).
func stepExtendNeverShortens(t *T) {
	a, b := t.driver(), t.driver()
	r := t.request(t.key(), 3*t.short())
	sent := time.Now()
	granted := t.asked(a, r, driver.Granted, "that is free", "L1")
	x := t.extend(a, r.Owner, t.short())
	if x.State != driver.Granted {
		t.Fatalf("step Extend of a holder: got %v, want granted", x.State)
	}
	if least := granted.TTL - time.Since(sent); x.TTL < least-10*time.Millisecond {
		t.Fatalf("step Extend by %v of a lease with about %v left: got TTL %v, want no less than before (L4)", t.short(), least, x.TTL)
	}
	again := r
	again.TTL = t.short()
	t.asked(a, again, driver.Granted, "again with a shorter TTL", "L5")
	t.takesOver(b, t.request(t.key(), t.long()), r.TTL)
	if lived := time.Since(sent); lived < granted.TTL {
		t.Fatalf("lease of %v after an extension by %v: got taken over after %v, want not before %v (L4)", r.TTL, t.short(), lived, granted.TTL)
	}
}

func stepExtendBringsNobodyBack(t *T) {
	a, b := t.driver(), t.driver()
	r := t.request(t.key(), t.long())
	if x := t.extend(a, r.Owner, t.long()); x.State != driver.Gone {
		t.Fatalf("step Extend of an owner that never asked: got %v, want gone (L3)", x.State)
	}
	t.asked(a, r, driver.Granted, "that is free", "L1")
	t.give(a, r.Owner, true, "of the holder", "L7")
	if x := t.extend(a, r.Owner, t.long()); x.State != driver.Gone {
		t.Fatalf("step Extend after Release: got %v, want gone (L3)", x.State)
	}
	t.nothingLeft(r.Name, "after extensions of nobody")
	t.asked(b, t.request(t.key(), t.long()), driver.Granted, "after extensions of nobody", "L3")
}

// beliefEndsBeforeTheLease: whenever a rival is granted the lock, the holder has stopped believing (L1, L2).
func beliefEndsBeforeTheLease(t *T) {
	b := t.driver()
	for range 3 {
		l := t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.short()), fencelock.NoRenew())
		r := t.request(t.key(), t.long())
		t.takesOver(b, r, t.short())
		t.is("Err of a lease when a rival was granted the lock", l.Err(), fencelock.ErrLost, "L1")
		if left := time.Until(l.Deadline()); left > 0 {
			t.Fatalf("Deadline of a lease when a rival was granted the lock: got %v ahead, want passed (L2)", left)
		}
		t.await(l.Done(), "Done of a lease that a rival took over", patience)
		t.give(b, r.Owner, true, "of the rival", "L7")
	}
}

// deadHolderIsSucceeded: nobody needs to clean up after a holder that died.
func deadHolderIsSucceeded(t *T) {
	dead := t.request(t.key(), t.steady())
	b := t.locker(t.client())
	left := t.asked(t.driver(), dead, driver.Granted, "that is free", "L1").TTL
	t.inTime("Lock after the holder died", left+slack, "W3", func() {
		t.release(t.lockLater(t.Context(), b, t.key(), fencelock.TTL(t.steady())).lease(left + patience))
	})
}

// holderWithLongTTLIsWaitedFor: the TTL of a waiter says nothing about the holder's lease.
func holderWithLongTTLIsWaitedFor(t *T) {
	a, b := t.driver(), t.driver()
	holder := t.request(t.key(), t.long())
	t.asked(a, holder, driver.Granted, "that is free", "L1")
	t.passes(2*t.short(), func() {
		t.asked(b, t.request(t.key(), t.short()), driver.Held, "whose holder has a long TTL", "L1")
	})
	t.asked(b, t.request(t.key(), t.short()), driver.Held, "whose holder has a long TTL", "L1")
}
