package conformance

import (
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var costTests = []test{
	{name: "Uncontended", run: costUncontended, permit: true},
	{name: "Refused", run: costRefused, permit: true},
	{name: "Idle", run: costIdle, permit: true},
	{name: "RestHolding", run: costRestHolding, alone: true},
	{name: "RestWaiting", run: costRestWaiting, alone: true, needs: []Need{Queueing}},
	{name: "ManyWaiters", run: costManyWaiters, permit: true, needs: []Need{Pushes}},
	{name: "ManyWaitersInLine", run: costManyWaitersInLine, permit: true},
	{name: "ServerUncontended", run: costServerUncontended, alone: true, needs: []Need{Requests}},
	{name: "ServerHandover", run: costServerHandover, alone: true, needs: []Need{Requests, Pushes}},
	{name: "ServerBatch", run: costServerBatch, alone: true, needs: []Need{Requests}},
}

// costUncontended: one request to take a lock, one to release it, none besides.
func costUncontended(t *T) {
	c, f := t.faulty()
	for i := range 20 {
		name := fmt.Sprintf("%s/%d", t.key(), i%2)
		if i%4 < 2 {
			t.release(t.lock(t.locker(c), name, fencelock.TTL(t.long())))
			continue
		}
		l, err := t.locker(c).Lock(t.Context(), name, fencelock.TTL(t.long()))
		if err != nil {
			t.Fatalf("Lock of a free lock: got %v, want a lease", err)
		}
		t.release(l)
	}
	if n := f.requests(); n != 40 {
		t.Fatalf("requests for 20 uncontended pairs: got %d, want 40", n)
	}
}

func costRefused(t *T) {
	c, f := t.faulty()
	give := t.holdFor(t.key())
	for range 10 {
		t.refused(t.locker(c), t.key(), "while held", "L1")
	}
	if n := f.requests(); n != 10 {
		t.Fatalf("requests for 10 refused tries: got %d, want 10", n)
	}
	give()
}

// costIdle: a client that neither holds nor waits sends nothing.
func costIdle(t *T) {
	c, f := t.faulty()
	t.release(t.lock(t.locker(c), t.key(), fencelock.TTL(t.short())))
	before := f.requests()
	t.passes(2*t.short(), func() {})
	if n := f.requests() - before; n != 0 {
		t.Fatalf("requests of an idle client: got %d, want 0 (W2)", n)
	}
}

// mostRestNames is for how many names clients rest.
const mostRestNames = 1000

// pollPeriod is how often a waiter with a long TTL polls.
const pollPeriod = 5 * time.Second

// restTTL is the least TTL for which the bound holds.
const restTTL = 4 * time.Second

// restNames is mostRestNames, or as many as the backend can do in a small part of the TTL now, so that no lease is lost
// on a busy machine.
func (t *T) restNames() int {
	t.Helper()
	const part = 10
	d := t.driver()
	var batch []driver.Extension
	for i := range mostRestNames / part {
		r := t.request(fmt.Sprintf("%s/batch/%d", t.key(), i), t.long())
		t.asked(d, r, driver.Granted, "that is free", "L1")
		batch = append(batch, driver.Extension{Owner: r.Owner, TTL: r.TTL})
	}
	began := time.Now()
	d.Extend(t.Context(), batch)
	all := part * time.Since(began)
	n := max(min(int(int64(mostRestNames)*int64(restTTL/40)/int64(all)), mostRestNames), mostRestNames/part)
	t.Logf("%d names", n)
	return n
}

// costRestHolding: fewer than two batches a second, for any number of leases.
func costRestHolding(t *T) {
	ttl, names := t.ttl(restTTL), t.restNames()
	c, f := t.faulty()
	leases := make([]*fencelock.Lease, names)
	t.many(names, func(i int) {
		var err error
		leases[i], err = c.TryLock(t.Context(), fmt.Sprintf("%s/%d", t.key(), i), fencelock.TTL(ttl))
		if err != nil {
			t.Errorf("TryLock of one of many names: got %v, want a lease", err)
		}
	})
	if t.Failed() {
		t.Fatalf("not all leases were taken")
	}
	t.rest(f, names, ttl, stepExtend)
	for i, l := range leases {
		if err := l.Err(); err != nil {
			t.Fatalf("Err of lease %d of %d at rest: got %v, want nil", i, names, err)
		}
	}
	t.many(names, func(i int) {
		if err := leases[i].Release(t.Context()); err != nil {
			t.Errorf("Release of one of many: got %v, want nil", err)
		}
	})
}

// many calls f with all numbers below n, a few at a time.
func (t *T) many(n int, f func(i int)) {
	const at = 16
	var all sync.WaitGroup
	for k := range at {
		all.Go(func() {
			for i := k; i < n; i += at {
				f(i)
			}
		})
	}
	all.Wait()
}

// rest checks what a client sends that is at rest: it lets the batches come together for half a TTL, and counts
// for a whole one.
func (t *T) rest(f *faults, names int, ttl time.Duration, step string) {
	t.Helper()
	t.passes(ttl/2, func() {})
	before, all, began := f.count(step), f.requests(), time.Now()
	t.passes(ttl, func() {})
	passed := time.Since(began)
	n := f.count(step) - before
	if other := f.requests() - all - n; other > 0 {
		t.Fatalf("requests of a client at rest besides %s: got %d in %v, want 0 (W2)", step, other, passed)
	}
	if n == 0 {
		t.Fatalf("batches of a client at rest with TTL %v: got 0 in %v, want some", ttl, passed)
	}
	if n >= int(2*passed/time.Second)+1 {
		t.Fatalf("batches of a client at rest, %d names with TTL %v: got %d in %v, want fewer than 2 in a second (W2)", names, ttl, n, passed)
	}
}

func costRestWaiting(t *T) {
	ttl, names := t.ttl(restTTL), t.restNames()
	holder := t.client()
	c, f := t.faulty()
	leases := make([]*fencelock.Lease, names)
	t.many(names, func(i int) {
		var err error
		if leases[i], err = holder.TryLock(t.Context(), fmt.Sprintf("%s/%d", t.key(), i), fencelock.TTL(fencelock.MaxTTL)); err != nil {
			t.Errorf("TryLock of one of many names: got %v, want a lease", err)
		}
	})
	if t.Failed() {
		t.Fatalf("not all leases were taken")
	}
	var waits []*pending
	for i := range names {
		waits = append(waits, t.lockLater(t.Context(), c, fmt.Sprintf("%s/%d", t.key(), i), fencelock.TTL(ttl)))
		t.awaitReply(f, stepLock, i-15) // some at a time: a pool of connections has its limits
	}
	t.awaitReply(f, stepLock, names)
	t.rest(f, names, ttl, stepPoll)
	for i, p := range waits {
		select {
		case r := <-p.result:
			t.Fatalf("Lock of held lock %d: got its end with %v, want it to wait", i, orNil(r.err))
		default:
		}
	}
	c.Close() // ends the waits
}

// costManyWaiters: n waiters cost O(n) requests, however many wait while one is served.
func costManyWaiters(t *T) {
	const clients, each = 4, 10
	var fs []*faults
	var all sync.WaitGroup
	give := t.holdFor(t.key())
	for range clients {
		c, f := t.faulty()
		fs = append(fs, f)
		for range each {
			all.Go(func() {
				l, err := t.locker(c).Lock(t.Context(), t.key(), fencelock.TTL(t.long()))
				if err != nil {
					t.Errorf("Lock of one among many: got %v, want a lease", err)
					return
				}
				if err := l.Release(t.Context()); err != nil {
					t.Errorf("Release: got %v, want nil", err)
				}
			})
		}
	}
	for _, f := range fs {
		t.awaitReply(f, stepLock, each)
	}
	began := time.Now()
	give()
	all.Wait()
	sum, polls := 0, 0
	for _, f := range fs {
		sum += f.requests()
		polls += f.count(stepPoll)
	}
	// One request to queue, one to release, a recheck when the client's subscription stands; and a poll now
	// and then by each client.
	allowed := 3*clients*each + clients*(2+int(time.Since(began)/pollPeriod))
	if sum > allowed {
		t.Fatalf("requests of %d waiters: got %d, of them %d polls, want at most %d (W2)", clients*each, sum, polls, allowed)
	}
}

// costManyWaitersInLine: where the driver does not queue, those of one client do not all ask.
func costManyWaitersInLine(t *T) {
	const waiters = 40
	c, f := t.faultyOn(t.withoutQueue())
	var all sync.WaitGroup
	for range waiters {
		all.Go(func() {
			l, err := t.locker(c).Lock(t.Context(), t.key(), fencelock.TTL(t.long()), fencelock.Backoff(time.Second, time.Minute))
			if err != nil {
				t.Errorf("Lock of one among many: got %v, want a lease", err)
				return
			}
			if err := l.Release(t.Context()); err != nil {
				t.Errorf("Release: got %v, want nil", err)
			}
		})
	}
	all.Wait()
	if n := f.requests(); n > 4*waiters {
		t.Fatalf("requests of %d waiters of one client without a queue: got %d, want at most %d (W2)", waiters, n, 4*waiters)
	}
}

// costServerUncontended: the driver makes one request of each step.
func costServerUncontended(t *T) {
	c := t.client()
	t.ready(c)
	before := t.Requests(t.TB)
	for range 20 {
		t.release(t.lock(c, t.key(), fencelock.TTL(t.long())))
	}
	if n := t.Requests(t.TB) - before; n > 40 {
		t.Fatalf("requests to the server for 20 uncontended pairs: got %d, want at most 40", n)
	}
}

// costServerHandover: one request to queue, and one to release, which hands over.
func costServerHandover(t *T) {
	a, b := t.client(), t.client()
	c, f := t.faulty()
	t.ready(a)
	t.ready(b)
	t.ready(c)
	l := t.lock(a, t.key(), fencelock.TTL(t.long()))
	before := t.Requests(t.TB)
	const waiters = 20
	asked := f.count(stepLock)
	var waits []*pending
	for i := range waiters {
		waits = append(waits, t.lockLater(t.Context(), c, t.key(), fencelock.TTL(t.long())))
		t.awaitReply(f, stepLock, asked+i+1)
	}
	began := time.Now()
	for _, p := range waits {
		t.release(l)
		l = p.lease(patience)
	}
	t.release(l)
	allowed := 2*waiters + 1 + 10 + int(time.Since(began)/pollPeriod)
	if n := t.Requests(t.TB) - before; n > allowed {
		t.Fatalf("requests to the server for %d waiters: got %d, want at most %d (W2)", waiters, n, allowed)
	}
}

// costServerBatch: a batch is not one request for each lease.
func costServerBatch(t *T) {
	const leases = 500
	c, f := t.faulty()
	for i := range leases {
		t.lock(c, fmt.Sprintf("%s/%d", t.key(), i), fencelock.TTL(t.steady()))
	}
	t.awaitReply(f, stepExtend, f.count(stepExtend)+2)
	before, batches := t.Requests(t.TB), f.count(stepExtend)
	t.awaitReply(f, stepExtend, batches+2)
	sent := f.count(stepExtend) - batches + 1
	if n := t.Requests(t.TB) - before; n > sent*leases/20 {
		t.Fatalf("requests to the server for %d batches of %d leases: got %d, want at most %d (W2)", sent, leases, n, sent*leases/20)
	}
}
