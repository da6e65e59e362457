package conformance

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

var lostReplyTests = []test{
	{name: "StepLockIsRepeatable", run: stepLockIsRepeatable, permit: true},
	{name: "StepEnqueueIsRepeatable", run: stepEnqueueIsRepeatable, permit: true, needs: []Need{Queueing}},
	{name: "StepReleaseIsRepeatable", run: stepReleaseIsRepeatable, permit: true, needs: []Need{Queueing}},
	{name: "TryLock", run: tryLockLost(lostReply), permit: true},
	{name: "TryLockRequest", run: tryLockLost(lostRequest), permit: true},
	{name: "TryLockTimesOut", run: tryLockTimesOut, permit: true},
	{name: "TryLockRequestArrivesLate", run: tryLockRequestArrivesLate, permit: true},
	{name: "Lock", run: lockLost, permit: true},
	{name: "CompensationIsRepeated", run: compensationIsRepeated, permit: true},
	{name: "RefusalIsSure", run: refusalIsSure, permit: true},
	{name: "ErrorsAreDistinct", run: errorsAreDistinct, permit: true},
	{name: "NextToken", run: nextTokenLost, needs: []Need{Tokens}},
	{name: "TimeoutFollowsTTL", run: timeoutFollowsTTL},

	{name: "StepHeedsDeadline", run: stepHeedsDeadline, permit: true, needs: []Need{Wired}},
	{name: "TryLockOnTheWire", run: tryLockLostOnTheWire, permit: true, needs: []Need{Wired}},
	{name: "LockOnTheWire", run: lockLostOnTheWire, permit: true, needs: []Need{Wired, Queueing}},
	{name: "ReleaseOnTheWire", run: releaseLostOnTheWire, permit: true, needs: []Need{Wired}},
	{name: "SlowWire", run: slowWire, permit: true, needs: []Need{Wired}},
	{name: "HeldWire", run: heldWire, permit: true, needs: []Need{Wired}},
	{name: "NobodyListens", run: nobodyListens, permit: true, needs: []Need{Wired}},
	{name: "ServerPaused", run: acquireFromPausedServer, permit: true, needs: []Need{Server}},
}

// stepLockIsRepeatable: the same request again is the same lease, not a second one, and never contention.
func stepLockIsRepeatable(t *T) {
	a, b := t.driver(), t.driver()
	r := t.request(t.key(), t.long())
	first := t.asked(a, r, driver.Granted, "that is free", "L1")
	for range 5 {
		again := t.asked(b, r, driver.Granted, "again, over another connection", "L5")
		if again.Token != first.Token {
			t.Fatalf("repeated step for a %s: got token %v, want %v as before (T3)", r.Name.Kind, again.Token, first.Token)
		}
	}
	t.give(a, r.Owner, true, "of the holder", "L7")
	t.give(a, r.Owner, false, "again: there was one lease, not many", "L5")
	next := t.asked(b, t.request(t.key(), t.long()), driver.Granted, "just released", "L5")
	if next.Token <= first.Token {
		t.Fatalf("token after %v: got %v, want more (T1)", first.Token, next.Token)
	}
}

// stepEnqueueIsRepeatable: a repeated enqueue keeps its place and makes no second entry.
func stepEnqueueIsRepeatable(t *T) {
	d := t.driver()
	holder := t.request(t.key(), t.long())
	t.asked(d, holder, driver.Granted, "that is free", "L1")
	first, second := waiting(t.request(t.key(), t.long()), t.long()), waiting(t.request(t.key(), t.long()), t.long())
	t.asked(d, first, driver.Waiting, "that is held", "W4")
	t.asked(d, second, driver.Waiting, "that is held", "W4")
	for range 3 {
		t.asked(d, first, driver.Waiting, "again, while waiting", "L5")
	}
	t.give(d, holder.Owner, true, "of the holder", "L7")
	if a := t.poll(d, first); a.State != driver.Granted {
		t.Fatalf("Poll of the first waiter, that enqueued again meanwhile: got %v, want granted: it keeps its place (L5)", a.State)
	}
	t.give(d, first.Owner, true, "of the first waiter", "L7")
	if a := t.poll(d, second); a.State != driver.Granted {
		t.Fatalf("Poll of the second waiter: got %v, want granted: the first had one entry only (L5)", a.State)
	}
	t.give(d, second.Owner, true, "of the second waiter", "L7")
	t.nothingLeft(holder.Name, "after all waiters were served")
}

// stepReleaseIsRepeatable: a repeated release of the holder takes nothing from the one who got the lock
// by the first.
func stepReleaseIsRepeatable(t *T) {
	d := t.driver()
	holder := t.request(t.key(), t.long())
	t.asked(d, holder, driver.Granted, "that is free", "L1")
	w := waiting(t.request(t.key(), t.long()), t.long())
	t.asked(d, w, driver.Waiting, "that is held", "W4")
	t.give(d, holder.Owner, true, "of the holder", "L7")
	for range 3 {
		t.give(d, holder.Owner, false, "again, after it was handed over", "L5")
	}
	if a := t.poll(d, w); a.State != driver.Granted {
		t.Fatalf("Poll of the waiter after the release came three times more: got %v, want granted (L4)", a.State)
	}
}

// tryLockLost: the caller learns that the outcome is unknown, and whatever there is goes away at once.
func tryLockLost(lost func() *fault) func(*T) {
	return func(t *T) {
		c, f := t.faulty()
		f.on(stepLock, once(lost()))
		l, err := t.locker(c).TryLock(t.Context(), t.key(), fencelock.TTL(t.long()))
		t.uncertain("TryLock whose reply is lost", l, err, t.long())
		t.takesBack(t.key(), "a TryLock whose reply was lost")
		t.nothingLeft(t.name(t.key()), "after a TryLock whose reply was lost")
	}
}

// uncertain checks what an acquisition of unknown outcome returns.
func (t *T) uncertain(op string, l *fencelock.Lease, err error, ttl time.Duration) {
	t.Helper()
	if l != nil {
		t.Fatalf("%s: got a lease, want ErrUncertain (L8)", op)
	}
	t.is(op, err, fencelock.ErrUncertain, "L8")
	for _, wrong := range []error{fencelock.ErrHeld, fencelock.ErrUnavailable} {
		if errors.Is(err, wrong) {
			t.Fatalf("%s: got %v, want not %v (L8)", op, err, wrong)
		}
	}
	t.residue(op, err, ttl)
}

// tryLockTimesOut: the reply comes, but after the time that a request is waited for.
func tryLockTimesOut(t *T) {
	const bound = 100 * time.Millisecond
	c, f := t.faulty(fencelock.WithRequestTimeout(bound))
	gate := make(chan struct{})
	f.on(stepLock, once(lateReply(gate)))
	t.inTime("TryLock whose reply is late", bound+50*time.Millisecond, "L6", func() {
		l, err := t.locker(c).TryLock(t.Context(), t.key(), fencelock.TTL(t.long()))
		t.uncertain("TryLock whose reply is late", l, err, t.long())
	})
	t.takesBack(t.key(), "a TryLock whose reply was late")
	close(gate)
	t.nothingLeft(t.name(t.key()), "after the late reply to a TryLock")
}

// tryLockRequestArrivesLate: the compensation overtakes the request.
func tryLockRequestArrivesLate(t *T) {
	c, f := t.faulty(fencelock.WithRequestTimeout(100 * time.Millisecond))
	gate := make(chan struct{})
	x := f.on(stepLock, once(late(gate)))
	l, err := t.locker(c).TryLock(t.Context(), t.key(), fencelock.TTL(t.long()))
	t.uncertain("TryLock whose request is late", l, err, t.long())
	t.eventually(patience, func() error {
		if f.count(stepRelease) == 0 {
			return errors.New("steps Release after a request of unknown outcome: got 0, want 1 (L7)")
		}
		return nil
	})
	close(gate)
	t.await(x.hit, "the late request", patience)
	t.takesBack(t.key(), "a TryLock whose request arrived after its compensation")
	t.nothingLeft(t.name(t.key()), "after a TryLock whose request arrived late")
}

// lockLost is tryLockLost for one who waits: no entry stays in the queue.
func lockLost(t *T) {
	c, f := t.faulty()
	give := t.holdFor(t.key())
	f.on(stepLock, once(lostReply()))
	l, err := t.locker(c).Lock(t.Context(), t.key(), fencelock.TTL(t.long()))
	t.uncertain("Lock whose reply is lost", l, err, t.long())
	t.awaitReply(f, stepRelease, 1)
	give()
	t.takesBack(t.key(), "a Lock of a held lock whose reply was lost")
	t.nothingLeft(t.name(t.key()), "after a Lock whose reply was lost")
}

// compensationIsRepeated: the trouble that swallowed the reply swallows some compensations as well.
func compensationIsRepeated(t *T) {
	c, f := t.faulty()
	f.on(stepLock, once(lostReply()))
	x := lostRequest()
	x.times = 3
	f.on(stepRelease, x)
	f.on(stepRelease, once(refusal()))
	l, err := t.locker(c).TryLock(t.Context(), t.key(), fencelock.TTL(t.long()))
	t.uncertain("TryLock whose reply is lost", l, err, t.long())
	t.takesOver(t.driver(), t.request(t.key(), t.long()), time.Second)
}

// refusalIsSure: after ErrUnavailable there is nothing to clean up, and nothing is sent.
func refusalIsSure(t *T) {
	c, f := t.faulty()
	for _, wait := range []bool{false, true} {
		f.on(stepLock, once(refusal()))
		call := t.locker(c).TryLock
		if wait {
			call = t.locker(c).Lock
		}
		l, err := call(t.Context(), t.key())
		if l != nil {
			t.Fatalf("Lock that the server refuses: got a lease, want ErrUnavailable (L8)")
		}
		t.is("Lock that the server refuses", err, fencelock.ErrUnavailable, "L8")
		t.is("Lock that the server refuses", err, errRefused, "L8") // the driver's own is kept
	}
	t.release(t.lock(t.locker(c), t.key()))
	if n := f.count(stepRelease); n != 1 {
		t.Fatalf("steps Release after two refused acquisitions and one lease: got %d, want 1: nothing was left by a refusal", n)
	}
}

// errorsAreDistinct: contention, a backend that refuses, one that does not answer, and bad arguments are four
// things.
func errorsAreDistinct(t *T) {
	c, f := t.faulty()
	give := t.holdFor(t.key())
	defer give()
	all := []error{fencelock.ErrHeld, fencelock.ErrUnavailable, fencelock.ErrUncertain, fencelock.ErrInvalid, fencelock.ErrLost,
		fencelock.ErrNotHeld, fencelock.ErrReleased, fencelock.ErrClosed, errors.ErrUnsupported, context.Canceled}
	check := func(what string, want error, name string, opts ...fencelock.Option) {
		t.Helper()
		_, err := t.locker(c).TryLock(t.Context(), name, opts...)
		for _, e := range all {
			if errors.Is(err, e) != (e == want) {
				t.Errorf("TryLock, %s: got %v, which matches %q: %v, want it to match %q only (L8)", what, orNil(err), e, errors.Is(err, e), want)
			}
		}
		var op *fencelock.OpError
		if !errors.As(err, &op) || op.Name != name || op.Kind != t.kind {
			t.Errorf("TryLock, %s: got %#v, want an *OpError with name and kind", what, err)
		}
	}
	check("held by another", fencelock.ErrHeld, t.key())
	check("bad TTL", fencelock.ErrInvalid, t.key(), fencelock.TTL(0))
	f.on(stepLock, once(refusal()))
	check("refused", fencelock.ErrUnavailable, t.key()+"/2")
	f.on(stepLock, once(lostRequest()))
	check("no answer", fencelock.ErrUncertain, t.key()+"/3")
	check("no name", fencelock.ErrInvalid, "")
}

func nextTokenLost(t *T) {
	c, f := t.faulty()
	before, err := c.NextToken(t.Context(), t.key())
	if err != nil {
		t.Fatalf("NextToken: got %v, want a token", err)
	}
	for _, x := range []struct {
		fault *fault
		want  error
	}{{lostReply(), fencelock.ErrUncertain}, {lostRequest(), fencelock.ErrUncertain}, {refusal(), fencelock.ErrUnavailable}} {
		f.on(stepNextToken, once(x.fault))
		token, err := c.NextToken(t.Context(), t.key())
		if token != 0 {
			t.Fatalf("NextToken that fails: got token %v, want none (L8)", token)
		}
		t.is("NextToken that fails", err, x.want, "L8")
	}
	after, err := c.NextToken(t.Context(), t.key())
	if err != nil || after <= before {
		t.Fatalf("NextToken after some that failed: got %v, %v, want more than %v (T1)", after, orNil(err), before)
	}
}

// timeoutFollowsTTL: without another word a request is waited for a third of the TTL, at least 100 ms.
func timeoutFollowsTTL(t *T) {
	f := newFaults(t.Driver(t.TB))
	c, err := fencelock.New(f)
	if err != nil {
		t.Fatalf("New: got %v, want a client", err)
	}
	defer c.Close()
	defer f.heal()
	for _, ttl := range []time.Duration{t.ttl(30 * time.Millisecond), t.ttl(900 * time.Millisecond)} {
		want := max(ttl/3, 100*time.Millisecond)
		f.on(stepLock, once(f.hang()))
		began := time.Now()
		t.inTime("TryLock while the backend hangs", want+50*time.Millisecond, "L6", func() {
			l, err := c.TryLock(t.Context(), fmt.Sprint(t.key(), ttl), fencelock.TTL(ttl))
			t.uncertain("TryLock while the backend hangs", l, err, ttl)
		})
		if took := time.Since(began); took < want {
			t.Fatalf("TryLock with TTL %v while the backend hangs: got its end after %v, want no earlier than %v", ttl, took, want)
		}
	}
}

// deadlineOnly is a context whose end nothing tells: Info.Deadlines promises that its deadline is heeded.
type deadlineOnly struct {
	context.Context
	at time.Time
}

func (c deadlineOnly) Deadline() (time.Time, bool) { return c.at, true }

// stepHeedsDeadline: a step whose answer does not come returns at its deadline, if the driver says so; and
// soon after the end of an ordinary context in any case.
func stepHeedsDeadline(t *T) {
	d, w := t.Wired(t.TB)
	defer d.Close()
	defer w.Pass(servers.Both)
	r := t.request(t.key(), t.long())
	t.asked(d, r, driver.Granted, "that is free", "L1")
	const bound = 300 * time.Millisecond
	contexts := map[string]func() context.Context{"a context": func() context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), bound)
		t.Cleanup(cancel)
		return ctx
	}}
	if d.Info().Deadlines {
		contexts["a deadline that nothing tells"] = func() context.Context {
			return deadlineOnly{context.Background(), time.Now().Add(bound)}
		}
	}
	for what, ctx := range contexts {
		w.Hold(servers.ToClient)
		for step, call := range t.steps(d, r) {
			var err error
			t.inTime("step "+step+" without answer, with "+what, bound+200*time.Millisecond, "L6", func() { err = call(ctx()) })
			if err == nil {
				t.Fatalf("step %s without answer, with %s: got nil, want an error (L8)", step, what)
			}
		}
		w.Pass(servers.ToClient)
	}
	t.eventually(patience, func() error {
		_, err := d.Release(t.Context(), r.Owner)
		return err
	})
}

// steps are all steps of the driver, for an owner that holds.
func (t *T) steps(d driver.Driver, r driver.Request) map[string]func(context.Context) error {
	steps := map[string]func(context.Context) error{
		stepExtend: func(ctx context.Context) error {
			return d.Extend(ctx, []driver.Extension{{Owner: r.Owner, TTL: r.TTL}})[0].Err
		},
		stepRelease: func(ctx context.Context) error {
			_, err := d.Release(ctx, driver.Owner{Name: r.Name, ID: rand.Text()})
			return err
		},
		stepLock: func(ctx context.Context) error {
			var err error
			if s, ok := driver.As[driver.Semaphore](d); ok && r.Name.Kind == driver.KindPermit {
				_, err = s.Acquire(ctx, r)
			} else {
				_, err = d.Lock(ctx, r)
			}
			return err
		},
	}
	if q, ok := driver.As[driver.Queue](d); ok {
		steps[stepPoll] = func(ctx context.Context) error {
			return q.Poll(ctx, []driver.Poll{{Owner: r.Owner, TTL: r.TTL, Claim: r.TTL}})[0].Err
		}
	}
	if f, ok := driver.As[driver.FencingSource](d); ok {
		steps[stepNextToken] = func(ctx context.Context) error {
			_, err := f.NextToken(ctx, r.Name, 0)
			return err
		}
		steps[stepAdvance] = func(ctx context.Context) error { return f.Advance(ctx, r.Name, 1) }
	}
	if l, ok := driver.As[driver.Lister](d); ok {
		steps[stepList] = func(ctx context.Context) error {
			return l.List(ctx, driver.Name{}, func(driver.Holding) bool { return true })
		}
	}
	return steps
}

// ready lets a client's connections be made, so that the next bytes on them are those of the test.
func (t *T) ready(l fencelock.Locker) {
	t.Helper()
	for range 3 {
		t.release(t.lock(l, t.key()+"/ready"))
	}
}

// tryLockLostOnTheWire: the server grants, the reply vanishes, the connection is reset.
func tryLockLostOnTheWire(t *T) {
	c, w := t.wired()
	t.ready(t.locker(c))
	acted := w.DropNextReply(nil)
	l, err := t.locker(c).TryLock(t.Context(), t.key(), fencelock.TTL(t.long()))
	t.await(acted, "the loss of a reply on the wire", patience)
	t.uncertain("TryLock whose reply is lost on the wire", l, err, t.long())
	t.takesBack(t.key(), "a TryLock whose reply was lost on the wire")
	t.nothingLeft(t.name(t.key()), "after a TryLock whose reply was lost on the wire")
	t.works(t.locker(c), "after a reply was lost on the wire")
}

func lockLostOnTheWire(t *T) {
	c, w := t.wired()
	t.ready(t.locker(c))
	give := t.holdFor(t.key())
	acted := w.DropNextReply(nil)
	l, err := t.locker(c).Lock(t.Context(), t.key(), fencelock.TTL(t.long()))
	t.await(acted, "the loss of a reply on the wire", patience)
	t.uncertain("Lock whose reply is lost on the wire", l, err, t.long())
	give()
	t.takesBack(t.key(), "a Lock of a held lock whose reply was lost on the wire")
	t.nothingLeft(t.name(t.key()), "after a Lock whose reply was lost on the wire")
}

func releaseLostOnTheWire(t *T) {
	c, w := t.wired()
	t.ready(t.locker(c))
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.long()))
	acted := w.DropNextReply(nil)
	err := l.Release(t.Context())
	t.await(acted, "the loss of a reply on the wire", patience)
	t.is("Release whose reply is lost on the wire", err, fencelock.ErrUncertain, "L8")
	t.residue("Release whose reply is lost on the wire", err, t.long())
	other := t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	t.eventually(patience, func() error {
		if err := l.Release(t.Context()); err != nil {
			if errors.Is(err, fencelock.ErrNotHeld) {
				t.Fatalf("Release again after its reply was lost: got %v, want nil (L5)", err)
			}
			return fmt.Errorf("Release again after its reply was lost: got %v, want nil (L5)", err)
		}
		return nil
	})
	t.held(other, "of the next holder after a repeated release")
	t.refused(t.locker(c), t.key(), "by the next holder after a repeated release", "L4")
}

// slowWire: a long way to the server makes everything slower, and nothing fail.
func slowWire(t *T) {
	c, w := t.wired()
	w.Delay(servers.Both, 15*time.Millisecond)
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.long()))
	t.refused(t.locker(c), t.key(), "over a slow wire", "L8")
	t.release(l)
	l = t.lock(t.locker(c), t.key(), fencelock.TTL(t.steady()))
	rival := t.locker(t.client())
	t.passes(t.steady(), func() { t.refused(rival, t.key(), "by a holder behind a slow wire", "L1") })
	t.release(l)
}

// heldWire: the reply comes long after the time that a request is waited for.
func heldWire(t *T) {
	c, w := t.wired(fencelock.WithRequestTimeout(time.Second))
	t.ready(t.locker(c))
	w.Hold(servers.ToClient)
	l, err := t.locker(c).TryLock(t.Context(), t.key(), fencelock.TTL(t.long()))
	t.uncertain("TryLock whose reply is held on the wire", l, err, t.long())
	w.Pass(servers.ToClient)
	t.takesBack(t.key(), "a TryLock whose reply was held on the wire")
	t.nothingLeft(t.name(t.key()), "after a TryLock whose reply was held on the wire")
	t.works(t.locker(c), "after the network is back")
}

// nobodyListens: a server that cannot be dialled surely did nothing.
func nobodyListens(t *T) {
	c, w := t.wired()
	if err := w.Refuse(); err != nil {
		t.Fatalf("Refuse: got %v, want nil", err)
	}
	w.Reset()
	// A request that the cut connection took before its end was noticed may have got through.
	var l *fencelock.Lease
	var err error
	t.eventually(patience, func() error {
		l, err = t.locker(c).TryLock(t.Context(), t.key())
		if errors.Is(err, fencelock.ErrUncertain) {
			return err
		}
		return nil
	})
	if l != nil {
		t.Fatalf("TryLock while nobody listens: got a lease, want ErrUnavailable (L8)")
	}
	t.is("TryLock while nobody listens", err, fencelock.ErrUnavailable, "L8")
	if errors.Is(err, fencelock.ErrHeld) {
		t.Fatalf("TryLock while nobody listens: got %v, want ErrUnavailable only (L8)", err)
	}
	if err := w.Accept(); err != nil {
		t.Fatalf("Accept: got %v, want nil", err)
	}
	t.works(t.locker(c), "after somebody listens again")
}

// acquireFromPausedServer: no answer is no refusal, and what the paused server does when it goes on is undone.
func acquireFromPausedServer(t *T) {
	c, d := t.client(fencelock.WithRequestTimeout(time.Second)), t.driver()
	t.ready(t.locker(c))
	warm := t.request(t.key()+"/ready", t.long())
	t.asked(d, warm, driver.Granted, "that is free", "L1")
	t.serverDo("pausing", t.Server.Pause())
	l, err := t.locker(c).TryLock(t.Context(), t.key(), fencelock.TTL(t.long()))
	t.serverDo("resuming", t.Server.Resume())
	t.uncertain("TryLock from a paused server", l, err, t.long())
	t.takesOver(d, t.request(t.key(), t.long()), time.Second)
}
