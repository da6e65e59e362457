package main

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	syncredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	driverrueidis "github.com/fencelock/fencelock/driver/rueidis"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

func redisSubjects() []subject {
	scripts := []string{"eval", "evalsha"}
	simple := append([]string{"set"}, scripts...)
	return []subject{
		{name: "raw go-redis", backend: "redis", floor: []string{"pair", "crowd"}, sends: simple, open: openRawRedis},
		{name: "BLPOP and LPUSH", backend: "redis", floor: []string{"handover"}, sends: []string{"blpop", "lpush"}, open: openListRedis},
		{name: "fencelock goredis", backend: "redis", fenced: true, renews: true, sends: scripts,
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				rdb := redis.NewClient(&redis.Options{Addr: s.url})
				d, err := goredis.New(rdb, nil)
				return ours(d, err, ttl, rdb.Close)
			}},
		{name: "fencelock rueidis", backend: "redis", fenced: true, renews: true, sends: scripts,
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				c, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{s.url}})
				if err != nil {
					return locker{}, err
				}
				d, err := driverrueidis.New(c, nil)
				return ours(d, err, ttl, func() error { c.Close(); return nil })
			}},
		{name: "redsync", backend: "redis", sends: simple,
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				rdb := redis.NewClient(&redis.Options{Addr: s.url})
				rs := redsync.New(syncredis.NewPool(rdb))
				return locker{close: rdb.Close, lock: func(ctx context.Context, name string) (held, error) {
					m := rs.NewMutex("redsync/"+name, redsync.WithExpiry(ttl), redsync.WithTries(1<<30))
					if err := m.LockContext(ctx); err != nil {
						return held{}, err
					}
					return held{unlock: func(ctx context.Context) error {
						ok, err := m.UnlockContext(ctx)
						if err == nil && !ok {
							err = errNotHeld
						}
						return err
					}}, nil
				}}, nil
			}},
		{name: "redislock", backend: "redis", sends: scripts,
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				rdb := redis.NewClient(&redis.Options{Addr: s.url})
				c := redislock.New(rdb)
				retry := &redislock.Options{RetryStrategy: redislock.LinearBackoff(20 * time.Millisecond)}
				return locker{close: rdb.Close, lock: func(ctx context.Context, name string) (held, error) {
					l, err := c.Obtain(ctx, "redislock/"+name, ttl, retry)
					if err != nil {
						return held{}, err
					}
					return held{unlock: l.Release}, nil
				}}, nil
			}},
		{name: "rueidislock", backend: "redis", renews: true, sends: simple,
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				c, err := rueidislock.NewLocker(rueidislock.LockerOption{
					ClientOption: rueidis.ClientOption{InitAddress: []string{s.url}}, KeyMajority: 1, KeyValidity: ttl})
				if err != nil {
					return locker{}, err
				}
				return locker{close: func() error { c.Close(); return nil }, lock: func(ctx context.Context, name string) (held, error) {
					lost, cancel, err := c.WithContext(ctx, name)
					if err != nil {
						return held{}, err
					}
					return held{unlock: func(context.Context) error { cancel(); return nil }, err: lost.Err}, nil
				}}, nil
			}},
	}
}

// ours is a client of fencelock on the driver; closeClient closes what the driver was made on.
func ours(d driver.Driver, err error, ttl time.Duration, closeClient func() error) (locker, error) {
	if err != nil {
		return locker{}, err
	}
	c, err := fencelock.New(d, fencelock.WithTTL(ttl))
	if err != nil {
		return locker{}, err
	}
	return locker{
		lock: func(ctx context.Context, name string) (held, error) {
			l, err := c.Lock(ctx, name)
			if err != nil {
				return held{}, err
			}
			return held{token: uint64(l.Token()), unlock: l.Release, err: l.Err}, nil
		},
		close: func() error {
			if err := c.Close(); err != nil {
				return err
			}
			return closeClient()
		},
	}, nil
}

func openRawRedis(ctx context.Context, s *server, ttl time.Duration) (locker, error) {
	rdb := redis.NewClient(&redis.Options{Addr: s.url})
	sha, err := rdb.ScriptLoad(ctx, redisbackend.CompareAndDelete).Result()
	id := rand.Text()
	return locker{close: rdb.Close, lock: func(ctx context.Context, name string) (held, error) {
		key := "raw/" + name
		ok, err := rdb.SetNX(ctx, key, id, ttl).Result()
		if err == nil && !ok {
			err = errNotHeld
		}
		return held{unlock: func(ctx context.Context) error {
			n, err := rdb.EvalSha(ctx, sha, []string{key}, id).Int()
			if err == nil && n != 1 {
				err = errNotHeld
			}
			return err
		}}, err
	}}, err
}

// openListRedis waits for the only element of a list: no lease, no token, but in order and woken by the server.
func openListRedis(ctx context.Context, s *server, _ time.Duration) (locker, error) {
	rdb := redis.NewClient(&redis.Options{Addr: s.url, PoolSize: 300, ContextTimeoutEnabled: true})
	// The first client that opens puts the element in.
	first, err := rdb.SetNX(ctx, "list/made", "1", 0).Result()
	if err == nil && first {
		err = rdb.LPush(ctx, "list", "1").Err()
	}
	return locker{close: rdb.Close, lock: func(ctx context.Context, _ string) (held, error) {
		for {
			err := rdb.BLPop(ctx, time.Second, "list").Err()
			if err == nil {
				return held{unlock: func(ctx context.Context) error { return rdb.LPush(ctx, "list", "1").Err() }}, nil
			}
			if err != redis.Nil { //nolint:errorlint // go-redis answers this very value
				return held{}, err
			}
			if ctx.Err() != nil {
				return held{}, ctx.Err()
			}
		}
	}}, err
}
