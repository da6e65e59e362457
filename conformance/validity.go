package conformance

import (
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

// The tests of this group hold back what tells a grant, and look until when it is then believed.
var validityTests = []test{
	{name: "LatePush", run: latePush, permit: true, needs: []Need{Pushes}},
	{name: "LateReplyToPoll", run: lateReplyToPoll, permit: true, needs: []Need{Queueing}},
	{name: "LateReplyShortensNothing", run: lateReplyShortensNothing, permit: true},
}

// patient is the TTL of waiters that poll rarely: every sixth of it.
func (t *T) patient() time.Duration { return t.ttl(12 * time.Second) }

// latePush: a claim has not begun later than the step that granted it, however late that is told.
func latePush(t *T) {
	c, f := t.faulty()
	give := t.holdFor(t.key())
	f.pushes(noEvents)
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.patient()))
	t.awaitReply(f, stepLock, 1)
	f.on(stepPoll, lostRequest()) // or it would tell
	give()
	claimEnds := time.Now().Add(t.patient() / 2)
	a := t.poll(t.driver(), driver.Request{Owner: f.owner(), TTL: t.patient(), Claim: t.patient() / 2})
	if a.State != driver.Granted {
		t.Fatalf("step Poll of the first waiter of a lock that was given back: got %v, want granted (W4)", a.State)
	}
	pause(t.patient() / 12)
	f.pushes(nil)
	f.push(driver.Event{Kind: driver.EventGranted, Owner: f.owner(), Token: a.Token})
	l := p.lease(patience)
	if over := l.Deadline().Sub(claimEnds); over > 0 {
		t.Fatalf("Deadline of a winner that was told late: got %v after the end of its claim, want before (L2)", over)
	}
	t.release(l)
}

// lateReplyToPoll: a lease that a poll has found counts from the sending of that poll.
func lateReplyToPoll(t *T) {
	c, f := t.faulty()
	granted := t.granted(t.patient())
	f.pushes(noEvents)
	for range runs {
		give := t.holdFor(t.key())
		before := f.count(stepLock)
		p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.patient()))
		t.awaitReply(f, stepLock, before+1)
		give()
		gate := make(chan struct{})
		x := f.on(stepPoll, once(lateReply(gate)))
		select {
		case <-x.hit:
			pause(t.patient() / 12)
			close(gate)
			l := p.lease(patience)
			t.latestDeadline("Lock by a poll", l, x.at, granted)
			t.release(l)
			return
		case r := <-p.result: // a poll was faster than the fault
			f.heal()
			t.done("Lock", r.err)
			t.release(r.lease)
		case <-time.After(t.patient() + patience):
			t.Fatalf("poll of a waiter: got none, want one every %v (W1)", t.patient()/6)
		}
	}
	t.Fatalf("%d waits: each was over before the reply to its poll could be held back", runs)
}

// lateReplyShortensNothing: of two extensions the one that was sent first is answered last.
func lateReplyShortensNothing(t *T) {
	c, f := t.faulty(fencelock.WithRequestTimeout(patience))
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.long()), fencelock.NoRenew())
	gate := make(chan struct{})
	x := f.on(stepExtend, once(lateReply(gate)))
	first := make(chan error, 1)
	go func() { first <- l.Extend(t.Context(), 2*t.long()) }()
	t.await(x.hit, "step Extend", patience)
	pause(100 * time.Millisecond)
	t.done("Extend", l.Extend(t.Context(), 2*t.long()))
	deadline := l.Deadline()
	close(gate)
	t.done("Extend that was answered late", <-first)
	if back := deadline.Sub(l.Deadline()); back > time.Millisecond {
		t.Fatalf("Deadline after the late reply to an earlier extension: got it %v before what it was, want the same (L4)", back)
	}
	t.release(l)
}
