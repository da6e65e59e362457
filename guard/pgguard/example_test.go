package pgguard_test

import (
	"context"
	"log"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock"
	_ "github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/guard/pgguard"
)

// A transfer is written only if nobody has taken the lock since, however long the writer was paused before.
func ExampleGuard_AdmitTx() {
	ctx := context.Background()
	db, err := pgxpool.New(ctx, "postgres://localhost/shop")
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	marks, err := pgguard.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := marks.EnsureTable(ctx, db); err != nil {
		log.Fatal(err)
	}
	client, err := fencelock.Open(ctx, "redis://localhost:6379")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	locks := guard.Fenced(client, func(ctx context.Context, name string, t fencelock.Token) error {
		return marks.Raise(ctx, db, name, t)
	})

	err = fencelock.Do(ctx, locks, "account/7", func(ctx context.Context, l *fencelock.Lease) error {
		return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			if err := marks.AdmitTx(ctx, tx, l.Name(), l.Token()); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "UPDATE account SET balance = balance - 10 WHERE id = 7")
			return err
		})
	})
	if err != nil {
		log.Fatal(err)
	}
}
