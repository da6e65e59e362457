package pgguard_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/guard/guardtest"
	"github.com/fencelock/fencelock/guard/pgguard"
)

const tables = `CREATE TABLE entry (name bytea PRIMARY KEY, value text NOT NULL, fence bigint NOT NULL DEFAULT 0)`

func startPostgres(t *testing.T) *servers.Postgres {
	t.Helper()
	s, err := servers.StartPostgres(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	if _, err := newPool(t, s).Exec(t.Context(), tables); err != nil {
		t.Fatal(err)
	}
	return s
}

func newPool(t testing.TB, s *servers.Postgres) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), s.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func newGuard(t testing.TB, db *pgxpool.Pool, o *pgguard.Options) *pgguard.Guard {
	t.Helper()
	g, err := pgguard.New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.EnsureTable(t.Context(), db); err != nil {
		t.Fatalf("EnsureTable: got %v, want nil", err)
	}
	return g
}

const (
	putEntry        = "INSERT INTO entry (name, value) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
	putGuardedEntry = "INSERT INTO entry AS e (name, value, fence) VALUES ($1, $2, $3) " +
		"ON CONFLICT (name) DO UPDATE SET value = excluded.value, fence = excluded.fence WHERE e.fence <= excluded.fence"
	raiseEntry = "INSERT INTO entry AS e (name, value, fence) VALUES ($1, '', $2) " +
		"ON CONFLICT (name) DO UPDATE SET fence = excluded.fence WHERE e.fence <= excluded.fence"
	getEntry = "SELECT coalesce((SELECT value FROM entry WHERE name = $1), '')"
)

// viaPgx writes to a row in a transaction that asks the table of marks.
type viaPgx struct {
	db   *pgxpool.Pool
	g    *pgguard.Guard
	name string
}

func (w viaPgx) Write(ctx context.Context, t guard.Token, value string) error {
	return pgx.BeginFunc(ctx, w.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, putEntry, []byte(w.name), value); err != nil {
			return err
		}
		return w.g.AdmitTx(ctx, tx, w.name, t)
	})
}

func (w viaPgx) Raise(ctx context.Context, t guard.Token) error {
	return w.g.Raise(ctx, w.db, w.name, t)
}

func (w viaPgx) Read(ctx context.Context) (value string, err error) {
	err = w.db.QueryRow(ctx, getEntry, []byte(w.name)).Scan(&value)
	return value, err
}

// viaSQL is viaPgx through database/sql.
type viaSQL struct {
	db   *sql.DB
	g    *pgguard.Guard
	name string
}

func (w viaSQL) Write(ctx context.Context, t guard.Token, value string) error {
	tx, err := w.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := w.g.AdmitSQLTx(ctx, tx, w.name, t); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, putEntry, []byte(w.name), value); err != nil {
		return err
	}
	return tx.Commit()
}

func (w viaSQL) Raise(ctx context.Context, t guard.Token) error {
	return w.g.RaiseSQL(ctx, w.db, w.name, t)
}

func (w viaSQL) Read(ctx context.Context) (value string, err error) {
	err = w.db.QueryRowContext(ctx, getEntry, []byte(w.name)).Scan(&value)
	return value, err
}

// viaColumn writes to a row that has a column for the token.
type viaColumn struct {
	db   *pgxpool.Pool
	name string
}

func (w viaColumn) Write(ctx context.Context, t guard.Token, value string) error {
	if err := guard.CheckToken(t); err != nil {
		return err
	}
	tag, err := w.db.Exec(ctx, putGuardedEntry, []byte(w.name), value, int64(t))
	if err != nil {
		return err
	}
	return pgguard.Changed(w.name, tag.RowsAffected())
}

func (w viaColumn) Raise(ctx context.Context, t guard.Token) error {
	if err := guard.CheckToken(t); err != nil {
		return err
	}
	tag, err := w.db.Exec(ctx, raiseEntry, []byte(w.name), int64(t))
	if err != nil {
		return err
	}
	return pgguard.Changed(w.name, tag.RowsAffected())
}

func (w viaColumn) Read(ctx context.Context) (string, error) {
	return viaPgx{db: w.db, name: w.name}.Read(ctx)
}

func TestGuard(t *testing.T) {
	s := startPostgres(t)
	g := newGuard(t, newPool(t, s), nil)
	for name, open := range map[string]func(t testing.TB, name string) guardtest.Writer{
		"Pgx": func(t testing.TB, name string) guardtest.Writer { return viaPgx{newPool(t, s), g, name} },
		"SQL": func(t testing.TB, name string) guardtest.Writer {
			db := stdlib.OpenDBFromPool(newPool(t, s))
			t.Cleanup(func() { db.Close() })
			return viaSQL{db, g, name}
		},
		"Column": func(t testing.TB, name string) guardtest.Writer { return viaColumn{newPool(t, s), name} },
	} {
		t.Run(name, func(t *testing.T) {
			guardtest.Run(t, guardtest.Harness{Open: open, Restart: func(t testing.TB) {
				if err := s.RestartImmediate(t.Context()); err != nil { // as after a crash
					t.Fatal(err)
				}
			}})
		})
	}
}

// TestAdmittedUntilTheEnd begins a transaction with a lower token and one with a higher: whichever is admitted first, the
// other waits for its end and then finds what it left.
func TestAdmittedUntilTheEnd(t *testing.T) {
	s := startPostgres(t)
	db := newPool(t, s)
	g := newGuard(t, db, nil)
	for name, test := range map[string]struct {
		first, second guard.Token
		commit        bool
		want          error
	}{
		"HigherAfterLower":           {41, 42, true, nil},
		"LowerAfterHigher":           {42, 41, true, guard.ErrStale},
		"LowerAfterHigherRolledBack": {42, 41, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			first, second := begin(t, db, pgx.ReadCommitted), begin(t, db, pgx.ReadCommitted)
			if err := g.AdmitTx(t.Context(), first, name, test.first); err != nil {
				t.Fatal(err)
			}
			got := make(chan error, 1)
			go func() { got <- g.AdmitTx(t.Context(), second, name, test.second) }()
			blocked(t, db, 1)
			end := first.Commit
			if !test.commit {
				end = first.Rollback
			}
			if err := end(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-got; !errors.Is(err, test.want) {
				t.Fatalf("AdmitTx with token %d once that with %d has ended: got %v, want %v", test.second, test.first, err, test.want)
			}
		})
	}
}

// TestSnapshot: in a transaction whose snapshot is older than the mark nothing is admitted.
func TestSnapshot(t *testing.T) {
	s := startPostgres(t)
	db := newPool(t, s)
	g := newGuard(t, db, nil)
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		name := string(level)
		tx := begin(t, db, level)
		if _, err := tx.Exec(t.Context(), "SELECT 1"); err != nil {
			t.Fatal(err)
		}
		if err := g.Raise(t.Context(), db, name, 42); err != nil {
			t.Fatal(err)
		}
		if err := g.AdmitTx(t.Context(), tx, name, 41); err == nil {
			t.Fatalf("%s: AdmitTx with a lower token than was admitted since: got nil, want an error", level)
		}
	}
}

func begin(t *testing.T, db *pgxpool.Pool, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

// blocked waits until so many sessions wait for a lock.
func blocked(t *testing.T, db *pgxpool.Pool, want int) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		var got int
		if err := db.QueryRow(t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'").Scan(&got); err != nil {
			t.Fatal(err)
		}
		if got == want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("sessions that wait for a lock: got %d, want %d", got, want)
		}
	}
}

func TestEnsureTable(t *testing.T) {
	s := startPostgres(t)
	db := newPool(t, s)
	if _, err := db.Exec(t.Context(), `CREATE SCHEMA "odd ""name"`); err != nil {
		t.Fatal(err)
	}
	g, err := pgguard.New(&pgguard.Options{Table: pgx.Identifier{`odd "name`, "fence; DROP TABLE entry"}})
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if err := g.EnsureTable(t.Context(), db); err != nil {
				t.Errorf("EnsureTable at the same time: got %v, want nil", err)
			}
		})
	}
	all.Wait()
	if err := g.Raise(t.Context(), db, "a", 42); err != nil {
		t.Fatal(err)
	}
	if err := g.EnsureTable(t.Context(), db); err != nil {
		t.Fatal(err)
	}
	if err := g.Raise(t.Context(), db, "a", 41); !errors.Is(err, guard.ErrStale) {
		t.Fatalf("after EnsureTable once more: got %v, want ErrStale", err)
	}
}

func TestBadTables(t *testing.T) {
	for _, table := range []pgx.Identifier{{}, {""}, {"a", ""}, {"a", "b", "c"}, {fmt.Sprintf("%064d", 0)}} {
		if _, err := pgguard.New(&pgguard.Options{Table: table}); !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("New with table %q: got %v, want ErrInvalid", table, err)
		}
	}
}

// TestNoTable tells what is missing.
func TestNoTable(t *testing.T) {
	s := startPostgres(t)
	g, err := pgguard.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Raise(t.Context(), newPool(t, s), "a", 42); err == nil || errors.Is(err, guard.ErrStale) {
		t.Fatalf("Raise without a table: got %v, want the error of the database", err)
	}
}
