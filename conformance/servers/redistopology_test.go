//go:build linux

package servers

import (
	"context"
	"errors"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// TestRedisCluster moves a slot with its keys, hands a primary's part to its replica, and kills that.
func TestRedisCluster(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c, err := StartRedisCluster(ctx, 3, 1, &RedisOptions{Password: "pw", Args: []string{"--cluster-node-timeout", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	defer mustClose(t, c)
	slot, err := c.Slot(ctx, "{k}1")
	if err != nil {
		t.Fatal(err)
	}
	primary := func() *Redis {
		t.Helper()
		p, err := c.AwaitPrimary(ctx, slot)
		if err != nil {
			t.Fatalf("Primary of slot %d: %v", slot, err)
		}
		return p
	}
	from := primary()
	mustDo(t, from, "OK", "SET", "{k}1", "v")
	to := c.Nodes[0]
	if to == from {
		to = c.Nodes[1]
	}
	var between []string
	err = c.MigrateSlot(ctx, slot, to, func(moved bool) error {
		_, err := from.Do(ctx, "GET", "{k}1")
		_, other := to.Do(ctx, "GET", "{k}1")
		between = append(between, prefixOf(err)+" "+prefixOf(other))
		return nil
	})
	if err != nil || len(between) != 2 || between[0] != "nil MOVED" || between[1] != "ASK MOVED" {
		t.Fatalf("MigrateSlot: got %v, and from the old and the new primary %q, want nil MOVED, then ASK MOVED", err, between)
	}
	if got := primary(); got != to {
		t.Fatalf("Primary after MigrateSlot: got %s, want %s", got.Addr(), to.Addr())
	}
	mustDo(t, to, "v", "GET", "{k}1")

	replica, err := c.Replica(ctx, to)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Failover(ctx, replica); err != nil {
		t.Fatal(err)
	}
	if got := primary(); got != replica {
		t.Errorf("Primary after Failover: got %s, want %s", got.Addr(), replica.Addr())
	}
	mustDo(t, replica, "v", "GET", "{k}1")
	if err := poll(20*time.Second, func() error { return c.Healthy(ctx, 3) }); err != nil {
		t.Fatal(err)
	}

	// Now the one that was the primary is the replica, and the cluster decides by itself.
	if err := replica.Kill(); err != nil {
		t.Fatal(err)
	}
	if got := primary(); got != to {
		t.Errorf("Primary after Kill: got %s, want %s", got.Addr(), to.Addr())
	}
	if err := poll(20*time.Second, func() error { return c.Healthy(ctx, 2) }); err != nil {
		t.Errorf("cluster without one node: %v", err)
	}
	mustDo(t, to, "v", "GET", "{k}1")
	if err := replica.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if err := poll(20*time.Second, func() error { return c.Healthy(ctx, 3) }); err != nil {
		t.Errorf("cluster with all nodes again: %v", err)
	}
	if len(c.Addrs()) != 6 {
		t.Errorf("Addrs: got %v, want 6", c.Addrs())
	}
}

func prefixOf(err error) string {
	var refused *RedisError
	if errors.As(err, &refused) {
		return refused.Prefix
	}
	if err != nil {
		return err.Error()
	}
	return "nil"
}

// TestRedisSentinels loses a write by a failover after Detach, and none by one that is asked for.
func TestRedisSentinels(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s, err := StartRedisSentinels(ctx, &RedisSentinelOptions{Redis: RedisOptions{Password: `p "w"`}, SentinelPassword: `s "w"`})
	if err != nil {
		t.Fatal(err)
	}
	defer mustClose(t, s)
	first, err := s.Primary(ctx)
	if err != nil || first != s.Nodes[0] {
		t.Fatalf("Primary at the start: got %v, %v, want the first node", first, err)
	}
	if len(s.SentinelAddrs()) != 3 {
		t.Errorf("SentinelAddrs: got %v, want 3", s.SentinelAddrs())
	}
	mustDo(t, first, "OK", "SET", "kept", "1")
	if err := poll(5*time.Second, func() error { return linked(ctx, first, 2) }); err != nil {
		t.Fatal(err)
	}
	mustDo(t, s.Sentinels[0], "OK", "SENTINEL", "FAILOVER", RedisSentinelName)
	second, err := s.AwaitPrimary(ctx, first)
	if err != nil {
		t.Fatal(err)
	}
	mustDo(t, second, "1", "GET", "kept")
	if err := poll(20*time.Second, func() error { return linked(ctx, second, 2) }); err != nil {
		t.Fatalf("replicas of the new primary: %v", err)
	}

	if err := s.Detach(ctx); err != nil {
		t.Fatal(err)
	}
	mustDo(t, second, "OK", "SET", "lost", "1")
	if err := second.Kill(); err != nil {
		t.Fatal(err)
	}
	third, err := s.AwaitPrimary(ctx, second)
	if err != nil {
		t.Fatal(err)
	}
	mustDo(t, third, "1", "GET", "kept")
	mustDo(t, third, nil, "GET", "lost")
	if err := second.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if err := poll(20*time.Second, func() error { return linked(ctx, third, 2) }); err != nil {
		t.Errorf("replicas when all run again: %v", err)
	}
}

// TestRedisTopologiesRefuse asks for what cannot be started, and expects nothing to be left (see TestMain).
func TestRedisTopologiesRefuse(t *testing.T) {
	t.Parallel()
	bad := RedisOptions{Binary: "no-such-redis"}
	if c, err := StartRedisCluster(t.Context(), 3, 0, &bad); c != nil || !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("StartRedisCluster without the program: got %v, %v, want exec.ErrNotFound", c, err)
	}
	if s, err := StartRedisSentinels(t.Context(), &RedisSentinelOptions{Redis: bad}); s != nil || !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("StartRedisSentinels without the program: got %v, %v, want exec.ErrNotFound", s, err)
	}
	if c, err := StartRedisCluster(t.Context(), 0, 0, nil); c != nil || err == nil {
		t.Errorf("StartRedisCluster of no primaries: got %v, %v, want an error", c, err)
	}
	if s, err := StartRedisSentinels(t.Context(), &RedisSentinelOptions{DownAfter: -1}); s != nil || err == nil {
		t.Errorf("StartRedisSentinels with a negative time: got %v, %v, want an error", s, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if c, err := StartRedisCluster(ended, 2, 0, nil); c != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("StartRedisCluster with an ended context: got %v, %v, want context.Canceled", c, err)
	}
	if s, err := StartRedisSentinels(ended, nil); s != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("StartRedisSentinels with an ended context: got %v, %v, want context.Canceled", s, err)
	}
	broken := RedisOptions{Args: []string{"--no-such-option", "1"}}
	if s, err := StartRedisSentinels(t.Context(), &RedisSentinelOptions{Redis: broken}); s != nil || err == nil || !strings.Contains(err.Error(), "no-such-option") {
		t.Errorf("StartRedisSentinels that ends by itself: got %v, %v, want the end of its log", s, err)
	}
}

func mustClose(t *testing.T, s interface{ Close() error }) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Errorf("Close: got %v, want nil", err)
	}
}
