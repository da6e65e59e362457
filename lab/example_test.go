package lab_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"testing"

	_ "github.com/jackc/pgx/v5/stdlib" // the database of the code

	"github.com/fencelock/fencelock"
	_ "github.com/fencelock/fencelock/driver/goredis" // the backend of the test
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/lab"
)

// orders is the code under test: it runs in processes of its own, so it finds its database by itself.
func orders(ctx context.Context, resource string, token fencelock.Token) error {
	db, err := sql.Open("pgx", os.Getenv("ORDERS_DATABASE"))
	if err != nil {
		return err
	}
	defer db.Close()
	done, err := db.ExecContext(ctx, "UPDATE orders SET state = 'paid', token = $2 WHERE id = $1 AND token <= $2", resource, int64(token))
	if err != nil {
		return err
	}
	if n, err := done.RowsAffected(); err != nil || n == 0 {
		return errors.Join(guard.Stale(resource), err)
	}
	return nil
}

// The two functions would be TestMain and a test of the package that has orders. Redis must be installed, and what else orders needs.
func ExampleRun() {
	_ = func(m *testing.M) {
		lab.Code("orders", orders) // what writes under the lock, with the token
		lab.Main()                 // does not return in the processes that the lab starts
		os.Exit(m.Run())
	}
	_ = func(t *testing.T) {
		result, err := lab.Run(t.Context(), lab.Redis, lab.HolderPaused, &lab.Options{Code: "orders"})
		if err == nil {
			err = result.Err() // a stale write came through, or the run proves nothing
		}
		if err != nil {
			t.Error(err)
		}
	}
}
