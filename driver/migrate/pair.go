package migrate

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// pair is the steps of phase both: the old backend first, then the new one, then the old one is told the token.
//
// A waiter stands in the old backend's queue. When that has served it, it holds there and takes the new lock or
// stands in the new queue; each of its polls goes on from where it is.
type pair struct {
	old, young *backend
	queues     bool

	mu     sync.Mutex
	owners map[string]*owner // by id
	sweep  int               // how many there may be before those that have ended are dropped
}

// owner is what must be known of an id between its steps.
type owner struct {
	request driver.Request
	queued  bool      // stands in the new backend's queue
	held    bool      // has been answered granted
	ends    time.Time // when it can be forgotten
}

func newPair(old, young *backend) *pair {
	return &pair{old: old, young: young, queues: old.queue != nil && young.queue != nil, owners: make(map[string]*owner)}
}

// note remembers an owner until its lease or queue entry would have ended.
func (p *pair) note(r driver.Request, queued, held bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if len(p.owners) > p.sweep {
		maps.DeleteFunc(p.owners, func(_ string, o *owner) bool { return now.After(o.ends) })
		p.sweep = 2*len(p.owners) + 16
	}
	p.owners[r.ID] = &owner{request: r, queued: queued, held: held, ends: now.Add(2 * max(r.TTL, r.Claim))}
}

func (p *pair) known(o driver.Owner) (owner, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o := p.owners[o.ID]; o != nil {
		return *o, true
	}
	return owner{}, false
}

func (p *pair) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.owners, id)
}

// extended lets an owner be remembered for another TTL.
func (p *pair) extended(id string, ttl time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if o := p.owners[id]; o != nil {
		o.ends = time.Now().Add(2 * ttl)
	}
}

func (p *pair) acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	if !p.queues && (p.old.queue != nil || p.young.queue != nil) {
		r.Wait, r.Claim = false, 0
	}
	before, known := p.known(r.Owner)
	first, err := p.old.acquire(ctx, r)
	if err != nil || first.State != driver.Granted {
		if err == nil && first.State == driver.Waiting {
			p.note(r, false, false)
		}
		return first, err
	}
	a, err := p.second(ctx, r, first)
	switch {
	case err != nil && errors.Is(err, driver.ErrUnavailable) && !known:
		// Whoever knows that nothing is left may say so.
		if _, failed := p.release(ctx, r.Owner); failed != nil {
			err = uncertain(err)
		}
		return driver.Answer{}, err
	case err != nil:
		return driver.Answer{}, uncertain(err)
	case a.State == driver.Granted:
		p.note(r, false, true)
	case a.State == driver.Waiting:
		p.note(r, true, before.held)
	default:
		p.forget(r.ID)
		if _, err := p.old.release(ctx, r.Owner); err != nil {
			return driver.Answer{}, uncertain(err)
		}
	}
	return a, nil
}

// attempts is how often the new lock is taken anew in one step because of its token.
const attempts = 3

// second takes the new lock for an owner that holds the old one.
func (p *pair) second(ctx context.Context, r driver.Request, first driver.Answer) (driver.Answer, error) {
	r.Floor = max(r.Floor, first.Token)
	for range attempts {
		a, err := p.young.acquire(ctx, r)
		if err != nil || a.State != driver.Granted {
			return a, err
		}
		ok, err := p.settle(ctx, r, first, &a)
		if err != nil || ok {
			return a, err
		}
		if _, err := p.young.release(ctx, r.Owner); err != nil {
			return driver.Answer{}, err
		}
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
		results[i] = p.both(leases[i], old[i], results[i])
	}
	return results
}

// both is the outcome of an extension: gone if either is, unknown if either is.
func (p *pair) both(e driver.Extension, old, young driver.Result) driver.Result {
	gone := func(r driver.Result) bool { return r.Err == nil && r.State != driver.Granted }
	switch {
	case gone(old) || gone(young):
		return driver.Result{Answer: driver.Answer{State: driver.Gone}}
	case old.Err != nil && young.Err != nil:
		return driver.Result{Err: errors.Join(old.Err, young.Err)}
	case old.Err != nil:
		return driver.Result{Err: uncertain(old.Err)}
	case young.Err != nil:
		return driver.Result{Err: uncertain(young.Err)}
	}
	p.extended(e.ID, e.TTL)
	young.TTL = min(young.TTL, old.TTL)
	return young
}

// release undoes whatever the owner has, in reverse order.
func (p *pair) release(ctx context.Context, o driver.Owner) (bool, error) {
	p.forget(o.ID)
	held, err := p.young.release(ctx, o)
	first, failed := p.old.release(ctx, o)
	if err == nil && failed == nil {
		return held || first, nil
	}
	if err == nil || failed == nil {
		return false, uncertain(errors.Join(err, failed))
	}
	if errors.Is(err, driver.ErrUnavailable) != errors.Is(failed, driver.ErrUnavailable) {
		return false, uncertain(errors.Join(err, failed))
	}
	return false, errors.Join(err, failed)
}

func (p *pair) poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	results := p.old.poll(ctx, waiters)
	var queued []int // places of those that stand in the new queue
	var polls []driver.Poll
	for i, w := range waiters {
		if results[i].Err != nil || results[i].State != driver.Granted {
			continue
		}
		if o, known := p.known(w.Owner); known && !o.queued {
			results[i] = p.promote(ctx, w, o.request, results[i].Answer)
			continue
		}
		queued, polls = append(queued, i), append(polls, w)
	}
	if len(polls) == 0 {
		return results
	}
	for k, second := range p.young.poll(ctx, polls) {
		first := &results[queued[k]]
		*first = p.served(ctx, polls[k], first.Answer, second)
	}
	return results
}

// promote takes the new lock for a waiter that the old queue has served.
func (p *pair) promote(ctx context.Context, w driver.Poll, r driver.Request, first driver.Answer) driver.Result {
	r.TTL, r.Claim = w.TTL, w.Claim
	a, err := p.second(ctx, r, first)
	if err != nil {
		return driver.Result{Err: uncertain(err)}
	}
	if a.State == driver.Held {
		return p.gone(ctx, w.Owner)
	}
	p.note(r, a.State == driver.Waiting, a.State == driver.Granted)
	return driver.Result{Answer: a}
}

// served takes the answer of the new queue about a waiter that holds the old lock.
func (p *pair) served(ctx context.Context, w driver.Poll, first driver.Answer, second driver.Result) driver.Result {
	switch {
	case second.Err != nil:
		return driver.Result{Err: uncertain(second.Err)}
	case second.State == driver.Gone:
		return p.gone(ctx, w.Owner)
	case second.State != driver.Granted:
		p.extended(w.ID, w.TTL)
		return second
	}
	r := driver.Request{Owner: w.Owner, TTL: w.TTL, Limit: 1}
	if o, known := p.known(w.Owner); known {
		r = o.request
	}
	ok, err := p.settle(ctx, r, first, &second.Answer)
	if err != nil {
		return driver.Result{Err: uncertain(err)}
	}
	if !ok {
		return p.gone(ctx, w.Owner)
	}
	p.note(r, false, true)
	return second
}

// gone takes away what is left of a waiter: it must queue anew, with another id.
func (p *pair) gone(ctx context.Context, o driver.Owner) driver.Result {
	if _, err := p.release(ctx, o); err != nil {
		return driver.Result{Err: uncertain(err)}
	}
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
	return errors.Join(p.old.advance(ctx, n, floor), p.young.advance(ctx, n, floor))
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

// notify makes of a grant that one backend announces a reason to ask: the waiter has more to do before it holds.
func (p *pair) notify(sink func(driver.Event)) {
	pass := func(e driver.Event) {
		if e.Kind == driver.EventGranted {
			e = driver.Event{Kind: driver.EventRecheck, Owner: driver.Owner{Name: e.Owner.Name}}
		}
		sink(e)
	}
	p.old.notify(pass)
	p.young.notify(pass)
}
