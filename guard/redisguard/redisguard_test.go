package redisguard_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/guard/guardtest"
	"github.com/fencelock/fencelock/guard/redisguard"
)

func startRedis(t *testing.T, args ...string) *servers.Redis {
	t.Helper()
	s, err := servers.StartRedis(t.Context(), &servers.RedisOptions{Args: args})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func newClient(t testing.TB, s *servers.Redis) *redis.Client {
	c := redis.NewClient(&redis.Options{Addr: s.Addr()})
	t.Cleanup(func() { c.Close() })
	return c
}

// value is a resource that is a string.
type value struct {
	c   *redis.Client
	key string
}

func (v value) Write(ctx context.Context, t guard.Token, text string) error {
	return redisguard.New(v.c).Do(ctx, t, "SET", v.key, text).Err()
}

func (v value) Raise(ctx context.Context, t guard.Token) error {
	return redisguard.New(v.c).Raise(ctx, t, v.key)
}

func (v value) Read(ctx context.Context) (string, error) {
	text, err := v.c.Get(ctx, v.key).Result()
	if errors.Is(err, redis.Nil) {
		err = nil
	}
	return text, err
}

// pair is a resource of two keys that a script writes.
type pair struct{ value }

var write = redisguard.NewScript(`
if #KEYS ~= 2 or #ARGV ~= 1 then return redis.error_reply('ERR keys ' .. #KEYS .. ' arguments ' .. #ARGV) end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], 'value', ARGV[1])`)

func (p pair) other() string { return p.key + "/hash" }

func (p pair) Write(ctx context.Context, t guard.Token, text string) error {
	err := redisguard.New(p.c).Run(ctx, t, write, []string{p.key, p.other()}, text).Err()
	if errors.Is(err, redis.Nil) {
		err = nil // the script returns nothing
	}
	return err
}

func (p pair) Read(ctx context.Context) (string, error) {
	text, err := p.value.Read(ctx)
	other, _ := p.c.HGet(ctx, p.other(), "value").Result()
	if err == nil && other != text {
		err = fmt.Errorf("the hash holds %q, the string %q", other, text)
	}
	return text, err
}

func TestGuard(t *testing.T) {
	s := startRedis(t, "--appendonly", "yes", "--appendfsync", "always")
	for name, open := range map[string]func(value) guardtest.Writer{
		"Command": func(v value) guardtest.Writer { return v },
		"Script":  func(v value) guardtest.Writer { return pair{v} },
	} {
		t.Run(name, func(t *testing.T) {
			guardtest.Run(t, guardtest.Harness{
				Open: func(t testing.TB, resource string) guardtest.Writer {
					return open(value{newClient(t, s), resource})
				},
				Restart: func(t testing.TB) {
					if err := errors.Join(s.Kill(), s.Start(t.Context())); err != nil {
						t.Fatal(err)
					}
				},
			})
		})
	}
}

// TestOneRoundTrip counts what the server was asked.
func TestOneRoundTrip(t *testing.T) {
	s := startRedis(t)
	c := newClient(t, s)
	g := redisguard.New(c)
	set := func(token guard.Token) {
		if err := g.Do(t.Context(), token, "SET", "a", "1").Err(); err != nil {
			t.Fatal(err)
		}
	}
	set(1) // the server learns the script
	const writes = 10
	before := requests(t, c)
	for i := range writes {
		set(guard.Token(i + 2))
	}
	if got := requests(t, c) - before; got != writes+1 { // the asking counts as well
		t.Fatalf("requests for %d guarded writes: got %d, want as many", writes, got-1)
	}
}

func requests(t *testing.T, c *redis.Client) (n int) {
	t.Helper()
	info, err := c.Info(t.Context(), "commandstats").Result()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(info) {
		for _, command := range []string{"eval", "evalsha", "info", "script|load"} {
			var calls int
			if _, err := fmt.Sscanf(line, "cmdstat_"+command+":calls=%d,", &calls); err == nil {
				n += calls
			}
		}
	}
	return n
}

// TestFailures leaves the key alone.
func TestFailures(t *testing.T) {
	s := startRedis(t)
	c := newClient(t, s)
	g := redisguard.New(c)
	for name, test := range map[string]struct {
		run  func() error
		want string
	}{
		"NoKeys":        {func() error { return g.Run(t.Context(), 1, write, nil).Err() }, driver.ErrInvalid.Error()},
		"EmptyKey":      {func() error { return g.Raise(t.Context(), 1, "") }, driver.ErrInvalid.Error()},
		"ForeignMark":   {func() error { c.Set(t.Context(), redisguard.MarkKey("m"), "x", 0); return g.Raise(t.Context(), 1, "m") }, "FENCELOCKGUARD"},
		"ForeignType":   {func() error { c.LPush(t.Context(), redisguard.MarkKey("l"), "x"); return g.Raise(t.Context(), 1, "l") }, "WRONGTYPE"},
		"NoSuchCommand": {func() error { return g.Do(t.Context(), 1, "NOSUCH", "c").Err() }, "nknown"},
		"ScriptFails": {func() error {
			return g.Run(t.Context(), 1, redisguard.NewScript("return redis.error_reply('MINE went wrong')"), []string{"s"}).Err()
		}, "MINE went wrong"},
	} {
		t.Run(name, func(t *testing.T) {
			err := test.run()
			if err == nil || !strings.Contains(err.Error(), test.want) || errors.Is(err, guard.ErrStale) {
				t.Fatalf("got %v, want an error with %q that is not ErrStale", err, test.want)
			}
		})
	}
}

// TestKeysOfTheCallerStay: their room is not written to.
func TestKeysOfTheCallerStay(t *testing.T) {
	s := startRedis(t)
	g := redisguard.New(newClient(t, s))
	keys, args := [...]string{"a", "b", "kept"}, [...]any{"1", "kept"}
	if err := g.Run(t.Context(), 1, write, keys[:2], args[:1]...).Err(); err != nil && !errors.Is(err, redis.Nil) {
		t.Fatal(err)
	}
	if keys[2] != "kept" || args[1] != "kept" {
		t.Fatalf("behind the slices of the caller: got %q and %q, want both as they were", keys[2], args[1])
	}
}

func TestMarkKey(t *testing.T) {
	seen := make(map[string]string)
	for _, key := range []string{"k", "{k}", "{k}:", "k}", "{", "{}", "a{}b", "a{b}c", "b", "b}:a{b}c", "a{b}", "b}:a{b", "{b}:a{b}c", "{k}:{k}", "}k{"} {
		mark := redisguard.MarkKey(key)
		if other, ok := seen[mark]; ok {
			t.Errorf("mark of %q: got %q, the same as that of %q", key, mark, other)
		}
		seen[mark] = key
	}
	for key, want := range map[string]string{"orders/7": "fencelock-guard:{orders/7}", "a{b}c": "fencelock-guard:{b}:a{b}c."} {
		if got := redisguard.MarkKey(key); got != want {
			t.Errorf("mark of %q: got %q, want %q", key, got, want)
		}
	}
}

func newLocks(t *testing.T, c *redis.Client) *fencelock.Client {
	t.Helper()
	d, err := goredis.New(c, nil)
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
	return locks
}

// TestWriteWithTheLock takes locks and writes in one request.
func TestWriteWithTheLock(t *testing.T) {
	s := startRedis(t)
	c := newClient(t, s)
	g, locks, rivals := redisguard.New(c), newLocks(t, c), newLocks(t, newClient(t, s))
	ctx := t.Context()
	holds := func(key, want string) {
		t.Helper()
		if got, err := c.Get(ctx, key).Result(); err != nil || got != want {
			t.Fatalf("%s: got %q, %v, want %q", key, got, err, want)
		}
	}
	take := func(option fencelock.Option) *fencelock.Lease {
		t.Helper()
		l, err := locks.TryLock(ctx, "a", option)
		if err != nil {
			t.Fatalf("TryLock that writes: got %v, want nil", err)
		}
		return l
	}
	release := func(l *fencelock.Lease) {
		t.Helper()
		if err := errors.Join(l.Extend(ctx, time.Minute), l.Release(ctx)); err != nil {
			t.Fatalf("Extend and Release of a lease that was taken so: got %v, want nil", err)
		}
	}

	first := take(redisguard.Write("SET", "state", "first")) // the server learns the scripts
	release(first)
	before := requests(t, c)
	second := take(redisguard.Write("SET", "state", "second"))
	if got := requests(t, c) - before - 1; got != 1 { // the asking counts as well
		t.Errorf("requests of a TryLock that writes: got %d, want 1 (W2)", got)
	}
	holds("state", "second")
	holds(redisguard.MarkKey("state"), fmt.Sprintf("%016d", uint64(second.Token())))
	if err := g.Do(ctx, first.Token(), "SET", "state", "late").Err(); !errors.Is(err, guard.ErrStale) {
		t.Errorf("write of the former holder: got %v, want ErrStale", err)
	}
	if _, err := rivals.TryLock(ctx, "a", redisguard.Write("SET", "state", "rival")); !errors.Is(err, fencelock.ErrHeld) {
		t.Errorf("TryLock that writes while held: got %v, want ErrHeld (L1)", err)
	}
	holds("state", "second")
	if err := g.Do(ctx, second.Token(), "SET", "state", "more").Err(); err != nil {
		t.Errorf("a further write of the holder: got %v, want nil", err)
	}
	release(second)

	third := take(redisguard.WriteScript(write, []string{"state", "hash"}, "third"))
	holds("state", "third")
	if err := g.Do(ctx, second.Token(), "SET", "state", "late").Err(); !errors.Is(err, guard.ErrStale) {
		t.Errorf("write of the former holder: got %v, want ErrStale", err)
	}
	release(third)

	// A write that fails, and one that is stale, leave no lock.
	for want, key := range map[string]string{"WRONGTYPE": "hash", "stale": "marked"} {
		if err := g.Raise(ctx, third.Token()+guard.Token(time.Hour/time.Microsecond), "marked"); err != nil {
			t.Fatal(err)
		}
		_, err := locks.TryLock(ctx, "a", redisguard.Write("APPEND", key, "x"))
		if !errors.Is(err, fencelock.ErrUnavailable) || !strings.Contains(err.Error(), want) || errors.Is(err, guard.ErrStale) != (want == "stale") {
			t.Errorf("TryLock whose write fails: got %v, want ErrUnavailable with %s", err, want)
		}
		l, err := rivals.TryLock(ctx, "a")
		if err != nil {
			t.Fatalf("TryLock after one whose write failed: got %v, want nil (L7)", err)
		}
		release(l)
	}
	if got := c.Exists(ctx, "marked").Val(); got != 0 {
		t.Error("a stale write was done")
	}

	for what, option := range map[string]fencelock.Option{
		"no keys":   redisguard.WriteScript(write, nil),
		"empty key": redisguard.Write("SET", "", "x"),
	} {
		if _, err := locks.TryLock(ctx, "a", option); !errors.Is(err, fencelock.ErrInvalid) {
			t.Errorf("TryLock with a write of %s: got %v, want ErrInvalid", what, err)
		}
	}
}

// TestWriteOnce lets the client library repeat a request that took the lock and wrote, and whose reply was lost.
func TestWriteOnce(t *testing.T) {
	s := startRedis(t)
	p, err := servers.NewProxy(s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	repeating := redis.NewClient(&redis.Options{Addr: p.Addr(), MaxRetries: 3})
	t.Cleanup(func() { repeating.Close() })
	locks, c := newLocks(t, repeating), newClient(t, s)
	if _, err := locks.TryLock(t.Context(), "warm", redisguard.Write("INCR", "other")); err != nil {
		t.Fatal(err) // the server knows the scripts now
	}
	dropped := p.DropNextReply(&servers.DropOptions{RequestWith: redisguard.MarkKey("count")})
	l, err := locks.TryLock(t.Context(), "a", redisguard.Write("INCR", "count"))
	if err != nil {
		t.Fatalf("TryLock whose first reply was lost: got %v, want nil (L5)", err)
	}
	<-dropped
	if got := c.Get(t.Context(), "count").Val(); got != "1" {
		t.Errorf("writes of a request that was repeated: got %s, want 1 (L5)", got)
	}
	if got, want := c.Get(t.Context(), redisguard.MarkKey("count")).Val(), fmt.Sprintf("%016d", uint64(l.Token())); got != want {
		t.Errorf("mark after a request that was repeated: got %s, want the lease's token, %s (T3)", got, want)
	}
}
