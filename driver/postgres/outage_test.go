package postgres

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
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

// forgetful are settings under which a server that crashes forgets what it has committed and not yet written.
var forgetful = []string{"-c", "synchronous_commit=off", "-c", "wal_writer_delay=10s"}

// leasesOf reads the leases from the tables: by owner, the token.
func leasesOf(t *testing.T, s *servers.Postgres, ns string) map[string]driver.Token {
	t.Helper()
	all := make(map[string]driver.Token)
	for line := range strings.Lines(psql(t, s, "SELECT owner, token FROM fencelock.leases WHERE ns = '%s'", ns)) {
		owner, text, _ := strings.Cut(strings.TrimSpace(line), "|")
		token, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		all[owner] = driver.Token(token)
	}
	return all
}

// stuck begins a step that waits for the row of its name, and answers its error.
func stuck(t *testing.T, s *servers.Postgres, d *Driver) <-chan error {
	t.Helper()
	locked(t, d, request("stuck", time.Minute), driver.Granted, "L1")
	do(t, admin(t, s), "SELECT FROM fencelock.names WHERE ns = $1 AND name = 'stuck' FOR UPDATE", d.ns)
	ended := make(chan error, 1)
	go func() {
		_, err := d.Lock(t.Context(), waiting(request("stuck", time.Minute), time.Minute))
		ended <- err
	}()
	blocked(t, s, ".lock(", 1)
	return ended
}

// TestImmediateRestart: the server ends by the mode "immediate" while a lock is held and waited for, and steps are under way.
// Nothing that a step has told is untrue after it.
func TestImmediateRestart(t *testing.T) {
	t.Parallel()
	s := newServer(t, forgetful...)
	psql(t, s, "CHECKPOINT")
	ns := namespace()
	a, b := newClient(t, s, ns), newClient(t, s, ns)
	held, err := a.TryLock(t.Context(), "a", fencelock.TTL(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	waits := make(chan *fencelock.Lease, 1)
	go func() {
		l, err := b.Lock(t.Context(), "a")
		if err != nil {
			t.Errorf("Lock that waits over a restart: got %v, want a lease", err)
		}
		waits <- l
	}()
	eventually(t, func() error {
		if got := psql(t, s, "SELECT count(*) FROM fencelock.waiters WHERE ns = '%s'", ns); got != "1" {
			return fmt.Errorf("waiters: got %s, want 1", got)
		}
		return nil
	})
	d := on(t, s.URL(), ns)
	ended := stuck(t, s, d)

	var mu sync.Mutex
	there, absent, failed := make(map[string]driver.Token), make(map[string]bool), 0
	var granted atomic.Int64
	var stop atomic.Bool
	var workers sync.WaitGroup
	for w := range 3 {
		workers.Go(func() {
			for i := 0; !stop.Load(); i++ {
				if a, err := d.Lock(t.Context(), request("a", time.Minute)); err == nil && a.State != driver.Held {
					t.Errorf("Lock of a held lock: got %v, want held or an error (L1)", a.State)
				}
				r := request(fmt.Sprint(w, " ", i), time.Minute)
				a, err := d.Lock(t.Context(), r)
				mu.Lock()
				switch {
				case err == nil && a.State != driver.Granted:
					t.Errorf("Lock of a free lock: got %v, want granted or an error (L8)", a.State)
				case err == nil:
					there[r.ID] = a.Token
					granted.Add(1)
				default:
					failed++
					absent[r.ID] = errors.Is(err, driver.ErrUnavailable)
				}
				mu.Unlock()
				if err != nil {
					pace()
				} else if i%2 == 0 {
					found, err := d.Release(t.Context(), r.Owner)
					mu.Lock()
					if err == nil && !found {
						t.Errorf("Release of a lock: got false, want true or an error (L8)")
					}
					if err == nil || !errors.Is(err, driver.ErrUnavailable) {
						delete(there, r.ID)
						absent[r.ID] = err == nil
					}
					mu.Unlock()
				}
			}
		})
	}
	more := func() {
		t.Helper()
		from := granted.Load()
		eventually(t, func() error {
			if n := granted.Load() - from; n < 20 {
				return fmt.Errorf("void: %d locks were granted, want 20", n)
			}
			return nil
		})
	}
	more()
	if err := s.RestartImmediate(t.Context()); err != nil {
		t.Fatal(err)
	}
	more()
	stop.Store(true)
	workers.Wait()

	if err := <-ended; err == nil || errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Lock whose server is ended: got %v, want an error that is not ErrUnavailable (L8)", err)
	}
	if failed == 0 {
		t.Error("void: no step has failed")
	}
	left, kept := leasesOf(t, s, ns), false
	for owner, token := range there {
		if left[owner] != token {
			t.Errorf("token of a lease after the restart: got %v, want %v, which was granted (L8)", left[owner], token)
		}
	}
	for owner, surely := range absent {
		if token, ok := left[owner]; ok && surely {
			t.Errorf("lease that was released, or refused with ErrUnavailable: got it with token %v, want none (L8)", token)
		}
	}
	for _, token := range left {
		kept = kept || uint64(token) == uint64(held.Token())
	}
	if err := held.Err(); err != nil || !kept {
		t.Errorf("lock that is held over a restart: got Err %v, lease on the server %v, want nil, true (L2)", err, kept)
	}
	select {
	case <-waits:
		t.Error("Lock of a lock that is held over a restart: got it, want it to wait (L1)")
	default:
	}
	if err := held.Release(t.Context()); err != nil {
		t.Errorf("Release after a restart: got %v, want nil (L7)", err)
	}
	next := <-waits
	if next == nil {
		return
	}
	if next.Token() <= held.Token() {
		t.Errorf("token of who has waited over a restart: got %v, want more than %v (T1)", next.Token(), held.Token())
	}
	if err := next.Release(t.Context()); err != nil {
		t.Errorf("Release: got %v, want nil", err)
	}
}

// TestPostmasterKilled: only the process that accepts connections is killed. Who serves one goes when it sees that, which may be after
// a step that is granted: then that is true after a restart, and so is all that was granted before.
func TestPostmasterKilled(t *testing.T) {
	t.Parallel()
	s := newServer(t, forgetful...)
	psql(t, s, `CREATE FUNCTION spin() RETURNS trigger LANGUAGE plpgsql AS
			'BEGIN WHILE NOT pg_catalog.pg_try_advisory_xact_lock_shared(1) LOOP END LOOP; RETURN NULL; END';
		CREATE TRIGGER spin BEFORE INSERT ON fencelock.leases FOR EACH STATEMENT EXECUTE FUNCTION public.spin(); CHECKPOINT`)
	ns := namespace()
	d := on(t, s.URL(), ns)
	r, w := request("a", time.Minute), waiting(request("a", time.Minute), time.Minute)
	first := locked(t, d, r, driver.Granted, "L1")
	locked(t, d, w, driver.Waiting, "W4")
	there := map[string]driver.Token{r.ID: first.Token}

	// One step waits for a row. Another waits for nothing, in the server's eyes, until an idle connection has gone, and so has the
	// postmaster.
	ended := stuck(t, s, d)
	do(t, admin(t, s), "SELECT pg_advisory_xact_lock(1)")
	type outcome struct {
		driver.Answer
		error
	}
	busy, spun := request("busy", time.Minute), make(chan outcome, 1)
	go func() {
		a, err := d.Lock(t.Context(), busy)
		spun <- outcome{a, err}
	}()
	eventually(t, func() error {
		if got := psql(t, s, "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%%.lock(%%' AND wait_event_type IS NULL AND pid <> pg_backend_pid()"); got != "1" {
			return fmt.Errorf("steps that wait for nothing: got %s, want 1", got)
		}
		return nil
	})
	if err := s.KillPostmaster(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil || errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Lock that waits for a row as the postmaster is killed: got %v, want an error that is not ErrUnavailable (L8)", err)
	}
	if got := <-spun; got.error != nil || got.State != driver.Granted {
		t.Errorf("Lock that waits for nothing as the postmaster is killed: got %v, %v, want granted", got.State, got.error)
	} else {
		there[busy.ID] = got.Token
	}
	// Connections may be there for a moment, but no new ones.
	eventually(t, func() error {
		r := request("b", time.Minute)
		r.Name.Name = r.ID
		a, err := d.Lock(t.Context(), r)
		switch {
		case err == nil && a.State == driver.Granted:
			there[r.ID] = a.Token
		case err == nil:
			t.Fatalf("Lock of a free lock without a postmaster: got %v, want granted or an error (L8)", a.State)
		}
		if !errors.Is(err, driver.ErrUnavailable) {
			return fmt.Errorf("Lock without a postmaster: got %v, %w, want ErrUnavailable (L8)", a.State, err)
		}
		return nil
	})

	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	left := leasesOf(t, s, ns)
	for owner, token := range there {
		if left[owner] != token {
			t.Errorf("token of a lease after the restart: got %v, want %v, which was granted (L8)", left[owner], token)
		}
	}
	d = on(t, s.URL(), ns)
	locked(t, d, request("a", time.Minute), driver.Held, "L1")
	polled(t, d, w, driver.Waiting)
	released(t, d, r.Owner, true)
	if next := polled(t, d, w, driver.Granted); next.Token <= first.Token {
		t.Errorf("token of the next holder: got %v, want more than %v (T1)", next.Token, first.Token)
	}
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
