package conformance

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var semaphoreTests = []test{
	{name: "StepBound", run: semStepBound, needs: []Need{Semaphores}},
	{name: "StepEachPermitLivesAlone", run: semStepEachPermitLivesAlone, needs: []Need{Semaphores}},
	{name: "StepOwnLimitDecides", run: semStepOwnLimitDecides, needs: []Need{Semaphores}},
	{name: "StepHeadIsJudgedByItsLimit", run: semStepHeadIsJudgedByItsLimit, needs: []Need{Semaphores, Queueing}},
	{name: "StepLeavingHeadServesSeveral", run: semStepLeavingHeadServesSeveral, needs: []Need{Semaphores, Queueing}},
	{name: "StepExpiryServesSeveral", run: semStepExpiryServesSeveral, needs: []Need{Semaphores, Queueing}},
	{name: "StepReleaseServesAllItCan", run: semStepReleaseServesAllItCan, needs: []Need{Semaphores, Queueing, Listing}},
	{name: "StepRepeatTakesNoSecondPermit", run: semStepRepeatTakesNoSecondPermit, needs: []Need{Semaphores}},
	{name: "Bound", run: semBound, needs: []Need{Semaphores}},
	{name: "BoundUnderContention", run: semBoundUnderContention, needs: []Need{Semaphores}},
	{name: "LoweredLimitDrains", run: semLoweredLimitDrains, needs: []Need{Semaphores}},
	{name: "RefusedTriesLeaveNothing", run: semRefusedTriesLeaveNothing, needs: []Need{Semaphores}},
	{name: "AllWaitersAreServed", run: semAllWaitersAreServed, needs: []Need{Semaphores}},
	{name: "AbandonedWaitsLeaveNothing", run: semAbandonedWaitsLeaveNothing, needs: []Need{Semaphores}},
	{name: "DeadPermitComesBack", run: semDeadPermitComesBack, needs: []Need{Semaphores}},
	{name: "LostReplyCountsForNobody", run: semLostReplyCountsForNobody, needs: []Need{Semaphores}},
	{name: "TokensOrderPermits", run: semTokensOrderPermits, needs: []Need{Semaphores}},
}

// permit asks for one of limit permits.
func (t *T) permit(ttl time.Duration, limit int) driver.Request {
	r := t.request(t.key(), ttl)
	r.Name.Kind, r.Limit = driver.KindPermit, limit
	return r
}

func semStepBound(t *T) {
	drivers := []driver.Driver{t.driver(), t.driver()}
	for _, limit := range []int{1, 2, 3, 10, 40} {
		var held []driver.Request
		by := make(map[driver.Owner]driver.Driver)
		for i := range limit {
			r := t.permit(t.long(), limit)
			by[r.Owner] = drivers[i%2]
			t.asked(drivers[i%2], r, driver.Granted, fmt.Sprintf("of which %d of %d are held", i, limit), "S1")
			held = append(held, r)
		}
		for i := range 3 {
			t.asked(drivers[i%2], t.permit(t.long(), limit), driver.Held, fmt.Sprintf("of which all %d are held", limit), "S1")
		}
		t.give(by[held[0].Owner], held[0].Owner, true, "of a permit", "L7")
		again := t.permit(t.long(), limit)
		t.asked(drivers[0], again, driver.Granted, "of which one was released", "S1")
		t.asked(drivers[0], t.permit(t.long(), limit), driver.Held, "of which all are held again", "S1")
		by[again.Owner] = drivers[0]
		for _, r := range append(held[1:], again) {
			t.give(by[r.Owner], r.Owner, true, "of a permit", "L7")
		}
		t.nothingLeft(again.Name, "after all permits were released")
	}
}

// semStepEachPermitLivesAlone: the end of one permit is not that of another, and a short one taken last does
// not shorten those before.
func semStepEachPermitLivesAlone(t *T) {
	d := t.driver()
	long := t.permit(t.long(), 2)
	t.asked(d, long, driver.Granted, "that is free", "S1")
	short := t.permit(t.short(), 2)
	t.asked(d, short, driver.Granted, "of which one is held", "S1")
	next := t.permit(t.long(), 2)
	t.takesOver(d, next, t.short())
	if x := t.extend(d, short.Owner, t.long()); x.State != driver.Gone {
		t.Fatalf("step Extend of a permit after expiry: got %v, want gone (L3)", x.State)
	}
	for _, r := range []driver.Request{long, next} {
		if x := t.extend(d, r.Owner, t.long()); x.State != driver.Granted {
			t.Fatalf("step Extend of a permit beside an expired one: got %v, want granted (S1)", x.State)
		}
	}
	t.asked(d, t.permit(t.long(), 2), driver.Held, "of which all are held", "S1")
}

// semStepOwnLimitDecides: counting it, no more than its own limit are held.
func semStepOwnLimitDecides(t *T) {
	d := t.driver()
	for i := range 3 {
		t.asked(d, t.permit(t.long(), 3), driver.Granted, fmt.Sprintf("of which %d of 3 are held", i), "S1")
	}
	for _, limit := range []int{1, 2, 3} {
		t.asked(d, t.permit(t.long(), limit), driver.Held, fmt.Sprintf("with limit %d, of which 3 are held", limit), "S1")
	}
	t.asked(d, t.permit(t.long(), 4), driver.Granted, "with limit 4, of which 3 are held", "S1")
	t.asked(d, t.permit(t.long(), 4), driver.Held, "with limit 4, of which 4 are held", "S1")
}

// semStepHeadIsJudgedByItsLimit: nobody passes the head, those with a greater limit neither.
func semStepHeadIsJudgedByItsLimit(t *T) {
	d := t.driver()
	a, b := t.permit(t.long(), 5), t.permit(t.long(), 5)
	t.asked(d, a, driver.Granted, "that is free", "S1")
	t.asked(d, b, driver.Granted, "of which one is held", "S1")
	head := waiting(t.permit(t.long(), 1), t.long())
	t.asked(d, head, driver.Waiting, "with limit 1, of which 2 are held", "S1")
	t.asked(d, t.permit(t.long(), 5), driver.Held, "with limit 5 behind a head with limit 1", "S1")
	behind := waiting(t.permit(t.long(), 5), t.long())
	t.asked(d, behind, driver.Waiting, "with limit 5 behind a head with limit 1", "S1")
	t.give(d, a.Owner, true, "of a permit", "L7")
	t.stands(d, head, driver.Waiting, "a head with limit 1 while 1 is held", "S1")
	t.stands(d, behind, driver.Waiting, "a waiter with limit 5 behind it", "S1")
	t.give(d, b.Owner, true, "of the last permit", "L7")
	t.stands(d, head, driver.Granted, "a head with limit 1 while none is held", "S1")
	t.stands(d, behind, driver.Granted, "a waiter with limit 5 behind it, while 1 is held", "S1")
}

func semStepLeavingHeadServesSeveral(t *T) {
	d := t.driver()
	h := t.permit(t.long(), 4)
	t.asked(d, h, driver.Granted, "that is free", "S1")
	head := waiting(t.permit(t.long(), 1), t.long())
	t.asked(d, head, driver.Waiting, "with limit 1, of which 1 is held", "S1")
	var behind []driver.Request
	for range 4 {
		r := waiting(t.permit(t.long(), 4), t.long())
		t.asked(d, r, driver.Waiting, "with limit 4 behind a head with limit 1", "S1")
		behind = append(behind, r)
	}
	t.give(d, head.Owner, true, "of the head", "L7")
	for i, r := range behind {
		want := driver.Granted
		if i == 3 {
			want = driver.Waiting
		}
		t.stands(d, r, want, fmt.Sprintf("waiter %d of limit 4 while 1 was held and the head left", i+1), "S1")
	}
}

func semStepExpiryServesSeveral(t *T) {
	d := t.driver()
	for range 2 {
		t.asked(d, t.permit(t.short(), 2), driver.Granted, "that is free", "S1")
	}
	first, second, third := waiting(t.permit(t.long(), 2), t.long()), waiting(t.permit(t.long(), 2), t.long()), waiting(t.permit(t.long(), 2), t.long())
	for _, r := range []driver.Request{first, second, third} {
		t.asked(d, r, driver.Waiting, "of which all are held", "S1")
	}
	t.passes(2*t.short(), func() {})
	t.stands(d, third, driver.Waiting, "the third waiter after two permits ended", "S1")
	t.stands(d, second, driver.Granted, "the second waiter after two permits ended", "S1")
	t.stands(d, first, driver.Granted, "the first waiter after two permits ended", "S1")
}

// semStepReleaseServesAllItCan: the step that makes room for several serves them; nobody has to ask first.
func semStepReleaseServesAllItCan(t *T) {
	d := t.driver()
	t.asked(d, t.permit(t.long(), 4), driver.Granted, "that is free", "S1")
	head := waiting(t.permit(t.long(), 1), t.long())
	t.asked(d, head, driver.Waiting, "with limit 1, of which 1 is held", "S1")
	for range 3 {
		t.asked(d, waiting(t.permit(t.long(), 4), t.long()), driver.Waiting, "with limit 4 behind a head with limit 1", "S1")
	}
	t.give(d, head.Owner, true, "of the head", "L7")
	if n := len(t.list(d, head.Name)); n != 4 {
		t.Fatalf("holders after the head with limit 1 left, with 3 of limit 4 behind it: got %d, want 4 (W4)", n)
	}
}

func semStepRepeatTakesNoSecondPermit(t *T) {
	d := t.driver()
	r := t.permit(t.long(), 2)
	first := t.asked(d, r, driver.Granted, "that is free", "S1")
	for range 3 {
		if again := t.asked(d, r, driver.Granted, "again", "L5"); again.Token != first.Token {
			t.Fatalf("repeated step for a permit: got token %v, want %v (T3)", again.Token, first.Token)
		}
	}
	t.asked(d, t.permit(t.long(), 2), driver.Granted, "of which one is held, asked for four times", "L5")
	t.asked(d, t.permit(t.long(), 2), driver.Held, "of which both are held", "S1")
}

func semBound(t *T) {
	const limit = 3
	clients := []*fencelock.Client{t.client(), t.client()}
	var held []*fencelock.Lease
	for i := range limit {
		held = append(held, t.lock(fencelock.Permits(clients[i%2], limit), t.key()))
	}
	for _, c := range clients {
		t.refused(fencelock.Permits(c, limit), t.key(), "while all permits are held", "S1")
	}
	t.release(held[1])
	t.release(t.lock(fencelock.Permits(clients[0], limit), t.key()))
	t.release(held[0])
	t.release(held[2])
}

// semBoundUnderContention: many try at the same moment, for the first time.
func semBoundUnderContention(t *T) {
	const tries, limit = 50, 3
	clients := []*fencelock.Client{t.client(), t.client(), t.client(), t.client()}
	for round := range 5 {
		name := fmt.Sprintf("%s/%d", t.key(), round)
		var got atomic.Int32
		var all sync.WaitGroup
		start := make(chan struct{})
		for i := range tries {
			all.Go(func() {
				<-start
				_, err := clients[i%4].TryAcquire(t.Context(), name, limit, fencelock.TTL(t.long()))
				if err == nil {
					got.Add(1)
				} else {
					t.checkIs("TryAcquire of many at once", err, fencelock.ErrHeld, "L8")
				}
			})
		}
		close(start)
		all.Wait()
		if n := got.Load(); n != limit {
			t.Fatalf("TryAcquire of %d at once: got %d permits, want %d (S1)", tries, n, limit)
		}
	}
}

// semLoweredLimitDrains: nobody is evicted, and nobody let in before fewer than the new limit are held.
func semLoweredLimitDrains(t *T) {
	c := t.client()
	var held []*fencelock.Lease
	for range 3 {
		held = append(held, t.lock(fencelock.Permits(c, 3), t.key(), fencelock.TTL(t.steady())))
	}
	low := fencelock.Permits(t.client(), 1)
	t.passes(t.steady(), func() { t.refused(low, t.key(), "with a lowered limit", "S1") })
	for i, l := range held {
		t.held(l, "of a permit taken before the limit was lowered")
		t.refused(low, t.key(), fmt.Sprintf("with a lowered limit, while %d are held", 3-i), "S1")
		t.release(l)
	}
	t.release(t.lock(low, t.key()))
}

func semRefusedTriesLeaveNothing(t *T) {
	c := t.client()
	l := t.lock(fencelock.Permits(c, 1), t.key(), fencelock.TTL(t.long()))
	for range 300 {
		t.refused(fencelock.Permits(c, 1), t.key(), "while the permit is held", "S1")
	}
	t.release(l)
	t.nothingLeft(driver.Name{Kind: driver.KindPermit, Name: t.key()}, "after many refused tries")
	t.release(t.lock(fencelock.Permits(t.client(), 1), t.key()))
}

func semAllWaitersAreServed(t *T) {
	const clients, each, limit = 4, 6, 2
	var inside, most, total atomic.Int32
	var all sync.WaitGroup
	for range clients {
		c := t.client()
		for range each {
			all.Go(func() {
				l, err := c.Acquire(t.Context(), t.key(), limit, fencelock.TTL(t.long()))
				if err != nil {
					t.Errorf("Acquire of one among many: got %v, want a permit", err)
					return
				}
				n := inside.Add(1)
				for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
				}
				total.Add(1)
				time.Sleep(5 * time.Millisecond) // work, so that permits overlap
				inside.Add(-1)
				if err := l.Release(t.Context()); err != nil {
					t.Errorf("Release of a permit: got %v, want nil", err)
				}
			})
		}
	}
	all.Wait()
	if n := most.Load(); n > limit {
		t.Fatalf("permits held at a time: got %d, want at most %d (S1)", n, limit)
	}
	if n := total.Load(); n != clients*each {
		t.Fatalf("permits of %d waiters: got %d, want as many", clients*each, n)
	}
	t.nothingLeft(driver.Name{Kind: driver.KindPermit, Name: t.key()}, "after all waiters were served")
}

// semAbandonedWaitsLeaveNothing: short waits for long leases, again and again, do not add up.
func semAbandonedWaitsLeaveNothing(t *T) {
	c := t.client()
	l := t.lock(fencelock.Permits(c, 1), t.key(), fencelock.TTL(t.long()))
	for range 15 {
		var waits []*pending
		for range 3 {
			waits = append(waits, t.lockLater(t.Context(), fencelock.Permits(c, 1), t.key(), fencelock.TTL(t.long()), fencelock.WaitFor(30*time.Millisecond)))
		}
		for _, p := range waits {
			if l, _ := p.wait(patience); l != nil {
				t.Fatalf("Acquire while the permit is held: got one, want the end of the wait (S1)")
			}
		}
	}
	t.release(l)
	t.nothingLeft(driver.Name{Kind: driver.KindPermit, Name: t.key()}, "after many abandoned waits")
	t.release(t.lock(fencelock.Permits(t.client(), 1), t.key()))
}

func semDeadPermitComesBack(t *T) {
	d := t.driver()
	var left time.Duration
	for range 2 {
		left = t.asked(d, t.permit(t.steady(), 2), driver.Granted, "that is free", "S1").TTL
	}
	c := t.client()
	t.inTime("Acquire after the holders of all permits died", left+slack, "W3", func() {
		for range 2 {
			t.lockLater(t.Context(), fencelock.Permits(c, 2), t.key(), fencelock.TTL(t.steady())).lease(patience)
		}
	})
}

// semLostReplyCountsForNobody: a permit whose reply was lost is given back, not counted for one who got an error.
func semLostReplyCountsForNobody(t *T) {
	c, f := t.faulty()
	f.on(stepLock, once(lostReply()))
	_, err := c.TryAcquire(t.Context(), t.key(), 2, fencelock.TTL(t.long()))
	t.is("TryAcquire whose reply is lost", err, fencelock.ErrUncertain, "L8")
	t.awaitReply(f, stepRelease, 1)
	d := t.driver()
	for i := range 2 {
		t.asked(d, t.permit(t.long(), 2), driver.Granted, fmt.Sprintf("of which %d of 2 are held, after a permit's reply was lost", i), "L7")
	}
}

// semTokensOrderPermits: each permit has a token of its own, greater than those before.
func semTokensOrderPermits(t *T) {
	var last driver.Token
	d := t.driver()
	for i := range 20 {
		r := t.permit(t.long(), 5)
		if i >= 5 {
			r.Limit = 100
		}
		a := t.asked(d, r, driver.Granted, "of which some are free", "S1")
		if a.Token <= last {
			t.Fatalf("token of permit %d: got %v after %v, want more (T1)", i, a.Token, last)
		}
		last = a.Token
	}
}
