package conformance

import (
	"context"
	"crypto/rand"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var renewalTests = []test{
	{name: "HoldsBeyondTTL", run: holdsBeyondTTL, permit: true},
	{name: "HoldsUnderLoad", run: holdsUnderLoad, alone: true},
	{name: "BeginsAtAThird", run: renewalBeginsAtAThird, permit: true},
	{name: "NoRenewEnds", run: noRenewEnds, permit: true},
	{name: "ValidityCountsFromSending", run: validityCountsFromSending, permit: true},
	{name: "FailureIsRetried", run: failureIsRetried, permit: true},
	{name: "SlowRepliesDoNotPileUp", run: slowRepliesDoNotPileUp},
	{name: "EndsAtCallOfRelease", run: endsAtCallOfRelease, permit: true},
	{name: "LateExtensionCreatesNothing", run: lateExtensionCreatesNothing, permit: true},
	{name: "ExtendMovesDeadline", run: extendMovesDeadline, permit: true},
	{name: "FailedExtendMovesNothing", run: failedExtendMovesNothing, permit: true},
	{name: "MaxHoldEnds", run: maxHoldEnds, permit: true},
	{name: "StepExtendsEachOfBatch", run: stepExtendsEachOfBatch},
}

// holdsBeyondTTL: work may take longer than the TTL, and schedulers on three clients never run it twice.
func holdsBeyondTTL(t *T) {
	a := t.locker(t.client())
	rivals := []fencelock.Locker{t.locker(t.client()), t.locker(t.client())}
	l := t.lock(a, t.key(), fencelock.TTL(t.steady()))
	first := l.Deadline()
	t.passes(2*t.steady(), func() {
		for _, b := range rivals {
			t.refused(b, t.key(), "while the holder works for longer than its TTL", "L1")
		}
	})
	t.held(l, "after two TTLs")
	if d := l.Deadline(); !d.After(first) {
		t.Fatalf("Deadline after two TTLs: got no move, want a later one (L2)")
	}
	t.release(l)
	t.release(t.lock(rivals[0], t.key()))
}

// holdsUnderLoad: renewal gets its turn on a machine whose processors are all busy.
func holdsUnderLoad(t *T) {
	a, b := t.locker(t.client()), t.locker(t.client())
	stop := make(chan struct{})
	var busy sync.WaitGroup
	for range 2 * runtime.GOMAXPROCS(0) {
		busy.Go(func() {
			for {
				select {
				case <-stop:
					return
				default: //nolint:staticcheck // it spins on purpose
				}
			}
		})
	}
	defer busy.Wait()
	defer close(stop)
	l := t.lock(a, t.key(), fencelock.TTL(t.steady()))
	t.passes(t.steady()*4/3, func() { t.refused(b, t.key(), "on a busy machine", "L1") })
	t.held(l, "after more than a TTL on a busy machine")
}

// renewalBeginsAtAThird: of the TTL, so that there is time for several more tries before the lease ends.
func renewalBeginsAtAThird(t *T) {
	c, f := t.faulty()
	x := f.on(stepExtend, refusal())
	before := time.Now()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.steady()))
	taken := time.Now()
	t.lostInTime(l)
	third := t.steady() / 3
	if early := third - x.at.Sub(before); early > time.Millisecond {
		t.Fatalf("first renewal with TTL %v: got sent %v earlier than after a third of it", t.steady(), early)
	}
	if late := x.at.Sub(taken) - third; late > 50*time.Millisecond+2*lateness(before) {
		t.Fatalf("first renewal with TTL %v: got sent %v later than after a third of it; plain signals were up to %v late", t.steady(), late, lateness(before))
	}
	if n := f.count(stepExtend); n < 3 {
		t.Fatalf("renewals of a lease while the backend refuses them: got %d, want at least 3 before it is lost", n)
	}
}

func noRenewEnds(t *T) {
	c, f := t.faulty()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.short()), fencelock.NoRenew())
	deadline := l.Deadline()
	t.lostInTime(l)
	if moved := l.Deadline().Sub(deadline).Abs(); moved > time.Millisecond {
		t.Fatalf("Deadline of a lease without renewal: got moved by %v, want not at all (L2)", moved)
	}
	if n := f.count(stepExtend); n != 0 {
		t.Fatalf("steps Extend for a lease without renewal: got %d, want 0", n)
	}
	t.takesOver(t.driver(), t.request(t.key(), t.long()), t.short())
}

// margin is what belief ends before a lease of that TTL does.
func margin(ttl time.Duration) time.Duration { return max(ttl/100, 2*time.Millisecond) }

// latestDeadline checks that the lease is believed no longer than TTL - margin after a request that was
// surely sent before then.
func (t *T) latestDeadline(op string, l *fencelock.Lease, sentBefore time.Time, ttl time.Duration) {
	t.Helper()
	if over := l.Deadline().Sub(sentBefore.Add(ttl - margin(ttl))); over > 0 {
		t.Fatalf("Deadline after %s whose reply came late: got %v after the time of sending + TTL - margin, want not later (L2)", op, over)
	}
}

// validityCountsFromSending: the time a reply takes is no time of belief.
func validityCountsFromSending(t *T) {
	c, f := t.faulty()
	ttl := t.steady()
	granted := t.granted(ttl)
	delay := ttl / 8 // less than the request timeout
	slowly := func(step string) (*fault, func()) {
		gate := make(chan struct{})
		x := f.on(step, once(lateReply(gate)))
		return x, func() {
			t.await(x.hit, "step "+step, patience)
			time.AfterFunc(delay, func() { close(gate) })
		}
	}
	x, answer := slowly(stepLock)
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(ttl))
	answer()
	l := p.lease(patience)
	t.latestDeadline("Lock", l, x.at, granted)

	before := l.Deadline()
	x, answer = slowly(stepExtend)
	answer()
	t.eventually(patience, func() error {
		if !l.Deadline().After(before.Add(time.Millisecond)) {
			return fmt.Errorf("Deadline after a renewal: got no move, want a later one (L2)")
		}
		return nil
	})
	if f.count(stepExtend) == 1 {
		t.latestDeadline("a renewal", l, x.at, granted)
	}
	t.release(l)

	l = t.lock(t.locker(c), t.key(), fencelock.TTL(ttl), fencelock.NoRenew())
	x, answer = slowly(stepExtend)
	extended := make(chan error, 1)
	go func() { extended <- l.Extend(t.Context(), ttl) }()
	answer()
	if err := <-extended; err != nil {
		t.Fatalf("Extend of a held lease: got %v, want nil", err)
	}
	t.latestDeadline("Extend", l, x.at, granted)
}

func failureIsRetried(t *T) {
	c, f := t.faulty()
	for what, x := range map[string]*fault{"is refused": refusal(), "loses its reply": lostReply(), "is lost": lostRequest(),
		"is not answered": silence()} {
		l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.steady()))
		first := l.Deadline()
		f.on(stepExtend, once(x))
		t.await(x.hit, "a renewal", patience)
		t.eventually(patience, func() error {
			if err := l.Err(); err != nil {
				t.Fatalf("Err after a renewal that %s: got %v, want nil: there is time to try again (L2)", what, err)
			}
			if !l.Deadline().After(first.Add(time.Millisecond)) {
				return fmt.Errorf("Deadline after a renewal that %s: got no move, want a later one by trying again", what)
			}
			return nil
		})
		t.release(l)
	}
}

// slowRepliesDoNotPileUp: a lease has one renewal going on, however slow the answers.
func slowRepliesDoNotPileUp(t *T) {
	const leases = 20
	c, f := t.faulty()
	gate := make(chan struct{})
	defer close(gate)
	f.on(stepExtend, lateReply(gate))
	all := make([]*fencelock.Lease, leases)
	t.ready(c)
	var taking sync.WaitGroup
	began := time.Now()
	for i := range leases { // at once, so that they fall due together
		taking.Go(func() { all[i] = t.lock(c, fmt.Sprintf("%s/%d", t.key(), i), fencelock.TTL(t.steady())) })
	}
	taking.Wait()
	took := time.Since(began)
	if t.Failed() {
		return
	}
	t.lostInTime(all...)
	// One batch at half a period from each other: six in a TTL, for all leases that were taken within half a period,
	// and some more.
	most := 6*(1+int(took/(t.steady()/6))) + 6
	if n := f.atOnce(stepExtend); n > most {
		t.Fatalf("steps Extend under way at a time for %d leases that a client took within %v, none answered: got %d, want at most %d (W2)", leases, took, n, most)
	}
}

// endsAtCallOfRelease: from the call of Release on nothing extends the lease, whether the release
// succeeds or not.
func endsAtCallOfRelease(t *T) {
	c, f := t.faulty()
	ttl := t.ttl(1500 * time.Millisecond)
	other := t.lock(t.locker(c), t.key()+"/other", fencelock.TTL(ttl))
	control := f.owner()
	renewals := func(n int) {
		t.Helper()
		n += f.extensions(control)
		t.eventually(patience, func() error {
			t.held(other, "of another lease of the client")
			if got := f.extensions(control); got < n {
				return fmt.Errorf("renewals of another lease of the client: got %d, want %d", got, n)
			}
			return nil
		})
	}

	l := t.lock(t.locker(c), t.key(), fencelock.TTL(ttl))
	owner := f.owner()
	renewals(1)
	gate := make(chan struct{})
	x := f.on(stepRelease, once(late(gate)))
	released := make(chan error, 1)
	go func() { released <- l.Release(context.WithoutCancel(t.Context())) }()
	t.await(x.came, "step Release", patience)
	t.is("Err during Release", l.Err(), fencelock.ErrReleased, "L2")
	renewals(1) // a batch that was on its way
	before := f.extensions(owner)
	renewals(3)
	if n := f.extensions(owner) - before; n > 0 {
		t.Fatalf("extensions after the call of Release: got %d, want 0 (L3)", n)
	}
	close(gate)
	<-released

	l = t.lock(t.locker(c), t.key()+"/2", fencelock.TTL(ttl))
	owner = f.owner()
	f.on(stepRelease, once(lostRequest()))
	t.is("Release that is lost", l.Release(t.Context()), fencelock.ErrUncertain, "L8")
	renewals(1)
	before = f.extensions(owner)
	renewals(3)
	if n := f.extensions(owner) - before; n > 0 {
		t.Fatalf("extensions after a Release that failed: got %d, want 0 (L3)", n)
	}
	t.takesOver(t.driver(), t.request(t.key()+"/2", t.long()), ttl)
}

// lateExtensionCreatesNothing: an extension that the network delivers after the release does nothing.
func lateExtensionCreatesNothing(t *T) {
	c, f := t.faulty()
	gate := make(chan struct{})
	x := f.on(stepExtend, once(late(gate)))
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.steady()))
	t.await(x.came, "a renewal", patience)
	t.release(l)
	close(gate)
	t.await(x.hit, "the late renewal", patience)
	t.nothingLeft(t.name(t.key()), "after an extension that came after the release")
	t.release(t.lock(t.locker(t.client()), t.key()))
}

func extendMovesDeadline(t *T) {
	c := t.client()
	for _, opts := range [][]fencelock.Option{{fencelock.TTL(t.short()), fencelock.NoRenew()}, {fencelock.TTL(t.steady())}} {
		l := t.lock(t.locker(c), t.key(), opts...)
		before := l.Deadline()
		if err := l.Extend(t.Context(), t.long()); err != nil {
			t.Fatalf("Extend of a held lease: got %v, want nil", err)
		}
		long := l.Deadline()
		if moved := long.Sub(before); moved < t.long()/2 {
			t.Fatalf("Deadline after Extend by %v: got later by %v, want about that (L2)", t.long(), moved)
		}
		if err := l.Extend(t.Context(), t.short()); err != nil {
			t.Fatalf("Extend by a shorter TTL: got %v, want nil", err)
		}
		if moved := long.Sub(l.Deadline()); moved > time.Millisecond {
			t.Fatalf("Deadline after Extend by a shorter TTL: got earlier by %v, want not (L4)", moved)
		}
		t.passes(2*t.short(), func() { t.refused(t.locker(c), t.key(), "within an extension by hand", "L1") })
		t.held(l, "within an extension by hand")
		t.release(l)
		t.is("Extend after Release", l.Extend(t.Context(), t.long()), fencelock.ErrReleased, "L3")
	}
}

func failedExtendMovesNothing(t *T) {
	c, f := t.faulty()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.long()), fencelock.NoRenew())
	deadline := l.Deadline()
	for _, x := range []struct {
		fault *fault
		want  error
	}{
		{refusal(), fencelock.ErrUnavailable},
		{lostReply(), fencelock.ErrUncertain},
		{lostRequest(), fencelock.ErrUncertain},
	} {
		f.on(stepExtend, once(x.fault))
		t.is("Extend that fails", l.Extend(t.Context(), 2*t.long()), x.want, "L8")
		t.held(l, "after an Extend that failed")
		if moved := l.Deadline().Sub(deadline).Abs(); moved > time.Millisecond {
			t.Fatalf("Deadline after an Extend that failed: got moved by %v, want not (L2)", moved)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	x := f.on(stepExtend, once(f.hang()))
	extended := make(chan error, 1)
	go func() { extended <- l.Extend(ctx, 2*t.long()) }()
	t.await(x.came, "step Extend", patience)
	cancel()
	select {
	case err := <-extended:
		t.is("Extend whose context was cancelled", err, context.Canceled, "L8")
	case <-time.After(patience):
		t.Fatalf("Extend whose context was cancelled: got no return, want one")
	}
	t.held(l, "after an Extend that was cancelled")
	t.is("Extend on a context that has ended", l.Extend(cancelled(), t.long()), context.Canceled, "L8")
	t.is("Extend by no TTL", l.Extend(t.Context(), 0), fencelock.ErrInvalid, "L8")
	t.held(l, "after all")
	t.release(l)
}

func maxHoldEnds(t *T) {
	c, d := t.client(), t.driver()
	const most = 300 * time.Millisecond
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.long()), fencelock.MaxHold(most))
	if left := time.Until(l.Deadline()); left > most {
		t.Fatalf("Deadline with MaxHold %v: got %v ahead, want at most that", most, left)
	}
	if err := l.Extend(t.Context(), t.long()); err != nil {
		t.Fatalf("Extend within MaxHold: got %v, want nil", err)
	}
	if left := time.Until(l.Deadline()); left > most {
		t.Fatalf("Deadline with MaxHold %v after Extend: got %v ahead, want at most that", most, left)
	}
	t.lostInTime(l)
	// The holder is alive and tells the server, so nobody waits for the TTL.
	t.takesOver(d, t.request(t.key(), t.long()), 0)
}

// stepExtendsEachOfBatch: results are in order, each of its own owner, of both kinds if there are two.
func stepExtendsEachOfBatch(t *T) {
	d := t.driver()
	const n = 60
	kinds := []driver.Kind{driver.KindLock}
	if has[driver.Semaphore](d) {
		kinds = append(kinds, driver.KindPermit)
	}
	var batch []driver.Extension
	var want []driver.Answer
	for i := range n {
		r := t.request(fmt.Sprintf("%s/%d", t.key(), i), t.long())
		r.Name.Kind = kinds[i%len(kinds)]
		a := driver.Answer{State: driver.Gone}
		if i%3 != 0 {
			a = t.asked(d, r, driver.Granted, "that is free", "L1")
		}
		batch, want = append(batch, driver.Extension{Owner: r.Owner, TTL: t.long()}), append(want, a)
	}
	// Two owners of one name, of which one holds.
	batch = append(batch, driver.Extension{Owner: driver.Owner{Name: batch[1].Name, ID: rand.Text()}, TTL: t.long()})
	want = append(want, driver.Answer{State: driver.Gone})
	results := d.Extend(t.Context(), batch)
	if len(results) != len(batch) {
		t.Fatalf("step Extend of %d: got %d results, want as many", len(batch), len(results))
	}
	for i, r := range results {
		if r.Err != nil || r.State != want[i].State || r.Token != want[i].Token && r.State == driver.Granted {
			t.Errorf("step Extend of many, result %d: got %v, token %v, error %v, want %v, token %v (T3)",
				i, r.State, r.Token, r.Err, want[i].State, want[i].Token)
		}
	}
}
