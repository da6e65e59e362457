package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
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
	all := []subject{
		{name: "raw go-redis", client: "go-redis", floor: []string{"pair", "crowd"}, open: openRawRedis},
		{name: "raw rueidis", client: "rueidis", floor: []string{"pair", "crowd"}, open: openRawRueidis},
		{name: "BLPOP and LPUSH", client: "go-redis", floor: []string{"handover", "drain"}, open: openListRedis},
		{name: "fencelock goredis", client: "go-redis", fenced: true,
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				rdb := s.goRedis(redis.Options{Addr: s.url})
				d, err := goredis.New(rdb, nil)
				return ours(d, err, ttl, rdb.Close)
			}},
		// Compared with raw commands that are not pipelined: what a user of the client has without doing anything.
		{name: "fencelock goredis, auto-pipelined", client: "go-redis", fenced: true, also: []string{"crowd"},
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				rdb := s.goRedis(redis.Options{Addr: s.url})
				piped, err := rdb.AutoPipeline()
				if err != nil {
					return locker{}, errors.Join(err, rdb.Close())
				}
				d, err := goredis.New(rdb, &goredis.Options{Process: piped.Process})
				return ours(d, err, ttl, rdb.Close)
			}},
		{name: "fencelock rueidis", client: "rueidis", fenced: true,
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				c, err := rueidis.NewClient(s.rueidis(s.url))
				if err != nil {
					return locker{}, err
				}
				d, err := driverrueidis.New(c, nil)
				return ours(d, err, ttl, func() error { c.Close(); return nil })
			}},
		{name: "redsync", client: "go-redis",
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				rdb := s.goRedis(redis.Options{Addr: s.url})
				return openRedsync(redsync.New(syncredis.NewPool(rdb)), ttl, rdb.Close), nil
			}},
		{name: "redislock", client: "go-redis",
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				rdb := s.goRedis(redis.Options{Addr: s.url})
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
		{name: "rueidislock", client: "rueidis",
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				c, err := rueidislock.NewLocker(rueidislock.LockerOption{
					ClientOption: s.rueidis(s.url), KeyMajority: 1, KeyValidity: ttl})
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
	for i := range all {
		all[i].backend = "redis"
	}
	return all
}

// ours is a client of fencelock on the driver; closeClient closes what the driver was made on.
func ours(d driver.Driver, err error, ttl time.Duration, closeClient func() error) (locker, error) {
	if err != nil {
		return locker{}, errors.Join(err, closeClient())
	}
	c, err := fencelock.New(d, fencelock.WithTTL(ttl))
	if err != nil {
		return locker{}, errors.Join(err, closeClient())
	}
	return locker{
		lock: func(ctx context.Context, name string) (held, error) {
			l, err := c.Lock(ctx, name)
			if err != nil {
				return held{}, err
			}
			return held{token: uint64(l.Token()), unlock: l.Release, err: l.Err}, nil
		},
		close: func() error { return errors.Join(c.Close(), closeClient()) },
	}, nil
}

// openRedsync tries again for as long as the context lives, after its default pause: 50 to 250 ms, at random.
func openRedsync(rs *redsync.Redsync, ttl time.Duration, closeClient func() error) locker {
	return locker{close: closeClient, lock: func(ctx context.Context, name string) (held, error) {
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
	}}
}

func openRawRedis(ctx context.Context, s *server, ttl time.Duration) (locker, error) {
	rdb := s.goRedis(redis.Options{Addr: s.url})
	sha, err := rdb.ScriptLoad(ctx, redisbackend.CompareAndDelete).Result()
	if err != nil {
		return locker{}, errors.Join(err, rdb.Close())
	}
	id := rand.Text()
	return locker{close: rdb.Close, lock: func(ctx context.Context, name string) (held, error) {
		key := "raw/" + name
		if err := setAbsent(ctx, rdb, key, id, ttl); err != nil {
			return held{}, err
		}
		return held{unlock: func(ctx context.Context) error { return compareAndDelete(ctx, rdb, sha, key, id) }}, nil
	}}, nil
}

func setAbsent(ctx context.Context, rdb *redis.Client, key, id string, ttl time.Duration) error {
	ok, err := rdb.SetNX(ctx, key, id, ttl).Result()
	if err == nil && !ok {
		err = errNotHeld
	}
	return err
}

func compareAndDelete(ctx context.Context, rdb *redis.Client, sha, key, id string) error {
	n, err := rdb.EvalSha(ctx, sha, []string{key}, id).Int()
	if err == nil && n != 1 {
		err = errNotHeld
	}
	return err
}

func openRawRueidis(ctx context.Context, s *server, ttl time.Duration) (locker, error) {
	c, err := rueidis.NewClient(s.rueidis(s.url))
	if err != nil {
		return locker{}, err
	}
	sha, err := c.Do(ctx, c.B().ScriptLoad().Script(redisbackend.CompareAndDelete).Build()).ToString()
	if err != nil {
		c.Close()
		return locker{}, err
	}
	id := rand.Text()
	return locker{close: func() error { c.Close(); return nil }, lock: func(ctx context.Context, name string) (held, error) {
		key := "rawrueidis/" + name
		// A key that is there answers nil, which is an error here.
		if err := c.Do(ctx, c.B().Set().Key(key).Value(id).Nx().PxMilliseconds(ttl.Milliseconds()).Build()).Error(); err != nil {
			return held{}, err
		}
		return held{unlock: func(ctx context.Context) error {
			n, err := c.Do(ctx, c.B().Evalsha().Sha1(sha).Numkeys(1).Key(key).Arg(id).Build()).AsInt64()
			if err == nil && n != 1 {
				err = errNotHeld
			}
			return err
		}}, nil
	}}, nil
}

// openListRedis waits for the only element of a list: no lease, no token, but in order and woken by the server.
func openListRedis(ctx context.Context, s *server, _ time.Duration) (locker, error) {
	rdb := s.goRedis(redis.Options{Addr: s.url, PoolSize: 300, ContextTimeoutEnabled: true})
	// The first client that opens puts the element in.
	first, err := rdb.SetNX(ctx, "list/made", "1", 0).Result()
	if err == nil && first {
		err = rdb.LPush(ctx, "list", "1").Err()
	}
	if err != nil {
		return locker{}, errors.Join(err, rdb.Close())
	}
	return locker{close: rdb.Close, lock: func(ctx context.Context, _ string) (held, error) {
		for {
			err := rdb.BLPop(ctx, time.Second, "list").Err()
			switch {
			case err == nil:
				return held{unlock: func(ctx context.Context) error { return rdb.LPush(ctx, "list", "1").Err() }}, nil
			case !errors.Is(err, redis.Nil):
				return held{}, fmt.Errorf("BLPOP: %w", err)
			case ctx.Err() != nil:
				return held{}, ctx.Err()
			}
		}
	}}, nil
}
