package conformance

import (
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var waitingTests = []test{
	{name: "StepOrder", run: stepOrder, permit: true, needs: []Need{Queueing}},
	{name: "StepNobodyPassesTheHead", run: stepNobodyPassesTheHead, permit: true, needs: []Need{Queueing}},
	{name: "StepExpiryServesTheHead", run: stepExpiryServesTheHead, permit: true, needs: []Need{Queueing}},
	{name: "StepGrantIsAClaim", run: stepGrantIsAClaim, permit: true, needs: []Need{Queueing}},
	{name: "StepClaimBecomesALease", run: stepClaimBecomesALease, permit: true, needs: []Need{Queueing}},
	{name: "StepDeadHeadIsPassed", run: stepDeadHeadIsPassed, permit: true, needs: []Need{Queueing}},
	{name: "StepPollKeepsThePlace", run: stepPollKeepsThePlace, permit: true, needs: []Need{Queueing}},
	{name: "StepPollCreatesNothing", run: stepPollCreatesNothing, permit: true, needs: []Need{Queueing}},
	{name: "StepWaiterLeaves", run: stepWaiterLeaves, permit: true, needs: []Need{Queueing}},
	{name: "StepExtendLeavesWaiters", run: stepExtendLeavesWaiters, permit: true, needs: []Need{Queueing}},
	{name: "StepPollsEachOfBatch", run: stepPollsEachOfBatch, needs: []Need{Queueing}},
	{name: "StepPushesTheGrant", run: stepPushesTheGrant, permit: true, needs: []Need{Pushes}},

	{name: "HandsOver", run: handsOver, permit: true},
	{name: "HandsOverWithoutQueue", run: handsOverWithoutQueue, permit: true},
	{name: "HandsOverQuickly", run: handsOverQuickly, alone: true, needs: []Need{Pushes}},
	{name: "Order", run: waitersAreServedInOrder, permit: true, needs: []Need{Queueing}},
	{name: "FirstInLineAsks", run: firstInLineAsks, permit: true},
	{name: "LineSurvivesOutage", run: lineSurvivesOutage, permit: true},
	{name: "FairNeedsQueue", run: fairNeedsQueue},
	{name: "ManyOfManyClients", run: manyWaitersOfManyClients, permit: true},
	{name: "ManyNames", run: manyNamesAreWaitedFor},
	{name: "PushIsLost", run: pushIsLost, permit: true, needs: []Need{Pushes}},
	{name: "PollsAreLost", run: pollsAreLost, permit: true, needs: []Need{Pushes}},
	{name: "PushIsLateOrTwice", run: pushIsLateOrTwice, permit: true, needs: []Need{Pushes}},
	{name: "RecheckAsksAtOnce", run: recheckAsksAtOnce, permit: true, needs: []Need{Pushes}},
	{name: "OutOfTouchQueuesAnew", run: outOfTouchQueuesAnew, permit: true, needs: []Need{Queueing}},
	{name: "DeadWaiterAhead", run: deadWaiterAhead, permit: true, needs: []Need{Queueing}},
	{name: "DeadWinner", run: deadWinner, permit: true, needs: []Need{Queueing}},
	{name: "WinnerBelievesItsClaim", run: winnerBelievesItsClaim, permit: true, needs: []Need{Queueing}},
	{name: "WinnerWithoutRenewal", run: winnerWithoutRenewal, permit: true, needs: []Need{Queueing}},
	{name: "WireResets", run: waiterWhoseWireResets, permit: true, needs: []Need{Wired, Queueing}},
	{name: "ServerForgot", run: waiterOfForgetfulServer, permit: true, needs: []Need{Server}},
}

// held takes the lock for the rest of the test.
func (t *T) holder(d driver.Driver, ttl time.Duration) driver.Request {
	t.Helper()
	r := t.request(t.key(), ttl)
	t.asked(d, r, driver.Granted, "that is free", "L1")
	return r
}

// queues makes one more waiter.
func (t *T) queues(d driver.Driver, ttl, claim time.Duration) driver.Request {
	t.Helper()
	r := waiting(t.request(t.key(), ttl), claim)
	t.asked(d, r, driver.Waiting, "that is held, by one who waits", "W4")
	return r
}

// stands checks how a waiter stands.
func (t *T) stands(d driver.Driver, r driver.Request, want driver.State, who, law string) driver.Answer {
	t.Helper()
	a := t.poll(d, r)
	if a.State != want {
		t.Fatalf("Poll of %s: got %v, want %v (%s)", who, a.State, want, law)
	}
	if want == driver.Granted {
		t.plausible(a, r.TTL)
	}
	return a
}

// stepOrder: first come, first served, whoever comes from where.
func stepOrder(t *T) {
	drivers := []driver.Driver{t.driver(), t.driver(), t.driver()}
	h := t.holder(drivers[0], t.long())
	var queue []driver.Request
	for i := range 9 {
		queue = append(queue, t.queues(drivers[i%3], t.long(), t.long()))
	}
	var last driver.Token
	for i, w := range queue {
		t.give(drivers[0], h.Owner, true, "of the holder", "L7")
		a := t.stands(drivers[i%3], w, driver.Granted, fmt.Sprintf("waiter %d after %d releases", i+1, i+1), "W4")
		if a.Token <= last {
			t.Fatalf("token of waiter %d: got %v after %v, want more (T1)", i+1, a.Token, last)
		}
		last = a.Token
		for j, behind := range queue[i+1:] {
			t.stands(drivers[(i+1+j)%3], behind, driver.Waiting, fmt.Sprintf("waiter %d after %d releases", i+2+j, i+1), "W4")
		}
		h = w
	}
	t.give(drivers[0], h.Owner, true, "of the last", "L7")
	t.nothingLeft(h.Name, "after all waiters were served")
}

// stepNobodyPassesTheHead: while somebody waits, whoever comes finds the lock held or queues behind.
func stepNobodyPassesTheHead(t *T) {
	a, b := t.driver(), t.driver()
	h := t.holder(a, t.short())
	w := t.queues(b, t.long(), t.long())
	var behind driver.Request
	// The holder's lease ends meanwhile. What frees it is a step of somebody else.
	t.passes(2*t.short(), func() {
		t.asked(a, t.request(t.key(), t.long()), driver.Held, "promised to a waiter", "W4")
	})
	behind = t.queues(a, t.long(), t.long())
	t.stands(a, behind, driver.Waiting, "the second waiter", "W4")
	t.stands(b, w, driver.Granted, "the first waiter after the holder's lease ended", "W4")
	t.give(b, w.Owner, true, "of the first waiter", "L7")
	t.asked(a, t.request(t.key(), t.long()), driver.Held, "handed over to a waiter", "W4")
	t.stands(a, behind, driver.Granted, "the second waiter", "W4")
	t.give(a, h.Owner, false, "of the first holder, long gone", "L4")
}

// stepExpiryServesTheHead: the head needs no release to be served, its own poll finds the lock expired.
func stepExpiryServesTheHead(t *T) {
	a, b := t.driver(), t.driver()
	t.holder(a, t.short())
	w := t.queues(b, t.long(), t.long())
	t.inTime("Poll of the head until its dead holder's lease has ended", t.short()+slack, "W3", func() {
		t.eventually(t.short()+patience, func() error {
			if s := t.poll(b, w).State; s != driver.Granted {
				return fmt.Errorf("Poll of the head: got %v, want granted (W3)", s)
			}
			return nil
		})
	})
	t.give(b, w.Owner, true, "of the waiter", "L7")
}

// stepGrantIsAClaim: who was served but does not react holds for a claim, neither shorter nor longer.
func stepGrantIsAClaim(t *T) {
	a, b := t.driver(), t.driver()
	h := t.holder(a, t.long())
	w := t.queues(b, t.long(), t.short())
	sent := time.Now()
	t.give(a, h.Owner, true, "of the holder", "L7")
	t.takesOver(a, t.request(t.key(), t.long()), w.Claim)
	if lived := time.Since(sent); lived < w.Claim {
		t.Fatalf("claim of %v: got taken over after %v, want not before (L2)", w.Claim, lived)
	}
	t.stands(b, w, driver.Gone, "a winner after its claim", "L3")
	if x := t.extend(b, w.Owner, t.long()); x.State != driver.Gone {
		t.Fatalf("step Extend of a winner after its claim: got %v, want gone (L3)", x.State)
	}
	t.give(b, w.Owner, false, "of a winner after its claim", "L4")
}

// stepClaimBecomesALease: by the winner's Extend, Poll or repeated Lock.
func stepClaimBecomesALease(t *T) {
	d := t.driver()
	type confirmed struct {
		what string
		w    driver.Request
		sent time.Time
	}
	var all []confirmed
	for what, confirm := range map[string]func(driver.Request) driver.Answer{
		"Extend":        func(w driver.Request) driver.Answer { return t.extend(d, w.Owner, w.TTL) },
		"Poll":          func(w driver.Request) driver.Answer { return t.poll(d, w) },
		"repeated Lock": func(w driver.Request) driver.Answer { return t.ask(d, w) },
	} {
		h := t.request(t.key()+"/"+what, t.long())
		t.asked(d, h, driver.Granted, "that is free", "L1")
		w := waiting(t.request(h.Name.Name, 4*t.short()), 2*t.short())
		t.asked(d, w, driver.Waiting, "that is held", "W4")
		t.give(d, h.Owner, true, "of the holder", "L7")
		sent := time.Now()
		first := confirm(w)
		if first.State != driver.Granted || first.Token == 0 || first.TTL < w.TTL-10*time.Millisecond {
			t.Fatalf("%s of a winner: got %v, token %v, TTL %v, want granted, a token, TTL %v (L4)", what, first.State, first.Token, first.TTL, w.TTL)
		}
		if again := t.extend(d, w.Owner, t.short()); again.Token != first.Token {
			t.Fatalf("token of a winner: got %v, then %v, want the same (T3)", first.Token, again.Token)
		}
		all = append(all, confirmed{what, w, sent})
	}
	for _, c := range all {
		t.takesOver(d, t.request(c.w.Name.Name, t.long()), c.w.TTL)
		if lived := time.Since(c.sent); lived < c.w.TTL {
			t.Fatalf("claim made a lease of %v by %s: got taken over after %v, want not before (L2)", c.w.TTL, c.what, lived)
		}
	}
}

// stepDeadHeadIsPassed: an entry that nobody renews does not get the lock.
func stepDeadHeadIsPassed(t *T) {
	d := t.driver()
	h := t.holder(d, t.long())
	dead := t.queues(d, t.long(), t.short())
	live := t.queues(d, t.long(), t.long())
	t.passes(2*t.short(), func() {})
	t.give(d, h.Owner, true, "of the holder", "L7")
	t.stands(d, live, driver.Granted, "the waiter behind a dead one", "W3")
	t.stands(d, dead, driver.Gone, "a waiter after its claim", "L3")
	t.give(d, dead.Owner, false, "of a waiter after its claim", "L7")
	t.give(d, live.Owner, true, "of the waiter behind it", "L7")
	t.nothingLeft(h.Name, "after a dead waiter was passed")
}

func stepPollKeepsThePlace(t *T) {
	d := t.driver()
	h := t.holder(d, t.long())
	first := t.queues(d, t.long(), 3*t.short())
	second := t.queues(d, t.long(), t.long())
	t.passes(6*t.short(), func() { t.stands(d, first, driver.Waiting, "a waiter that polls", "W3") })
	t.give(d, h.Owner, true, "of the holder", "L7")
	t.stands(d, first, driver.Granted, "the first waiter, that has polled for longer than its claim", "W4")
	t.stands(d, second, driver.Waiting, "the second waiter", "W4")
}

func stepPollCreatesNothing(t *T) {
	d := t.driver()
	stranger := waiting(t.request(t.key(), t.long()), t.long())
	t.stands(d, stranger, driver.Gone, "an owner that never asked, for a free lock", "L3")
	t.nothingLeft(stranger.Name, "after a Poll of nobody")
	h := t.holder(d, t.long())
	t.stands(d, stranger, driver.Gone, "an owner that never asked, for a held lock", "L3")
	if a := t.poll(d, waiting(h, t.long())); a.State != driver.Granted {
		t.Fatalf("Poll of the holder: got %v, want granted (L5)", a.State)
	}
	t.give(d, h.Owner, true, "of the holder", "L7")
	t.stands(d, waiting(h, t.long()), driver.Gone, "an owner that released", "L3")
	t.asked(d, t.request(t.key(), t.long()), driver.Granted, "after polls of nobody", "L3")
}

// stepWaiterLeaves: from the middle, from the head, and with its grant.
func stepWaiterLeaves(t *T) {
	d := t.driver()
	h := t.holder(d, t.long())
	first, second, third, fourth := t.queues(d, t.long(), t.long()), t.queues(d, t.long(), t.long()),
		t.queues(d, t.long(), t.long()), t.queues(d, t.long(), t.long())
	t.give(d, second.Owner, true, "of a waiter in the middle", "L7")
	t.give(d, second.Owner, false, "of a waiter in the middle, again", "L5")
	t.give(d, first.Owner, true, "of the head", "L7")
	t.stands(d, third, driver.Waiting, "a waiter that is the head now, while the lock is held", "L1")
	t.give(d, h.Owner, true, "of the holder", "L7")
	t.give(d, third.Owner, true, "of a winner that does not want it any more", "L7")
	t.stands(d, fourth, driver.Granted, "the waiter behind", "L7")
	t.give(d, fourth.Owner, true, "of the last", "L7")
	t.nothingLeft(h.Name, "after all waiters left")

	// A head that leaves while the lock is free lets the next one in.
	t.holder(d, t.short())
	head, next := t.queues(d, t.long(), t.long()), t.queues(d, t.long(), t.long())
	t.passes(2*t.short(), func() {})
	t.give(d, head.Owner, true, "of the head", "L7")
	t.stands(d, next, driver.Granted, "the waiter behind a head that left a lock whose holder had died", "W4")
}

// stepExtendLeavesWaiters: a waiter does not hold, and an attempt to extend it changes nothing.
func stepExtendLeavesWaiters(t *T) {
	d := t.driver()
	h := t.holder(d, t.long())
	w := t.queues(d, t.long(), t.long())
	if x := t.extend(d, w.Owner, t.long()); x.State != driver.Gone {
		t.Fatalf("step Extend of a waiter: got %v, want gone (L3)", x.State)
	}
	t.give(d, h.Owner, true, "of the holder", "L7")
	t.stands(d, w, driver.Granted, "a waiter that was asked to be extended", "L4")
}

func stepPollsEachOfBatch(t *T) {
	d := t.driver()
	q, _ := driver.As[driver.Queue](d)
	const n = 40
	kinds := []driver.Kind{driver.KindLock}
	if has[driver.Semaphore](d) {
		kinds = append(kinds, driver.KindPermit)
	}
	var polls []driver.Poll
	var want []driver.State
	for i := range n {
		h := t.request(fmt.Sprintf("%s/%d", t.key(), i), t.long())
		h.Name.Kind = kinds[i%len(kinds)]
		t.asked(d, h, driver.Granted, "that is free", "L1")
		w := waiting(driver.Request{Owner: driver.Owner{Name: h.Name, ID: rand.Text()}, TTL: t.long(), Limit: 1}, t.long())
		state := driver.Gone
		if i%3 > 0 {
			t.asked(d, w, driver.Waiting, "that is held", "W4")
			state = driver.Waiting
		}
		if i%3 == 1 {
			t.give(d, h.Owner, true, "of the holder", "L7")
			state = driver.Granted
		}
		polls, want = append(polls, driver.Poll{Owner: w.Owner, TTL: w.TTL, Claim: w.Claim}), append(want, state)
	}
	results := q.Poll(t.Context(), polls)
	if len(results) != n {
		t.Fatalf("step Poll of %d: got %d results, want as many", n, len(results))
	}
	for i, r := range results {
		if r.Err != nil || r.State != want[i] || (r.Token != 0) != (r.State == driver.Granted) {
			t.Errorf("step Poll of many, result %d: got %v, token %v, error %v, want %v", i, r.State, r.Token, r.Err, want[i])
		}
	}
}

// stepPushesTheGrant: with the owner it is for and the token that a poll would answer.
func stepPushesTheGrant(t *T) {
	a, b := t.driver(), t.driver()
	n, _ := driver.As[driver.Notifier](b)
	events := make(chan driver.Event, 1000)
	n.Notify(func(e driver.Event) { events <- e })
	pushed := func(h, w driver.Request) bool {
		timeout := time.After(300 * time.Millisecond)
		for {
			select {
			case e := <-events:
				if e.Kind != driver.EventGranted || e.Owner != w.Owner {
					continue // a subscription began; or the grant of a round before
				}
				if p := t.stands(b, w, driver.Granted, "a waiter that was told its grant", "W1"); p.Token != e.Token {
					t.Fatalf("pushed token: got %v, want %v as a poll answers (T3)", e.Token, p.Token)
				}
				return true
			case <-timeout:
				return false
			}
		}
	}
	// What is pushed before the subscription stands may be lost, so that more than one round may be needed.
	for range 30 {
		h := t.holder(a, t.long())
		w := t.queues(b, t.long(), t.long())
		t.give(a, h.Owner, true, "of the holder", "L7")
		told := pushed(h, w)
		t.give(b, w.Owner, true, "of the winner", "L7")
		if told {
			return
		}
	}
	t.Fatalf("push of a grant: got none in 30 rounds, want one (W1)")
}

func (t *T) handOver(a, b fencelock.Locker) {
	t.Helper()
	for range 5 {
		l := t.lock(a, t.key(), fencelock.TTL(t.long()))
		p := t.lockLater(t.Context(), b, t.key(), fencelock.TTL(t.long()))
		t.moment(100*time.Millisecond, func() {
			select {
			case <-p.result:
				t.Fatalf("Lock of a held lock: got its end, want it to wait (L1)")
			default:
			}
		})
		t.release(l)
		var m *fencelock.Lease
		t.inTime("Lock after the holder released", slack, "W4", func() { m = p.lease(patience) })
		if m.Token() <= l.Token() {
			t.Fatalf("token after %v: got %v, want more (T1)", l.Token(), m.Token())
		}
		t.refused(a, t.key(), "after the lock was handed over", "L1")
		t.release(m)
	}
	t.nothingLeft(t.name(t.key()), "after handovers")
}

func handsOver(t *T) {
	a := t.locker(t.client())
	t.handOver(a, t.locker(t.client()))
	t.handOver(a, a)
}

func handsOverWithoutQueue(t *T) {
	a, b := t.locker(t.clientOn(t.withoutQueue())), t.locker(t.clientOn(t.withoutQueue()))
	t.handOver(a, b)
	t.handOver(a, a)
}

// handsOverQuickly: in a crowd, the median of the gaps between a release and the next holder is short.
func handsOverQuickly(t *T) {
	const clients, rounds = 8, 15
	var mu sync.Mutex
	var released time.Time
	var gaps []time.Duration
	var all sync.WaitGroup
	began := time.Now()
	for range clients {
		c := t.client()
		all.Go(func() {
			for range rounds {
				l, err := c.Lock(t.Context(), t.key(), fencelock.TTL(t.long()))
				if err != nil {
					t.Errorf("Lock: got %v, want a lease", err)
					return
				}
				mu.Lock()
				if !released.IsZero() {
					gaps = append(gaps, time.Since(released))
				}
				released = time.Now()
				mu.Unlock()
				if err := l.Release(t.Context()); err != nil {
					t.Errorf("Release: got %v, want nil", err)
				}
			}
		})
	}
	all.Wait()
	slices.Sort(gaps)
	if len(gaps) == 0 {
		t.Fatalf("handovers: got none, want %d", clients*rounds-1)
	}
	median := gaps[len(gaps)/2]
	t.Logf("median gap %v, longest %v", median, gaps[len(gaps)-1])
	if machine := lateness(began); median > 50*time.Millisecond+machine {
		t.Fatalf("median gap between Release and the next holder: got %v, want within 50ms; plain signals were up to %v late", median, machine)
	}
}

// inOrder lets waiters queue one after the other and checks that they are served so.
func (t *T) inOrder(lockers []fencelock.Locker, queued func(i int)) {
	t.Helper()
	l := t.lock(lockers[0], t.key(), fencelock.TTL(t.long()))
	var waits []*pending
	for i, c := range lockers {
		waits = append(waits, t.lockLater(t.Context(), c, t.key(), fencelock.TTL(t.long())))
		queued(i)
	}
	for i, p := range waits {
		t.release(l)
		next := p.lease(patience)
		if next.Token() <= l.Token() {
			t.Fatalf("token of waiter %d: got %v after %v, want more (T1)", i+1, next.Token(), l.Token())
		}
		l = next
		for j, behind := range waits[i+1:] {
			select {
			case <-behind.result:
				t.Fatalf("Lock of waiter %d after %d releases: got its end, want it to wait (W4)", i+2+j, i+1)
			default:
			}
		}
	}
	t.release(l)
}

func waitersAreServedInOrder(t *T) {
	var lockers []fencelock.Locker
	var fs []*faults
	for range 3 {
		c, f := t.faulty()
		lockers, fs = append(lockers, t.locker(c), t.locker(c)), append(fs, f, f)
	}
	replies := map[*faults]int{fs[0]: 1} // the first one's, for the lock that is held
	t.inOrder(lockers, func(i int) {
		replies[fs[i]]++
		t.awaitReply(fs[i], stepLock, replies[fs[i]])
	})
}

// firstInLineAsks: where the driver does not queue, the waiters of one client stand in a line of their own, and
// only the first asks the server.
func firstInLineAsks(t *T) {
	const waiters = 20
	c, f := t.faultyOn(t.withoutQueue())
	l := t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	answer := make(chan struct{})
	first := lateReply(answer)
	first.times = 1
	f.on(stepLock, first)
	var waits []*pending
	for range waiters {
		waits = append(waits, t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.long()),
			fencelock.Backoff(time.Millisecond, 10*time.Millisecond)))
	}
	t.await(first.came, "the request of the first waiter", patience)
	for began := time.Now(); f.count(stepLock) == 1 && time.Since(began) < t.short()/2; {
		time.Sleep(time.Millisecond) // the others have time to ask, if they would
	}
	close(answer)
	t.awaitReply(f, stepLock, 3*waiters)
	t.release(l)
	for served := range waiters {
		served++
		t.eventually(patience, func() error {
			for i, p := range waits {
				select {
				case r := <-p.result:
					if r.err != nil {
						t.Fatalf("Lock of a waiter in line: got %v, want a lease", r.err)
					}
					waits = slices.Delete(waits, i, i+1)
					t.release(r.lease)
					return nil
				default:
				}
			}
			return fmt.Errorf("Lock of %d waiters in line: got %d leases, want all", waiters, served)
		})
	}
	if n := f.atOnce(stepLock); n != 1 {
		t.Fatalf("steps Lock under way at a time for %d waiters of one client: got %d, want 1 (W2)", waiters, n)
	}
}

// lineSurvivesOutage: a waiter that was told once that the lock is held waits through an outage as one in a queue
// does, for up to a TTL; one that was not ends with the error.
func lineSurvivesOutage(t *T) {
	c, f := t.faultyOn(t.withoutQueue())
	l := t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	backoff := fencelock.Backoff(time.Millisecond, 10*time.Millisecond)
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.long()), backoff)
	t.awaitReply(f, stepLock, 1)
	f.on(stepLock, refusal())
	asked := f.count(stepLock)
	t.eventually(patience, func() error {
		if n := f.count(stepLock); n < asked+5 {
			return fmt.Errorf("requests of a waiter during an outage: got %d, want it to go on (W1)", n-asked)
		}
		return nil
	})
	f.heal()
	t.release(l)
	t.release(p.lease(patience))

	l = t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	answered := f.count(stepLock)
	p = t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.short()), backoff)
	t.awaitReply(f, stepLock, answered+1)
	f.on(stepLock, refusal())
	began := time.Now()
	_, err := p.wait(t.short() + patience)
	t.is("Lock after an outage of more than its TTL", err, fencelock.ErrUnavailable, "W3")
	if took := time.Since(began); took < t.short()/2 {
		t.Fatalf("Lock in an outage: ended after %v, want not before its TTL, %v (W1)", took, t.short())
	}
	_, err = t.locker(c).Lock(t.Context(), t.key(), fencelock.TTL(t.long()))
	t.is("Lock during an outage", err, fencelock.ErrUnavailable, "L8")
	f.heal()
	t.release(l)
}

func fairNeedsQueue(t *T) {
	c := t.clientOn(t.withoutQueue())
	_, err := c.Lock(t.Context(), t.key(), fencelock.Fair())
	t.is("Lock with Fair on a driver that does not queue", err, errors.ErrUnsupported, "C1")
	if c := t.client(); c.Supports(fencelock.Queueing) {
		t.release(t.lock(c, t.key(), fencelock.Fair()))
	}
}

func manyWaitersOfManyClients(t *T) {
	const clients, each = 5, 8
	ctx := t.Context()
	var mu sync.Mutex
	var tokens []fencelock.Token
	inside := 0
	var all sync.WaitGroup
	for range clients {
		c := t.locker(t.client())
		for range each {
			all.Go(func() {
				l, err := c.Lock(ctx, t.key(), fencelock.TTL(t.long()))
				if err != nil {
					t.Errorf("Lock of one among many: got %v, want a lease", err)
					return
				}
				mu.Lock()
				inside++
				if inside > 1 {
					t.Errorf("Lock of one among many: got a lease beside another, want one at a time (L1)")
				}
				if len(tokens) > 0 && l.Token() <= tokens[len(tokens)-1] {
					t.Errorf("token: got %v after %v, want more (T1)", l.Token(), tokens[len(tokens)-1])
				}
				tokens = append(tokens, l.Token())
				inside--
				mu.Unlock()
				if err := l.Release(ctx); err != nil {
					t.Errorf("Release: got %v, want nil", err)
				}
			})
		}
	}
	all.Wait()
	if len(tokens) != clients*each {
		t.Fatalf("leases of %d waiters: got %d, want as many", clients*each, len(tokens))
	}
	t.nothingLeft(t.name(t.key()), "after many waiters")
}

// manyNamesAreWaitedFor: by one client, at the same time.
func manyNamesAreWaitedFor(t *T) {
	const names = 150
	a, b := t.client(), t.client()
	var held []*fencelock.Lease
	var waits []*pending
	for i := range names {
		name := fmt.Sprintf("%s/%d", t.key(), i)
		held = append(held, t.lock(a, name, fencelock.TTL(t.long())))
		waits = append(waits, t.lockLater(t.Context(), b, name, fencelock.TTL(t.long())))
	}
	for _, l := range held {
		t.release(l)
	}
	t.inTime(fmt.Sprintf("Lock of %d names after their release", names), t.long()/4, "W2", func() {
		for _, p := range waits {
			t.release(p.lease(patience))
		}
	})
}

// pushIsLost: the grant is found by polling, within the claim.
func pushIsLost(t *T) {
	c, f := t.faulty()
	f.pushes(noEvents)
	l := t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.steady()))
	t.awaitReply(f, stepPoll, 1)
	t.release(l)
	var m *fencelock.Lease
	t.inTime("Lock after its grant was pushed and lost", t.steady()/6+slack, "W1", func() { m = p.lease(patience) })
	rival := t.locker(t.client())
	t.passes(t.steady(), func() { t.refused(rival, t.key(), "by one whose push was lost", "L1") })
	t.release(m)
}

// pollsAreLost: the push alone will do, as long as the entry lives.
func pollsAreLost(t *T) {
	c, f := t.faulty()
	stands := make(chan struct{})
	stand := sync.OnceFunc(func() { close(stands) })
	f.pushes(func(e driver.Event) []event {
		if e.Kind == driver.EventRecheck {
			stand()
		}
		return []event{e}
	})
	f.on(stepPoll, lostRequest())
	l := t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.long()))
	t.awaitReply(f, stepLock, 1)
	select {
	case <-stands:
	case <-time.After(slack): // this driver has nothing to subscribe to
	}
	t.release(l)
	t.inTime("Lock after its grant was pushed while polls are lost", slack, "W1", func() { t.release(p.lease(patience)) })
}

// pushIsLateOrTwice: events for owners that are gone, for others, and repeated ones do nothing.
func pushIsLateOrTwice(t *T) {
	c, f := t.faulty()
	var mu sync.Mutex
	var old []driver.Event
	f.pushes(func(e driver.Event) []event {
		mu.Lock()
		defer mu.Unlock()
		if e.Kind == driver.EventGranted {
			old = append(old, e)
		}
		return []event{e, e}
	})
	l := t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.long()))
	t.awaitReply(f, stepLock, 1)
	t.release(l)
	m := p.lease(t.long())
	t.release(m)

	l = t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	p = t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.long()))
	t.awaitReply(f, stepLock, 2)
	mu.Lock()
	stale := append([]driver.Event{{Kind: driver.EventGranted, Token: 1, Owner: driver.Owner{Name: t.name(t.key()), ID: rand.Text()}},
		{Kind: driver.EventFreed, Owner: driver.Owner{Name: t.name(t.key())}}, {Kind: driver.EventFreed}}, old...)
	mu.Unlock()
	for _, e := range stale {
		f.push(e)
	}
	other := f.owner()
	other.Name.Name += "x"
	f.push(driver.Event{Kind: driver.EventGranted, Token: 1, Owner: other})
	t.passes(t.short(), func() {
		select {
		case r := <-p.result:
			t.Fatalf("Lock of a held lock after stale pushes: got its end with %v, %v, want it to wait (W1)", r.lease, orNil(r.err))
		default:
		}
	})
	t.held(l, "after stale pushes")
	t.release(l)
	t.release(p.lease(patience))
}

// recheckAsksAtOnce: when a subscription stands (again), a grant that it missed is found at once.
func recheckAsksAtOnce(t *T) {
	c, f := t.faulty()
	f.pushes(noEvents)
	l := t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.long()))
	t.awaitReply(f, stepLock, 1)
	t.release(l) // the push is lost, and the next poll is due in seconds
	t.inTime("Lock after a recheck", slack, "W1", func() {
		f.push(driver.Event{Kind: driver.EventRecheck})
		t.release(p.lease(patience))
	})
}

// outOfTouchQueuesAnew: a waiter whose entry has ended, because it could not poll for longer than its claim,
// queues again, as a new owner, and the old one has nothing.
func outOfTouchQueuesAnew(t *T) {
	c, f := t.faulty()
	give := t.holdFor(t.key())
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.steady()))
	t.awaitReply(f, stepLock, 1)
	old, d := f.owner(), t.driver()
	t.give(d, old, true, "of a waiter, in place of the end of its entry", "L7")
	t.awaitReply(f, stepLock, 2)
	if now := f.owner(); now.ID == old.ID {
		t.Fatalf("owner id of a waiter that queues anew: got the old one, want another (L3)")
	}
	give()
	l := p.lease(patience)
	t.give(d, old, false, "of the entry that had ended", "L7")
	t.held(l, "after a release of its waiter's old entry")
	t.release(l)
	t.nothingLeft(t.name(t.key()), "after a waiter queued anew")
}

func deadWaiterAhead(t *T) {
	d := t.driver()
	h := t.holder(d, t.long())
	t.queues(d, t.long(), t.steady()/2)
	c, f := t.faulty()
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.steady()))
	t.awaitReply(f, stepLock, 1)
	t.give(d, h.Owner, true, "of the holder", "L7")
	t.inTime("Lock behind a dead waiter", t.steady()+slack, "W3", func() { t.release(p.lease(patience)) })
}

// deadWinner: the lock was handed over to somebody who died just then.
func deadWinner(t *T) {
	d := t.driver()
	c, f := t.faulty()
	t.ready(t.locker(c)) // what follows must be over before the claim is
	h := t.holder(d, t.long())
	asked := f.count(stepLock)
	dead := t.queues(d, t.steady(), t.steady()/2)
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.steady()))
	t.awaitReply(f, stepLock, asked+1)
	t.stands(d, dead, driver.Waiting, "a waiter that lives yet", "W3")
	t.give(d, h.Owner, true, "of the holder", "L7")
	t.inTime("Lock behind a winner that died", t.steady()+slack, "W3", func() { t.release(p.lease(patience)) })
}

// winnerBelievesItsClaim: until its first extension is answered, the winner believes no longer than the
// claim lives on the server, which is less than its TTL.
func winnerBelievesItsClaim(t *T) {
	c, f := t.faulty()
	rival := t.driver()
	l := t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.steady()))
	t.awaitReply(f, stepPoll, 2) // so that it has waited for some time
	f.all(f.hang, stepExtend, stepPoll)
	t.release(l)
	m, err := p.wait(t.steady() + patience)
	if err != nil {
		// Where the grant was not pushed, it can only be found by a poll.
		t.is("Lock whose polls hang", err, fencelock.ErrUncertain, "L8")
		return
	}
	claimEnds := time.Now().Add(t.steady() / 2)
	if over := m.Deadline().Sub(claimEnds); over > 0 {
		t.Fatalf("Deadline of a winner whose extension hangs: got %v after the end of its claim, want before (L2)", over)
	}
	t.takesOver(rival, t.request(t.key(), t.long()), t.steady()/2)
	t.is("Err of a winner when a rival was granted the lock", m.Err(), fencelock.ErrLost, "L1")
}

// winnerWithoutRenewal: gets one extension, which makes the claim a full lease, and no other.
func winnerWithoutRenewal(t *T) {
	c, f := t.faulty()
	l := t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.steady()), fencelock.NoRenew())
	t.awaitReply(f, stepLock, 1)
	owner := f.owner()
	t.release(l)
	m := p.lease(patience)
	began := time.Now()
	rival := t.locker(t.client())
	t.passes(t.steady()*3/4, func() {
		r, err := rival.TryLock(t.Context(), t.key())
		if err == nil { // on a machine so busy that the lease has ended meanwhile
			t.is("Err of a winner without renewal when a rival was granted the lock", m.Err(), fencelock.ErrLost, "L1")
			t.release(r)
			return
		}
		t.is("rival TryLock by a winner without renewal", err, fencelock.ErrHeld, "L1")
	})
	t.lostInTime(m)
	// The deadline tells how long it was held, whenever this test had a look.
	if lived := m.Deadline().Sub(began); lived < t.steady()*3/4 {
		t.Fatalf("lease of a winner without renewal: got lost after %v, want about %v", lived, t.steady())
	}
	if n := f.extensions(owner); n > 1 {
		t.Fatalf("extensions of a winner without renewal: got %d, want at most 1", n)
	}
}

func waiterWhoseWireResets(t *T) {
	c, w := t.wired()
	t.ready(t.locker(c))
	l := t.lock(t.locker(t.client()), t.key(), fencelock.TTL(t.long()))
	p := t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.steady()))
	for range 5 {
		t.moment(200*time.Millisecond, func() {})
		w.Reset()
	}
	t.release(l)
	m, err := p.wait(patience)
	if err != nil {
		// Only the enqueuing request itself may have met a reset: on its way, or while it was connecting.
		if !errors.Is(err, fencelock.ErrUncertain) && !errors.Is(err, fencelock.ErrUnavailable) {
			t.Fatalf("Lock whose connections were reset: got %v, want a lease, ErrUncertain or ErrUnavailable (L8)", err)
		}
		m = t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.steady())).lease(patience)
	}
	t.release(m)
	t.nothingLeft(t.name(t.key()), "after a waiter whose connections were reset")
}

// waiterOfForgetfulServer: the queue is gone, the waiter stands in it again. Its TTL is longer than a server takes to start,
// or it would give up (W3).
func waiterOfForgetfulServer(t *T) {
	ttl := t.ttl(30 * time.Second)
	a, b := t.locker(t.client()), t.locker(t.client())
	l := t.lock(a, t.key(), fencelock.TTL(t.long()))
	p := t.lockLater(t.Context(), b, t.key(), fencelock.TTL(ttl))
	t.moment(300*time.Millisecond, func() {})
	t.serverDo("killing", t.Server.Kill())
	t.serverDo("starting", t.Server.StartEmpty(t.Context()))
	m := p.lease(ttl/6 + patience)
	if m.Token() <= l.Token() {
		t.Fatalf("token after the server forgot the one before, %v: got %v, want more (T4)", l.Token(), m.Token())
	}
	t.release(m)
}
