//go:build linux

package servers

import (
	"errors"
	"strconv"
	"testing"
	"time"
)

// TestRedisClock steps a server's clock: its time changes by as much, what expires by it does, and a restart keeps it.
func TestRedisClock(t *testing.T) {
	r := newRedis(t, &RedisOptions{Clock: true})
	ahead := func() time.Duration {
		t.Helper()
		reply, err := r.Do(t.Context(), "TIME")
		parts, ok := reply.([]any)
		if err != nil || !ok || len(parts) != 2 {
			t.Fatalf("TIME: got %v, %v, want two numbers", reply, err)
		}
		seconds, err := strconv.ParseInt(parts[0].(string), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return time.Until(time.Unix(seconds, 0)).Round(10 * time.Second)
	}
	if got := ahead(); got != 0 {
		t.Fatalf("clock at first: got %v ahead, want 0", got)
	}
	mustDo(t, r, "OK", "SET", "k", "v", "PX", "600000")
	for _, step := range []time.Duration{-time.Hour, 5 * time.Minute} {
		if err := r.SetClock(step); err != nil {
			t.Fatal(err)
		}
		if got := ahead(); got != step {
			t.Fatalf("clock after a step: got %v ahead, want %v", got, step)
		}
		mustDo(t, r, "v", "GET", "k")
	}
	if err := r.SetClock(11 * time.Minute); err != nil {
		t.Fatal(err)
	}
	mustDo(t, r, nil, "GET", "k")
	if err := errors.Join(r.Kill(), r.Start(t.Context())); err != nil {
		t.Fatal(err)
	}
	if got := ahead(); got < 10*time.Minute {
		t.Fatalf("clock after a restart: got %v ahead, want 11m", got)
	}
}

func TestRedisClockIsAnOption(t *testing.T) {
	if err := newRedis(t, nil).SetClock(0); !errors.Is(err, errNoClock) {
		t.Fatalf("SetClock without the option: got %v, want %v", err, errNoClock)
	}
}
