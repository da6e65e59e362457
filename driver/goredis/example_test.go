package goredis_test

import (
	"context"
	"fmt"
	"log"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/goredis"
)

// A client that the program has anyway serves for locks as well.
func ExampleNew() {
	rdb := redis.NewClient(&redis.Options{Addr: "localhost:6379", ContextTimeoutEnabled: true, MaxRetries: -1})
	defer rdb.Close()
	d, err := goredis.New(rdb, &goredis.Options{Namespace: "shop"})
	if err != nil {
		log.Fatal(err)
	}
	locks, err := fencelock.New(d)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	err = fencelock.Do(context.Background(), locks, "reports/daily", func(ctx context.Context, l *fencelock.Lease) error {
		fmt.Println("fenced by", l.Token())
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
}
