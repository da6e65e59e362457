package postgres_test

import (
	"context"
	"log"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/postgres"
)

// A service that has a pool uses it for its locks as well.
func ExampleNew() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://app@localhost/app")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if err := postgres.EnsureSchema(ctx, pool, nil); err != nil { // or schema.sql among the migrations
		log.Fatal(err)
	}
	d, err := postgres.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	client, err := fencelock.New(d)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	lease, err := client.Lock(ctx, "orders/7")
	if err != nil {
		log.Fatal(err)
	}
	defer lease.Release(ctx)
}

// A transaction that can commit only while nobody else has got the lock.
func ExampleDriver_VerifyTx() {
	pay := func(ctx context.Context, pool *pgxpool.Pool, d *postgres.Driver, lease *fencelock.Lease) error {
		tx, err := pool.Begin(ctx)
		if err != nil {
			return err
		}
		defer tx.Rollback(ctx)
		if err := d.VerifyTx(ctx, tx, lease.Name(), lease.Token()); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "UPDATE orders SET paid = true WHERE id = 7"); err != nil {
			return err
		}
		return tx.Commit(ctx) // however long this process was stopped since VerifyTx
	}
	_ = pay
}
