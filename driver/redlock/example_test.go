package redlock_test

import (
	"context"
	"log"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/driver/redlock"
)

// The nodes are of clients that you have. What rueidis.NewNode makes will do as well, also side by side.
func ExampleNew() {
	var nodes []redlock.Node
	for _, addr := range []string{"redis1:6379", "redis2:6379", "redis3:6379", "redis4:6379", "redis5:6379"} {
		rdb := redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true, MaxRetries: -1})
		defer rdb.Close()
		n, err := goredis.NewNode(rdb)
		if err != nil {
			log.Fatal(err)
		}
		nodes = append(nodes, n)
	}
	d, err := redlock.New(nodes, nil)
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	if err := d.Verify(ctx); err != nil { // they are independent masters
		log.Fatal(err)
	}
	locks, err := fencelock.New(d)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	lease, err := locks.Lock(ctx, "orders/7")
	if err != nil {
		log.Fatal(err)
	}
	defer lease.Release(ctx)
	log.Print(lease.Token())
}
