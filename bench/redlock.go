package main

import (
	"context"
	"crypto/rand"
	"errors"
	"sync"
	"time"

	"github.com/go-redsync/redsync/v4"
	syncpool "github.com/go-redsync/redsync/v4/redis"
	syncredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/driver/redlock"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// redlockSubjects use five masters, each through a client of go-redis of its own with the same settings.
func redlockSubjects() []subject {
	return []subject{
		{name: "five in parallel", backend: "redlock", floor: []string{"pair", "crowd"}, open: openFive},
		{name: "BLPOP and LPUSH on one", backend: "redlock", floor: []string{"handover"}, open: openListRedis},
		{name: "fencelock redlock", backend: "redlock", fenced: true,
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				clients, closeAll := five(s)
				var nodes []redlock.Node
				for _, c := range clients {
					n, err := goredis.NewNode(c)
					if err != nil {
						return locker{}, errors.Join(err, closeAll())
					}
					nodes = append(nodes, n)
				}
				d, err := redlock.New(nodes, nil)
				return ours(d, err, ttl, closeAll)
			}},
		{name: "redsync", backend: "redlock",
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				clients, closeAll := five(s)
				var pools []syncpool.Pool
				for _, c := range clients {
					pools = append(pools, syncredis.NewPool(c))
				}
				return openRedsync(redsync.New(pools...), ttl, closeAll), nil
			}},
	}
}

func five(s *server) (clients []*redis.Client, closeAll func() error) {
	for _, addr := range s.addrs {
		clients = append(clients, s.goRedis(redis.Options{Addr: addr, PoolSize: 64, ContextTimeoutEnabled: true, MaxRetries: -1}))
	}
	return clients, func() (err error) {
		for _, c := range clients {
			err = errors.Join(err, c.Close())
		}
		return err
	}
}

// openFive asks all five at the same time and waits for all.
func openFive(ctx context.Context, s *server, ttl time.Duration) (locker, error) {
	clients, closeAll := five(s)
	each := func(f func(c *redis.Client) error) error {
		errs := make([]error, len(clients))
		var all sync.WaitGroup
		for i, c := range clients {
			all.Go(func() { errs[i] = f(c) })
		}
		all.Wait()
		return errors.Join(errs...)
	}
	sha := ""
	for _, c := range clients {
		var err error
		if sha, err = c.ScriptLoad(ctx, redisbackend.CompareAndDelete).Result(); err != nil {
			return locker{}, errors.Join(err, closeAll())
		}
	}
	id := rand.Text()
	return locker{close: closeAll, lock: func(ctx context.Context, name string) (held, error) {
		key := "raw/" + name
		if err := each(func(c *redis.Client) error { return setAbsent(ctx, c, key, id, ttl) }); err != nil {
			return held{}, err
		}
		return held{unlock: func(ctx context.Context) error {
			return each(func(c *redis.Client) error { return compareAndDelete(ctx, c, sha, key, id) })
		}}, nil
	}}, nil
}
