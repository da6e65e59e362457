package postgres

import (
	"bytes"
	"context"
	"crypto/rand"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/conformance/worker"
	"github.com/fencelock/fencelock/driver"
)

// shared is the server of all tests that do not break theirs, with the schema "fencelock".
var shared struct {
	sync.Mutex
	server *servers.Postgres
}

func TestMain(m *testing.M) {
	worker.Main()
	if order := os.Getenv(pausedEnv); order != "" {
		if err := runPaused(order); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// Most of the parallel tests wait; by default there would be as many at a time as processors.
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		_ = flag.Set("test.parallel", "8")
	}
	code := m.Run()
	if shared.server != nil {
		if err := shared.server.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func sharedServer(t testing.TB) *servers.Postgres {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil {
		s, err := servers.StartPostgres(context.Background(), &servers.PostgresOptions{Args: counting}) //nolint:usetesting // it outlives this test
		if err != nil {
			t.Fatal(err)
		}
		shared.server = s
		prepare(t, s)
	}
	return shared.server
}

// newServer starts a server for one test, with the schema.
func newServer(t testing.TB, args ...string) *servers.Postgres {
	t.Helper()
	s, err := servers.StartPostgres(t.Context(), &servers.PostgresOptions{Args: append(args, counting...)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	prepare(t, s)
	return s
}

// counting makes a server count statements.
var counting = []string{"-c", "shared_preload_libraries=pg_stat_statements"}

func prepare(t testing.TB, s *servers.Postgres) {
	t.Helper()
	psql(t, s, "CREATE EXTENSION pg_stat_statements")
	ensure(t, newPool(t, s.URL()), nil)
}

func ensure(t testing.TB, pool *pgxpool.Pool, o *Options) {
	t.Helper()
	if err := EnsureSchema(t.Context(), pool, o); err != nil {
		t.Fatalf("EnsureSchema: got %v, want nil", err)
	}
}

func newPool(t testing.TB, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// on makes a driver with a pool of its own.
func on(t testing.TB, url, namespace string) *Driver {
	t.Helper()
	d, err := New(newPool(t, url), &Options{Namespace: namespace})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// namespace is a new one.
func namespace() string { return "t-" + rand.Text() }

// psql runs statements on the server behind the back of the drivers, and answers the rows of the last one.
func psql(t testing.TB, s *servers.Postgres, format string, args ...any) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 20*time.Second)
	defer cancel()
	conn, err := admins.get(ctx, s)
	if err != nil {
		t.Fatal(err)
	}
	results, err := conn.PgConn().Exec(ctx, fmt.Sprintf(format, args...)).ReadAll()
	if err != nil {
		conn.Close(ctx)
		t.Fatal(err)
	}
	admins.put(s, conn)
	var lines []string
	for _, row := range results[len(results)-1].Rows {
		lines = append(lines, string(bytes.Join(row, []byte("|"))))
	}
	return strings.Join(lines, "\n")
}

// admins are connections for psql. They end with their servers.
var admins = adminPool{idle: make(map[*servers.Postgres][]*pgx.Conn)}

type adminPool struct {
	sync.Mutex
	idle map[*servers.Postgres][]*pgx.Conn
}

func (a *adminPool) get(ctx context.Context, s *servers.Postgres) (*pgx.Conn, error) {
	a.Lock()
	for n := len(a.idle[s]); n > 0; n = len(a.idle[s]) {
		conn := a.idle[s][n-1]
		a.idle[s] = a.idle[s][:n-1]
		a.Unlock()
		if conn.Ping(ctx) == nil {
			return conn, nil
		}
		a.Lock()
	}
	a.Unlock()
	return pgx.Connect(ctx, s.URL()+"&application_name=admin")
}

func (a *adminPool) put(s *servers.Postgres, conn *pgx.Conn) {
	a.Lock()
	defer a.Unlock()
	a.idle[s] = append(a.idle[s], conn)
}

// eventually fails the test if check does not answer nil soon.
func eventually(t testing.TB, check func() error) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// request asks for a lock as a new owner.
func request(name string, ttl time.Duration) driver.Request {
	return driver.Request{Owner: driver.Owner{Name: driver.Name{Kind: driver.KindLock, Name: name}, ID: rand.Text()},
		TTL: ttl, Limit: 1}
}

func waiting(r driver.Request, claim time.Duration) driver.Request {
	r.Wait, r.Claim = true, claim
	return r
}

// locked makes the step Lock and checks the state.
func locked(t testing.TB, d *Driver, r driver.Request, want driver.State, law string) driver.Answer {
	t.Helper()
	a, err := d.Lock(t.Context(), r)
	if err != nil || a.State != want {
		t.Fatalf("Lock of %q: got %v, %v, want %v (%s)", r.Name.Name, a.State, err, want, law)
	}
	return a
}

func released(t testing.TB, d *Driver, o driver.Owner, want bool) {
	t.Helper()
	found, err := d.Release(t.Context(), o)
	if err != nil || found != want {
		t.Fatalf("Release of %q: got %v, %v, want %v (L7)", o.Name.Name, found, err, want)
	}
}

func extended(t testing.TB, d *Driver, o driver.Owner, ttl time.Duration, want driver.State) driver.Answer {
	t.Helper()
	r := d.Extend(t.Context(), []driver.Extension{{Owner: o, TTL: ttl}})[0]
	if r.Err != nil || r.State != want {
		t.Fatalf("Extend of %q: got %v, %v, want %v (L4)", o.Name.Name, r.State, r.Err, want)
	}
	return r.Answer
}

func polled(t testing.TB, d *Driver, r driver.Request, want driver.State) driver.Answer {
	t.Helper()
	p := d.Poll(t.Context(), []driver.Poll{{Owner: r.Owner, TTL: r.TTL, Claim: r.Claim}})[0]
	if p.Err != nil || p.State != want {
		t.Fatalf("Poll of %q: got %v, %v, want %v (W3)", r.Name.Name, p.State, p.Err, want)
	}
	return p.Answer
}

// events collects what a driver tells.
type events struct {
	sync.Mutex
	all []driver.Event
}

func listen(d *Driver) *events {
	e := new(events)
	d.Notify(func(ev driver.Event) {
		e.Lock()
		defer e.Unlock()
		e.all = append(e.all, ev)
	})
	return e
}

func (e *events) of(kind driver.EventKind) (some []driver.Event) {
	e.Lock()
	defer e.Unlock()
	for _, ev := range e.all {
		if ev.Kind == kind {
			some = append(some, ev)
		}
	}
	return some
}
