package redisguard_test

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/guard/redisguard"
)

// The write and the comparison of the token are one step on the server.
func ExampleGuard_Do() {
	ctx := context.Background()
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	defer rdb.Close()
	d, err := goredis.New(rdb, nil)
	if err != nil {
		log.Fatal(err)
	}
	locks, err := fencelock.New(d)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()
	g := redisguard.New(rdb)

	err = fencelock.Do(ctx, locks, "report", func(ctx context.Context, l *fencelock.Lease) error {
		return g.Do(ctx, l.Token(), "SET", "report:latest", "42 orders", "EX", int(time.Hour.Seconds())).Err()
	})
	if err != nil {
		log.Fatal(err) // matches guard.ErrStale if somebody else has written since
	}
}

// The lock is taken, the mark raised and the order marked as in work by one request, or nothing of it.
func ExampleWrite() {
	ctx := context.Background()
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	defer rdb.Close()
	d, err := goredis.New(rdb, nil)
	if err != nil {
		log.Fatal(err)
	}
	locks, err := fencelock.New(d)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	lease, err := locks.TryLock(ctx, "orders/7", redisguard.Write("SET", "{orders/7}:state", "in work"))
	switch {
	case errors.Is(err, fencelock.ErrHeld):
		return // another one works on it, and nothing was written
	case err != nil:
		log.Fatal(err)
	}
	defer lease.Release(ctx)
	err = redisguard.New(rdb).Do(ctx, lease.Token(), "SET", "{orders/7}:state", "done").Err()
	if err != nil {
		log.Fatal(err) // matches guard.ErrStale if somebody else has had the lock since
	}
}
