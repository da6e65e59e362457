package main

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/driver/postgres"
)

func postgresSubjects() []subject {
	return []subject{
		{name: "upsert and delete", backend: "postgres", floor: []string{"pair", "crowd"}, open: openRawPostgres},
		{name: "blocking advisory lock", backend: "postgres", floor: []string{"handover"}, also: []string{"pair", "crowd"}, open: openAdvisory},
		{name: "fencelock postgres", backend: "postgres", fenced: true,
			open: func(ctx context.Context, s *server, ttl time.Duration) (locker, error) {
				pool, err := dialPostgres(ctx, s, 4)
				if err != nil {
					return locker{}, err
				}
				d, err := postgres.New(pool, nil)
				return ours(d, err, ttl, func() error { pool.Close(); return nil })
			}},
	}
}

func dialPostgres(ctx context.Context, s *server, conns int32) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(s.url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = conns
	return pgxpool.NewWithConfig(ctx, config)
}

func openRawPostgres(ctx context.Context, s *server, ttl time.Duration) (locker, error) {
	pool, err := dialPostgres(ctx, s, 4)
	id := rand.Text()
	return locker{close: func() error { pool.Close(); return nil }, lock: func(ctx context.Context, name string) (held, error) {
		tag, err := pool.Exec(ctx, "INSERT INTO raw VALUES ($1, $2, clock_timestamp() + $3::interval) ON CONFLICT (name) DO UPDATE "+
			"SET owner = excluded.owner, expires = excluded.expires WHERE raw.expires < clock_timestamp()", name, id, ttl)
		if err == nil && tag.RowsAffected() != 1 {
			err = errNotHeld
		}
		return held{unlock: func(ctx context.Context) error {
			tag, err := pool.Exec(ctx, "DELETE FROM raw WHERE name = $1 AND owner = $2", name, id)
			if err == nil && tag.RowsAffected() != 1 {
				err = errNotHeld
			}
			return err
		}}, err
	}}, err
}

// openAdvisory takes a connection for each waiter and holder: no lease, no token.
func openAdvisory(ctx context.Context, s *server, _ time.Duration) (locker, error) {
	pool, err := dialPostgres(ctx, s, 280)
	return locker{close: func() error { pool.Close(); return nil }, lock: func(ctx context.Context, name string) (held, error) {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return held{}, err
		}
		if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock(hashtextextended($1, 0))", name); err != nil {
			conn.Release()
			return held{}, err
		}
		return held{unlock: func(ctx context.Context) error {
			defer conn.Release()
			var was bool
			err := conn.QueryRow(ctx, "SELECT pg_advisory_unlock(hashtextextended($1, 0))", name).Scan(&was)
			if err == nil && !was {
				err = errNotHeld
			}
			return err
		}}, nil
	}}, err
}
