package postgres

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/driver"
)

// Limits of listening.
const (
	dialTimeout   = 10 * time.Second       // to get a connection and LISTEN on it
	proofTimeout  = 3 * time.Second        // to hear what was sent for a trial, without asking
	checkInterval = 10 * time.Second       // of silence until the connection is tried
	checkTimeout  = 5 * time.Second        // for its answer
	firstRetry    = 100 * time.Millisecond // after the connection broke, then doubled
	lastRetry     = 5 * time.Second        //   up to this
	deafRetry     = 10 * time.Minute       // after the trial has failed
)

// inbox is where other clients tell of grants: a channel of LISTEN and NOTIFY that only this client listens on. Its
// connection stands from when the first one waits until nobody has for one claim; one goroutine reads it for as long.
type inbox struct {
	driver  *Driver
	channel string // waiters carry it
	done    sync.WaitGroup

	mu      sync.Mutex
	sink    func(driver.Event)
	until   time.Time
	running bool
	closed  bool
	deaf    time.Time // not listened again before
}

func (b *inbox) init(d *Driver) { b.driver, b.channel = d, "fencelock_"+rand.Text() }

// Notify implements driver.Notifier. If notifications do not arrive, as behind a pooler in transaction mode, the sink
// gets an EventWarning and waiters poll.
func (d *Driver) Notify(sink func(driver.Event)) {
	d.inbox.mu.Lock()
	defer d.inbox.mu.Unlock()
	d.inbox.sink = sink
}

// want says that somebody waits whose entry lives for claim. It does not wait for the connection: what is missed
// until that listens, EventRecheck makes good.
func (b *inbox) want(claim time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if b.sink == nil || b.closed || now.Before(b.deaf) {
		return
	}
	if until := now.Add(claim); until.After(b.until) {
		b.until = until
	}
	if !b.running {
		b.running = true
		b.done.Go(b.run)
	}
}

// address is where this client's waiters are told of grants. One that begins with "!" is told nothing by others.
func (b *inbox) address() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sink == nil || time.Now().Before(b.deaf) {
		return "!" + b.channel
	}
	return b.channel
}

// wanted answers for how long the connection is, 0 if it is not now.
func (b *inbox) wanted() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.left()
}

// left is wanted with b.mu held.
func (b *inbox) left() time.Duration {
	if b.closed || time.Now().Before(b.deaf) {
		return 0
	}
	return max(time.Until(b.until), 0)
}

// over ends the goroutine if the connection is not wanted. Only here it is decided, so that there are never two.
func (b *inbox) over() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left() > 0 {
		return false
	}
	b.running = false
	return true
}

// close ends the inbox, after its driver's context, and waits for its goroutine.
func (b *inbox) close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.done.Wait()
}

var errDeaf = errors.New("postgres: notifications do not arrive (a pooler in transaction mode?), waiters poll")

func (b *inbox) run() {
	retry := firstRetry
	for !b.over() {
		heard, err := b.listen()
		if heard {
			retry = firstRetry
		}
		switch {
		case err == nil || b.driver.open.Err() != nil:
		case errors.Is(err, errDeaf):
			b.mu.Lock()
			b.deaf = time.Now().Add(deafRetry)
			b.mu.Unlock()
			b.sink(driver.Event{Kind: driver.EventWarning, Err: err})
		default:
			if retry > firstRetry { // one break is nothing to tell
				b.sink(driver.Event{Kind: driver.EventWarning,
					Err: fmt.Errorf("postgres: no connection for wake-ups, waiters poll: %w", err)})
			}
			b.pause(retry)
			retry = min(2*retry, lastRetry)
		}
	}
}

func (b *inbox) pause(d time.Duration) {
	t := time.NewTimer(min(d, b.wanted()))
	defer t.Stop()
	select {
	case <-t.C:
	case <-b.driver.open.Done():
	}
}

// listen reads notifications until none are wanted or the connection breaks. It reports whether it heard any.
func (b *inbox) listen() (heard bool, err error) {
	conn, err := b.dial()
	if err != nil {
		return false, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), checkTimeout)
		defer cancel()
		_ = conn.Close(ctx)
	}()
	b.sink(driver.Event{Kind: driver.EventRecheck})

	// Through another connection, since a pooler might show this one what it has sent itself.
	ctx, cancel := context.WithTimeout(b.driver.open, dialTimeout)
	defer cancel()
	if err := b.driver.query(ctx, func(ctx context.Context, q querier) error {
		return exec(ctx, q, "SELECT pg_notify($1, 'trial')", b.channel)
	}); err != nil {
		return false, err
	}
	err = b.receive(conn, proofTimeout)
	if errors.Is(err, context.DeadlineExceeded) {
		// Deaf, or slow. The answer to a question comes after what was sent before.
		if err = b.check(conn); err == nil {
			err = b.receive(conn, time.Millisecond)
		}
		if errors.Is(err, context.DeadlineExceeded) {
			err = errDeaf
		}
	}
	if err != nil {
		return false, err
	}
	for {
		left := b.wanted()
		if left == 0 {
			return true, nil
		}
		err := b.receive(conn, min(left, checkInterval))
		if errors.Is(err, context.DeadlineExceeded) && left > checkInterval {
			// Silence, or a network that swallows everything.
			err = b.check(conn)
		}
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return true, err
		}
	}
}

// dial takes a connection out of the pool, so that whatever the user has set up for connections is done, and listens.
func (b *inbox) dial() (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(b.driver.open, dialTimeout)
	defer cancel()
	pooled, err := b.driver.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	conn := pooled.Hijack()
	if _, err := conn.Exec(ctx, `LISTEN "`+b.channel+`"`); err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	return conn, nil
}

// receive waits for a notification and delivers it.
func (b *inbox) receive(conn *pgx.Conn, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(b.driver.open, limit)
	defer cancel()
	n, err := conn.WaitForNotification(ctx)
	if err != nil {
		if ctx.Err() != nil && !conn.IsClosed() {
			return ctx.Err()
		}
		return err
	}
	if name, granted, ok := parse(n.Payload); ok && n.Channel == b.channel {
		b.deliver(name, granted, "")
	}
	return nil
}

func (b *inbox) check(conn *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(b.driver.open, checkTimeout)
	defer cancel()
	if err := conn.Ping(ctx); err != nil {
		return fmt.Errorf("no answer on the connection that listens: %v", err) //nolint:errorlint // not a silence of its own
	}
	return nil
}

// parse reads what serve in schema.sql sends: kind, owner, token and name.
func parse(payload string) (n driver.Name, granted string, ok bool) {
	part := strings.Fields(payload)
	if len(part) != 4 {
		return n, "", false
	}
	kind, err := strconv.ParseUint(part[0], 10, 8)
	if err != nil {
		return n, "", false
	}
	name, err := hex.DecodeString(part[3])
	if err != nil {
		return n, "", false
	}
	return driver.Name{Kind: driver.Kind(kind), Name: string(name)}, part[1] + " " + part[2], true
}

// deliver tells the client of grants, an owner and a token each with blanks between all, but for that of the owner whose own step it
// was: the answer tells it.
func (b *inbox) deliver(n driver.Name, granted string, own string) {
	if granted == "" {
		return
	}
	b.mu.Lock()
	sink := b.sink
	b.mu.Unlock()
	if sink == nil {
		return
	}
	for part := range slices.Chunk(strings.Fields(granted), 2) {
		token, err := strconv.ParseInt(part[len(part)-1], 10, 64)
		if id := part[0]; err == nil && id != own {
			sink(driver.Event{Kind: driver.EventGranted, Owner: driver.Owner{Name: n, ID: id}, Token: driver.Token(token)})
		}
	}
}
