package fencelock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// Lease is a lock or permit that was taken. Its holder may believe in it until its own Release, until it is
// told of a loss, or until Deadline, whichever comes first (L2). All methods may be called by any goroutine at
// any time; a lease belongs to no goroutine.
//
// A lease that nobody releases renews itself for ever; [MaxHold] bounds that, [Do] releases on a panic.
type Lease struct {
	h *hold

	// Written with c.mu held; phase is also read without.
	phase    atomic.Int32
	done     chan struct{}      // made when somebody asks
	watchers map[*func()]func() // called at the end, c.mu not held
	unknown  bool               // a Release was sent whose outcome is not known
	sending  chan struct{}      // closed when the Release under way is over; nil if none is
	settled  bool               // a Release has got its final answer
	answer   error              // that answer
}

// The phases of a Lease. It never goes back.
const (
	leaseLive     = iota
	leaseReleased // its Release was called
	leaseLost
)

// hold is an owner's belief, shared by the leases of one Holder. Fields below mu's line are guarded by c.mu.
type hold struct {
	c       *Client
	owner   driver.Owner
	token   Token
	ttl     time.Duration
	granted int64 // when it was taken
	most    int64 // the end by MaxHold
	until   atomic.Int64

	place
	claim   time.Duration // of a grant that a step of somebody else made, until the first extension
	noRenew bool
	renewAt int64
	reaches int64 // how far an Extend may have brought the lease on the server
	cause   error // why it was lost
	ended   bool
	first   Lease
	more    []*Lease
	share   shareKey // zero unless re-entrant
}

func (h *hold) due() int64 { return min(h.renewAt, h.until.Load()) }

// period is the time between renewals.
func (h *hold) period() time.Duration {
	if h.claim > 0 {
		return h.claim / 3
	}
	return h.ttl / 3
}

// planRenewal sets when the next extension is due, after a request that was sent then has been answered.
func (h *hold) planRenewal(sent int64) {
	h.renewAt = never
	if !h.noRenew || h.claim > 0 {
		h.renewAt = sent + int64(h.period())
	}
}

// believe makes belief end at the given time, but not after MaxHold.
func (h *hold) believe(until int64) { h.until.Store(min(until, h.most)) }

// used reports whether a handle is left that has not ended. c.mu is held.
func (h *hold) used() bool {
	return h.first.phase.Load() == leaseLive ||
		slices.ContainsFunc(h.more, func(l *Lease) bool { return l.phase.Load() == leaseLive })
}

// Name is the name given to Lock or Acquire.
func (l *Lease) Name() string { return l.h.owner.Name.Name }

// Token is the fencing token. It never changes.
func (l *Lease) Token() Token { return l.h.token }

// Deadline is until when the holder may believe if no further extension succeeds. A successful one moves it.
// It lies before the end of the lease on the server and needs no answer to come true.
func (l *Lease) Deadline() time.Time { return l.h.c.clock.Time(l.h.until.Load()) }

// Done is closed when the lease is released or lost, at the latest 50 ms after Deadline on a machine that runs
// the process.
func (l *Lease) Done() <-chan struct{} {
	l.h.c.mu.Lock()
	defer l.h.c.mu.Unlock()
	if l.done == nil {
		l.done = make(chan struct{})
		if l.phase.Load() != leaseLive {
			close(l.done)
		}
	}
	return l.done
}

// Err is nil while the holder may believe, an error matching [ErrReleased] after Release was called, and one
// matching [ErrLost] after a loss. It reads the clock itself, so it is right even when Done comes late.
func (l *Lease) Err() error {
	h := l.h
	if l.phase.Load() == leaseLive && h.c.clock.Now() < h.until.Load() {
		return nil
	}
	h.c.expire(h)
	h.c.mu.Lock()
	defer h.c.mu.Unlock()
	switch l.phase.Load() {
	case leaseReleased:
		return ErrReleased
	case leaseLost:
		return h.cause
	}
	return nil
}

// Context makes a context that ends with parent, and when the lease is released or lost; [context.Cause] then
// matches [ErrReleased] or [ErrLost]. The function frees it.
func (l *Lease) Context(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	stop := l.onEnd(func() { cancel(l.Err()) })
	return ctx, func() {
		stop()
		cancel(context.Canceled)
	}
}

// onEnd calls f once when the lease has been released or lost, at once if it was. The function it answers
// takes that back.
func (l *Lease) onEnd(f func()) (stop func()) {
	c := l.h.c
	c.mu.Lock()
	if l.phase.Load() != leaseLive {
		c.mu.Unlock()
		f()
		return func() {}
	}
	if l.watchers == nil {
		l.watchers = make(map[*func()]func())
	}
	key := &f
	l.watchers[key] = f
	c.mu.Unlock()
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(l.watchers, key)
	}
}

// Extend makes the lease live at least ttl from now, for this once; renewal goes on with the lease's own TTL.
// It never shortens. On success the deadline is the later of the present one and the new one. The wait is
// bounded by ctx and the request timeout.
//
// Errors: ErrLost (then also [ErrNotHeld]) or [ErrReleased] if the lease has ended; [ErrUnavailable] or
// [ErrUncertain] if no answer came, and then the lease is believed until its old deadline; [ErrInvalid].
func (l *Lease) Extend(ctx context.Context, ttl time.Duration) error {
	h, c := l.h, l.h.c
	n := h.owner.Name
	if ctx == nil {
		return c.opError("extend", n, errNilContext)
	}
	if err := c.checkTTL(ttl); err != nil {
		return c.opError("extend", n, err)
	}
	if err := l.Err(); err != nil {
		return c.ended("extend", n, err)
	}
	c.mu.Lock()
	if h.claim > 0 {
		ttl = max(ttl, h.ttl) // it is the first extension as well
	}
	c.mu.Unlock()
	sent := c.clock.Start()
	result, err := call(ctx, c, c.requestTimeout(ttl), func(ctx context.Context) (driver.Result, error) {
		return c.d.Extend(ctx, []driver.Extension{{Owner: h.owner, TTL: ttl}})[0], nil
	}, nil)
	c.mu.Lock()
	h.reaches = max(h.reaches, c.clock.Now()+int64(max(ttl, result.TTL)))
	c.mu.Unlock()
	if err == nil {
		err = result.Err
	}
	if err != nil {
		return c.failure(ctx, "extend", n, err, c.remainsUntil(ttl))
	}
	c.extended(h, sent, result.Answer)
	if err := l.Err(); err != nil {
		return c.ended("extend", n, err)
	}
	return nil
}

// ended makes the error of an operation on a lease that has ended with err.
func (c *Client) ended(op string, n driver.Name, err error) error {
	if errors.Is(err, ErrReleased) {
		return c.opError(op, n, err)
	}
	return &OpError{Op: op, Kind: n.Kind, Name: n.Name, Err: ErrNotHeld, Cause: err}
}

// extended takes the answer to an extension that was sent then.
func (c *Client) extended(h *hold, sent int64, a driver.Answer) {
	var after ending
	c.mu.Lock()
	switch {
	case h.ended || c.clock.Now() >= h.until.Load():
		// Told too late: a lease is never taken up again after its deadline (L3). The scheduler ends it.
	case a.State != driver.Granted:
		after = c.end(h, fmt.Errorf("%w: the backend does not know its owner any more", ErrLost))
	default:
		h.claim = 0
		h.believe(max(h.until.Load(), validUntil(sent, a.TTL)))
		h.planRenewal(sent)
		c.reschedule(h)
	}
	c.mu.Unlock()
	after.run()
}

// expire ends belief in the hold if its time has passed.
func (c *Client) expire(h *hold) {
	c.mu.Lock()
	after := c.endIfExpired(h, c.clock.Now())
	c.mu.Unlock()
	after.run()
}

// endIfExpired is expire with c.mu held. The server may keep the lease a little longer, so it is told, once.
func (c *Client) endIfExpired(h *hold, now int64) ending {
	if h.ended || now < h.until.Load() {
		return ending{}
	}
	why := fmt.Errorf("%w: not extended in time", ErrLost)
	if now >= h.most {
		why = fmt.Errorf("%w: held for longer than MaxHold", ErrLost)
	}
	c.clean(h.owner, now)
	return c.end(h, why)
}

// ending is what remains to be done, without c.mu, after a lease ended.
type ending struct{ calls []func() }

func (e *ending) add(other ending) { e.calls = append(e.calls, other.calls...) }

func (e ending) run() {
	for _, f := range e.calls {
		f()
	}
}

// end makes the hold lost. c.mu is held.
func (c *Client) end(h *hold, cause error) (after ending) {
	if h.ended {
		return after
	}
	h.cause = cause
	c.retire(h)
	after.add(h.first.endAs(leaseLost))
	for _, l := range h.more {
		after.add(l.endAs(leaseLost))
	}
	c.obs.tell(Event{Kind: EventLost, Of: h.owner.Name.Kind, Name: h.owner.Name.Name, Token: h.token,
		Held: time.Duration(c.clock.Now() - h.granted), Err: cause})
	return after
}

// retire stops renewal. c.mu is held.
func (c *Client) retire(h *hold) {
	h.ended = true
	c.unschedule(h)
	if s := c.shares[h.share]; s != nil && s.h == h {
		delete(c.shares, h.share)
	}
}

// endAs ends one handle. c.mu is held.
func (l *Lease) endAs(phase int32) (after ending) {
	if l.phase.Load() != leaseLive {
		return after
	}
	l.phase.Store(phase)
	if l.done != nil {
		close(l.done)
	}
	for _, f := range l.watchers {
		after.calls = append(after.calls, f)
	}
	l.watchers = nil
	return after
}

// Release gives the lock or permit back. Belief and renewal end when it is called, before anything is sent,
// and stay ended whatever it returns (L3). It works on a cancelled ctx: only its values are used, and the
// request timeout bounds it (L6).
//
// Errors: nil if it was given back, or had been by an earlier Release; [ErrNotHeld] if the lease had been lost
// before - then nothing is waited for - or the server did not know it any more: somebody else may have held the
// lock since; [ErrUnavailable] if the backend refused, [ErrUncertain] if no answer came. After these two the
// lease ends on the server at the time [OpError.Until] says, and Release may be called again.
func (l *Lease) Release(ctx context.Context) error {
	h, c := l.h, l.h.c
	n := h.owner.Name
	if ctx == nil {
		return c.opError("release", n, errNilContext)
	}
	c.expire(h)

	c.mu.Lock()
	for l.sending != nil { // another call: it has a bound, and its answer may be ours
		sending := l.sending
		c.mu.Unlock()
		<-sending
		c.mu.Lock()
	}
	var after ending
	switch l.phase.Load() {
	case leaseLost:
		c.mu.Unlock()
		return c.ended("release", n, h.cause)
	case leaseLive:
		after = l.endAs(leaseReleased)
		h.more = slices.DeleteFunc(h.more, func(o *Lease) bool { return o == l })
		if !h.used() {
			c.retire(h)
		}
	}
	if !h.ended { // others of the same Holder go on
		l.settled = true
	}
	if l.settled {
		c.mu.Unlock()
		after.run()
		return l.answer
	}
	repeated := l.unknown
	l.unknown, l.sending = true, make(chan struct{})
	if !c.closed { // Close waits for it
		c.calls.Add(1)
		defer c.calls.Done()
	}
	c.mu.Unlock()
	after.run()

	if ctx.Done() != nil {
		ctx = context.WithoutCancel(ctx)
	}
	found, err := call(ctx, c, c.requestTimeout(h.ttl), func(ctx context.Context) (bool, error) {
		return c.d.Release(ctx, h.owner)
	}, nil)
	return c.releasedWith(l, repeated, found, err)
}

// releasedWith takes the answer to a release. repeated says that an earlier one had no answer.
func (c *Client) releasedWith(l *Lease, repeated, found bool, err error) error {
	h := l.h
	n := h.owner.Name
	c.mu.Lock()
	defer c.mu.Unlock()
	close(l.sending)
	l.sending = nil
	var result error
	switch {
	case err != nil:
		l.unknown = repeated || !errors.Is(err, ErrUnavailable)
		e := c.failure(context.Background(), "release", n, err, time.Time{})
		e.Until = c.clock.Time(max(c.clock.Now()+int64(h.ttl), h.reaches)) // also after a refusal
		result = e
	case !found && !repeated:
		l.settled, l.answer = true, c.opError("release", n, ErrNotHeld)
		result = l.answer
	case !found && c.clock.Now() >= h.until.Load():
		result = &OpError{Op: "release", Kind: n.Kind, Name: n.Name, Err: ErrUncertain,
			Cause: errors.New("an earlier release had no answer, and the lease has ended since")}
	default:
		l.settled = true
		if next := c.lines[n]; next != nil {
			next.hint()
		}
	}
	if c.obs != nil {
		c.obs.tell(Event{Kind: EventReleased, Of: n.Kind, Name: n.Name, Token: h.token,
			Held: time.Duration(c.clock.Now() - h.granted), Err: result})
	}
	return result
}

// remainsUntil is the latest end of a lease of which nothing is known after now.
func (c *Client) remainsUntil(ttl time.Duration) time.Time { return time.Now().Add(ttl) }
