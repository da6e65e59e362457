package redisguard_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
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
