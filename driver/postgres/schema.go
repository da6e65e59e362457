package postgres

import (
	"context"
	_ "embed"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// migrations are what leads from each schema version to the next; the first one makes version 1 out of nothing. They
// name the default schema.
var migrations = []string{schemaSQL}

//go:embed schema.sql
var schemaSQL string

// EnsureSchema makes the schema, or brings it up to the version that this package needs; nil options are the defaults. If it is there
// already, that is all it finds out, and the role needs the right to use it only; one that may not create schemas can own an empty
// one. Any number of processes may call it at
// the same time. It is one transaction: on an error nothing has changed.
//
// Errors match [driver.ErrInvalid] or [driver.ErrUnavailable]; so does a schema that is newer than this package.
// Only an error of the commit leaves it open whether the schema was made; call it again.
func EnsureSchema(ctx context.Context, pool *pgxpool.Pool, o *Options) error {
	d, err := New(pool, o)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.ensureSchema(ctx)
}

func (d *Driver) ensureSchema(ctx context.Context) error {
	var have int
	look := func(ctx context.Context, q querier) (err error) {
		have, err = version(ctx, q, d.schema)
		return err
	}
	if err := d.query(ctx, look); err != nil {
		return err
	}
	if have < len(migrations) {
		err := d.transaction(ctx, func(ctx context.Context, tx pgx.Tx) error {
			// Whoever comes second waits here, and then sees what the first one made.
			if err := exec(ctx, tx, "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", "fencelock schema "+d.schema); err != nil {
				return err
			}
			if err := look(ctx, tx); err != nil {
				return err
			}
			for ; have < len(migrations); have++ {
				if _, err := tx.Exec(ctx, strings.ReplaceAll(migrations[have], DefaultSchema, d.schema)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("make schema %s: %w", d.schema, err)
		}
	}
	if have > len(migrations) {
		return unavailable(fmt.Errorf("schema %s has version %d, this package knows %d", d.schema, have, len(migrations)))
	}
	return nil
}

// version answers the version of the schema, a quoted name, 0 if there is none.
func version(ctx context.Context, q querier, schema string) (int, error) {
	var standby, there bool
	err := q.QueryRow(ctx, `SELECT pg_is_in_recovery(), EXISTS (
		SELECT FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1 AND p.proname = 'version')`,
		pgx.QueryExecModeExec, strings.Trim(schema, `"`)).Scan(&standby, &there)
	switch {
	case err != nil:
		return 0, err
	case standby:
		return 0, errStandby
	case !there:
		return 0, nil
	}
	var v int
	err = q.QueryRow(ctx, "SELECT "+schema+".version()", pgx.QueryExecModeExec).Scan(&v)
	return v, err
}

// exec runs a statement of one row that nobody wants.
func exec(ctx context.Context, q querier, sql string, args ...any) error {
	return q.QueryRow(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...).Scan(nil)
}
