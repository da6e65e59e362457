// Package pgguard refuses stale writers to rows of PostgreSQL (13 or later), in the transactions that write them. The
// fencing tokens may come from any backend; for locks that are leases in the same database driver/postgres has VerifyTx,
// which needs no mark.
//
// # A column of your own
//
// A row that has room for the token is guarded by one more condition:
//
//	UPDATE account SET balance = $1, fence = $2 WHERE id = $3 AND fence <= $2
//	INSERT INTO account AS a (id, balance, fence) VALUES ($3, $1, $2)
//		ON CONFLICT (id) DO UPDATE SET balance = excluded.balance, fence = excluded.fence WHERE a.fence <= excluded.fence
//
// with fence bigint NOT NULL DEFAULT 0. [Changed] makes an error of a statement that changed no row. Two such statements
// that meet wait for each other, and the second one compares with what the first one left, in READ COMMITTED, which is the
// default; in the higher levels it fails with SQLSTATE 40001, and writes nothing either.
//
// # A table of marks
//
// For what has no such column, or is more than a row, a [Guard] keeps the marks in a table. [Guard.AdmitTx] in a
// transaction admits all that it writes. Until the end of the transaction nobody else is admitted to this resource.
//
// # Errors
//
// What is stale matches [guard.ErrStale]. The transaction has not failed by that, so it is for the caller to roll it
// back. Other errors are those of the database.
package pgguard

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/guard"
)

// Changed makes an error matching [guard.ErrStale] if a guarded statement changed no row. An UPDATE also changes none
// if there is no such row: where that can be, use the INSERT.
func Changed(resource string, rows int64) error {
	if rows == 0 {
		return guard.Stale(resource)
	}
	return nil
}

// Options of [New].
type Options struct {
	// Table is the name of the table of marks, with its schema or without, as it is stored, that is without quotes.
	// Default {"fencelock_guard"}.
	Table pgx.Identifier
}

// Guard keeps marks in a table. It is safe for concurrent use.
type Guard struct {
	table, admit string
}

// New makes a guard; nil options are the defaults. It sends nothing. A bad option is an error matching
// [driver.ErrInvalid].
func New(o *Options) (*Guard, error) {
	table := pgx.Identifier{"fencelock_guard"}
	if o != nil && o.Table != nil {
		table = o.Table
	}
	if len(table) > 2 {
		return nil, driver.Invalid("Table", table, "must be a name, or a schema and a name")
	}
	for _, part := range table {
		if part == "" || len(part) > 63 {
			return nil, driver.Invalid("Table", part, "must have names of 1 to 63 bytes")
		}
	}
	if len(table) == 0 {
		return nil, driver.Invalid("Table", table, "must not be empty")
	}
	name := table.Sanitize()
	return &Guard{table: name, admit: "INSERT INTO " + name + " AS g (resource, token) VALUES ($1, $2::bigint)" +
		" ON CONFLICT (resource) DO UPDATE SET token = excluded.token WHERE g.token <= excluded.token"}, nil
}

// TableSQL is the statement that makes the table, for those who migrate by hand. The guard itself needs the rights to
// INSERT, SELECT and UPDATE. A row may be deleted when no writer can be left with a token below its own.
func (g *Guard) TableSQL() string {
	return "CREATE TABLE IF NOT EXISTS " + g.table + " (resource bytea PRIMARY KEY, token bigint NOT NULL)"
}

// EnsureTable makes the table unless it is there. Any number of processes may call it at the same time. db is a pool or a
// connection.
func (g *Guard) EnsureTable(ctx context.Context, db interface {
	Begin(context.Context) (pgx.Tx, error)
}) error {
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		// IF NOT EXISTS alone fails at times when two come at once.
		if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", "fencelock guard "+g.table); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, g.TableSQL())
		return err
	})
	if err != nil {
		return fmt.Errorf("guard: make table %s: %w", g.table, err)
	}
	return nil
}

// AdmitTx admits what the transaction writes to the resource, before or after the call: if the token is stale, roll
// back. Whoever else asks for this resource waits until the transaction has ended. A transaction that is admitted to
// several resources may run into a deadlock with another one (SQLSTATE 40P01) unless all take them in the same order.
func (g *Guard) AdmitTx(ctx context.Context, tx pgx.Tx, resource string, t guard.Token) error {
	return g.viaPgx(ctx, tx, resource, t)
}

// AdmitSQLTx is [Guard.AdmitTx] for a transaction of database/sql.
func (g *Guard) AdmitSQLTx(ctx context.Context, tx *sql.Tx, resource string, t guard.Token) error {
	return g.viaSQL(ctx, tx, resource, t)
}

// Raise admits the token in a transaction of its own, so that lower ones are refused from now on. db is a pool or a
// connection that is not in a transaction. It is for guard.Fenced.
func (g *Guard) Raise(ctx context.Context, db interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
}, resource string, t guard.Token) error {
	return g.viaPgx(ctx, db, resource, t)
}

// RaiseSQL is [Guard.Raise] for database/sql.
func (g *Guard) RaiseSQL(ctx context.Context, db *sql.DB, resource string, t guard.Token) error {
	return g.viaSQL(ctx, db, resource, t)
}

func (g *Guard) viaPgx(ctx context.Context, db interface {
	Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
}, resource string, t guard.Token) error {
	return g.admitted(resource, t, func(args ...any) (int64, error) {
		tag, err := db.Exec(ctx, g.admit, args...)
		return tag.RowsAffected(), err
	})
}

func (g *Guard) viaSQL(ctx context.Context, db interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}, resource string, t guard.Token) error {
	return g.admitted(resource, t, func(args ...any) (int64, error) {
		r, err := db.ExecContext(ctx, g.admit, args...)
		if err != nil {
			return 0, err
		}
		return r.RowsAffected()
	})
}

func (g *Guard) admitted(resource string, t guard.Token, exec func(args ...any) (int64, error)) error {
	if err := guard.CheckToken(t); err != nil {
		return err
	}
	changed, err := exec([]byte(resource), int64(t))
	if err != nil {
		return fmt.Errorf("guard: %.80q: %w", resource, err)
	}
	return Changed(resource, changed)
}
