package migrate

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/internal/leaseclock"
)

// everybody is the limit of the semaphore that phase leases are permits of.
const everybody = 1 << 20

// member holds a client's phase lease: a permit under the same id on each backend that its phase uses. Nothing is believed
// beyond it, so that whoever waits until it is gone waits for all that the client may believe.
//
// The lease is taken first, and then the backend that the phase does not use is asked for clients two phases away.
// Of two such clients that begin at one moment at least one sees the other.
type member struct {
	phase Phase
	uses  []*backend
	looks []*backend
	ttl   time.Duration
	clock *leaseclock.Clock

	until atomic.Int64  // V of the phase lease; 0: none
	floor atomic.Uint64 // not less than any token of the other backend
	busy  chan struct{} // of capacity 1: held by who joins or renews
	owner driver.Owner  // guarded by busy
	ended bool          // guarded by busy

	ctx     context.Context // of the renewal
	stop    context.CancelFunc
	running sync.WaitGroup
}

func newMember(phase Phase, uses, looks []*backend, ttl time.Duration) *member {
	m := &member{phase: phase, uses: uses, looks: looks, ttl: ttl, clock: leaseclock.New(), busy: make(chan struct{}, 1)}
	m.ctx, m.stop = context.WithCancel(context.Background())
	return m
}

// open joins the phase and begins to renew.
func (m *member) open(ctx context.Context) error {
	if err := m.join(ctx); err != nil {
		m.stop()
		return err
	}
	m.running.Go(m.renewing)
	return nil
}

var errClosed = errors.New("migrate: the driver is closed")

// close leaves the phase.
func (m *member) close() {
	m.stop()
	m.running.Wait()
	m.busy <- struct{}{}
	defer func() { <-m.busy }()
	m.ended = true
	m.until.Store(0)
	m.leave(context.Background())
}

// leaveTimeout bounds the end of a phase lease. What does not end by then ends with its TTL.
const leaveTimeout = time.Second

// leave gives the phase lease back, whatever there is of it. busy is held, as in the next two.
func (m *member) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	var all sync.WaitGroup
	for _, b := range m.uses {
		all.Go(func() { b.release(ctx, m.owner) }) //nolint:errcheck // it ends by itself
	}
	all.Wait()
}

// join takes a new phase lease, unless somebody two phases away lives.
func (m *member) join(ctx context.Context) error {
	m.until.Store(0)
	m.owner = driver.Owner{Name: phaseName, ID: rand.Text()}
	until, err := join(ctx, m.clock, m.uses, driver.Request{
		Owner: m.owner, TTL: m.ttl, Limit: everybody, Holder: newCard(m.phase, m.ttl, false).text(),
	})
	if err == nil {
		err = m.phase.alone(ctx, m.looks)
	}
	// Clients that are gone by now, and whom nobody in phase both has followed, may have been ahead of this backend's clock.
	for _, b := range m.looks {
		var most driver.Token
		if err == nil {
			most, err = greatest(ctx, b)
			m.floor.Store(max(m.floor.Load(), uint64(most)))
		}
	}
	if err != nil {
		m.leave(ctx)
		return fmt.Errorf("migrate: phase %s: %w", m.phase, err)
	}
	m.until.Store(until)
	return nil
}

// join takes a phase lease on each of the backends and answers its V.
func join(ctx context.Context, clock *leaseclock.Clock, uses []*backend, r driver.Request) (int64, error) {
	until := int64(1<<63 - 1)
	for _, b := range uses {
		sent := clock.Start()
		a, err := b.acquire(ctx, r)
		switch {
		case err != nil:
			return 0, err
		case a.State != driver.Granted:
			return 0, b.fail(driver.Unavailable(fmt.Errorf("phase lease: %v", a.State)))
		}
		until = min(until, validUntil(sent, a.TTL))
	}
	return until, nil
}

// alone fails if a client two phases away is on one of the backends.
func (p Phase) alone(ctx context.Context, looks []*backend) error {
	for _, b := range looks {
		var other *card
		if err := b.list(ctx, phaseName, func(h driver.Holding) bool {
			if c := readCard(h.Holder); p.apart(c.Phase) {
				other = &c
			}
			return other == nil
		}); err != nil {
			return err
		}
		if other != nil {
			return driver.Unavailable(fmt.Errorf("%w: %s on the %s backend", ErrPhase, other.who(), b.which))
		}
	}
	return nil
}

// validUntil is V (L2).
func validUntil(sent int64, ttl time.Duration) int64 {
	return sent + int64(ttl-max(ttl/100, 2*time.Millisecond))
}

// renew extends the phase lease, or joins again if it is lost.
func (m *member) renew(ctx context.Context, ttl time.Duration) error {
	if m.until.Load() <= m.clock.Now() {
		return m.join(ctx)
	}
	until := int64(1<<63 - 1)
	for _, b := range m.uses {
		sent := m.clock.Start()
		r := b.extend(ctx, []driver.Extension{{Owner: m.owner, TTL: ttl}})[0]
		switch {
		case r.Err != nil:
			return fmt.Errorf("migrate: phase lease: %w", r.Err)
		case r.State != driver.Granted:
			// All that was believed under it ends at the next extension, or by its own V.
			return m.join(ctx)
		}
		until = min(until, validUntil(sent, r.TTL))
	}
	m.until.Store(max(m.until.Load(), until))
	return nil
}

// ensure makes the phase lease reach as far as a lease of this TTL from now on, and answers until when it does. An
// error says that nothing may be granted now.
func (m *member) ensure(ctx context.Context, ttl time.Duration) (int64, error) {
	if until := m.until.Load(); until-m.clock.Now() > int64(ttl) {
		return until, nil
	}
	select {
	case m.busy <- struct{}{}:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	defer func() { <-m.busy }()
	if m.ended {
		return 0, errClosed
	}
	if until := m.until.Load(); until-m.clock.Now() > int64(ttl) {
		return until, nil
	}
	// Room for some renewals of the lease.
	if err := m.renew(ctx, max(m.ttl, min(ttl+ttl/2, maxTTL))); err != nil {
		return 0, err
	}
	until := m.until.Load()
	if until-m.clock.Now() <= int64(ttl) && ttl < maxTTL/2 {
		// It was taken anew, for its own TTL.
		if err := m.renew(ctx, max(m.ttl, min(ttl+ttl/2, maxTTL))); err != nil {
			return 0, err
		}
		until = m.until.Load()
	}
	if until <= m.clock.Now() {
		return 0, errors.New("migrate: the phase lease has ended")
	}
	return until, nil
}

// renewing keeps the phase lease alive until close.
func (m *member) renewing() {
	pause := m.ttl / 3
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-m.ctx.Done():
			return
		}
		select {
		case m.busy <- struct{}{}:
		case <-m.ctx.Done():
			return
		}
		ctx, cancel := context.WithTimeout(m.ctx, min(m.ttl/3, 5*time.Second))
		err := m.renew(ctx, m.ttl)
		cancel()
		<-m.busy
		pause = m.ttl / 3
		if err != nil {
			pause = max(m.ttl/12, time.Millisecond)
		}
		timer.Reset(pause)
	}
}

// card is what is stored with a phase lease; its label makes listings of a plain client readable.
type card struct {
	Host   string    `json:"host,omitempty"`
	PID    int       `json:"pid,omitempty"`
	Since  time.Time `json:"since,omitzero"`
	Label  string    `json:"label"`
	Phase  Phase     `json:"phase"`
	TTL    int64     `json:"ttl"` // ms
	Record bool      `json:"record,omitempty"`
}

func newCard(p Phase, ttl time.Duration, record bool) *card {
	host, err := os.Hostname()
	if err != nil {
		host = ""
	}
	c := &card{Host: host, PID: os.Getpid(), Since: time.Now().UTC(), Label: "phase=" + string(p), Phase: p,
		TTL: ttl.Milliseconds(), Record: record}
	if record {
		c.Label = "recorded phase=" + string(p)
	}
	return c
}

func readCard(s string) (c card) {
	if json.Unmarshal([]byte(s), &c) != nil || c.Phase.index() < 0 {
		return card{}
	}
	return c
}

// text is what is kept with the lease.
func (c *card) text() string {
	text, err := json.Marshal(c)
	if err != nil {
		return ""
	}
	return string(text)
}

// who tells an operator about the client.
func (c *card) who() string {
	if c.Record {
		return fmt.Sprintf("the recorded phase %s", c.Phase)
	}
	return fmt.Sprintf("phase %s, host %s, pid %d", c.Phase, c.Host, c.PID)
}
