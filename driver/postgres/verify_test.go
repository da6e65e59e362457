package postgres

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"os"
	osexec "os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/fencelock/fencelock/driver"
)

// verified begins a transaction of a user and verifies.
func verified(t *testing.T, d *Driver, level pgx.TxIsoLevel, name string, token driver.Token, want error) pgx.Tx {
	t.Helper()
	tx, err := d.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	if err := d.VerifyTx(t.Context(), tx, name, token); !errors.Is(err, want) {
		t.Fatalf("VerifyTx: got %v, want %v", err, want)
	}
	if want != nil {
		_ = tx.Rollback(t.Context())
	}
	return tx
}

// expire ends the leases of a namespace by the clock.
func expire(t *testing.T, ns string) {
	t.Helper()
	psql(t, sharedServer(t), "UPDATE fencelock.leases SET expires = clock_timestamp() WHERE ns = '%s'", ns)
}

func TestVerifyTx(t *testing.T) {
	s := sharedServer(t)
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			ns := namespace()
			d := on(t, s.URL(), ns)
			r := request("a", time.Minute)
			a := locked(t, d, r, driver.Granted, "L1")
			verified(t, d, level, "a", a.Token-1, ErrStale)
			verified(t, d, level, "a", a.Token+1, ErrStale)
			verified(t, d, level, "b", a.Token, ErrStale)
			tx := verified(t, d, level, "a", a.Token, nil)

			// The holder goes on extending, alone and in a batch.
			extended(t, d, r.Owner, time.Minute, driver.Granted)
			for _, e := range d.Extend(t.Context(), []driver.Extension{{Owner: r.Owner, TTL: time.Hour}, {Owner: request("b", time.Minute).Owner, TTL: time.Hour}})[:1] {
				if e.Err != nil || e.State != driver.Granted {
					t.Errorf("Extend of a lease that a transaction depends on: got %v, %v, want granted", e.State, e.Err)
				}
			}

			// It expires. Nobody is kept waiting, nobody gets it, and it does not come back.
			expire(t, ns)
			locked(t, d, request("a", time.Minute), driver.Held, "L1")
			w := waiting(request("a", time.Minute), time.Minute)
			locked(t, d, w, driver.Waiting, "L1")
			polled(t, d, w, driver.Waiting)
			extended(t, d, r.Owner, time.Minute, driver.Gone)
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatalf("Commit after the lease has expired and before anybody got it: got %v, want nil", err)
			}
			b := polled(t, d, w, driver.Granted)
			if b.Token <= a.Token {
				t.Errorf("token of the successor: got %v, want more than %v (T1)", b.Token, a.Token)
			}
			verified(t, d, level, "a", a.Token, ErrStale)

			// So with a release, which tells the truth and does not wait, and with force.
			tx = verified(t, d, level, "a", b.Token, nil)
			released(t, d, w.Owner, true)
			released(t, d, w.Owner, false)
			next := request("a", time.Minute)
			locked(t, d, next, driver.Held, "L1")
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			c := locked(t, d, next, driver.Granted, "L1")
			tx = verified(t, d, level, "a", c.Token, nil)
			if n, err := d.ForceUnlock(t.Context(), r.Name); n != 1 || err != nil {
				t.Errorf("ForceUnlock of a lease that a transaction depends on: got %d, %v, want 1", n, err)
			}
			locked(t, d, request("a", time.Minute), driver.Held, "L1")
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			locked(t, d, request("a", time.Minute), driver.Granted, "L1")
		})
	}
}

// TestPinnedLeaseStaysEnded: a batch of extensions reads the clock before it comes to a row. If the lease was released or
// taken away in between, and its row stays because a transaction has pinned it, it must not come back (L3).
func TestPinnedLeaseStaysEnded(t *testing.T) {
	s := sharedServer(t)
	for what, end := range map[string]func(*Driver, driver.Owner){
		"Release":     func(d *Driver, o driver.Owner) { released(t, d, o, true) },
		"ForceUnlock": func(d *Driver, o driver.Owner) { _, _ = d.ForceUnlock(t.Context(), o.Name) },
	} {
		ns := namespace()
		d := on(t, s.URL(), ns)
		r := request("a", time.Minute)
		tx := verified(t, d, pgx.ReadCommitted, "a", locked(t, d, r, driver.Granted, "L1").Token, nil)
		before := psql(t, s, "SELECT clock_timestamp()")
		end(d, r.Owner)
		// What a batch does that began before.
		got := psql(t, s, "SELECT token IS NULL FROM fencelock.renew('%s', 1::smallint, 'a', '%s', '%s', 60000000)", ns, r.ID, before)
		if got != "t" {
			t.Errorf("%s of a pinned lease, then an extension that began before: it lives, want ended (L3)", what)
		}
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		locked(t, d, request("a", time.Minute), driver.Granted, "L3")
	}
}

// TestVerifyTxWithAnOldSnapshot: it must be the first statement, and if it is not, the transaction fails rather than passes.
func TestVerifyTxWithAnOldSnapshot(t *testing.T) {
	s := sharedServer(t)
	ns := namespace()
	d := on(t, s.URL(), ns)
	r := request("a", time.Minute)
	a := locked(t, d, r, driver.Granted, "L1")
	tx, err := d.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	do(t, tx, "SELECT 1")
	released(t, d, r.Owner, true)
	locked(t, d, request("a", time.Minute), driver.Granted, "L1")
	err = d.VerifyTx(t.Context(), tx, "a", a.Token)
	var answered *pgconn.PgError
	if !errors.As(err, &answered) || answered.Code != stateSerialization {
		t.Errorf("VerifyTx with a snapshot from before the takeover: got %v, want SQLSTATE %s", err, stateSerialization)
	}
}

// TestVerifyTxMeetsATakeover: the takeover is under way, not committed. The transaction waits and then fails.
func TestVerifyTxMeetsATakeover(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	ns := namespace()
	d := on(t, s.URL(), ns)
	r := request("a", time.Minute)
	a := locked(t, d, r, driver.Granted, "L1")
	takeover := admin(t, s)
	do(t, takeover, "SELECT fencelock.release($1, 1::int2, 'a', $2, '!')", ns, r.ID)
	tx, err := d.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.VerifyTx(t.Context(), tx, "a", a.Token) }()
	blocked(t, s, "verify(", 1)
	if err := takeover.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, ErrStale) {
		t.Errorf("VerifyTx while the lease is given back: got %v, want ErrStale", err)
	}
}

func TestVerifySQLTx(t *testing.T) {
	s := sharedServer(t)
	ns := namespace()
	pool := newPool(t, s.URL())
	d, err := New(pool, &Options{Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	r := request("a", time.Minute)
	a := locked(t, d, r, driver.Granted, "L1")
	for token, want := range map[driver.Token]error{a.Token: nil, a.Token + 1: ErrStale} {
		tx, err := db.BeginTx(t.Context(), &sql.TxOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := d.VerifySQLTx(t.Context(), tx, "a", token); !errors.Is(err, want) {
			t.Errorf("VerifySQLTx: got %v, want %v", err, want)
		}
		if want == nil {
			expire(t, ns)
			locked(t, d, request("a", time.Minute), driver.Held, "L1")
		}
		if err := tx.Rollback(); err != nil {
			t.Fatal(err)
		}
	}
}

// pausedEnv makes this program the process of a user that is stopped: it holds URL, namespace, name and token, and whether it is
// stopped after or before it verifies.
const pausedEnv = "FENCELOCK_TEST_PAUSED"

// runPaused begins a transaction, writes, verifies, and commits once it is told to go on.
func runPaused(order string) error {
	part := strings.Split(order, " ")
	token, err := strconv.ParseUint(part[2], 10, 64)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, part[0])
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	d := &Driver{schema: `"fencelock"`, ns: part[1]}
	pause := func() error {
		fmt.Println("pause")
		_, err := bufio.NewReader(os.Stdin).ReadString('\n')
		return err
	}
	if part[3] == "before" {
		if err := pause(); err != nil {
			return err
		}
	}
	if err := d.VerifyTx(ctx, tx, "a", driver.Token(token)); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, "INSERT INTO written VALUES ($1)", int64(token)); err != nil {
		return err
	}
	if part[3] == "after" {
		if err := pause(); err != nil {
			return err
		}
	}
	if err := tx.Commit(ctx); err != nil {
		return err
	}
	fmt.Println("committed")
	return nil
}

// TestPausedBeforeCommit stops a real process between check and commit, for longer than its lease lives.
func TestPausedBeforeCommit(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	psql(t, s, "CREATE TABLE written (token bigint, at timestamptz DEFAULT clock_timestamp())")
	const ttl = 3 * time.Second // in which the process starts
	for _, when := range []string{"after", "before"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			ns := namespace()
			d := on(t, s.URL(), ns)
			r := request("a", ttl)
			a := locked(t, d, r, driver.Granted, "L1")
			cmd := osexec.CommandContext(t.Context(), os.Args[0])
			cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %d %s", pausedEnv, s.URL(), ns, a.Token, when))
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewReader(out)
			for extended(t, d, r.Owner, ttl, driver.Granted); ; { // until it has come so far
				line, err := lines.ReadString('\n')
				if err != nil {
					t.Fatalf("process: got %v, want that it pauses", err)
				}
				if line == "pause\n" {
					break
				}
			}
			if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			// A signal is pending for a moment, in which the process goes on.
			eventually(t, func() error {
				status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
				if err == nil && !bytes.Contains(status, []byte("State:\tT")) {
					err = fmt.Errorf("process after SIGSTOP: got %q, want it stopped", status)
				}
				return err
			})
			// The order is there already when it wakes up.
			if _, err := io.WriteString(in, "\n"); err != nil {
				t.Fatal(err)
			}
			eventually(t, func() error {
				if got := psql(t, s, "SELECT count(*) FROM fencelock.leases WHERE ns = '%s' AND expires > clock_timestamp()", ns); got != "0" {
					return fmt.Errorf("live leases: got %s, want 0", got)
				}
				return nil
			})
			rival := request("a", time.Minute)
			want := driver.Granted
			if when == "after" {
				want = driver.Held
			}
			b := locked(t, d, rival, want, "L1")
			if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			rest, err := io.ReadAll(lines)
			if err != nil {
				t.Fatal(err)
			}
			err = cmd.Wait()
			written := psql(t, s, "SELECT count(*) FROM written WHERE token = %d", a.Token)
			if when == "before" {
				if err == nil || written != "0" {
					t.Errorf("commit of a process that was stopped before it verified: got %v, %s rows, want that it fails", err, written)
				}
				if b.Token <= a.Token {
					t.Errorf("token of the rival: got %v, want more than %v (T1)", b.Token, a.Token)
				}
				return
			}
			if err != nil || string(rest) != "committed\n" || written != "1" {
				t.Errorf("commit of a process that was stopped after it verified: got %v, %q, %s rows, want committed: nobody got the lock meanwhile", err, rest, written)
			}
			if b := locked(t, d, rival, driver.Granted, "L1"); b.Token <= a.Token {
				t.Errorf("token of the rival: got %v, want more than %v (T1)", b.Token, a.Token)
			}
		})
	}
}
