package postgres

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	mathrand "math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/conformance/history"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

// TestDurable: the server crashes after each answer, under settings that let it forget what it has committed.
func TestDurable(t *testing.T) {
	t.Parallel()
	s := newServer(t, forgetful...)
	psql(t, s, "ALTER ROLE postgres SET synchronous_commit = off; CHECKPOINT")
	ns := namespace()
	crash := func() {
		t.Helper()
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := s.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	var last driver.Token
	for i := range 3 {
		d := on(t, s.URL(), ns)
		r := request("a", time.Minute)
		a := locked(t, d, r, driver.Granted, "L1")
		crash()
		d = on(t, s.URL(), ns)
		var held []driver.Holding
		if err := d.List(t.Context(), r.Name, func(h driver.Holding) bool { held = append(held, h); return true }); err != nil {
			t.Fatal(err)
		}
		if len(held) != 1 || held[0].ID != r.ID || held[0].Token != a.Token {
			t.Fatalf("leases after a crash: got %+v, want that of %s with token %v", held, r.ID, a.Token)
		}
		released(t, d, r.Owner, true)
		// A token ahead of the clock cannot be made up for by the clock.
		ahead, err := d.NextToken(t.Context(), r.Name, driver.Token(time.Now().Add(time.Hour).UnixMicro()))
		if err != nil {
			t.Fatal(err)
		}
		crash()
		if next, err := on(t, s.URL(), ns).NextToken(t.Context(), r.Name, 0); err != nil || next <= ahead || next <= last {
			t.Fatalf("token after crash %d: got %v, %v, want more than %v (T1)", i, next, err, ahead)
		}
		last = ahead
	}
}

// TestOtherDefaults: what a role or database has as default must not matter.
func TestOtherDefaults(t *testing.T) {
	for _, setting := range []string{
		"default_transaction_isolation = serializable", "default_transaction_isolation = 'repeatable read'",
		"default_transaction_read_only = on", "statement_timeout = '2s'", "lock_timeout = '1ms'", "idle_session_timeout = '200ms'",
		"search_path = nowhere", "standard_conforming_strings = off", "bytea_output = escape", "timezone = 'Asia/Kolkata'", "intervalstyle = iso_8601",
		"extra_float_digits = 0", "plan_cache_mode = force_custom_plan", "plpgsql.check_asserts = off",
	} {
		t.Run(setting, func(t *testing.T) {
			t.Parallel()
			role, address := asRole(t, leastRights...)
			psql(t, sharedServer(t), "ALTER ROLE %s SET %s", role, setting)
			everyStep(t, on(t, address, namespace()))
		})
	}
}

// TestSerializable: 20 clients on one name, whose server has another default (F158).
func TestSerializable(t *testing.T) {
	role, address := asRole(t, leastRights...)
	psql(t, sharedServer(t), "ALTER ROLE %s SET default_transaction_isolation = serializable", role)
	crowd(t, address, 20, 1)
}

// pooled is a connection of the driver's pool.
func pooled(t *testing.T, d *Driver) *pgxpool.Conn {
	t.Helper()
	conn, err := d.pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Release)
	return conn
}

// TestStoppedInTheMiddle: where a step needs a transaction of three round trips, a client that stops between them has a name
// locked, for others not longer than they wait for it (W3).
func TestStoppedInTheMiddle(t *testing.T) {
	t.Parallel()
	d := on(t, sharedServer(t).URL(), namespace())
	conn := pooled(t, d)
	stopped, goOn, ended := make(chan error), make(chan struct{}), make(chan error)
	go func() {
		ended <- inTx(t.Context(), conn.Conn(), func(ctx context.Context, q querier) error {
			stopped <- exec(ctx, q, "SELECT fencelock.next_token($1, 1::int2, 'a', 0)", d.ns)
			<-goOn
			return nil
		})
	}()
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	locked(t, d, request("a", time.Minute), driver.Granted, "W3")
	close(goOn)
	if err := <-ended; err == nil {
		t.Error("commit of the client that had stopped: got nil, want an error")
	}
}

// TestSemaphoreOfACrowd: a snapshot that was taken before the row was had would let in a fourth (F120).
func TestSemaphoreOfACrowd(t *testing.T) { crowd(t, sharedServer(t).URL(), 50, 3) }

// pace leaves the processors to those who hold something.
func pace() { time.Sleep(time.Duration(mathrand.IntN(40)) * time.Millisecond) }

// crowd lets many clients, each with a connection of its own, take a permit over and over, waiting or not, and judges the history.
func crowd(t *testing.T, address string, clients, limit int) {
	ns := namespace()
	var grants atomic.Int64
	rec := history.NewRecorder("", nil)
	want := 3 * clients
	stop := time.Now().Add(30 * time.Second) // on a busy machine
	var all sync.WaitGroup
	for c := range clients {
		d := on(t, address+"&pool_max_conns=2", ns)
		all.Go(func() {
			for grants.Load() < int64(want) && time.Now().Before(stop) {
				r := request("crowd", time.Minute)
				r.Name.Kind, r.Limit = driver.KindPermit, limit
				if c%2 == 0 {
					r = waiting(r, 20*time.Second)
				}
				attempt := rec.Start(history.Request{Client: fmt.Sprint(c), Kind: history.Permit, Name: r.Name.Name, Limit: limit, TTL: r.TTL, Wait: r.Wait})
				a, err := d.Acquire(t.Context(), r)
				for err == nil && a.State == driver.Waiting {
					pace()
					p := d.Poll(t.Context(), []driver.Poll{{Owner: r.Owner, TTL: r.TTL, Claim: r.Claim}})[0]
					a, err = p.Answer, p.Err
				}
				if err != nil {
					attempt.Failed(history.Other)
					t.Errorf("Acquire or Poll in a crowd: got %v, want nil", err)
					return
				}
				if a.State != driver.Granted {
					attempt.Refused()
					pace()
					continue
				}
				attempt.Acquired(history.Grant{Token: uint64(a.Token)})
				grants.Add(1)
				pace()
				attempt.ReleaseCalled()
				found, err := d.Release(t.Context(), r.Owner)
				switch {
				case err != nil:
					attempt.ReleaseReturned(history.Other)
				case !found:
					attempt.ReleaseReturned(history.NotHeld)
				default:
					attempt.ReleaseReturned(history.OK)
				}
				if err != nil || !found {
					t.Errorf("Release: got %v, %v, want true (L7)", found, err)
				}
			}
		})
	}
	all.Wait()
	h := rec.History()
	if err := history.Check(h, history.Rules{MinAcquired: want, MinContended: want}).Err(); err != nil {
		t.Errorf("history of a crowd: got\n%v\nwant no violation", err)
	}
	inside, most := 0, 0 // holders, whom Check counts better: this is for a run that would show nothing
	for _, e := range h {
		switch e.Type {
		case history.Acquired:
			inside++
			most = max(most, inside)
		case history.ReleaseCalled:
			inside--
		}
	}
	if most < limit {
		t.Errorf("void: at most %d held at the same time, want %d", most, limit)
	}
}

// admin is a transaction of somebody else.
func admin(t *testing.T, s *servers.Postgres) pgx.Tx {
	t.Helper()
	tx, err := newPool(t, s.URL()).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }) // does nothing after a commit
	return tx
}

func do(t *testing.T, tx pgx.Tx, statement string, args ...any) {
	t.Helper()
	if _, err := tx.Exec(t.Context(), statement, args...); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

// blocked waits until so many statements of the driver's namespace wait for a lock.
func blocked(t *testing.T, s *servers.Postgres, call string, n int) {
	t.Helper()
	eventually(t, func() error {
		out := psql(t, s, `SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%%s%%'`, call)
		if out != fmt.Sprint(n) {
			return fmt.Errorf("statements with %s that wait for a lock: got %s, want %d", call, out, n)
		}
		return nil
	})
}

// TestReleaseSeesWhoQueuedMeanwhile: a waiter is enqueued, but not committed, when the release begins and waits
// for the row of the name. A release whose snapshot is older than that would leave the name free and the waiter alone.
func TestReleaseSeesWhoQueuedMeanwhile(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ns := namespace()
	d := on(t, s.URL(), ns)
	r, w := request("a", time.Minute), waiting(request("a", time.Minute), time.Minute)
	locked(t, d, r, driver.Granted, "L1")
	tx := admin(t, s)
	do(t, tx, "SELECT fencelock.lock($1, 1::int2, 'a', $2, 60000000, 1, 0, '', true, 60000000, '!')", ns, w.ID)
	done := make(chan error, 1)
	go func() {
		_, err := d.Release(t.Context(), r.Owner)
		done <- err
	}()
	blocked(t, s, "release(", 1)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatalf("Release: got %v, want nil", err)
	}
	if got := psql(t, s, "SELECT owner FROM fencelock.leases WHERE ns = '%s'", ns); got != w.ID {
		t.Errorf("holder after the release: got %q, want the waiter %q that was committed while the release waited (W4)", got, w.ID)
	}
}

// TestClaimBeginsAfterTheLatestPoll: the entry of the waiter is locked by a poll when the release wants to
// grant. The waiter counts its claim from that poll, so the server must not count from before.
func TestClaimBeginsAfterTheLatestPoll(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ns := namespace()
	d := on(t, s.URL(), ns)
	const claim = 10 * time.Second
	r, w := request("a", time.Minute), waiting(request("a", time.Minute), claim)
	locked(t, d, r, driver.Granted, "L1")
	locked(t, d, w, driver.Waiting, "W4")
	tx := admin(t, s)
	do(t, tx, "SELECT fencelock.poll($1, '{1}', ARRAY['a'::bytea], ARRAY[$2], '{10000000}', true)", ns, w.ID)
	done := make(chan error, 1)
	go func() {
		_, err := d.Release(t.Context(), r.Owner)
		done <- err
	}()
	blocked(t, s, "release(", 1)
	time.Sleep(300 * time.Millisecond) // so much earlier the release has begun
	polledAt := time.Now()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatalf("Release: got %v, want nil", err)
	}
	var left time.Duration
	if err := d.List(t.Context(), r.Name, func(h driver.Holding) bool { left = h.Left; return true }); err != nil {
		t.Fatal(err)
	}
	if ends := left + time.Since(polledAt); ends < claim {
		t.Errorf("claim of a waiter whose poll was committed while the release waited: got an end %v after the poll, want no less than %v (L2)", ends, claim)
	}
}

// TestLockedRow: somebody has locked the row of a name for good. Others are not concerned, and steps on it end (F152).
func TestLockedRow(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	ns := namespace()
	d := on(t, s.URL(), ns)
	r := request("a", time.Minute)
	locked(t, d, r, driver.Granted, "L1")
	free := request("free", time.Minute)
	locked(t, d, free, driver.Granted, "L1")
	released(t, d, free.Owner, true)
	tx := admin(t, s)
	do(t, tx, "SELECT FROM fencelock.names WHERE ns = $1 FOR UPDATE", ns)
	locked(t, d, request("b", time.Minute), driver.Granted, "L1")
	// Who does not wait is answered without the row.
	locked(t, d, request("a", time.Minute), driver.Held, "L8")
	extended(t, d, r.Owner, time.Minute, driver.Granted)
	var steps sync.WaitGroup
	for op, step := range map[string]func() error{
		"Lock": func() error {
			_, err := d.Lock(t.Context(), waiting(request("a", time.Minute), time.Minute))
			return err
		},
		"Lock of a free name": func() error { _, err := d.Lock(t.Context(), request("free", time.Minute)); return err },
		"Release":             func() error { _, err := d.Release(t.Context(), r.Owner); return err },
	} {
		steps.Go(func() {
			began := time.Now()
			err := step()
			var answered *pgconn.PgError
			if !errors.Is(err, driver.ErrUnavailable) || !errors.As(err, &answered) || answered.Code != stateLockTimeout {
				t.Errorf("%s while the row of the name is locked: got %v, want ErrUnavailable with %s (L8)", op, err, stateLockTimeout)
			}
			if took := time.Since(began); took > 15*time.Second {
				t.Errorf("%s while the row of the name is locked: took %v, want about 5 s", op, took)
			}
		})
	}
	steps.Wait()
}

// TestPlansOfFewRows: what lock and release do must be planned to use the indexes even while tables are next to empty, since the
// plans stay while they grow.
func TestPlansOfFewRows(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	locked(t, on(t, s.URL(), namespace()), request("a", time.Minute), driver.Granted, "L1")
	for _, table := range []string{"names", "leases"} {
		psql(t, s, "VACUUM ANALYZE fencelock.%s", table)
		plan := psql(t, s, "EXPLAIN DELETE FROM fencelock.%s WHERE ns = 'a' AND kind = 1 AND name = 'a' AND xmax = '0'", table)
		if !strings.Contains(plan, "Index Scan") {
			t.Errorf("plan for one of the %s: got %s, want an Index Scan", table, plan)
		}
	}
}

// TestLockedLease: a batch extends what it can at once, and sends the rest alone.
func TestLockedLease(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ns := namespace()
	d := on(t, s.URL(), ns)
	var batch []driver.Extension
	for i := range 5 {
		r := request(fmt.Sprint(i), time.Minute)
		locked(t, d, r, driver.Granted, "L1")
		batch = append(batch, driver.Extension{Owner: r.Owner, TTL: time.Hour})
	}
	tx := admin(t, s)
	do(t, tx, "SELECT FROM fencelock.leases WHERE ns = $1 AND owner = $2 FOR UPDATE", ns, batch[2].ID)
	done := make(chan []driver.Result, 1)
	go func() { done <- d.Extend(t.Context(), batch) }()
	blocked(t, s, "extend_one(", 1)
	if got := psql(t, s, "SELECT string_agg(convert_from(name, 'UTF8'), ',' ORDER BY name) FROM fencelock.leases WHERE ns = '%s' AND expires > now() + interval '30 min'", ns); got != "0,1,3,4" {
		t.Errorf("leases extended while one is locked: got %s, want 0,1,3,4", got)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, r := range <-done {
		if r.Err != nil || r.State != driver.Granted {
			t.Errorf("Extend of lease %d: got %v, %v, want granted", i, r.State, r.Err)
		}
	}
}

// TestBatches: 10,000 leases are extended by few statements, in any order and by many at the same time, without a deadlock.
func TestBatches(t *testing.T) {
	s := newServer(t)
	ns := namespace()
	d := on(t, s.URL(), ns)
	const leases = 10000
	locked(t, d, request("other", time.Minute), driver.Granted, "L1")
	psql(t, s, `INSERT INTO fencelock.leases SELECT '%s', 1, ('n' || i)::bytea, 'o' || i, i, now() + interval '1 min', '' FROM generate_series(0, %d) i`, ns, leases-1)
	batch := make([]driver.Extension, leases)
	for i := range batch {
		batch[i] = driver.Extension{Owner: driver.Owner{Name: driver.Name{Kind: driver.KindLock, Name: fmt.Sprint("n", i)}, ID: fmt.Sprint("o", i)}, TTL: time.Hour}
	}
	psql(t, s, "SELECT pg_stat_statements_reset()")
	check := func(results []driver.Result) {
		for i, r := range results {
			if r.Err != nil || r.State != driver.Granted {
				t.Fatalf("Extend of lease %d of %d: got %v, %v, want granted", i, leases, r.State, r.Err)
			}
		}
	}
	began := time.Now()
	check(d.Extend(t.Context(), batch))
	t.Logf("%d leases extended in %v", leases, time.Since(began))
	if got := psql(t, s, `SELECT sum(calls) FROM pg_stat_statements WHERE query LIKE '%%.extend%%'`); got != fmt.Sprint(leases/batchSize) {
		t.Errorf("statements for %d extensions: got %s, want %d", leases, got, leases/batchSize)
	}
	back := slices.Clone(batch[:3000])
	slices.Reverse(back)
	var all sync.WaitGroup
	for _, b := range [][]driver.Extension{batch[:3000], back, batch[:3000], back} {
		all.Go(func() { check(d.Extend(t.Context(), b)) })
	}
	all.Wait()
	if got := psql(t, s, "SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'"); got != "0" {
		t.Errorf("deadlocks: got %s, want 0", got)
	}
}

// TestBatchesOverlap: a client whose batch comes before the one before it is done does not send each owner alone (W2).
func TestBatchesOverlap(t *testing.T) {
	s := newServer(t)
	ns := namespace()
	d := on(t, s.URL()+"&pool_max_conns=8", ns)
	const names = 1000
	locked(t, d, request("other", time.Minute), driver.Granted, "L1")
	psql(t, s, `INSERT INTO fencelock.names SELECT '%[1]s', 1, ('n' || i)::bytea, i, now() FROM generate_series(0, %[2]d) i;
		INSERT INTO fencelock.leases SELECT '%[1]s', 1, ('n' || i)::bytea, 'o' || i, i, now() + interval '1 min', '' FROM generate_series(0, %[2]d) i;
		INSERT INTO fencelock.waiters SELECT '%[1]s', 1, ('n' || i)::bytea, 1, 'w' || i, 1, 0, 1e9, now() + interval '1 min', '', '!' FROM generate_series(0, %[2]d) i`,
		ns, names-1)
	leases, waiters := make([]driver.Extension, names), make([]driver.Poll, names)
	for i := range names {
		n := driver.Name{Kind: driver.KindLock, Name: fmt.Sprint("n", i)}
		leases[i] = driver.Extension{Owner: driver.Owner{Name: n, ID: fmt.Sprint("o", i)}, TTL: time.Hour}
		waiters[i] = driver.Poll{Owner: driver.Owner{Name: n, ID: fmt.Sprint("w", i)}, TTL: time.Hour, Claim: time.Hour}
	}
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			for i, r := range d.Extend(t.Context(), leases) {
				if r.Err != nil || r.State != driver.Granted {
					t.Errorf("Extend of lease %d: got %v, %v, want granted", i, r.State, r.Err)
					return
				}
			}
		})
		all.Go(func() {
			for i, r := range d.Poll(t.Context(), waiters) {
				if r.Err != nil || r.State != driver.Waiting {
					t.Errorf("Poll of waiter %d: got %v, %v, want waiting", i, r.State, r.Err)
					return
				}
			}
		})
	}
	all.Wait()
	got, err := strconv.Atoi(psql(t, s, `SELECT coalesce(sum(calls), 0) FROM pg_stat_statements WHERE query ~ '^SELECT.*(extend|poll)(_one)?\('`))
	if err != nil {
		t.Fatal(err)
	}
	if got < 6 || got > names/10 {
		t.Errorf("statements for 6 batches of %d at the same time: got %d, want few (W2)", names, got)
	}
}

// counter counts the statements of a pool.
type counter struct{ atomic.Int64 }

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.Add(1)
	return ctx
}

func (c *counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TestPollsOfAPinnedName: while a user's transaction has pinned a lease that has ended, each poll finds the name to be
// served and cannot. That does not make a statement of every waiter (W2).
func TestPollsOfAPinnedName(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	ns := namespace()
	holder := on(t, s.URL(), ns)
	config, err := pgxpool.ParseConfig(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	var statements counter
	config.ConnConfig.Tracer = &statements
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	d, err := New(pool, &Options{Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()

	r := request("a", time.Minute)
	a := locked(t, holder, r, driver.Granted, "L1")
	const waiters = 30
	var polls []driver.Poll
	for range waiters {
		w := waiting(request("a", time.Minute), time.Minute)
		locked(t, d, w, driver.Waiting, "W4")
		polls = append(polls, driver.Poll{Owner: w.Owner, TTL: w.TTL, Claim: w.Claim})
	}
	tx := verified(t, holder, pgx.ReadCommitted, "a", a.Token, nil)
	released(t, holder, r.Owner, true)
	d.sweep.close() // it is not about these waiters
	statements.Store(0)
	for i, p := range d.Poll(t.Context(), polls) {
		if p.Err != nil || p.State != driver.Waiting {
			t.Errorf("Poll of waiter %d for a pinned name: got %v, %v, want waiting", i, p.State, p.Err)
		}
	}
	if n := statements.Load(); n > 3 {
		t.Errorf("statements for a poll of %d waiters for a pinned name: got %d, want at most 3 (W2)", waiters, n)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, p := range d.Poll(t.Context(), polls) {
		want := driver.Waiting
		if i == 0 {
			want = driver.Granted
		}
		if p.Err != nil || p.State != want {
			t.Errorf("Poll of waiter %d after the transaction: got %v, %v, want %v (W4)", i, p.State, p.Err, want)
		}
	}
}

// TestTimeouts: a role's timeouts end neither a wait nor a lock (F153), and a statement that one ends was rolled back.
func TestTimeouts(t *testing.T) {
	s := sharedServer(t)
	role, address := asRole(t, leastRights...)
	psql(t, s, "ALTER ROLE %s SET statement_timeout = '300ms'", role)
	ns := namespace()
	d := on(t, address, ns)
	r := request("a", time.Minute)
	locked(t, d, r, driver.Granted, "L1")
	tx := admin(t, s)
	do(t, tx, "SELECT FROM fencelock.names WHERE ns = $1 FOR UPDATE", ns)
	w := waiting(request("a", time.Minute), time.Minute)
	_, err := d.Lock(t.Context(), w)
	var answered *pgconn.PgError
	if !errors.Is(err, driver.ErrUnavailable) || !errors.As(err, &answered) || answered.Code != stateCancelled {
		t.Errorf("Lock that statement_timeout ends: got %v, want ErrUnavailable with %s (L8)", err, stateCancelled)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	polled(t, d, w, driver.Gone)
	locked(t, d, w, driver.Waiting, "W4")
	for began := time.Now(); time.Since(began) < time.Second; time.Sleep(100 * time.Millisecond) {
		polled(t, d, w, driver.Waiting)
	}
	released(t, d, r.Owner, true)
	polled(t, d, w, driver.Granted)
}

// TestLimit: a statement outlives its context by leastTime and no more, and what ended in time leaves the connection as it was (L7).
func TestLimit(t *testing.T) {
	t.Parallel()
	d := on(t, sharedServer(t).URL(), namespace())
	conn := pooled(t, d)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, end := d.limit(ctx, conn.Conn())
	if !end() {
		t.Error("end of a context that had ended: got false, want true")
	}
	if err := conn.Ping(t.Context()); err != nil {
		t.Errorf("Ping after what ended in time: got %v, want nil", err)
	}
	run, end := d.limit(ctx, conn.Conn())
	began := time.Now()
	err := exec(run, conn.Conn(), "SELECT pg_sleep(30)")
	if took := time.Since(began); !errors.Is(err, os.ErrDeadlineExceeded) || took < leastTime || took > 20*time.Second {
		t.Errorf("statement whose context has ended: got %v after %v, want a time-out after %v", err, took, leastTime)
	}
	if !end() {
		t.Error("end of a context that had ended: got false, want true")
	}
}

// TestOutcomes: what an error promises (L8).
func TestOutcomes(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ns := namespace()
	proxy, err := servers.NewProxy(s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer proxy.Close()
	address := strings.Replace(s.URL(), s.Addr(), proxy.Addr(), 1)
	d := on(t, address, ns)
	locked(t, d, request("warm", time.Minute), driver.Granted, "L1")

	t.Run("LostReply", func(t *testing.T) {
		r := request("reply", time.Minute)
		dropped := proxy.DropNextReply(&servers.DropOptions{RequestWith: r.ID})
		_, err := d.Lock(t.Context(), r)
		<-dropped
		if err == nil || errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("Lock whose reply is lost: got %v, want an error that is not ErrUnavailable: it was granted (L8)", err)
		}
		first := locked(t, d, r, driver.Granted, "L5")
		if again := locked(t, d, r, driver.Granted, "L5"); again.Token != first.Token {
			t.Errorf("token of a repeated Lock: got %v, want %v (T3)", again.Token, first.Token)
		}
		released(t, d, r.Owner, true)
	})
	t.Run("Terminated", func(t *testing.T) {
		r := request("warm", time.Minute)
		tx := admin(t, s)
		do(t, tx, "SELECT FROM fencelock.names WHERE ns = $1 FOR UPDATE", ns)
		done := make(chan error, 1)
		go func() {
			_, err := d.Lock(t.Context(), waiting(r, time.Minute))
			done <- err
		}()
		blocked(t, s, ".lock(", 1)
		psql(t, s, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
		if err := <-done; err == nil || errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("Lock whose connection is ended: got %v, want an error that is not ErrUnavailable (L8)", err)
		}
	})
	t.Run("Cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		r := request("cancelled", time.Minute)
		if _, err := d.Lock(ctx, r); !errors.Is(err, driver.ErrUnavailable) || !errors.Is(err, context.Canceled) {
			t.Errorf("Lock with a cancelled context: got %v, want ErrUnavailable and the context's error", err)
		}
		released(t, d, r.Owner, false)
	})
	t.Run("IdleConnectionsEnded", func(t *testing.T) {
		if _, err := s.TerminateBackends(t.Context()); err != nil {
			t.Fatal(err)
		}
		// Whatever the first answer is, it is no contention, and the next ones work.
		if a, err := d.Lock(t.Context(), request("idle", time.Minute)); err == nil && a.State != driver.Granted {
			t.Errorf("Lock on a connection that was ended while idle: got %v, want granted or an error (L8)", a.State)
		}
		eventually(t, func() error {
			if _, err := d.Release(t.Context(), request("idle", time.Minute).Owner); err != nil {
				return fmt.Errorf("Release after connections were ended: got %w, want nil", err)
			}
			return nil
		})
	})
	t.Run("Refused", func(t *testing.T) {
		if err := proxy.Refuse(); err != nil {
			t.Fatal(err)
		}
		proxy.Reset()
		eventually(t, func() error {
			if _, err := d.Lock(t.Context(), request("refused", time.Minute)); !errors.Is(err, driver.ErrUnavailable) {
				return fmt.Errorf("Lock while nobody listens: got %w, want ErrUnavailable (L8)", err)
			}
			return nil
		})
		if err := proxy.Accept(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestStandby: a standby is refused, and tokens go on after its promotion. What the primary had not sent is lost: that
// the same name is then free on it is what the package comment says of an asynchronous standby.
func TestStandby(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	standby, err := servers.StartPostgres(t.Context(), &servers.PostgresOptions{StandbyOf: s, Args: counting})
	if err != nil {
		t.Fatal(err)
	}
	defer standby.Close()
	ns := namespace()
	primary, second := on(t, s.URL(), ns), on(t, standby.URL(), ns)
	for op, err := range map[string]error{
		"Lock":      func() error { _, err := second.Lock(t.Context(), request("a", time.Minute)); return err }(),
		"Release":   func() error { _, err := second.Release(t.Context(), request("a", time.Minute).Owner); return err }(),
		"List":      second.List(t.Context(), driver.Name{}, func(driver.Holding) bool { return true }),
		"Extend":    second.Extend(t.Context(), []driver.Extension{{Owner: request("a", time.Minute).Owner, TTL: time.Minute}})[0].Err,
		"open":      func() error { _, err := driver.Open(t.Context(), standby.URL()); return err }(),
		"NextToken": func() error { _, err := second.NextToken(t.Context(), driver.Name{Kind: 1, Name: "a"}, 0); return err }(),
	} {
		if !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), "standby") {
			t.Errorf("%s on a standby: got %v, want ErrUnavailable that says so", op, err)
		}
	}
	first := locked(t, primary, request("sent", time.Minute), driver.Granted, "L1")
	eventually(t, func() error {
		if got := psql(t, standby, "SELECT count(*) FROM fencelock.leases"); got != "1" {
			return fmt.Errorf("leases on the standby: got %s, want 1", got)
		}
		return nil
	})
	// Detached, then written to, then gone for good.
	if err := standby.Detach(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if got := psql(t, s, "SELECT count(*) FROM pg_stat_replication"); got != "0" {
			return fmt.Errorf("standbys attached: got %s, want 0", got)
		}
		return nil
	})
	lost := locked(t, primary, request("lost", time.Minute), driver.Granted, "L1")
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if got := psql(t, standby, "SELECT pg_promote()"); got != "t" {
		t.Fatalf("pg_promote: got %s, want t", got)
	}
	eventually(t, func() error {
		_, err := second.Lock(t.Context(), request("promoted", time.Minute))
		return err
	})
	locked(t, second, request("sent", time.Minute), driver.Held, "L1")
	again := locked(t, second, request("lost", time.Minute), driver.Granted, "T1")
	if again.Token <= lost.Token || again.Token <= first.Token {
		t.Errorf("token after failover: got %v, want more than %v (T1)", again.Token, lost.Token)
	}
}

// TestForget: rows of idle names go 48 h after, not earlier (T5); what has expired goes sooner.
func TestForget(t *testing.T) {
	s := sharedServer(t)
	ns := namespace()
	d := on(t, s.URL(), ns)
	d.sweep.close() // it may begin by itself, and no two run at the same time
	names := []string{"idle", "recent", "ahead", "held", "expired"}
	for _, n := range names {
		r := request(n, time.Minute)
		locked(t, d, r, driver.Granted, "L1")
		if n != "held" && n != "expired" {
			released(t, d, r.Owner, true)
		}
	}
	old := func(column, value string, names string) {
		psql(t, s, "UPDATE fencelock.names SET %s = %s WHERE ns = '%s' AND name IN (%s)", column, value, ns, names)
	}
	micros := "(extract(epoch FROM now() - interval '50 hours') * 1000000)::bigint"
	old("used", "now() - interval '50 hours'", "'idle', 'ahead', 'held'")
	old("last", micros, "'idle', 'recent', 'held'")
	psql(t, s, "UPDATE fencelock.leases SET expires = now() - interval '1 s' WHERE ns = '%s' AND name = 'expired'", ns)
	for range 4 { // a page holds fewer than all
		if err := d.sweepPage(t.Context(), 2); err != nil {
			t.Fatal(err)
		}
	}
	if got := psql(t, s, "SELECT string_agg(convert_from(name, 'UTF8'), ',' ORDER BY name) FROM fencelock.names WHERE ns = '%s'", ns); got != "ahead,expired,held,recent" {
		t.Errorf("names after clearing up: got %s, want all but the idle one (T5)", got)
	}
	if got := psql(t, s, "SELECT string_agg(convert_from(name, 'UTF8'), ',') FROM fencelock.leases WHERE ns = '%s'", ns); got != "held" {
		t.Errorf("leases after clearing up: got %s, want the held one (L7)", got)
	}
}

// TestSweepFollowsTraffic: nobody has to call it.
func TestSweepFollowsTraffic(t *testing.T) {
	s := sharedServer(t)
	ns := namespace()
	d := on(t, s.URL(), ns)
	locked(t, d, request("dead", time.Minute), driver.Granted, "L1")
	psql(t, s, "UPDATE fencelock.leases SET expires = now() - interval '1 s' WHERE ns = '%s'", ns)
	for range sweepEvery {
		released(t, d, request("other", time.Minute).Owner, false)
	}
	eventually(t, func() error {
		if got := psql(t, s, "SELECT count(*) FROM fencelock.leases WHERE ns = '%s'", ns); got != "0" {
			return fmt.Errorf("leases of the dead after %d steps: got %s, want 0 (L7)", sweepEvery, got)
		}
		return nil
	})
}

// TestSweepByManyDrivers: nor does one driver have to make many steps. What is to be cleared up comes before the names in use,
// or between others.
func TestSweepByManyDrivers(t *testing.T) {
	s := sharedServer(t)
	pool := newPool(t, s.URL())
	ns := namespace()
	expired := fmt.Sprintf("INSERT INTO fencelock.leases SELECT '%s', 1, n.name, 'o', 1, now() - interval '1 s', '' FROM fencelock.names n WHERE n.ns = '%[1]s'", ns)
	names := "INSERT INTO fencelock.names SELECT '%s', 1, ('%s' || lpad(i::text, 5, '0'))::bytea, 1, now() FROM generate_series(1, %d) i"
	psql(t, s, names, ns, "job-", 300)
	psql(t, s, "%s", expired)
	psql(t, s, names, ns, "a", 2*sweepPage) // fixed names: to begin with the first of all leads nowhere
	for i := range 30 * sweepEvery {
		d, err := New(pool, &Options{Namespace: ns})
		if err != nil {
			t.Fatal(err)
		}
		released(t, d, request(fmt.Sprintf("job-%05d", 301+i), time.Minute).Owner, false)
		d.sweep.done.Wait()
		d.Close()
	}
	if got := psql(t, s, "SELECT count(*) FROM fencelock.leases WHERE ns = '%s'", ns); got != "0" {
		t.Errorf("leases of the dead after %d drivers of one step each: got %s, want 0 (L7)", 30*sweepEvery, got)
	}
}

// TestListPages: more than one page, and each lease once.
func TestListPages(t *testing.T) {
	s := sharedServer(t)
	ns := namespace()
	d := on(t, s.URL(), ns)
	const leases = 2*listPage + 1
	psql(t, s, `INSERT INTO fencelock.leases SELECT '%s', 1 + i %% 2, ('n' || i)::bytea, 'o' || i, i, now() + interval '1 min', 'h' FROM generate_series(1, %d) i`, ns, leases)
	seen := make(map[driver.Owner]bool)
	if err := d.List(t.Context(), driver.Name{}, func(h driver.Holding) bool { seen[h.Owner] = true; return true }); err != nil {
		t.Fatal(err)
	}
	if len(seen) != leases {
		t.Errorf("leases listed: got %d different, want %d", len(seen), leases)
	}
	n := 0
	if err := d.List(t.Context(), driver.Name{}, func(driver.Holding) bool { n++; return n < 3 }); err != nil || n != 3 {
		t.Errorf("List until the third: got %d, %v, want 3", n, err)
	}
}

// TestSteps counts round trips.
func TestSteps(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	d := on(t, s.URL(), namespace())
	d.sweep.steps = 0
	r := request("a", time.Minute)
	psql(t, s, "SELECT pg_stat_statements_reset()")
	locked(t, d, r, driver.Granted, "L1")
	extended(t, d, r.Owner, time.Minute, driver.Granted)
	released(t, d, r.Owner, true)
	if got := psql(t, s, `SELECT sum(calls) FROM pg_stat_statements WHERE query NOT LIKE '%%pg_stat%%'`); got != "3" {
		t.Errorf("statements for Lock, Extend, Release: got %s, want 3", got)
	}
}

// TestUserPool: the pool of the user stays open, and no goroutine of the driver outlives Close.
func TestUserPool(t *testing.T) {
	s := sharedServer(t)
	pool := newPool(t, s.URL())
	d, err := New(pool, &Options{Namespace: namespace()})
	if err != nil {
		t.Fatal(err)
	}
	listen(d)
	locked(t, d, request("a", time.Minute), driver.Granted, "L1")
	locked(t, d, waiting(request("a", time.Minute), time.Minute), driver.Waiting, "W4")
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := pool.Ping(t.Context()); err != nil {
		t.Errorf("Ping of the user's pool after Close: got %v, want nil", err)
	}
	if n := pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("connections that the driver keeps after Close: got %d, want 0", n)
	}
	if err := d.Advance(t.Context(), driver.Name{Kind: 1, Name: "a"}, 1); !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Advance after Close: got %v, want ErrUnavailable", err)
	}
}

// TestExecModes: a pool that is set up for another way to send statements than the driver's.
func TestExecModes(t *testing.T) {
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec} {
		config, err := pgxpool.ParseConfig(sharedServer(t).URL())
		if err != nil {
			t.Fatal(err)
		}
		config.ConnConfig.DefaultQueryExecMode = mode
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		d, err := New(pool, &Options{Namespace: namespace()})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		everyStep(t, d)
	}
}

// TestHugeLimit: a limit that no integer column holds is a limit that nobody reaches.
func TestHugeLimit(t *testing.T) {
	d := on(t, sharedServer(t).URL(), namespace())
	r := request("a", time.Minute)
	r.Name.Kind, r.Limit = driver.KindPermit, math.MaxInt
	if a, err := d.Acquire(t.Context(), waiting(r, time.Minute)); err != nil || a.State != driver.Granted {
		t.Errorf("Acquire with limit %d: got %v, %v, want granted", r.Limit, a.State, err)
	}
}

func TestNamesAreBytes(t *testing.T) {
	d := on(t, sharedServer(t).URL(), namespace())
	for _, n := range []string{"a", "A", "a ", "\x00", "\x00\x00", "\xff", "é", "e\u0301", strings.Repeat("x", 512), strings.Repeat("x", 511) + "y", `\x61`, "'"} {
		r := request(n, time.Minute)
		r.Holder = "\x00 'é' " + rand.Text()
		locked(t, d, r, driver.Granted, "L1")
		if err := d.List(t.Context(), r.Name, func(h driver.Holding) bool {
			if h.Owner != r.Owner || h.Holder != r.Holder {
				t.Errorf("List of %q: got %+v, want %+v", n, h, r)
			}
			return true
		}); err != nil {
			t.Fatal(err)
		}
	}
}
