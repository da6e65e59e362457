package worker

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/history"
)

// Ask says what is to be taken, and how.
type Ask struct {
	Name string
	// Limit is that of a semaphore; 0 asks for the lock.
	Limit int
	// Try makes one attempt instead of waiting.
	Try bool
	// TTL must be set.
	TTL     time.Duration
	NoRenew bool
	Label   string
	// WaitFor bounds the wait; 0 leaves that to the context.
	WaitFor time.Duration
}

func (a Ask) kind() history.Kind {
	if a.Limit > 0 {
		return history.Permit
	}
	return history.Lock
}

func (a Ask) options() []fencelock.Option {
	opts := []fencelock.Option{fencelock.TTL(a.TTL)}
	if a.NoRenew {
		opts = append(opts, fencelock.NoRenew())
	}
	if a.Label != "" {
		opts = append(opts, fencelock.Label(a.Label))
	}
	if a.WaitFor > 0 {
		opts = append(opts, fencelock.WaitFor(a.WaitFor))
	}
	return opts
}

// Recorded is a client whose acquisitions, leases and tokens are written into a history. Safe for
// concurrent use.
type Recorded struct {
	client *fencelock.Client
	name   string
	rec    *history.Recorder
	longer bool
	taken  atomic.Int64
}

// Record makes what is done through the result appear in rec under the given client's name. It does not
// close the client. longer says that the backend may grant more than the TTL that was asked for, so that V
// cannot be held against that.
func Record(c *fencelock.Client, name string, rec *history.Recorder, longer bool) *Recorded {
	return &Recorded{client: c, name: name, rec: rec, longer: longer}
}

// Take is the call of Lock, TryLock, Acquire or TryAcquire that a stands for.
func (c *Recorded) Take(ctx context.Context, a Ask) (*Lease, error) {
	q := history.Request{Client: c.name, Kind: a.kind(), Name: a.Name, Limit: a.Limit, TTL: a.TTL, Wait: !a.Try}
	if c.longer {
		q.TTL = 0
	}
	attempt := c.rec.Start(q)
	lease, err := c.call(ctx, a)
	switch {
	case err == nil:
		c.taken.Add(1)
		return newLease(lease, attempt, a.TTL, c.longer), nil
	case errors.Is(err, fencelock.ErrHeld):
		attempt.Refused()
	default:
		attempt.Failed(class(err))
	}
	return nil, err
}

func (c *Recorded) call(ctx context.Context, a Ask) (*fencelock.Lease, error) {
	opts := a.options()
	switch {
	case a.Limit > 0 && a.Try:
		return c.client.TryAcquire(ctx, a.Name, a.Limit, opts...)
	case a.Limit > 0:
		return c.client.Acquire(ctx, a.Name, a.Limit, opts...)
	case a.Try:
		return c.client.TryLock(ctx, a.Name, opts...)
	}
	return c.client.Lock(ctx, a.Name, opts...)
}

// Taken is how many leases were taken.
func (c *Recorded) Taken() int { return int(c.taken.Load()) }

// NextToken mints a token.
func (c *Recorded) NextToken(ctx context.Context, name string) (fencelock.Token, error) {
	attempt := c.rec.Start(history.Request{Client: c.name, Kind: history.Token, Name: name})
	token, err := c.client.NextToken(ctx, name)
	if err != nil {
		attempt.Failed(class(err))
		return 0, err
	}
	attempt.Acquired(history.Grant{Token: uint64(token)})
	return token, nil
}

// class is what a history says of an error. What is left behind counts more than why the wait ended.
func class(err error) history.Result {
	switch {
	case err == nil:
		return history.OK
	case errors.Is(err, fencelock.ErrUncertain):
		return history.Uncertain
	case errors.Is(err, fencelock.ErrUnavailable):
		return history.Unavailable
	case errors.Is(err, fencelock.ErrNotHeld):
		return history.NotHeld
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return history.Context
	}
	return history.Other
}

// Lease is a lease whose life is recorded: until its Release a goroutine of its own watches for its loss
// and for renewals, which show in its deadline.
type Lease struct {
	lease   *fencelock.Lease
	attempt *history.Attempt

	stop    sync.Once
	stopped chan struct{} // closed when Release is about to be called
	watched chan struct{} // closed when the watcher has ended

	mu     sync.Mutex
	ttl    time.Duration // the longest that was asked for; 0 = unknown
	until  time.Time     // V as recorded
	looked time.Time     // when it was read last
}

// A reading of one deadline may differ by this much from another one.
const readingError = time.Millisecond

func newLease(lease *fencelock.Lease, attempt *history.Attempt, ttl time.Duration, longer bool) *Lease {
	l := &Lease{lease: lease, attempt: attempt, looked: time.Now(), stopped: make(chan struct{}), watched: make(chan struct{})}
	l.until = deadline(lease)
	if !longer {
		l.ttl = ttl
	}
	attempt.Acquired(history.Grant{Token: uint64(lease.Token()), Until: l.until})
	go l.watch(min(max(ttl/20, 2*time.Millisecond), 50*time.Millisecond))
	return l
}

// deadline reads V. A reading is too early by as much as the goroutine was off the CPU in the midst of it, so
// the latest of a few is taken.
func deadline(l *fencelock.Lease) time.Time {
	until := l.Deadline()
	for range 2 {
		if d := l.Deadline(); d.After(until) {
			until = d
		}
	}
	return until
}

func (l *Lease) watch(every time.Duration) {
	defer close(l.watched)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-l.stopped:
			return
		case <-l.lease.Done():
			l.look()
			l.attempt.Lost()
			return
		case <-tick.C:
			l.look()
		}
	}
}

// look records a deadline that has moved.
func (l *Lease) look() {
	l.mu.Lock()
	defer l.mu.Unlock()
	last := l.looked
	l.looked = time.Now()
	if until := deadline(l.lease); until.Sub(l.until) > readingError {
		l.until = until
		l.attempt.Extended(history.Grant{Token: uint64(l.lease.Token()), Until: until, TTL: l.ttl, Called: last})
	}
}

// Token is that of the lease.
func (l *Lease) Token() fencelock.Token { return l.lease.Token() }

// Deadline is that of the lease.
func (l *Lease) Deadline() time.Time { return l.lease.Deadline() }

// Done is that of the lease.
func (l *Lease) Done() <-chan struct{} { return l.lease.Done() }

// Err is that of the lease; the answer is recorded.
func (l *Lease) Err() error {
	called := time.Now()
	err := l.lease.Err()
	l.look()
	l.attempt.Observed(called, err == nil, uint64(l.lease.Token()), time.Time{})
	return err
}

// Extend is that of the lease.
func (l *Lease) Extend(ctx context.Context, ttl time.Duration) error {
	l.mu.Lock()
	if l.ttl > 0 {
		l.ttl = max(l.ttl, ttl)
	}
	l.mu.Unlock()
	err := l.lease.Extend(ctx, ttl)
	l.look()
	return err
}

// Release is that of the lease. It may be called again where that makes sense.
func (l *Lease) Release(ctx context.Context) error {
	l.stop.Do(func() { close(l.stopped) })
	<-l.watched
	l.look()
	l.attempt.ReleaseCalled()
	err := l.lease.Release(ctx)
	l.attempt.ReleaseReturned(class(err))
	return err
}

// live says whether a Release is still owed.
func (l *Lease) live() bool { return l.lease.Err() == nil }
