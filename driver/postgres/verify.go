package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/driver"
)

// ErrStale says that a token is not that of the lock's present lease.
var ErrStale = errors.New("postgres: the lock is not held with this token")

// VerifyTx makes a transaction of the user's, in the same database, depend on a lock: it fails with an error matching [ErrStale]
// unless the lock is held with this token now. After nil nobody else gets the lock before the transaction has
// ended, even if the lease expires or is released meanwhile. So whatever pause lies between this call and
// the commit, a transaction that commits did so before any successor, and needs no comparison of tokens.
//
// It holds for the transaction, not for a savepoint (which is what a pgx.Tx begun in another one is): to roll back to one that
// was made before this call undoes it.
//
// In a READ COMMITTED transaction, which is the default, call it before reading what the lock protects. In one that is
// REPEATABLE READ or SERIALIZABLE call it first of all, because its snapshot is that of the first statement; it may then
// fail with SQLSTATE 40001, which means stale as well.
//
// What a rollback to an earlier savepoint undoes is as if it had not been called. The lease can be extended meanwhile. Should the process stop in the middle of the transaction, the name
// stays locked until the server ends that: set idle_in_transaction_session_timeout. Locks that wait for it are
// not held up otherwise: they are told that the lock is held, and are given it by a poll soon after the transaction.
//
// Besides ErrStale errors are those of the transaction, which is then aborted.
func (d *Driver) VerifyTx(ctx context.Context, tx pgx.Tx, name string, token driver.Token) error {
	return d.verified(tx.QueryRow(ctx, d.verifySQL(), pgx.QueryExecModeExec, d.ns, []byte(name), int64(token)))
}

// VerifySQLTx is [Driver.VerifyTx] for a transaction of database/sql on a pgx driver.
func (d *Driver) VerifySQLTx(ctx context.Context, tx *sql.Tx, name string, token driver.Token) error {
	return d.verified(tx.QueryRowContext(ctx, d.verifySQL(), d.ns, []byte(name), int64(token)))
}

func (d *Driver) verifySQL() string { return "SELECT " + d.schema + ".verify($1,$2,$3::int8)" }

func (d *Driver) verified(row pgx.Row) error {
	var held bool
	if err := row.Scan(&held); err != nil {
		return fmt.Errorf("postgres: verify: %w", err)
	}
	if !held {
		return ErrStale
	}
	return nil
}
