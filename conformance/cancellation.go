package conformance

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var cancellationTests = []test{
	{name: "StepOnEndedContext", run: stepOnEndedContext, permit: true},
	{name: "EndsWait", run: cancelEndsWait, permit: true},
	{name: "EndsWaitWithoutQueue", run: cancelEndsWaitWithoutQueue, permit: true},
	{name: "EndsWaitInLine", run: cancelEndsWaitInLine, permit: true},
	{name: "WaitForEndsWait", run: waitForEndsWait, permit: true},
	{name: "BeforeTheCall", run: cancelBeforeTheCall, permit: true},
	{name: "DuringRequest", run: cancelDuringRequest, permit: true},
	{name: "DuringLateRequest", run: cancelDuringLateRequest, permit: true},
	{name: "CrossesGrant", run: cancelCrossesGrant, permit: true},
	{name: "WaitOutlivesTTL", run: waitOutlivesTTL, permit: true},
	{name: "LeaseOutlivesContext", run: leaseOutlivesContext, permit: true},
	{name: "CleanupIsBounded", run: cleanupIsBounded, permit: true},
}

// holdFor makes a holder that stays until the test releases it, speaking to the driver.
func (t *T) holdFor(key string) (give func()) {
	t.Helper()
	d := t.driver()
	r := t.request(key, t.long())
	t.asked(d, r, driver.Granted, "that is free", "L1")
	return func() {
		t.Helper()
		t.give(d, r.Owner, true, "of the holder", "L7")
	}
}

// stepOnEndedContext: what is called unavailable has not been done.
func stepOnEndedContext(t *T) {
	d, other := t.driver(), t.driver()
	ask := d.Lock
	if t.kind == driver.KindPermit {
		s, _ := driver.As[driver.Semaphore](d)
		ask = s.Acquire
	}
	r := t.request(t.key(), t.long())
	if _, err := ask(cancelled(), r); !errors.Is(err, driver.ErrUnavailable) {
		// It was done, or may have been.
		if _, err := d.Release(t.Context(), r.Owner); err != nil {
			t.Fatalf("step Release: got %v, want nil", err)
		}
	}
	h := t.request(t.key(), t.long())
	t.asked(other, h, driver.Granted, "that a step on an ended context asked for before", "L8")
	if found, err := d.Release(cancelled(), h.Owner); errors.Is(err, driver.ErrUnavailable) {
		t.give(d, h.Owner, true, "after one on an ended context that was called unavailable", "L8")
	} else if err == nil && !found {
		t.Fatalf("step Release of the holder on an ended context: got false, want true or an error (L8)")
	}
}

// endsWith checks that Lock fails with the context's error soon after the context ends, and answers whether it says that nothing
// is left: on a slow backend the clean-up goes on when the call has returned.
func (t *T) endsWith(what string, want error, lock func() (*fencelock.Lease, error), ended func() time.Time) (clean bool) {
	t.Helper()
	began := time.Now()
	l, err := lock()
	late := time.Since(ended())
	if l != nil {
		t.Fatalf("%s: got a lease, want %v (L6)", what, want)
	}
	t.is(what, err, want, "L8")
	if errors.Is(err, fencelock.ErrHeld) {
		t.Fatalf("%s: got %v, want not ErrHeld as well (L8)", what, err)
	}
	if machine := lateness(began); late > 50*time.Millisecond+hops*machine {
		t.Fatalf("%s: got it %v after the end, want within 50ms (L6); plain signals were up to %v late", what, late, machine)
	}
	return !errors.Is(err, fencelock.ErrUncertain)
}

func (t *T) cancelledWait(l fencelock.Locker, opts ...fencelock.Option) {
	t.Helper()
	give := t.holdFor(t.key())
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	deadline, _ := ctx.Deadline()
	clean := t.endsWith("Lock whose context passes its deadline", context.DeadlineExceeded,
		func() (*fencelock.Lease, error) { return l.Lock(ctx, t.key(), opts...) },
		func() time.Time { return deadline })

	ctx, cancel = context.WithCancel(t.Context())
	var at time.Time
	time.AfterFunc(100*time.Millisecond, func() {
		at = time.Now()
		cancel()
	})
	clean = t.endsWith("Lock whose context is cancelled", context.Canceled,
		func() (*fencelock.Lease, error) { return l.Lock(ctx, t.key(), opts...) },
		func() time.Time { return at }) && clean
	give() // to nobody: were an entry left, it would hold now
	next := t.locker(t.client())
	if clean {
		t.release(t.lock(next, t.key()))
	} else {
		t.release(t.lockLater(t.Context(), next, t.key()).lease(patience))
	}
	t.nothingLeft(t.name(t.key()), "after cancelled waits and the release of the holder")
}

func cancelEndsWait(t *T) { t.cancelledWait(t.locker(t.client()), fencelock.TTL(t.long())) }

// cancelEndsWaitWithoutQueue: a long pause between attempts does not delay the end.
func cancelEndsWaitWithoutQueue(t *T) {
	t.cancelledWait(t.locker(t.clientOn(t.withoutQueue())), fencelock.TTL(t.long()), fencelock.Backoff(10*time.Second, 10*time.Second))
}

// cancelEndsWaitInLine: those who stand behind another waiter of their own client can leave as well, and
// pass their turn on.
func cancelEndsWaitInLine(t *T) {
	for _, d := range []driver.Driver{t.withoutQueue(), t.Driver(t.TB)} {
		c := t.locker(t.clientOn(d))
		give := t.holdFor(t.key())
		var waits []*pending
		var cancels []context.CancelFunc
		for range 5 {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			waits = append(waits, t.lockLater(ctx, c, t.key(), fencelock.TTL(t.long()), fencelock.Backoff(time.Millisecond, 20*time.Millisecond)))
			cancels = append(cancels, cancel)
		}
		for _, i := range []int{2, 0, 4, 1} {
			cancels[i]()
			_, err := waits[i].wait(patience)
			t.is("Lock that was cancelled in line", err, context.Canceled, "L8")
		}
		give()
		t.release(waits[3].lease(patience))
		t.nothingLeft(t.name(t.key()), "after the last of a line was served")
	}
}

func waitForEndsWait(t *T) {
	give := t.holdFor(t.key())
	c := t.locker(t.client())
	began := time.Now()
	const limit = 200 * time.Millisecond
	t.endsWith("Lock with WaitFor", context.DeadlineExceeded,
		func() (*fencelock.Lease, error) {
			return c.Lock(t.Context(), t.key(), fencelock.TTL(t.long()), fencelock.WaitFor(limit))
		},
		func() time.Time { return began.Add(limit) })
	if waited := time.Since(began); waited < limit {
		t.Fatalf("Lock with WaitFor %v: got its end after %v, want not before", limit, waited)
	}
	give()
	l, err := c.Lock(t.Context(), t.key(), fencelock.TTL(t.steady()), fencelock.WaitFor(5*limit))
	if err != nil {
		t.Fatalf("Lock of a free lock with WaitFor: got %v, want a lease", err)
	}
	t.passes(t.ttl(10*limit), func() {})
	t.held(l, "long after WaitFor has passed") // it bounds the wait only
	t.release(l)
}

func cancelBeforeTheCall(t *T) {
	c, f := t.faulty()
	_, err := t.locker(c).TryLock(cancelled(), t.key())
	t.is("TryLock on a cancelled context", err, context.Canceled, "L8")
	_, err = t.locker(c).Lock(cancelled(), t.key())
	t.is("Lock on a cancelled context", err, context.Canceled, "L8")
	if n := f.requests(); n != 0 {
		t.Fatalf("requests on a cancelled context: got %d, want 0", n)
	}
	t.nothingLeft(t.name(t.key()), "after calls on a cancelled context")
}

// cancelDuringRequest: the client library does not look at the context; the reply, a grant, comes after the
// caller has gone. The lock is free long before the TTL.
func cancelDuringRequest(t *T) {
	for _, lock := range []string{"TryLock", "Lock"} {
		c, f := t.faulty()
		gate := make(chan struct{})
		x := f.on(stepLock, once(lateReply(gate)))
		ctx, cancel := context.WithCancel(t.Context())
		var at time.Time
		go func() {
			<-x.hit
			at = time.Now()
			cancel()
		}()
		call := t.locker(c).TryLock
		if lock == "Lock" {
			call = t.locker(c).Lock
		}
		t.endsWith(lock+" that is cancelled during its request", context.Canceled,
			func() (*fencelock.Lease, error) { return call(ctx, t.key(), fencelock.TTL(t.long())) },
			func() time.Time { return at })
		t.takesBack(t.key(), lock+" that was cancelled during its request")
		close(gate)
		t.nothingLeft(t.name(t.key()), "after the reply to a cancelled request came")
	}
}

// takesBack checks that a lock whose acquisition failed is free within a second, not within its TTL.
func (t *T) takesBack(key, after string) {
	t.Helper()
	d := t.driver()
	t.inTime("taking a lock after "+after, time.Second, "L7", func() {
		r := t.request(key, t.long())
		t.takesOver(d, r, t.long())
		t.give(d, r.Owner, true, "of the holder", "L7")
	})
}

// cancelDuringLateRequest: the compensation overtakes the request on its way; it must be sent again when the
// request has been answered.
func cancelDuringLateRequest(t *T) {
	for _, step := range []string{"TryLock", "Lock"} {
		c, f := t.faulty()
		gate := make(chan struct{})
		x := f.on(stepLock, once(late(gate)))
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-x.came
			cancel()
		}()
		call := t.locker(c).TryLock
		if step == "Lock" {
			call = t.locker(c).Lock
		}
		_, err := call(ctx, t.key(), fencelock.TTL(t.long()))
		t.is(step+" that is cancelled before its request arrives", err, context.Canceled, "L8")
		t.eventually(patience, func() error {
			if f.count(stepRelease) == 0 {
				return errors.New("steps Release after a cancelled request: got 0, want 1 (L7)")
			}
			return nil
		})
		close(gate)
		t.await(x.hit, "the late request", patience)
		t.takesBack(t.key(), step+" whose request arrived after its compensation")
		t.nothingLeft(t.name(t.key()), "after a request that arrived after its compensation")
	}
}

// cancelCrossesGrant: the wait is cancelled at the moment of the grant. Whatever Lock answers is true: with a
// lease the lock is held, with an error it is free again at once.
func cancelCrossesGrant(t *T) {
	const rounds = 60
	a, b, probe := t.locker(t.client()), t.locker(t.client()), t.driver()
	got := 0
	for round := range rounds {
		// The request of a wait that was cancelled at once may arrive after its compensation; it is undone when it
		// has been answered.
		l := t.lockLater(t.Context(), a, t.key(), fencelock.TTL(t.long())).lease(patience)
		ctx, cancel := context.WithCancel(t.Context())
		p := t.lockLater(ctx, b, t.key(), fencelock.TTL(t.long()))
		var both sync.WaitGroup
		both.Go(func() {
			if err := l.Release(t.Context()); err != nil {
				t.Errorf("Release of the holder: got %v, want nil", err)
			}
		})
		both.Go(func() {
			time.Sleep(rand.N(time.Duration(1+round%10) * 500 * time.Microsecond)) // so that both orders happen
			cancel()
		})
		both.Wait()
		m, err := p.wait(patience)
		if err == nil {
			got++
			t.asked(probe, t.request(t.key(), t.long()), driver.Held, "after Lock answered a lease", "L8")
			t.release(m)
		} else {
			t.is("Lock that is cancelled as it is granted", err, context.Canceled, "L8")
		}
		r := t.request(t.key(), t.long())
		t.inTime("taking a lock after a cancelled wait that crossed its grant", time.Second, "L7", func() { t.takesOver(probe, r, t.long()) })
		t.give(probe, r.Owner, true, "of the holder", "L7")
	}
	t.Logf("%d of %d waits were granted before they were cancelled", got, rounds)
	t.nothingLeft(t.name(t.key()), "after waits that crossed their grants")
}

// waitOutlivesTTL: the wait is bounded by its context alone, not by any TTL or timeout of a request.
func waitOutlivesTTL(t *T) {
	d := t.driver()
	var holders []driver.Request
	var waits []*pending
	for i, c := range []*fencelock.Client{t.client(fencelock.WithRequestTimeout(t.short())), t.clientOn(t.withoutQueue())} {
		h := t.request(fmt.Sprintf("%s/%d", t.key(), i), t.long())
		t.asked(d, h, driver.Granted, "that is free", "L1")
		holders = append(holders, h)
		waits = append(waits, t.lockLater(t.Context(), t.locker(c), h.Name.Name, fencelock.TTL(t.short()*2)))
	}
	t.passes(5*t.short(), func() {
		for _, p := range waits {
			select {
			case r := <-p.result:
				t.Fatalf("Lock of a held lock: got its end with %v, want it to wait (L6)", orNil(r.err))
			default:
			}
		}
	})
	for i, p := range waits {
		t.give(d, holders[i].Owner, true, "of the holder", "L7")
		t.release(p.lease(patience))
	}
}

// leaseOutlivesContext: the context of Lock is not that of the lease (L6).
func leaseOutlivesContext(t *T) {
	c, rival := t.locker(t.client()), t.locker(t.client())
	ctx, cancel := context.WithCancel(t.Context())
	l, err := c.Lock(ctx, t.key(), fencelock.TTL(t.steady()))
	if err != nil {
		t.Fatalf("Lock of a free lock: got %v, want a lease", err)
	}
	cancel()
	t.passes(t.steady()+t.steady()/2, func() { t.refused(rival, t.key(), "after the context of Lock has ended", "L6") })
	t.held(l, "a TTL after the context of Lock has ended")
	t.release(l)
}

// cleanupIsBounded: the backend stops answering while somebody waits. The cancelled wait returns in time
// all the same, and the entry on the server ends by itself.
func cleanupIsBounded(t *T) {
	c, f := t.faulty()
	give := t.holdFor(t.key())
	ctx, cancel := context.WithCancel(t.Context())
	p := t.lockLater(ctx, t.locker(c), t.key(), fencelock.TTL(t.short()*2))
	t.awaitReply(f, stepLock, 1)
	f.all(f.hang, stepLock, stepPoll, stepRelease)
	began := time.Now()
	cancel()
	_, err := p.wait(patience)
	if took, machine := time.Since(began), lateness(began); took > 50*time.Millisecond+hops*machine {
		t.Fatalf("Lock that is cancelled while the backend hangs: got its end after %v, want within 50ms (L6); plain signals were up to %v late", took, machine)
	}
	t.is("Lock that is cancelled while the backend hangs", err, context.Canceled, "L8")
	// Without a queue there may be nothing that could be left: no request was under way.
	if has[driver.Queue](f) || errors.Is(err, fencelock.ErrUncertain) {
		t.is("Lock that is cancelled while the backend hangs", err, fencelock.ErrUncertain, "L8")
		t.residue("Lock that is cancelled while the backend hangs", err, 2*t.short())
	}
	give()
	t.takesOver(t.driver(), t.request(t.key(), t.long()), 2*t.short())
}
