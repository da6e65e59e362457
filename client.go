package fencelock

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/internal/leaseclock"
)

// Kind tells locks from permits of semaphores. A lock and a semaphore of one name are two names.
type Kind = driver.Kind

// The kinds.
const (
	KindLock   = driver.KindLock
	KindPermit = driver.KindPermit
)

// Client takes locks and permits and mints tokens from one backend. It implements [Locker], [Semaphore] and
// [FencingSource] and is safe for concurrent use. A program needs one per backend; two clients on one
// backend exclude each other like two machines, and so do two goroutines on one client.
type Client struct {
	d     driver.Driver
	info  driver.Info
	sem   driver.Semaphore // nil if the driver has none
	queue driver.Queue     // nil if the driver does not queue
	tells bool             // the driver is a Notifier
	cfg   clientConfig
	host  string // the constant beginning of the holder data
	clock *leaseclock.Clock
	obs   *observing

	closing chan struct{}      // closed when Close begins
	ctx     context.Context    // of the requests that no caller waits for; ends at the end of Close
	stop    context.CancelFunc // ends ctx
	bound   atomic.Pointer[bound]
	wake    chan struct{}  // tells the scheduler that something is due earlier than it thought
	running sync.WaitGroup // the scheduler
	calls   sync.WaitGroup // acquisitions and releases under way

	// mu guards what follows, and the fields of holds, leases and waiters that say so.
	mu       sync.Mutex
	closed   bool
	timeline timeline
	sleeping int64 // until when the scheduler sleeps
	waiters  map[string]*waiter
	lines    map[driver.Name]*line
	shares   map[shareKey]*share
	cleanup  cleanup
}

// New makes a client of the driver, which then belongs to the client: Close closes it. It sends nothing.
// On an error the driver is left as it is.
func New(d driver.Driver, opts ...ClientOption) (*Client, error) {
	if d == nil {
		return nil, fmt.Errorf("fencelock: %w", driver.Invalid("driver", nil, "must not be nil"))
	}
	cfg := clientConfig{ttl: DefaultTTL}
	for _, o := range opts {
		o.applyClient(&cfg)
	}
	if cfg.err == nil {
		cfg.err = require(d, cfg.require)
	}
	if cfg.err != nil {
		return nil, fmt.Errorf("fencelock: %w", cfg.err)
	}
	c := &Client{
		d: d, info: d.Info(), cfg: cfg, host: hostData(), clock: leaseclock.New(),
		closing: make(chan struct{}), wake: make(chan struct{}, 1), sleeping: never,
		waiters: make(map[string]*waiter), lines: make(map[driver.Name]*line), shares: make(map[shareKey]*share),
	}
	c.cleanup.wake = make(chan struct{}, 1)
	c.ctx, c.stop = context.WithCancel(context.Background())
	c.sem, _ = driver.As[driver.Semaphore](d)
	c.queue, _ = driver.As[driver.Queue](d)
	c.obs = newObserving(cfg.observer, c.info.Backend)
	if n, ok := driver.As[driver.Notifier](d); ok {
		c.tells = true
		n.Notify(c.event)
	}
	c.running.Go(c.schedule)
	return c, nil
}

// Open opens a client by URL, for example "redis://localhost:6379/0", "file:///var/lib/locks" or "memory:".
// The scheme names the driver, which must have been imported. ctx bounds the opening only. Errors match
// [ErrInvalid] (unknown scheme or parameter), [ErrUnavailable], or [errors.ErrUnsupported] (see [Require]), and
// hold no credentials; nothing is left open.
func Open(ctx context.Context, url string, opts ...ClientOption) (*Client, error) {
	if ctx == nil {
		return nil, fmt.Errorf("fencelock: open: %w", errNilContext)
	}
	d, err := driver.Open(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("fencelock: open: %w", err)
	}
	c, err := New(d, opts...)
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return c, nil
}

var errNilContext = driver.Invalid("context", nil, "must not be nil")

// Close ends belief in all leases of the client: they are lost, with [ErrClosed]. Then it releases them,
// makes waiting calls return ErrClosed, sends what clean-up is owed, and closes the driver. It takes no longer
// than about the request timeout; what could not be released by then ends by its TTL. It returns the driver's
// error. A second Close does nothing.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	close(c.closing)
	var after ending
	for len(c.timeline) > 0 {
		switch it := c.timeline[0].(type) {
		case *hold:
			c.clean(it.owner, never)
			after.add(c.end(it, fmt.Errorf("%w: %w", ErrLost, ErrClosed)))
		default:
			c.unschedule(it)
		}
	}
	c.mu.Unlock()
	after.run()

	began := time.Now()
	c.running.Wait()
	c.calls.Wait()
	c.drainCleanup(max(c.requestTimeout(c.cfg.ttl)-time.Since(began), 5*cleanupPatience))
	c.stop()
	err := c.d.Close()
	c.obs.close(time.Second)
	return err
}

// requestTimeout is how long one request about a lease of this TTL is waited for.
func (c *Client) requestTimeout(ttl time.Duration) time.Duration {
	if c.cfg.requestTimeout > 0 {
		return c.cfg.requestTimeout
	}
	return min(max(ttl/3, minRequestTimeout), maxRequestTimeout)
}

// margin is what belief ends earlier than the lease, for clocks that do not run at the same rate.
func margin(ttl time.Duration) time.Duration { return max(ttl/100, 2*time.Millisecond) }

// validUntil is V: see docs/contract.md.
func validUntil(sent int64, ttl time.Duration) int64 { return sent + int64(ttl-margin(ttl)) }

// Lock implements [Locker].
func (c *Client) Lock(ctx context.Context, name string, opts ...Option) (*Lease, error) {
	return c.acquire(ctx, "lock", driver.Name{Kind: KindLock, Name: name}, 1, true, opts)
}

// TryLock implements [Locker].
func (c *Client) TryLock(ctx context.Context, name string, opts ...Option) (*Lease, error) {
	return c.acquire(ctx, "try lock", driver.Name{Kind: KindLock, Name: name}, 1, false, opts)
}

// Acquire implements [Semaphore].
func (c *Client) Acquire(ctx context.Context, name string, limit int, opts ...Option) (*Lease, error) {
	return c.acquire(ctx, "acquire", driver.Name{Kind: KindPermit, Name: name}, limit, true, opts)
}

// TryAcquire implements [Semaphore].
func (c *Client) TryAcquire(ctx context.Context, name string, limit int, opts ...Option) (*Lease, error) {
	return c.acquire(ctx, "try acquire", driver.Name{Kind: KindPermit, Name: name}, limit, false, opts)
}

// NextToken implements [FencingSource].
func (c *Client) NextToken(ctx context.Context, name string) (Token, error) {
	n := driver.Name{Kind: KindLock, Name: name}
	f, ok := driver.As[driver.FencingSource](c.d)
	if err := c.checkCall(ctx, n, ok, Tokens); err != nil {
		return 0, c.opError("next token", n, err)
	}
	t, err := call(ctx, c, c.requestTimeout(c.cfg.ttl), func(ctx context.Context) (Token, error) {
		return f.NextToken(ctx, n, 0)
	}, nil)
	if err != nil {
		return 0, c.failure(ctx, "next token", n, err, time.Time{})
	}
	return t, nil
}

// checkCall checks what all calls about a name have in common.
func (c *Client) checkCall(ctx context.Context, n driver.Name, able bool, what Capability) error {
	if ctx == nil {
		return errNilContext
	}
	if l := len(n.Name); l < 1 || l > MaxName {
		return driver.Invalid("name of length", l, fmt.Sprintf("must be 1 to %d bytes", MaxName))
	}
	if !able {
		return unsupported(c.d, string(what))
	}
	select {
	case <-c.closing:
		return ErrClosed
	default:
	}
	return ctx.Err()
}

func (c *Client) opError(op string, n driver.Name, err error) *OpError {
	return &OpError{Op: op, Kind: n.Kind, Name: n.Name, Err: err}
}

// failure makes the error of a request that failed with err while ctx, the caller's, bounded it (L8). until
// is the end of what it may have left behind.
func (c *Client) failure(ctx context.Context, op string, n driver.Name, err error, until time.Time) *OpError {
	e := c.opError(op, n, err)
	switch sure := errors.Is(err, ErrUnavailable); {
	case ctx.Err() != nil:
		e.Err = ctx.Err()
		if !sure {
			e.Cause, e.Until = ErrUncertain, until
		}
	case sure:
		e.Err, e.Cause = ErrUnavailable, err
	case errors.Is(err, errors.ErrUnsupported), errors.Is(err, ErrInvalid):
	default:
		e.Err, e.Cause, e.Until = ErrUncertain, err, until
	}
	return e
}

// timeline orders what is due by time: renewals and ends of leases, polls of waiters.
type timeline []timed

type timed interface {
	due() int64
	setIndex(int)
	index() int
}

const never = int64(1<<63 - 1)

func (t timeline) Len() int           { return len(t) }
func (t timeline) Less(i, j int) bool { return t[i].due() < t[j].due() }
func (t timeline) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].setIndex(i)
	t[j].setIndex(j)
}
func (t *timeline) Push(x any) {
	it := x.(timed)
	it.setIndex(len(*t))
	*t = append(*t, it)
}
func (t *timeline) Pop() any {
	last := len(*t) - 1
	it := (*t)[last]
	(*t)[last] = nil
	*t = (*t)[:last]
	it.setIndex(-1)
	return it
}

// place is an item's position in the timeline, kept as index + 1 so that zero is none.
type place int32

func (p *place) setIndex(i int) { *p = place(i + 1) }
func (p *place) index() int     { return int(*p) - 1 }

// reschedule puts the item where its due time says. c.mu is held.
func (c *Client) reschedule(it timed) {
	if it.index() < 0 {
		heap.Push(&c.timeline, it)
	} else {
		heap.Fix(&c.timeline, it.index())
	}
	if it.due() < c.sleeping {
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
}

func (c *Client) unschedule(it timed) {
	if it.index() >= 0 {
		heap.Remove(&c.timeline, it.index())
	}
}
