package goredis_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// withOldLock holds the lock of a name, and the key by which older code excludes, while fn runs. fn must end when its
// context does, after maxHold at the latest.
func withOldLock(ctx context.Context, locks fencelock.Locker, rdb redis.UniversalClient, name, key string, maxHold time.Duration,
	fn func(context.Context, *fencelock.Lease) error) error {
	return fencelock.Do(ctx, locks, name, func(ctx context.Context, lease *fencelock.Lease) error {
		mine := lease.Token().String() // no two holders have the same
		release := func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			const ifMine = `if redis.call("GET", KEYS[1]) == ARGV[1] then return redis.call("DEL", KEYS[1]) end return 0`
			_ = rdb.Eval(ctx, ifMine, []string{key}, mine).Err() // else it ends by itself
		}
		for {
			sent := time.Now()
			ok, err := rdb.SetNX(ctx, key, mine, maxHold).Result()
			if err != nil {
				release() // it may have been set
				return err
			}
			if ok {
				defer release()
				ctx, cancel := context.WithDeadline(ctx, sent.Add(maxHold-maxHold/100))
				defer cancel()
				return fn(ctx, lease)
			}
			select {
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	})
}

// TestOldCodeIsExcluded lets code that uses SET NX and code that uses withOldLock count together, without atomicity.
func TestOldCodeIsExcluded(t *testing.T) {
	server := redisbackend.GoRedis.Start(t)
	rdb := server.Client(t)
	d, err := goredis.New(rdb, nil)
	if err != nil {
		t.Fatal(err)
	}
	locks, err := fencelock.New(d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := locks.Close(); err != nil {
			t.Error(err)
		}
	})
	const key, name, each, rounds = "lock:report", "report", 3, 10
	var inside, count atomic.Int32
	work := func() {
		if n := inside.Add(1); n != 1 {
			t.Errorf("holders: got %d at a time, want 1 (L1)", n)
		}
		time.Sleep(time.Millisecond)
		count.Add(1)
		inside.Add(-1)
	}
	old := func() error {
		id := redisbackend.NewID()
		for {
			ok, err := rdb.SetNX(t.Context(), key, id, time.Minute).Result()
			if err != nil {
				return err
			}
			if ok {
				break
			}
			time.Sleep(time.Millisecond)
		}
		work()
		return rdb.Eval(t.Context(), redisbackend.CompareAndDelete, []string{key}, id).Err()
	}
	young := func() error {
		return withOldLock(t.Context(), locks, rdb, name, key, time.Minute, func(context.Context, *fencelock.Lease) error {
			work()
			return nil
		})
	}
	results := make(chan error)
	for range each {
		for _, way := range []func() error{old, young} {
			go func() {
				var all error
				for range rounds {
					all = errors.Join(all, way())
				}
				results <- all
			}()
		}
	}
	for range 2 * each {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	if n := count.Load(); n != 2*each*rounds {
		t.Errorf("turns: got %d, want %d", n, 2*each*rounds)
	}
	if n := rdb.Exists(t.Context(), key).Val(); n != 0 {
		t.Errorf("key of the old lock in the end: got it, want it gone (L7)")
	}
}
