package postgres

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

// listeners is how many connections listen.
func listeners(t *testing.T, s *servers.Postgres) string {
	t.Helper()
	return psql(t, s, `SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN %%' AND pid <> pg_backend_pid()`)
}

func rechecks(e *events, least int) func() error {
	return func() error {
		if n := len(e.of(driver.EventRecheck)); n < least {
			return fmt.Errorf("rechecks: got %d, want %d (W1)", n, least)
		}
		return nil
	}
}

// granted waits for the push of a grant.
func granted(t *testing.T, e *events, o driver.Owner, since time.Time) driver.Token {
	t.Helper()
	var token driver.Token
	eventually(t, func() error {
		for _, ev := range e.of(driver.EventGranted) {
			if ev.Owner == o {
				token = ev.Token
				return nil
			}
		}
		return fmt.Errorf("push of a grant: got none after %v, want one (W1)", time.Since(since))
	})
	return token
}

// TestOneListener: a thousand names are waited for on one connection (F074), which goes when nobody waits any more.
func TestOneListener(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ns := namespace()
	d := on(t, s.URL()+"&pool_max_conns=2", ns)
	e := listen(d)
	const names, claim = 1000, 3 * time.Second
	psql(t, s, `INSERT INTO fencelock.names SELECT '%[1]s', 1, ('n' || i)::bytea, i, now() FROM generate_series(1, %[2]d) i;
		INSERT INTO fencelock.leases SELECT '%[1]s', 1, ('n' || i)::bytea, 'o' || i, i, now() + interval '1 min', '' FROM generate_series(1, %[2]d) i`, ns, names)
	requests := make(chan driver.Request, names)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for r := range requests {
				if a, err := d.Lock(t.Context(), r); err != nil || a.State != driver.Waiting {
					t.Errorf("Lock of a held name: got %v, %v, want waiting", a.State, err)
				}
			}
		})
	}
	for i := range names {
		requests <- waiting(request(fmt.Sprint("n", i+1), time.Minute), claim)
	}
	close(requests)
	all.Wait()
	eventually(t, rechecks(e, 1))
	if got := listeners(t, s); got != "1" {
		t.Errorf("connections that listen for %d names: got %s, want 1", names, got)
	}
	eventually(t, func() error {
		if got := listeners(t, s); got != "0" {
			return fmt.Errorf("connections that listen a while after the last claim: got %s, want 0 (L7)", got)
		}
		return nil
	})
}

// TestNoListenerWithoutWaiters: who gets a lock at once takes no connection to listen, though it would have waited.
func TestNoListenerWithoutWaiters(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d := on(t, s.URL(), namespace())
	e := listen(d)
	for range 20 {
		r := waiting(request("a", time.Minute), time.Minute)
		locked(t, d, r, driver.Granted, "L1")
		released(t, d, r.Owner, true)
	}
	d.inbox.mu.Lock()
	running := d.inbox.running
	d.inbox.mu.Unlock()
	if got := listeners(t, s); running || got != "0" || len(e.of(driver.EventRecheck)) > 0 {
		t.Errorf("connections that listen for nobody: got %s, %v, want none (L7)", got, running)
	}
}

// TestOneListenerAtATime: a waiter that comes while the connection of those before it is given up does not begin a second
// one beside it.
func TestOneListenerAtATime(t *testing.T) {
	b := inbox{sink: func(driver.Event) {}, running: true, until: time.Now().Add(-time.Second)}
	if left := b.wanted(); left != 0 {
		t.Fatalf("wanted after the last claim: got %v, want 0", left)
	}
	b.want(time.Minute)
	if b.over() || !b.running {
		t.Errorf("the goroutine that listens: got ended, want it to go on for the next waiter")
	}
	b.until = time.Now()
	if !b.over() || b.running {
		t.Errorf("the goroutine that listens for nobody: got it going on, want it to end")
	}
}

// TestPushToAnotherClient: the release of one client tells the other one.
func TestPushToAnotherClient(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ns := namespace()
	a, b := on(t, s.URL(), ns), on(t, s.URL(), ns)
	e := listen(b)
	r, w := request("a\x00'", time.Minute), waiting(request("a\x00'", time.Minute), time.Minute)
	locked(t, a, r, driver.Granted, "L1")
	locked(t, b, w, driver.Waiting, "W4")
	eventually(t, rechecks(e, 1))
	released(t, a, r.Owner, true)
	token := granted(t, e, w.Owner, time.Now())
	if p := polled(t, b, w, driver.Granted); p.Token != token {
		t.Errorf("token of the push: got %v, want %v as the poll answers (T3)", token, p.Token)
	}
	released(t, b, w.Owner, true)

	// Ended from outside: it listens again, and asks its waiters to look (F161).
	w = waiting(request("b", time.Minute), time.Minute)
	r = request("b", time.Minute)
	locked(t, a, r, driver.Granted, "L1")
	locked(t, b, w, driver.Waiting, "W4")
	before := len(e.of(driver.EventRecheck))
	psql(t, s, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN %%' AND pid <> pg_backend_pid()`)
	eventually(t, rechecks(e, before+1))
	released(t, a, r.Owner, true)
	granted(t, e, w.Owner, time.Now())
	if n := len(e.of(driver.EventWarning)); n != 0 {
		t.Errorf("warnings: got %v, want none", e.of(driver.EventWarning))
	}
}

// TestNoNotifyWithoutWaiters: NOTIFY takes a lock that all databases of the server share.
func TestNoNotifyWithoutWaiters(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ns := namespace()
	d := on(t, s.URL(), ns)
	listen(d)
	psql(t, s, "ALTER SYSTEM SET pg_stat_statements.track = 'all'")
	psql(t, s, "SELECT pg_reload_conf()")
	eventually(t, func() error {
		if got := psql(t, s, "SHOW pg_stat_statements.track"); got != "all" {
			return fmt.Errorf("track: got %s, want all", got)
		}
		return nil
	})
	notifies := func() string {
		return psql(t, s, "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements WHERE query LIKE '%%pg_notify(%%' AND query NOT LIKE '%%CREATE FUNCTION%%' AND query NOT LIKE '%%pg_stat%%'")
	}
	r := request("a", time.Minute)
	locked(t, d, r, driver.Granted, "L1")
	locked(t, d, request("a", time.Minute), driver.Held, "L1")
	extended(t, d, r.Owner, time.Minute, driver.Granted)
	released(t, d, r.Owner, true)
	if got := notifies(); got != "0" {
		t.Errorf("NOTIFYs without a waiter: got %s, want 0", got)
	}
	// The own waiter of a client learns of it by the answer.
	w := waiting(request("a", time.Minute), time.Minute)
	locked(t, d, r, driver.Granted, "L1")
	locked(t, d, w, driver.Waiting, "W4")
	eventually(t, func() error {
		if got := notifies(); got != "1" {
			return fmt.Errorf("NOTIFYs: got %s, want that of the trial", got)
		}
		return nil
	})
	released(t, d, r.Owner, true)
	polled(t, d, w, driver.Granted)
	if got := notifies(); got != "1" {
		t.Errorf("NOTIFYs after a grant to the client itself: got %s, want that of the trial only", got)
	}
}

// TestDeaf: behind a pooler in transaction mode locks work, and the client finds out that it hears nothing (F137).
func TestDeaf(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	pooler, err := servers.StartPgBouncer(t.Context(), s.Addr(), &servers.PgBouncerOptions{Settings: []string{"default_pool_size = 3"}})
	if err != nil {
		t.Fatal(err)
	}
	defer pooler.Close()
	ns := namespace()
	a, b := on(t, pooler.URL(), ns), on(t, pooler.URL(), ns)
	everyStep(t, a)
	e := listen(b)
	r, w := request("a", time.Minute), waiting(request("a", time.Minute), time.Minute)
	locked(t, a, r, driver.Granted, "L1")
	locked(t, b, w, driver.Waiting, "W4")
	eventually(t, func() error {
		for _, ev := range e.of(driver.EventWarning) {
			if errors.Is(ev.Err, errDeaf) {
				return nil
			}
		}
		return fmt.Errorf("warnings behind a pooler: got %+v, want that nothing is heard", e.of(driver.EventWarning))
	})
	released(t, a, r.Owner, true)
	polled(t, b, w, driver.Granted)
	released(t, b, w.Owner, true)
	everyStep(t, b)
	crowd(t, pooler.URL(), 12, 2)
}

// silence is a network that can swallow the replies of one connection.
type silence struct {
	mu    sync.Mutex
	conns []*silentConn
}

type silentConn struct {
	net.Conn
	swallow  atomic.Bool
	listened atomic.Bool
}

func (c *silentConn) Write(b []byte) (int, error) {
	if strings.Contains(string(b), "LISTEN ") {
		c.listened.Store(true)
	}
	return c.Conn.Write(b)
}

func (c *silentConn) Read(b []byte) (int, error) {
	for {
		n, err := c.Conn.Read(b)
		if err != nil || !c.swallow.Load() {
			return n, err
		}
	}
}

func (s *silence) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns = append(s.conns, &silentConn{Conn: c})
	return s.conns[len(s.conns)-1], nil
}

// over makes a driver whose connections are dialled by dial.
func over(t *testing.T, s *servers.Postgres, namespace string, dial pgconn.DialFunc) *Driver {
	t.Helper()
	config, err := pgxpool.ParseConfig(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.DialFunc = dial
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	d, err := New(pool, &Options{Namespace: namespace})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// TestSilentListener: only the connection that listens is cut off, and nobody tells (F160).
func TestSilentListener(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	ns := namespace()
	var network silence
	d := over(t, s, ns, network.dial)
	e := listen(d)
	r, w := request("a", time.Hour), waiting(request("a", time.Hour), time.Hour)
	locked(t, d, r, driver.Granted, "L1")
	locked(t, d, w, driver.Waiting, "W4")
	eventually(t, rechecks(e, 1))
	time.Sleep(500 * time.Millisecond) // the trial is over
	cut := 0
	network.mu.Lock()
	for _, c := range network.conns {
		if c.listened.Load() {
			c.swallow.Store(true)
			cut++
		}
	}
	network.mu.Unlock()
	if cut != 1 {
		t.Fatalf("void: got %d connections that listen, want 1", cut)
	}
	polled(t, d, w, driver.Waiting)
	eventually(t, rechecks(e, 2))
	released(t, on(t, s.URL(), ns), r.Owner, true)
	granted(t, e, w.Owner, time.Now())
}

// slowListener dials through a proxy for each connection, and delays what one that listens is told.
func slowListener(t *testing.T, by time.Duration) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		p, err := servers.NewProxy(addr)
		if err != nil {
			return nil, err
		}
		t.Cleanup(func() { p.Close() })
		c, err := new(net.Dialer).DialContext(ctx, network, p.Addr())
		if err != nil {
			return nil, err
		}
		return &slowConn{c, func() { p.Delay(servers.ToClient, by) }}, nil
	}
}

type slowConn struct {
	net.Conn
	listens func()
}

func (c *slowConn) Write(b []byte) (int, error) {
	if strings.Contains(string(b), "LISTEN ") {
		c.listens()
	}
	return c.Conn.Write(b)
}

// TestSlowIsNotDeaf: a notification that takes longer than the trial waits is no proof that none arrive.
func TestSlowIsNotDeaf(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	ns := namespace()
	d := over(t, s, ns, slowListener(t, proofTimeout+300*time.Millisecond))
	e := listen(d)
	r, w := request("a", time.Hour), waiting(request("a", time.Hour), time.Hour)
	locked(t, d, r, driver.Granted, "L1")
	locked(t, d, w, driver.Waiting, "W4")
	eventually(t, rechecks(e, 1))
	began := time.Now()
	eventually(t, func() error {
		if warnings := e.of(driver.EventWarning); len(warnings) > 0 {
			t.Fatalf("warnings on a slow connection: got %v, want none", warnings)
		}
		if passed := time.Since(began); passed < 2*proofTimeout+2*time.Second {
			return fmt.Errorf("the trial is over after %v", passed)
		}
		return nil
	})
	released(t, on(t, s.URL(), ns), r.Owner, true)
	granted(t, e, w.Owner, time.Now())
}
