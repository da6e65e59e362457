package postgres

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
)

// newClient makes a client of a driver with a pool of its own.
func newClient(t *testing.T, s *servers.Postgres, ns string) *fencelock.Client {
	t.Helper()
	return clientOf(t, on(t, s.URL(), ns))
}

func clientOf(t *testing.T, d *Driver) *fencelock.Client {
	t.Helper()
	c, err := fencelock.New(d, fencelock.WithRequestTimeout(3*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// warmClient makes a client that has connections for all that it does at a time: a step, a renewal and a sweep.
func warmClient(t *testing.T, s *servers.Postgres, ns string) *fencelock.Client {
	t.Helper()
	d := on(t, s.URL(), ns)
	var all []*pgxpool.Conn
	for range 3 {
		conn, err := d.pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, conn)
	}
	for _, conn := range all {
		conn.Release()
	}
	return clientOf(t, d)
}

// TestConnectionsEndAtRandom: while connections are ended at random, no lock is lost, nothing is left, and what an error
// says is true (F145).
func TestConnectionsEndAtRandom(t *testing.T) {
	s := newServer(t)
	ns := namespace()
	c := newClient(t, s, ns)
	const locks, workers, atLeast = 500, 8, 50
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Second)
	defer cancel()
	var ended atomic.Int64
	turns := make(chan struct{}, 1) // one after some locks, so that there are connections to be ended
	var terminator, all sync.WaitGroup
	terminator.Go(func() {
		for range turns {
			n, err := strconv.Atoi(psql(t, s, `SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity
				WHERE backend_type = 'client backend' AND application_name <> 'admin' ORDER BY random() LIMIT 1) victim`))
			if err != nil {
				t.Error(err)
				return
			}
			ended.Add(int64(n))
		}
	})
	// The outcome of a request may be unknown, or it was refused; it is neither contention nor anything else.
	failed := func(op string, err error) {
		if !errors.Is(err, fencelock.ErrUncertain) && !errors.Is(err, fencelock.ErrUnavailable) {
			t.Errorf("%s while connections end: got %v, want nil, ErrUncertain or ErrUnavailable (L8)", op, err)
		}
	}
	for w := range workers {
		all.Go(func() {
			for i := w; (i < locks || ended.Load() < atLeast) && ctx.Err() == nil; i += workers {
				l, err := c.Lock(ctx, fmt.Sprint(i), fencelock.TTL(time.Minute))
				if err != nil {
					failed("Lock", err)
					continue
				}
				if i%4 == 0 {
					select {
					case turns <- struct{}{}:
					default:
					}
				}
				if i%10 == 0 {
					if err := l.Extend(ctx, time.Minute); err != nil {
						failed("Extend", err)
					}
				}
				if err := l.Err(); err != nil {
					t.Errorf("Err of a lease whose connection ended: got %v, want nil (L2)", err)
				}
				for err := l.Release(ctx); err != nil && ctx.Err() == nil; err = l.Release(ctx) {
					failed("Release", err)
				}
			}
		})
	}
	all.Wait()
	close(turns)
	terminator.Wait()
	if n := ended.Load(); n < atLeast || ctx.Err() != nil {
		t.Fatalf("void: %d connections were ended, want %d; %v", n, atLeast, ctx.Err())
	}
	eventually(t, func() error {
		if got := psql(t, s, "SELECT count(*) FROM (SELECT ns FROM fencelock.leases UNION ALL SELECT ns FROM fencelock.waiters) x WHERE ns = '%s'", ns); got != "0" {
			return fmt.Errorf("left of %d locks: got %s rows, want none (L7)", locks, got)
		}
		return nil
	})
}

// TestNoNewConnections: the process that makes connections stands still, those that are there work. A lock is kept, handed
// over and taken on them; who needs a new one is told in time, and not that the lock is held (F162).
func TestNoNewConnections(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ns := namespace()
	a, b := warmClient(t, s, ns), warmClient(t, s, ns)
	const ttl = 3 * time.Second
	held, err := a.TryLock(t.Context(), "a", fencelock.TTL(ttl))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(s.PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	goOn := sync.OnceFunc(func() { _ = syscall.Kill(s.PID(), syscall.SIGCONT) })
	defer goOn()

	stranger := newClient(t, s, ns)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	began := time.Now()
	if _, err := stranger.TryLock(ctx, "free"); err == nil || errors.Is(err, fencelock.ErrHeld) {
		t.Errorf("TryLock that needs a new connection: got %v, want an error that is not ErrHeld (L8)", err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("TryLock that needs a new connection: took %v, want about 1 s", took)
	}
	first := held.Deadline()
	eventually(t, func() error {
		if err := held.Err(); err != nil {
			t.Fatalf("Err of a lock while no connection can be made: got %v, want nil (L2)", err)
		}
		if _, err := b.TryLock(t.Context(), "a"); !errors.Is(err, fencelock.ErrHeld) {
			t.Fatalf("TryLock of a held lock on a connection that works: got %v, want ErrHeld (L1)", err)
		}
		if more := held.Deadline().Sub(first); more < ttl {
			return fmt.Errorf("deadline while no connection can be made: got it %v later, want %v", more, ttl)
		}
		return nil
	})
	if err := held.Release(t.Context()); err != nil {
		t.Errorf("Release while no connection can be made: got %v, want nil", err)
	}
	l, err := b.Lock(t.Context(), "a", fencelock.TTL(ttl))
	if err != nil {
		t.Fatalf("Lock after it: got %v, want a lease", err)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Errorf("Release while no connection can be made: got %v, want nil", err)
	}
	goOn()
	eventually(t, func() error {
		l, err := stranger.TryLock(t.Context(), "free")
		if err != nil {
			return fmt.Errorf("TryLock when connections can be made again: got %w, want a lease", err)
		}
		return l.Release(t.Context())
	})
}

// TestFewConnections: who holds a lock or waits for one keeps no connection of the pool that it shares with the work that is
// guarded, but for the one that listens (F148).
func TestFewConnections(t *testing.T) {
	t.Parallel()
	pool := newPool(t, sharedServer(t).URL()+"&pool_max_conns=2")
	d, err := New(pool, &Options{Namespace: namespace()})
	if err != nil {
		t.Fatal(err)
	}
	c, err := fencelock.New(d)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	const holders = 10
	var holding, all sync.WaitGroup
	holding.Add(holders)
	for i := range holders {
		all.Go(func() {
			l, err := c.Lock(ctx, fmt.Sprint(i))
			holding.Done()
			if err != nil {
				t.Errorf("Lock: got %v, want a lease", err)
				return
			}
			holding.Wait() // all hold, and one more waits for each
			waits := make(chan error, 1)
			go func() {
				l, err := c.Lock(ctx, fmt.Sprint(i))
				if err == nil {
					err = l.Release(ctx)
				}
				waits <- err
			}()
			for range 5 {
				if _, err := pool.Exec(ctx, "SELECT 1"); err != nil {
					t.Errorf("query of a holder: got %v, want nil", err)
				}
			}
			if err := l.Release(ctx); err != nil {
				t.Errorf("Release: got %v, want nil", err)
			}
			if err := <-waits; err != nil {
				t.Errorf("Lock of the next, and its Release: got %v, want nil", err)
			}
		})
	}
	all.Wait()
}

// TestWaitersHoldNoSnapshot: what waits for all snapshots that are older, such as an index that is built concurrently, does
// not wait for those who hold or wait for locks (F150).
func TestWaitersHoldNoSnapshot(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ns := namespace()
	c := newClient(t, s, ns)
	l, err := c.TryLock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	const waiters = 5
	var all sync.WaitGroup
	for range waiters {
		all.Go(func() {
			if _, err := c.Lock(ctx, "a"); !errors.Is(err, context.Canceled) {
				t.Errorf("Lock of a held lock: got %v, want it to wait", err)
			}
		})
	}
	eventually(t, func() error {
		if got := psql(t, s, "SELECT count(*) FROM fencelock.waiters WHERE ns = '%s'", ns); got != fmt.Sprint(waiters) {
			return fmt.Errorf("waiters: got %s, want %d", got, waiters)
		}
		return nil
	})
	psql(t, s, "CREATE TABLE work (id int)")
	psql(t, s, "CREATE INDEX CONCURRENTLY ON work (id)") // it has 20 s
	if err := l.Err(); err != nil {
		t.Errorf("Err after an index was built: got %v, want nil", err)
	}
	cancel()
	all.Wait()
}
