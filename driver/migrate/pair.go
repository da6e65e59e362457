package migrate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// pair is the steps of phase both: the old backend first, then the new one, then the old one is told the token.
//
// A waiter stands in the old backend's queue. When that has served it, it holds there and takes the new lock or
// stands in the new queue; each of its polls goes on from where it is, and so does each grant that a backend announces.
type pair struct {
	old, young *backend
	queues     bool

	ctx     context.Context // of what announced grants begin
	stop    context.CancelFunc
	pushing sync.WaitGroup

	mu     sync.Mutex
	sink   func(driver.Event)
	owners map[string]*owner // by id
	sweep  int               // how many there may be before those that have ended are dropped
}

// owner is what must be known of an id between its steps.
type owner struct {
	request driver.Request
	first   driver.Token // that the old backend gave, if it stands in the new one's queue; else 0
	held    bool         // has been answered granted
	ends    time.Time    // when it can be forgotten
	work    *work        // that takes it a step further; one at a time
	ended   bool         // its release has begun: it goes no further
}

// work is under way for an owner.
type work struct {
	cancel context.CancelFunc
	done   chan struct{}
	missed bool // a grant was announced meanwhile
}

func newPair(old, young *backend) *pair {
	p := &pair{old: old, young: young, queues: old.queue != nil && young.queue != nil, owners: make(map[string]*owner)}
	p.ctx, p.stop = context.WithCancel(context.Background())
	return p
}

// close ends what announced grants have begun.
func (p *pair) close() {
	p.mu.Lock()
	p.stop()
	p.mu.Unlock()
	p.pushing.Wait()
}

// note remembers an owner until its lease or queue entry would have ended. set changes what is known of it.
func (p *pair) note(r driver.Request, set func(*owner)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if len(p.owners) > p.sweep {
		maps.DeleteFunc(p.owners, func(_ string, o *owner) bool { return o.work == nil && now.After(o.ends) })
		p.sweep = 2*len(p.owners) + 16
	}
	o := p.owners[r.ID]
	if o == nil {
		o = new(owner)
		p.owners[r.ID] = o
	}
	o.request, o.ends = r, now.Add(2*max(r.TTL, r.Claim))
	set(o)
}

func (o *owner) queued(first driver.Token) { o.first, o.held = first, false }
func (o *owner) holds()                    { o.first, o.held = 0, true }

// lookup answers what is known of an id, nil if nothing is.
func (p *pair) lookup(id string) *owner {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.owners[id]
}

var errEnded = errors.New("the owner has been released")

// begin waits for the work on an owner and begins another, for as long as the context that it answers lives. It fails
// with errEnded when the owner's release has begun.
func (p *pair) begin(ctx context.Context, o *owner) (context.Context, owner, error) {
	for {
		p.mu.Lock()
		w := o.work
		switch {
		case o.ended:
			p.mu.Unlock()
			return nil, owner{}, errEnded
		case w == nil:
			defer p.mu.Unlock()
			ctx := o.begin(ctx)
			return ctx, *o, nil
		}
		p.mu.Unlock()
		select {
		case <-w.done:
		case <-ctx.Done():
			return nil, owner{}, ctx.Err()
		}
	}
}

// begin notes the work. p.mu is held, as in end.
func (o *owner) begin(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	o.work = &work{cancel: cancel, done: make(chan struct{})}
	return ctx
}

// end ends the work on an owner.
func (p *pair) end(o *owner) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endLocked(o)
}

func (p *pair) endLocked(o *owner) {
	w := o.work
	o.work = nil
	w.cancel()
	close(w.done)
	if w.missed && !o.held && !o.ended {
		p.recheck(o.request.Name)
	}
}

// recheck makes all waiters for a name ask. p.mu is held.
func (p *pair) recheck(n driver.Name) {
	p.sink(driver.Event{Kind: driver.EventRecheck, Owner: driver.Owner{Name: n}})
}

// extended lets an owner be remembered for another TTL.
func (p *pair) extended(id string, ttl time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o := p.owners[id]; o != nil {
		o.ends = time.Now().Add(2 * ttl)
	}
}

func (p *pair) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.owners, id)
}

func (p *pair) acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	if !p.queues && (p.old.queue != nil || p.young.queue != nil) {
		r.Wait, r.Claim = false, 0
	}
	known := p.lookup(r.ID) != nil
	if r.Wait && !known {
		p.note(r, func(*owner) {}) // a grant may be announced before the reply comes
	}
	first, err := p.old.acquire(ctx, r)
	if err != nil || first.State == driver.Waiting {
		return first, err
	}
	if first.State != driver.Granted {
		p.forget(r.ID)
		return first, nil
	}
	a, err := p.second(ctx, r, first)
	switch {
	case err != nil && errors.Is(err, driver.ErrUnavailable) && !known:
		// Whoever knows that nothing is left may say so.
		undo := p.old.release
		if a.State == driver.Granted {
			undo = p.release
		}
		if _, failed := undo(ctx, r.Owner); failed != nil {
			err = uncertain(err)
		}
		p.forget(r.ID)
		return driver.Answer{}, err
	case err != nil:
		return driver.Answer{}, uncertain(err)
	case a.State == driver.Granted:
		p.note(r, (*owner).holds)
	case a.State == driver.Waiting:
		p.note(r, func(o *owner) { o.queued(first.Token) })
	default:
		if _, err := p.release(ctx, r.Owner); err != nil {
			return driver.Answer{}, uncertain(err)
		}
	}
	return a, nil
}

// attempts is how often the new lock is taken anew in one step because of its token.
const attempts = 3

// leap is how far above the last token a new attempt begins at most, in microseconds. Two backends whose tokens run ahead of
// the clock both count by ones, so that the next of one would be the next of the other again.
const leap = 4096

// second takes the new lock for an owner that holds the old one. With an error it answers granted if the new lock was.
func (p *pair) second(ctx context.Context, r driver.Request, first driver.Answer) (driver.Answer, error) {
	r.Floor = max(r.Floor, first.Token)
	for range attempts {
		a, err := p.young.acquire(ctx, r)
		if err != nil {
			return driver.Answer{}, err
		}
		if a.State != driver.Granted {
			return a, nil
		}
		ok, err := p.settle(ctx, r, first, &a)
		if err != nil || ok {
			return a, err
		}
		if _, err := p.young.release(ctx, r.Owner); err != nil {
			return a, err
		}
		r.Floor = max(r.Floor, a.Token) + 1 + driver.Token(rand.Int64N(leap))
	}
	return driver.Answer{}, fmt.Errorf("the new backend granted no token above %v that is not in use in %d attempts", first.Token, attempts)
}

// settle makes a grant of both backends one: it tells the new token to the old backend, so that all that is granted there
// from now on is above it (T1). It answers false if the token will not do: the owner had the new lock from an
// earlier turn on the old backend, or a permit has the same token there (T2).
func (p *pair) settle(ctx context.Context, r driver.Request, first driver.Answer, a *driver.Answer) (bool, error) {
	if a.Token <= first.Token {
		return false, nil
	}
	if err := p.old.advance(ctx, r.Name, a.Token); err != nil {
		return false, err
	}
	a.TTL = min(a.TTL, first.TTL)
	if r.Limit <= 1 {
		return true, nil
	}
	// Clients in phase from take permits of the old backend meanwhile. No later one gets this token.
	twin := false
	err := p.old.list(ctx, r.Name, func(h driver.Holding) bool {
		twin = h.Token == a.Token && h.ID != r.ID
		return !twin
	})
	return !twin, err
}

func (p *pair) extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	var old []driver.Result
	var asked sync.WaitGroup
	asked.Go(func() { old = p.old.extend(ctx, leases) })
	results := p.young.extend(ctx, leases)
	asked.Wait()
	for i := range results {
		results[i] = p.both(ctx, leases[i], old[i], results[i])
	}
	return results
}

// both is the outcome of an extension: gone if either is, unknown if either is.
func (p *pair) both(ctx context.Context, e driver.Extension, old, young driver.Result) driver.Result {
	gone := func(r driver.Result) bool { return r.Err == nil && r.State != driver.Granted }
	switch {
	case gone(young) && old.Err == nil && old.State == driver.Granted:
		// A waiter that the old queue has served, and that has not been told to hold yet, still has its way to go.
		o := p.lookup(e.ID)
		if o == nil {
			return driver.Result{Answer: driver.Answer{State: driver.Gone}}
		}
		ctx, now, err := p.begin(ctx, o)
		if errors.Is(err, errEnded) {
			return driver.Result{Answer: driver.Answer{State: driver.Gone}}
		}
		if err != nil {
			return driver.Result{Err: err}
		}
		defer p.end(o)
		if now.held {
			return driver.Result{Answer: driver.Answer{State: driver.Gone}}
		}
		r := p.promote(ctx, driver.Poll{Owner: e.Owner, TTL: e.TTL, Claim: now.request.Claim}, now.request, old.Answer)
		if r.Err == nil && r.State == driver.Waiting {
			r = driver.Result{Err: errors.New("the lease waits for the new backend")}
		}
		return r
	case gone(old) || gone(young):
		return driver.Result{Answer: driver.Answer{State: driver.Gone}}
	case old.Err != nil || young.Err != nil:
		return driver.Result{Err: joined(old.Err, young.Err)}
	}
	p.extended(e.ID, e.TTL)
	young.TTL = min(young.TTL, old.TTL)
	return young
}

// release undoes whatever the owner has, in reverse order.
func (p *pair) release(ctx context.Context, o driver.Owner) (bool, error) {
	p.mu.Lock()
	known := p.owners[o.ID]
	var under *work
	if known != nil {
		known.ended = true
		if under = known.work; under != nil {
			under.cancel()
		}
	}
	p.mu.Unlock()
	if under != nil {
		select {
		case <-under.done:
		case <-ctx.Done():
			return false, ctx.Err()
		}
	}
	// Until the end it is known, so that a poll that passes the release takes nothing for it.
	defer p.forget(o.ID)
	return p.undo(ctx, o)
}

// undo gives back what there is on both backends, in reverse order.
func (p *pair) undo(ctx context.Context, o driver.Owner) (bool, error) {
	held, err := p.young.release(ctx, o)
	first, failed := p.old.release(ctx, o)
	if err := joined(err, failed); err != nil {
		return false, err
	}
	return held || first, nil
}

// joined is the error of a step on both backends. Only if neither did it, surely nothing happened.
func joined(one, other error) error {
	err := errors.Join(one, other)
	if errors.Is(one, driver.ErrUnavailable) && errors.Is(other, driver.ErrUnavailable) {
		return err
	}
	return uncertain(err)
}

func (p *pair) poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	owners := make([]*owner, len(waiters))
	for i, w := range waiters {
		owners[i] = p.lookup(w.ID)
	}
	results := p.old.poll(ctx, waiters)
	var queued []int // places of those that stand in the new queue
	var polls []driver.Poll
	for i, w := range waiters {
		if results[i].Err != nil || results[i].State != driver.Granted {
			continue
		}
		o := owners[i]
		if o == nil {
			queued, polls = append(queued, i), append(polls, w)
			continue
		}
		ctx, now, err := p.begin(ctx, o)
		switch {
		case errors.Is(err, errEnded):
			results[i] = driver.Result{Answer: driver.Answer{State: driver.Gone}}
		case err != nil:
			results[i] = driver.Result{Err: err}
		case now.held || now.first != 0:
			defer p.end(o)
			queued, polls = append(queued, i), append(polls, w)
		default:
			results[i] = p.promote(ctx, w, now.request, results[i].Answer)
			p.end(o)
		}
	}
	if len(polls) == 0 {
		return results
	}
	for k, second := range p.young.poll(ctx, polls) {
		i := queued[k]
		results[i] = p.served(ctx, polls[k], owners[i], results[i].Answer, second)
	}
	return results
}

// promote takes the new lock for a waiter that the old queue has served.
func (p *pair) promote(ctx context.Context, w driver.Poll, r driver.Request, first driver.Answer) driver.Result {
	r.TTL, r.Claim = w.TTL, w.Claim
	a, err := p.second(ctx, r, first)
	switch {
	case err != nil:
		return driver.Result{Err: uncertain(err)}
	case a.State == driver.Granted:
		p.note(r, (*owner).holds)
	case a.State == driver.Waiting:
		p.note(r, func(o *owner) { o.queued(first.Token) })
	default:
		return p.gone(ctx, w.Owner)
	}
	return driver.Result{Answer: a}
}

// served takes the answer of the new queue about a waiter that holds the old lock. o is nil if it is another client's.
func (p *pair) served(ctx context.Context, w driver.Poll, o *owner, first driver.Answer, second driver.Result) driver.Result {
	switch {
	case second.Err != nil:
		return driver.Result{Err: uncertain(second.Err)}
	case second.State == driver.Gone && o == nil:
		// Its limit is not known here, so it waits for the strictest.
		return p.promote(ctx, w, driver.Request{Owner: w.Owner, Limit: 1, Wait: true}, first)
	case second.State == driver.Gone:
		return p.gone(ctx, w.Owner)
	case second.State != driver.Granted:
		p.extended(w.ID, w.TTL)
		return second
	}
	r := driver.Request{Owner: w.Owner, TTL: w.TTL, Limit: 1}
	if o != nil {
		p.mu.Lock()
		r = o.request
		p.mu.Unlock()
	}
	ok, err := p.settle(ctx, r, first, &second.Answer)
	if err != nil {
		return driver.Result{Err: uncertain(err)}
	}
	if !ok {
		return p.gone(ctx, w.Owner)
	}
	p.note(r, (*owner).holds)
	return second
}

// gone takes away what is left of a waiter: it must queue anew, with another id.
func (p *pair) gone(ctx context.Context, o driver.Owner) driver.Result {
	if _, err := p.undo(ctx, o); err != nil {
		return driver.Result{Err: uncertain(err)}
	}
	p.forget(o.ID)
	return driver.Result{Answer: driver.Answer{State: driver.Gone}}
}

func (p *pair) nextToken(ctx context.Context, n driver.Name, floor driver.Token) (driver.Token, error) {
	first, err := p.old.nextToken(ctx, n, floor)
	if err != nil {
		return 0, err
	}
	t, err := p.young.nextToken(ctx, n, max(floor, first))
	if err != nil {
		return 0, err
	}
	return t, p.old.advance(ctx, n, t)
}

func (p *pair) advance(ctx context.Context, n driver.Name, floor driver.Token) error {
	return joined(p.old.advance(ctx, n, floor), p.young.advance(ctx, n, floor))
}

// list shows a lease that is on both backends once, with the new token. One that is on the old backend only is of a
// client in phase from, or waits for the new one.
func (p *pair) list(ctx context.Context, n driver.Name, yield func(driver.Holding) bool) error {
	first := make(map[driver.Owner]driver.Holding)
	var order []driver.Owner
	if err := p.old.list(ctx, n, func(h driver.Holding) bool {
		first[h.Owner] = h
		order = append(order, h.Owner)
		return true
	}); err != nil {
		return err
	}
	more := true
	if err := p.young.list(ctx, n, func(h driver.Holding) bool {
		if o, both := first[h.Owner]; both {
			h.Left = min(h.Left, o.Left)
			delete(first, h.Owner)
		}
		more = yield(h)
		return more
	}); err != nil {
		return err
	}
	order = slices.DeleteFunc(order, func(o driver.Owner) bool { _, left := first[o]; return !left })
	for _, o := range order {
		if !more {
			break
		}
		more = yield(first[o])
	}
	return nil
}

// forceUnlock counts a lease that is on both backends once.
func (p *pair) forceUnlock(ctx context.Context, n driver.Name) (int, error) {
	old, err := p.old.forceUnlock(ctx, n)
	if err != nil {
		return 0, err
	}
	young, err := p.young.forceUnlock(ctx, n)
	if err != nil {
		return 0, uncertain(err)
	}
	return max(old, young), nil
}

func (p *pair) notify(sink func(driver.Event)) {
	p.mu.Lock()
	p.sink = sink
	p.mu.Unlock()
	p.old.notify(func(e driver.Event) { p.event(e, p.old) })
	p.young.notify(func(e driver.Event) { p.event(e, p.young) })
}

// event passes on what a backend tells. A grant by one of them is a reason to go on to the next step.
func (p *pair) event(e driver.Event, by *backend) {
	if e.Kind != driver.EventGranted {
		p.sink(e)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.owners[e.Owner.ID]
	switch {
	case o == nil || o.held || o.ended || o.request.Owner != e.Owner || p.ctx.Err() != nil:
	case o.work != nil:
		o.work.missed = true
	case (by == p.young) != (o.first != 0):
		p.recheck(e.Owner.Name) // the reply that tells where it stands is still on its way
	default:
		now := *o
		ctx, cancel := context.WithTimeout(p.ctx, now.request.Claim)
		ctx = o.begin(ctx)
		p.pushing.Go(func() {
			defer cancel()
			p.goOn(ctx, o, now, e.Token)
		})
	}
}

// goOn takes an owner to which a backend gave a claim with this token as far as it comes, and tells the sink if it holds
// then. A failure is left to the owner's next poll.
func (p *pair) goOn(ctx context.Context, o *owner, now owner, t driver.Token) {
	r := now.request
	r.TTL = r.Claim // what it gets is a claim
	var a driver.Answer
	var err error
	if now.first == 0 {
		a, err = p.second(ctx, r, driver.Answer{Token: t, TTL: r.Claim})
	} else {
		a = driver.Answer{State: driver.Granted, Token: t, TTL: r.Claim}
		if ok, failed := p.settle(ctx, r, driver.Answer{Token: now.first, TTL: r.Claim}, &a); !ok {
			a.State, err = driver.Gone, failed
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	defer p.endLocked(o)
	switch {
	case err != nil || o.ended:
	case a.State == driver.Waiting:
		o.queued(t)
	case a.State == driver.Granted:
		o.holds()
		p.sink(driver.Event{Kind: driver.EventGranted, Owner: r.Owner, Token: a.Token})
	}
}
