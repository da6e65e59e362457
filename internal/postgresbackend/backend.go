// Package postgresbackend gives the conformance suite a PostgreSQL server, whatever that runs in, through
// driver/postgres. It is for the suite's runs on local processes and on containers.
package postgresbackend

import (
	"context"
	"crypto/rand"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/postgres"
)

// Args are what the suite needs of a server: it counts statements, and takes the connections of many tests.
func Args() []string {
	return []string{"-c", "shared_preload_libraries=pg_stat_statements", "-c", "max_connections=400"}
}

// Run runs the suite on servers made by start with Args, which also closes them by t.Cleanup. atOnce is as in
// conformance.Harness.
func Run(t *testing.T, provider string, atOnce int, start func(testing.TB) servers.Server) {
	// The pools of drivers on the shared server that are closed. The next driver gets one of them, for itself: the server
	// would need most of the time of a run for new connections.
	used := new(pools)
	shared := prepare(t, start(t))
	conformance.Run(t, conformance.Harness{
		Provider: provider,
		AtOnce:   atOnce,
		New:      func(t testing.TB) *conformance.Backend { return backend(shared, used) },
		NewServer: func(t testing.TB) *conformance.Backend {
			return backend(prepare(t, start(t)), nil)
		},
	})
	used.close()
}

// server is a server with somebody who makes the schema, also when all data was lost.
type server struct {
	servers.Server
	admin *pgxpool.Pool // asks behind the backs of the drivers
}

// prepare makes schema and statistics.
func prepare(t testing.TB, s servers.Server) *server {
	t.Helper()
	admin, err := pgxpool.New(context.WithoutCancel(t.Context()), url(s.Addr())+"&pool_max_conns=2")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(admin.Close)
	x := &server{s, admin}
	if err := x.prepare(t.Context()); err != nil {
		t.Fatalf("prepare a server: got %v, want nil", err)
	}
	return x
}

func (s *server) prepare(ctx context.Context) error {
	if _, err := s.admin.Exec(ctx, "CREATE EXTENSION pg_stat_statements"); err != nil {
		return err
	}
	return postgres.EnsureSchema(ctx, s.admin, nil)
}

func (s *server) StartEmpty(ctx context.Context) error {
	if err := s.Server.StartEmpty(ctx); err != nil {
		return err
	}
	s.admin.Reset()
	return s.prepare(ctx)
}

// url is that of servers.Postgres for every server at an address.
func url(addr string) string { return "postgres://postgres@" + addr + "/postgres?sslmode=disable" }

// backend is a namespace of its own on the server.
func backend(s *server, used *pools) *conformance.Backend {
	namespace := rand.Text()
	return &conformance.Backend{
		Server: s,
		Driver: func(t testing.TB) driver.Driver { return connect(t, url(s.Addr()), namespace, used) },
		URL:    url(s.Addr()) + "&namespace=" + namespace,
		Wired: func(t testing.TB) (driver.Driver, conformance.Wire) {
			p, err := servers.NewProxy(s.Addr())
			if err != nil {
				t.Fatalf("NewProxy: got %v, want nil", err)
			}
			t.Cleanup(func() { p.Close() })
			return connect(t, url(p.Addr()), namespace, nil), conformance.StepsOnly(p, `"fencelock".`)
		},
		Requests: func(t testing.TB) int {
			// To clear up is not about a lock; a driver does so at any time.
			calls, err := strconv.Atoi(s.ask(t, `SELECT coalesce(sum(calls), 0)::text FROM pg_stat_statements WHERE query LIKE '%"fencelock".%'
				AND query NOT LIKE '%"fencelock".sweep(%'`)[0])
			if err != nil {
				t.Fatal(err)
			}
			return calls
		},
		Leftovers: func(t testing.TB, n driver.Name) (all []string) {
			for _, table := range []string{"leases", "waiters"} {
				all = append(all, s.ask(t, "SELECT owner FROM fencelock."+table+` WHERE ns = $1 AND kind = $2 AND name = $3 AND expires > clock_timestamp()`,
					namespace, int16(n.Kind), []byte(n.Name))...)
			}
			return all
		},
	}
}

// ask answers the rows of a query, each of one column.
func (s *server) ask(t testing.TB, query string, args ...any) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 20*time.Second)
	defer cancel()
	rows, err := s.admin.Query(ctx, query, append([]any{pgx.QueryExecModeExec}, args...)...)
	if err != nil {
		t.Fatalf("question to the server: got %v, want an answer", err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatalf("question to the server: got %v, want an answer", err)
	}
	return all
}

// pools are some that wait for their next driver.
type pools struct {
	mu   sync.Mutex
	idle []*pgxpool.Pool
}

// mostIdle is how many connections a pool may keep while it waits.
const mostIdle = 2

func (p *pools) get() *pgxpool.Pool {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.idle)
	if n == 0 {
		return nil
	}
	pool := p.idle[n-1]
	p.idle = p.idle[:n-1]
	return pool
}

func (p *pools) put(pool *pgxpool.Pool) {
	if p == nil || pool.Stat().TotalConns() > mostIdle {
		pool.Close()
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = append(p.idle, pool)
}

func (p *pools) close() {
	for pool := p.get(); pool != nil; pool = p.get() {
		pool.Close()
	}
}

// onPool is a driver that has a pool to itself until it is closed.
type onPool struct {
	*postgres.Driver
	giveBack func()
}

func (d *onPool) Close() error {
	err := d.Driver.Close()
	d.giveBack()
	return err
}

func connect(t testing.TB, url, namespace string, used *pools) driver.Driver {
	t.Helper()
	pool := used.get()
	if pool == nil {
		var err error
		if pool, err = newPool(context.WithoutCancel(t.Context()), url); err != nil {
			t.Fatalf("connect: got %v, want nil", err)
		}
	}
	d, err := postgres.New(pool, &postgres.Options{Namespace: namespace})
	if err != nil {
		t.Fatalf("New: got %v, want nil", err)
	}
	return &onPool{d, sync.OnceFunc(func() { used.put(pool) })}
}

// newPool makes a pool with a connection. A server process compiles the functions when it first calls them, which on a
// busy machine takes longer than the shortest TTLs of the suite allow for.
func newPool(ctx context.Context, url string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.ConnConfig.ConnectTimeout = 5 * time.Second
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	if err := warm(ctx, pool); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

func warm(ctx context.Context, pool *pgxpool.Pool) error {
	d, err := postgres.New(pool, &postgres.Options{Namespace: "warm"})
	if err != nil {
		return err
	}
	defer d.Close()
	o := driver.Owner{Name: driver.Name{Kind: driver.KindLock, Name: rand.Text()}, ID: rand.Text()}
	if a, err := d.Lock(ctx, driver.Request{Owner: o, TTL: time.Minute, Limit: 1}); err != nil || a.State != driver.Granted {
		return fmt.Errorf("step Lock: %v, %w", a.State, err)
	}
	if r := d.Extend(ctx, []driver.Extension{{Owner: o, TTL: time.Minute}})[0]; r.Err != nil {
		return r.Err
	}
	_, err = d.Release(ctx, o)
	return err
}
