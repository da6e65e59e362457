package conformance

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/history"
	"github.com/fencelock/fencelock/conformance/worker"
	"github.com/fencelock/fencelock/driver"
)

// The tests of this group stop and kill holders and waiters that are processes of their own.
var processTests = []test{
	{name: "StoppedHolderIsSucceeded", run: stoppedHolderIsSucceeded, permit: true, needs: []Need{URL}},
	{name: "StoppedForLessThanTTL", run: stoppedForLessThanTTL, permit: true, needs: []Need{URL}},
	{name: "StoppedWinnerIsPassed", run: stoppedWinnerIsPassed, permit: true, needs: []Need{URL}},
	{name: "KilledHolderIsSucceeded", run: killedHolderIsSucceeded, permit: true, needs: []Need{URL}},
	{name: "KilledHeadIsPassed", run: killedHeadIsPassed, permit: true, needs: []Need{URL}},
	{name: "KilledHolderFreesItsPermitOnly", run: killedHolderFreesItsPermitOnly, needs: []Need{URL, Semaphores}},
	{name: "ManyWaitersSomeKilled", run: manyWaitersSomeKilled, permit: true, needs: []Need{URL}, limit: 3 * time.Minute},
	{name: "ClocksDiffer", run: clocksDiffer, permit: true, needs: []Need{URL, Clocks}},
}

// survivors is the TTL of those who wait for others to die: long enough to be kept on a busy machine. They look
// after the queue every sixth of it.
func (t *T) survivors() time.Duration { return 3 * t.steady() }

// takeover is how long a survivor may have to wait for what somebody has left behind who held it with the TTL.
func (t *T) takeover(ttl time.Duration) time.Duration { return ttl + t.survivors()/6 + slack }

// workerAsk is what this variant of the test takes.
func (t *T) workerAsk(ttl time.Duration) worker.Ask {
	a := worker.Ask{Name: t.key(), TTL: ttl}
	if t.kind == driver.KindPermit {
		a.Limit = 1
	}
	return a
}

func (t *T) take(w *worker.Worker, a worker.Ask) *worker.Remote {
	t.Helper()
	l, err := w.Take(t.Context(), a)
	if err != nil {
		t.Fatalf("Lock by another process: got %v, want a lease", err)
	}
	return l
}

// queued makes a worker wait, and returns when the backend has been told.
func (t *T) queued(w *worker.Worker, a worker.Ask) *remotePending {
	t.Helper()
	p := &remotePending{t: t, result: make(chan remoteLocked, 1)}
	go func() {
		l, err := w.Take(t.Context(), a)
		p.result <- remoteLocked{l, err}
	}()
	t.done("request of a process that waits", w.AwaitRequests(t.Context(), a.Name, a.Limit, 1))
	return p
}

// remotePending is a wait of a worker.
type remotePending struct {
	t      *T
	result chan remoteLocked
}

type remoteLocked struct {
	lease *worker.Remote
	err   error
}

func (p *remotePending) wait(limit time.Duration) (*worker.Remote, error) {
	p.t.Helper()
	select {
	case r := <-p.result:
		return r.lease, r.err
	case <-time.After(limit):
		p.t.Fatalf("Lock by another process: got no return within %v, want one", limit)
		return nil, nil
	}
}

// done checks that something was done.
func (t *T) done(what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: got %v, want nil", what, err)
	}
}

// lawful judges what the processes have recorded.
func (t *T) lawful(workers ...*worker.Worker) {
	t.Helper()
	machine := t.pulse()
	var parts []history.History
	for _, w := range workers {
		t.done("Close of a worker", w.Close())
		parts = append(parts, w.History())
	}
	rules := history.Rules{LossTolerance: 200*time.Millisecond + machine.end()}
	if err := history.Check(history.Merge(parts...), rules).Err(); err != nil {
		t.Fatalf("history of the processes: got\n%v\nwant no violation", err)
	}
}

// later checks that a token is greater than one before it.
func (t *T) later(next, before fencelock.Token) {
	t.Helper()
	if next <= before {
		t.Fatalf("token of the successor: got %v, want more than %v (T1)", next, before)
	}
}

// stoppedHolderIsSucceeded stops a holder that renews, until another one has the lock. When it goes on it must
// not believe for a moment, and cannot harm the other one.
func stoppedHolderIsSucceeded(t *T) {
	ctx, ttl := t.Context(), t.steady()
	w := t.worker("holder", patience/2)
	old := t.take(w, t.workerAsk(ttl))
	t.done("Err of a held lease", old.Err(ctx))
	c := t.locker(t.client())
	waiter := t.lockLater(ctx, c, t.key(), fencelock.TTL(t.survivors()))
	t.done("stop of a process", w.PauseBetween())
	var l *fencelock.Lease
	t.inTime("taking over from a holder that is stopped", t.takeover(ttl), "W3", func() { l = waiter.lease(ttl + patience) })
	t.later(l.Token(), old.Token())

	t.done("Resume", w.Resume())
	t.is("Err of a holder that was stopped past its deadline", old.Err(ctx), fencelock.ErrLost, "L2")
	t.is("Extend of it", old.Extend(ctx, t.long()), fencelock.ErrNotHeld, "L3")
	t.is("Release of it", old.Release(ctx), fencelock.ErrNotHeld, "L4")
	t.held(l, "of the successor after the old holder's Release")
	t.refused(c, t.key(), "after the old holder's Release", "L4")
	t.release(l)
	t.lawful(w)
}

// stoppedForLessThanTTL is no loss.
func stoppedForLessThanTTL(t *T) {
	ctx, ttl := t.Context(), t.ttl(3*time.Second)
	w := t.worker("holder", patience/2)
	l := t.take(w, t.workerAsk(ttl))
	t.done("stop of a process", w.PauseBetween())
	pause(ttl / 3) // a renewal falls due meanwhile
	t.done("Resume", w.Resume())
	t.done("Err of a holder that was stopped for a third of its TTL", l.Err(ctx))
	pause(ttl)
	t.done("Err of it, a TTL later", l.Err(ctx))
	t.refused(t.locker(t.client()), t.key(), "by a holder that was stopped for a third of its TTL", "L1")
	t.done("Release of it", l.Release(ctx))
	t.lawful(w)
}

// stoppedWinnerIsPassed stops the first waiter. It does not see that it is served, others are served after it,
// and when it goes on it must wait anew.
func stoppedWinnerIsPassed(t *T) {
	ctx, ttl := t.Context(), t.steady()
	c := t.locker(t.client())
	first := t.lock(c, t.key(), fencelock.TTL(t.long()))
	w := t.worker("waiter", patience/2)
	stopped := t.queued(w, t.workerAsk(ttl))
	second := t.lockLater(ctx, c, t.key(), fencelock.TTL(t.survivors()))
	t.done("stop of a process", w.PauseBetween())
	t.release(first)
	var l *fencelock.Lease
	t.inTime("passing a winner that is stopped", t.takeover(ttl), "W3", func() { l = second.lease(ttl + patience) })
	t.done("Resume", w.Resume())
	pause(ttl)
	t.held(l, "beside a waiter that was stopped while it was served")
	t.release(l)
	late, err := stopped.wait(ttl + patience)
	t.done("Lock of a waiter that was stopped", err)
	t.later(late.Token(), l.Token())
	t.refused(c, t.key(), "by the waiter that was stopped", "L1")
	t.done("Release of it", late.Release(ctx))
	t.lawful(w)
}

func killedHolderIsSucceeded(t *T) {
	ttl := t.steady()
	w := t.worker("holder", patience/2)
	old := t.take(w, t.workerAsk(ttl))
	waiter := t.lockLater(t.Context(), t.locker(t.client()), t.key(), fencelock.TTL(t.survivors()))
	t.done("Kill", w.Kill())
	var l *fencelock.Lease
	t.inTime("taking over from a holder that was killed", t.takeover(ttl), "W3", func() { l = waiter.lease(ttl + patience) })
	t.later(l.Token(), old.Token())
	t.release(l)
	t.nothingLeft(t.name(t.key()), "after the successor of a killed holder")
	t.lawful(w)
}

// killedHeadIsPassed kills the first waiter of several.
func killedHeadIsPassed(t *T) {
	ttl := t.steady()
	c := t.locker(t.client())
	first := t.lock(c, t.key(), fencelock.TTL(t.long()))
	w := t.worker("waiter", patience/2)
	head := t.queued(w, t.workerAsk(ttl))
	second := t.lockLater(t.Context(), c, t.key(), fencelock.TTL(t.survivors()))
	t.done("Kill", w.Kill())
	_, err := head.wait(patience)
	t.is("Lock of a process that was killed", err, worker.ErrEnded, "W3")
	t.release(first)
	var l *fencelock.Lease
	t.inTime("passing a waiter that was killed", t.takeover(ttl), "W3", func() { l = second.lease(ttl + patience) })
	t.release(l)
	t.nothingLeft(t.name(t.key()), "after a waiter that was killed")
	t.lawful(w)
}

// killedHolderFreesItsPermitOnly kills one of three holders while two wait.
func killedHolderFreesItsPermitOnly(t *T) {
	const limit = 3
	ctx, ttl := t.Context(), t.steady()
	a, b := t.worker("holder", patience/2), t.client()
	ask := worker.Ask{Name: t.key(), Limit: limit, TTL: ttl}
	old := t.take(a, ask)
	permits := fencelock.Permits(b, limit)
	held := []*fencelock.Lease{t.lock(permits, t.key()), t.lock(permits, t.key())}
	waiters := []*pending{t.lockLater(ctx, permits, t.key(), fencelock.TTL(t.survivors())), t.lockLater(ctx, permits, t.key(), fencelock.TTL(t.survivors()))}
	t.done("Kill", a.Kill())
	var l *fencelock.Lease
	t.inTime("taking over a permit from a holder that was killed", t.takeover(ttl), "W3", func() {
		select {
		case r := <-waiters[0].result:
			l = r.lease
		case r := <-waiters[1].result:
			l = r.lease
			waiters[1] = waiters[0]
		case <-time.After(ttl + patience):
		}
	})
	if l == nil {
		t.Fatalf("Acquire after a holder was killed: got no permit, want one (W3)")
	}
	t.later(l.Token(), old.Token())
	t.refused(permits, t.key(), "with all permits held", "S1")
	for _, h := range held {
		t.held(h, "of a permit beside one whose holder was killed")
		t.release(h)
	}
	t.release(waiters[1].lease(patience))
	t.release(l)
	t.nothingLeft(t.name(t.key()), "after a holder that was killed")
	t.lawful(a)
}

// manyWaitersSomeKilled has fifty waiters in ten processes take turns, while some processes are killed: those
// that live are all served, one at a time.
func manyWaitersSomeKilled(t *T) {
	const processes, each, kills = 10, 5, 3
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	ttl := t.survivors()
	c := t.locker(t.client())
	first := t.lock(c, t.key(), fencelock.TTL(t.long()))

	workers := make([]*worker.Worker, processes)
	for i := range workers {
		workers[i] = t.worker(fmt.Sprintf("process %d", i), patience/2)
	}
	type outcome struct {
		process int
		err     error
	}
	served := make(chan outcome, processes*each)
	for i, w := range workers {
		for range each {
			go func() {
				l, err := w.Take(t.Context(), t.workerAsk(ttl))
				if err == nil {
					if err = l.Err(t.Context()); err == nil {
						err = l.Release(t.Context())
					}
				}
				served <- outcome{i, err}
			}()
		}
		t.done("request of a process that waits", w.AwaitEvent(t.Context(), func(e history.Event) bool { return e.Type == history.Started }))
	}
	t.release(first)
	killed := map[int]bool{}
	deadline := time.After(patience + (kills+1)*t.takeover(ttl))
	for n := range processes * each {
		if n%4 == 0 && len(killed) < kills {
			i := r.IntN(processes)
			killed[i] = true
			t.done("Kill", workers[i].Kill())
		}
		select {
		case o := <-served:
			if o.err != nil && !(killed[o.process] && errors.Is(o.err, worker.ErrEnded)) {
				t.Errorf("turn of one of %d waiters: got %v, want a lease and its release (W3)", processes*each, o.err)
			}
		case <-deadline:
			t.Fatalf("turns of %d waiters with %d processes killed: got %d, want all (W3)", processes*each, len(killed), n)
		}
	}
	// Who was killed last may hold or wait for as long as its TTL. One that waits for that may be known as a waiter for half of its own.
	t.release(t.lockLater(t.Context(), c, t.key(), fencelock.TTL(ttl)).lease(patience + t.takeover(ttl)))
	t.nothingLeftAfter(t.name(t.key()), ttl+patience/4, "after waiters that were killed")
	t.lawful(workers...)
}

// workerAhead starts a process whose wall clock is that much ahead.
func (t *T) workerAhead(process string, by time.Duration) *worker.Worker {
	t.Helper()
	w := t.workerOf(worker.Options{Process: process, RequestTimeout: patience / 2, Clock: true})
	t.done("SetClock", w.SetClock(by))
	return w
}

// clocksDiffer has two processes, whose wall clocks are further apart than a lease is long, take one lock, or two permits. Neither
// finds the other's leases expired, and each one's tokens are greater than those before, also than those of the one that is ahead.
func clocksDiffer(t *T) {
	const off = 10 * time.Second
	ctx, a := t.Context(), t.workerAsk(t.steady())
	if a.Limit > 0 {
		a.Limit = 2
	}
	ahead, behind := t.workerAhead("ahead", off), t.workerAhead("behind", -off)
	var last fencelock.Token
	try := a
	try.Try = true
	for _, turn := range [][2]*worker.Worker{{ahead, behind}, {behind, ahead}} {
		holder, rival := turn[0], turn[1]
		var held []*worker.Remote
		for range max(a.Limit, 1) {
			l := t.take(holder, a)
			t.later(l.Token(), last)
			last = l.Token()
			held = append(held, l)
		}
		_, err := rival.Take(ctx, try)
		t.is("rival TryLock by a process whose clock differs", err, fencelock.ErrHeld, "S2")
		for _, l := range held {
			t.done("Release of a process whose clock differs", l.Release(ctx))
		}
	}

	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	load := worker.Load{Seed: seed, Goroutines: 3, Attempts: 1 << 20, For: 200 * time.Millisecond,
		TTL: a.TTL, Hold: 10 * time.Millisecond, Unit: t.Unit, WaitFor: patience / 2}
	if a.Limit > 0 {
		load.Permits = []worker.Permits{{Name: a.Name, Limits: []int{a.Limit}}}
	} else {
		load.Locks = []string{a.Name}
	}
	done := make(chan error, 2)
	for i, w := range []*worker.Worker{ahead, behind} {
		load.Seed = seed + uint64(i)
		go func(l worker.Load) { done <- w.Run(ctx, l) }(load)
	}
	for range 2 {
		t.done("work of a process whose clock differs", <-done)
	}
	t.lawful(ahead, behind)
}
