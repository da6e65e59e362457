package fencelock

import (
	"context"
	"crypto/rand"
	"errors"
	mathrand "math/rand/v2"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// After a cancelled wait its clean-up is waited for this long, so that usually nothing is left behind when
// the call returns.
const cleanupPatience = 20 * time.Millisecond

// attempt is one call of Lock, TryLock, Acquire or TryAcquire.
type attempt struct {
	op    string
	name  driver.Name
	limit int
	wait  bool
	cfg   config
	began int64
	tries int
}

func (c *Client) acquire(ctx context.Context, op string, n driver.Name, limit int, wait bool, opts []Option) (*Lease, error) {
	a := &attempt{op: op, name: n, limit: limit, wait: wait, began: c.clock.Start()}
	if err := c.configure(ctx, a, opts); err != nil {
		return nil, c.opError(op, n, err)
	}
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, c.opError(op, n, ErrClosed)
	}
	c.calls.Add(1)
	c.mu.Unlock()
	defer c.calls.Done()
	if a.cfg.waitFor > 0 && wait {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, a.cfg.waitFor)
		defer cancel()
	}
	var l *Lease
	var err error
	if a.cfg.holder != "" {
		l, err = c.takeShared(ctx, a)
	} else {
		l, err = c.take(ctx, a)
	}
	if c.obs != nil {
		e := Event{Kind: EventAcquired, Of: n.Kind, Name: n.Name, Wait: time.Duration(c.clock.Now() - a.began), Attempts: a.tries}
		if err != nil {
			e.Kind, e.Err = EventRefused, err
		} else {
			e.Token = l.Token()
		}
		c.obs.tell(e)
	}
	return l, err
}

// configure reads and checks all arguments of the attempt.
func (c *Client) configure(ctx context.Context, a *attempt, opts []Option) error {
	a.cfg = config{ttl: c.cfg.ttl, backoffMin: defaultBackoffMin, backoffMax: defaultBackoffMax}
	for _, o := range opts {
		if o == nil {
			return driver.Invalid("option", nil, "must not be nil")
		}
		o.apply(&a.cfg)
	}
	permit := a.name.Kind == KindPermit
	able := !permit || c.sem != nil
	switch err := c.checkCall(ctx, a.name, able, Semaphores); {
	case err != nil:
		return err
	case a.cfg.err != nil:
		return a.cfg.err
	case a.limit < 1:
		return driver.Invalid("limit", a.limit, "must be at least 1")
	case c.checkTTL(a.cfg.ttl) != nil:
		return c.checkTTL(a.cfg.ttl)
	case permit && a.cfg.holder != "":
		return driver.Invalid("Holder", a.cfg.holder, "is for locks only, not for semaphores")
	case a.cfg.fair && c.queue == nil:
		return unsupported(c.d, string(Queueing))
	}
	return c.checkWrite(a, permit)
}

// checkWrite refuses a write where it could not be done, or not as part of one grant.
func (c *Client) checkWrite(a *attempt, permit bool) error {
	switch {
	case a.cfg.write == nil:
		return nil
	case a.wait || permit:
		return driver.Invalid("Write with", a.op, "is for TryLock only: nobody else's step can do it at a grant")
	case a.cfg.holder != "":
		return driver.Invalid("Write with Holder", a.cfg.holder, "must not be used together: a lease that is shared is not granted")
	case !has[driver.Writer](c.d):
		return unsupported(c.d, "write in the step that grants")
	}
	return nil
}

// take gets a new lease from the backend.
func (c *Client) take(ctx context.Context, a *attempt) (*Lease, error) {
	var turn *line
	if a.wait && c.queue == nil {
		var err error
		if turn, err = c.stand(ctx, a); err != nil {
			return nil, err
		}
		defer c.leave(turn)
	}
	var heard int64 // when the driver last said that it is held
	stands := false // it has said so
	for {
		w := c.newWaiter(a)
		answer, sent, err := c.ask(ctx, a, w)
		if err != nil && stands && c.clock.Now()-heard <= int64(w.ttl) && ctx.Err() == nil && !c.isClosing() {
			// As in a queue, an outage costs the place only after a whole TTL.
			if err := c.pause(ctx, a, turn); err != nil {
				return nil, err
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		switch answer.State {
		case driver.Granted:
			return c.taken(ctx, a, w, validUntil(sent, answer.TTL), sent, answer.Token, 0)
		case driver.Held:
			if !a.wait {
				return nil, c.opError(a.op, a.name, ErrHeld)
			}
			if turn == nil {
				return nil, c.opError(a.op, a.name, errors.New("driver has a queue and did not enqueue a request that waits"))
			}
			heard, stands = c.clock.Now(), true
			if err := c.pause(ctx, a, turn); err != nil {
				return nil, err
			}
		case driver.Waiting:
			if w.signal == nil {
				c.discard(w)
				return nil, c.opError(a.op, a.name, errors.New("driver enqueued a request that does not wait"))
			}
			if l, err := c.await(ctx, a, w); l != nil || err != nil {
				return l, err
			}
			// The entry had expired, for example because this process was paused. Its id is spent.
		default:
			c.discard(w)
			return nil, c.opError(a.op, a.name, errors.New("driver answered the state "+answer.State.String()))
		}
	}
}

// ask sends one request for the lease. On an error the waiter has been discarded.
func (c *Client) ask(ctx context.Context, a *attempt, w *waiter) (answer driver.Answer, sent int64, err error) {
	a.tries++
	r := driver.Request{Owner: w.owner, TTL: w.ttl, Limit: a.limit, Holder: c.holderData(a.cfg.label)}
	if a.wait && (c.queue != nil || c.tells) {
		r.Wait, r.Claim = true, w.claim
	}
	sent = c.clock.Start()
	c.mu.Lock()
	w.sent, w.heard = sent, sent
	c.mu.Unlock()
	answer, err = call(ctx, c, c.requestTimeout(w.ttl), func(ctx context.Context) (driver.Answer, error) {
		if a.name.Kind == KindPermit {
			return c.sem.Acquire(ctx, r)
		}
		if a.cfg.write != nil {
			w, _ := driver.As[driver.Writer](c.d)
			return w.LockAndWrite(ctx, r, *a.cfg.write)
		}
		return c.d.Lock(ctx, r)
	}, func(answer driver.Answer, err error) {
		// The compensation may have passed the request on its way: send it again.
		if !errors.Is(err, ErrUnavailable) && answer.State != driver.Held {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.clean(w.owner, c.clock.Now()+int64(w.ttl))
		}
	})
	if err == nil {
		if answer.State != driver.Waiting {
			c.forget(w)
		}
		return answer, sent, nil
	}
	if errors.Is(err, ErrUnavailable) {
		c.forget(w)
	} else {
		c.settle(c.discard(w))
	}
	return answer, sent, c.failure(ctx, a.op, a.name, err, c.remainsUntil(w.ttl))
}

// taken makes the lease of a grant that is valid until then. A claim needs its first extension soon.
func (c *Client) taken(ctx context.Context, a *attempt, w *waiter, until, sent int64, t Token, claim time.Duration) (*Lease, error) {
	h := &hold{c: c, owner: w.owner, token: t, ttl: w.ttl, claim: claim, noRenew: a.cfg.noRenew, most: never}
	h.first.h = h
	h.granted = c.clock.Now()
	if a.cfg.maxHold > 0 && int64(a.cfg.maxHold) < never-h.granted {
		h.most = h.granted + int64(a.cfg.maxHold)
	}
	h.believe(until)
	h.planRenewal(sent)

	c.mu.Lock()
	var err *OpError
	switch {
	case c.closed:
		err = c.opError(a.op, a.name, ErrClosed)
	case ctx.Err() != nil:
		err = c.opError(a.op, a.name, ctx.Err())
	case h.granted >= h.until.Load():
		err = c.opError(a.op, a.name, ErrUncertain)
		err.Cause = errors.New("the grant was answered after its validity had ended: the TTL is too short for this backend")
		err.Until = c.remainsUntil(w.ttl)
	default:
		c.reschedule(h)
		c.mu.Unlock()
		return &h.first, nil
	}
	j := c.clean(w.owner, h.granted+int64(w.ttl))
	c.mu.Unlock()
	if !c.settle(j) && err.Cause == nil {
		err.Cause, err.Until = ErrUncertain, c.remainsUntil(w.ttl)
	}
	return nil, err
}

// settle waits a moment for a clean-up and reports whether it was confirmed.
func (c *Client) settle(j *cleaning) bool {
	select {
	case <-j.settled:
		return j.ok
	case <-time.After(cleanupPatience):
		return false
	}
}

// waiter is an owner that asks for a lease, from before its first request. Fields after owner's line are
// guarded by c.mu.
type waiter struct {
	owner      driver.Owner
	ttl, claim time.Duration
	signal     chan struct{} // of capacity 1: state has changed

	place
	pollAt  int64
	polls   int   // under way
	sent    int64 // when the latest request was sent that was answered "waiting", or the first one
	heard   int64 // when the latest answer came
	state   driver.State
	token   Token
	until   int64 // of a grant found by polling: a full lease
	full    bool
	recheck bool  // events may have been missed since its first request was sent
	lastErr error // set with state Held: given up
}

func (w *waiter) due() int64 { return w.pollAt }

// period is the time between polls.
func (w *waiter) period() time.Duration { return w.claim / 3 }

// newWaiter makes an owner and, if the server keeps a queue, registers it before anything is sent (W1).
func (c *Client) newWaiter(a *attempt) *waiter {
	ttl := a.cfg.ttl
	w := &waiter{
		owner: driver.Owner{Name: a.name, ID: rand.Text()},
		ttl:   ttl,
		claim: 3 * min(ttl/6, 5*time.Second),
		state: driver.Waiting,
	}
	if a.wait && c.queue != nil {
		w.signal = make(chan struct{}, 1)
		c.mu.Lock()
		c.waiters[w.owner.ID] = w
		c.mu.Unlock()
	}
	return w
}

// forget takes the waiter out of the client's books.
func (c *Client) forget(w *waiter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetLocked(w)
}

func (c *Client) forgetLocked(w *waiter) {
	c.unschedule(w)
	delete(c.waiters, w.owner.ID)
}

// discard forgets the waiter and removes what it may have on the server.
func (c *Client) discard(w *waiter) *cleaning {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetLocked(w)
	return c.clean(w.owner, c.clock.Now()+int64(w.ttl))
}

func (w *waiter) tell() {
	select {
	case w.signal <- struct{}{}:
	default:
	}
}

// pushed takes a grant that the server announced. c.mu is held, as in the next two.
func (w *waiter) pushed(t Token) {
	if w.state == driver.Waiting {
		w.state, w.token = driver.Granted, t
		w.tell()
	}
}

// answered takes the answer to a poll that was sent then.
func (w *waiter) answered(sent, now int64, a driver.Answer) {
	w.heard = now
	switch {
	case a.State == driver.Waiting && w.state == driver.Waiting:
		w.sent = max(w.sent, sent)
	case a.State == driver.Granted && !w.full:
		w.state, w.token, w.full = driver.Granted, a.Token, true
		w.sent, w.until = sent, validUntil(sent, a.TTL)
		w.tell()
	case a.State == driver.Gone && w.state == driver.Waiting:
		w.state = driver.Gone
		w.tell()
	}
}

// failed takes the error of a poll. A waiter that hears nothing for a whole TTL gives up: its entry has ended.
func (w *waiter) failed(c *Client, now int64, err error) {
	if w.state != driver.Waiting || w.index() < 0 {
		return
	}
	if now-w.heard > int64(w.ttl) {
		w.state, w.lastErr = driver.Held, err
		w.tell()
		return
	}
	w.pollAt = min(w.pollAt, now+int64(c.retryAfter(w.period())))
	c.reschedule(w)
}

// await waits for the grant of an owner that stands in the server's queue. It answers neither lease nor error
// if the owner is gone from there and must enqueue anew.
func (c *Client) await(ctx context.Context, a *attempt, w *waiter) (*Lease, error) {
	c.mu.Lock()
	w.heard = c.clock.Now()
	w.pollAt = w.sent + int64(w.period())
	if w.recheck {
		w.pollAt = w.heard
	}
	if !c.closed {
		c.reschedule(w)
	}
	c.mu.Unlock()
	for {
		select {
		case <-w.signal:
		case <-ctx.Done():
		case <-c.closing:
		}
		if ctx.Err() != nil || c.isClosing() {
			e := c.opError(a.op, a.name, ErrClosed)
			if ctx.Err() != nil {
				e.Err = ctx.Err()
			}
			if !c.settle(c.discard(w)) {
				e.Cause, e.Until = ErrUncertain, c.remainsUntil(w.ttl)
			}
			return nil, e
		}
		c.mu.Lock()
		state := w.state
		if state != driver.Waiting {
			c.forgetLocked(w)
		}
		c.mu.Unlock()
		switch state {
		case driver.Granted:
			return c.granted(ctx, a, w)
		case driver.Gone:
			c.discard(w)
			return nil, nil
		case driver.Held:
			return nil, c.givenUp(ctx, a, w, w.lastErr)
		}
	}
}

func (c *Client) isClosing() bool {
	select {
	case <-c.closing:
		return true
	default:
		return false
	}
}

// granted makes the lease of a waiter that the server has served. Nobody else changes w any more.
func (c *Client) granted(ctx context.Context, a *attempt, w *waiter) (*Lease, error) {
	now := c.clock.Now()
	if w.full && now < w.until {
		return c.taken(ctx, a, w, w.until, w.sent, w.token, 0)
	}
	// The latest request that was answered "waiting" ran before the grant, so the claim has not begun earlier
	// than that request was sent. Its first extension is due when a period of it is left, or sooner.
	until := validUntil(w.sent, w.claim)
	if due := until - int64(w.period()); !w.full && due >= now {
		return c.taken(ctx, a, w, until, min(now, due-int64(w.period())), w.token, w.claim)
	}
	// Little of it may be left, or nothing: ask, which makes it a full lease if it is ours still.
	sent := c.clock.Start()
	a.tries++
	result, err := call(ctx, c, c.requestTimeout(w.ttl), func(ctx context.Context) (driver.Result, error) {
		return c.d.Extend(ctx, []driver.Extension{{Owner: w.owner, TTL: w.ttl}})[0], nil
	}, nil)
	if err == nil {
		err = result.Err
	}
	switch {
	case err != nil:
		return nil, c.givenUp(ctx, a, w, err)
	case result.State != driver.Granted:
		c.discard(w)
		return nil, nil
	}
	return c.taken(ctx, a, w, validUntil(sent, result.TTL), sent, w.token, 0)
}

// givenUp discards a waiter whose latest request failed, and makes the error. Whatever that request says, an
// earlier one may have put the owner into the queue or served it: only a confirmed clean-up makes sure.
func (c *Client) givenUp(ctx context.Context, a *attempt, w *waiter, err error) error {
	sure := c.settle(c.discard(w))
	e := c.failure(ctx, a.op, a.name, err, c.remainsUntil(w.ttl))
	if !sure && errors.Is(e.Err, ErrUnavailable) {
		e.Err, e.Until = ErrUncertain, c.remainsUntil(w.ttl)
	}
	return e
}

// line is where the waiters of this client for one name stand if the driver keeps no queue: only the first asks
// the server (W2). Guarded by c.mu.
type line struct {
	name   driver.Name
	turns  []chan struct{} // of those behind the first
	hinted chan struct{}   // of capacity 1: the name may be free
}

func (l *line) hint() {
	select {
	case l.hinted <- struct{}{}:
	default:
	}
}

// stand waits for the first place in the line.
func (c *Client) stand(ctx context.Context, a *attempt) (*line, error) {
	c.mu.Lock()
	l := c.lines[a.name]
	if l == nil {
		l = &line{name: a.name, hinted: make(chan struct{}, 1)}
		c.lines[a.name] = l
		c.mu.Unlock()
		return l, nil
	}
	turn := make(chan struct{})
	l.turns = append(l.turns, turn)
	c.mu.Unlock()
	var err error
	select {
	case <-turn:
		return l, nil
	case <-ctx.Done():
		err = ctx.Err()
	case <-c.closing:
		err = ErrClosed
	}
	c.mu.Lock()
	for i, t := range l.turns {
		if t == turn {
			l.turns = append(l.turns[:i], l.turns[i+1:]...)
			c.mu.Unlock()
			return nil, c.opError(a.op, a.name, err)
		}
	}
	c.mu.Unlock()
	c.leave(l) // our turn came at the same moment
	return nil, c.opError(a.op, a.name, err)
}

// leave passes the first place on.
func (c *Client) leave(l *line) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(l.turns) == 0 {
		delete(c.lines, l.name)
		return
	}
	close(l.turns[0])
	l.turns = l.turns[1:]
}

// pause waits before the next attempt: for a hint, or for a random time that grows with the attempts. A driver
// that gives hints is asked rarely without one.
func (c *Client) pause(ctx context.Context, a *attempt, l *line) error {
	d := a.cfg.backoffMax
	if shift := a.tries - 1; shift < 63 && a.cfg.backoffMin <= d>>shift {
		d = a.cfg.backoffMin << shift
	}
	d = mathrand.N(d) + 1
	if c.tells {
		d = min(a.cfg.ttl/6, 5*time.Second)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-l.hinted:
	case <-timer.C:
	case <-ctx.Done():
		return c.opError(a.op, a.name, ctx.Err())
	case <-c.closing:
		return c.opError(a.op, a.name, ErrClosed)
	}
	return nil
}
