package goredis_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// cluster is a Redis Cluster of one test.
type cluster struct{ *servers.RedisCluster }

// startCluster runs three primaries that share all slots, with so many replicas each.
func startCluster(t testing.TB, replicas int, args ...string) cluster {
	t.Helper()
	return cluster{redisbackend.StartCluster(t, replicas, args...)}
}

func (c cluster) nodes() (nodes []server) {
	for _, n := range c.Nodes {
		nodes = append(nodes, server{n})
	}
	return nodes
}

func (c cluster) client(t testing.TB) *redis.ClusterClient {
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs()})
	t.Cleanup(func() { client.Close() })
	return client
}

// url opens a driver on the cluster.
func (c cluster) url() string { return "redis+cluster://" + strings.Join(c.Addrs(), ",") }

// slot answers where the keys of a name are.
func (c cluster) slot(t testing.TB, n driver.Name) int {
	t.Helper()
	slot, err := c.Slot(t.Context(), "fencelock:l:{"+n.Name+"}")
	if err != nil {
		t.Fatal(err)
	}
	return slot
}

// primary answers who serves the name.
func (c cluster) primary(t testing.TB, n driver.Name) server {
	t.Helper()
	p, err := c.AwaitPrimary(t.Context(), c.slot(t, n))
	if err != nil {
		t.Fatal(err)
	}
	return server{p}
}

type driverOf = goredis.Driver

// openDriver opens a driver by URL.
func openDriver(t testing.TB, url string) *goredis.Driver {
	t.Helper()
	d, err := driver.Open(t.Context(), url)
	if err != nil {
		t.Fatalf("Open %s: got %v, want nil", url, err)
	}
	t.Cleanup(func() { d.Close() })
	return d.(*goredis.Driver)
}

// TestClusterCost counts the requests of a handover at many names, which are on all nodes (W2).
func TestClusterCost(t *testing.T) {
	t.Parallel()
	c := startCluster(t, 0)
	const names = 30
	ctx := t.Context()
	holder, waiter := openClient(t, c.url(), fencelock.WithTTL(time.Minute)), openClient(t, c.url(), fencelock.WithTTL(time.Minute))
	scripts := func() (sum int) {
		for _, s := range c.nodes() {
			commands := s.commands(t)
			sum += commands["evalsha"] + commands["eval"]
		}
		return sum
	}
	var held []*fencelock.Lease
	for i := range names {
		l, err := holder.Lock(ctx, fmt.Sprint(i))
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, l)
	}
	got := make(chan error, names)
	var queued sync.WaitGroup
	for i := range names {
		queued.Go(func() {
			l, err := waiter.Lock(ctx, fmt.Sprint(i))
			if err == nil {
				err = l.Release(context.WithoutCancel(ctx))
			}
			got <- err
		})
	}
	eventually(t, "a subscription for each name", func() bool {
		channels := 0
		for _, s := range c.nodes() {
			list, _ := s.do(t, "PUBSUB", "SHARDCHANNELS").([]any)
			channels += len(list)
		}
		return channels == names
	})
	before := scripts()
	for _, l := range held {
		if err := l.Release(ctx); err != nil {
			t.Errorf("Release: got %v, want nil", err)
		}
	}
	for range names {
		if err := <-got; err != nil {
			t.Errorf("Lock and Release by a waiter: got %v, want nil", err)
		}
	}
	queued.Wait()
	// A release each. What else a waiter may send meanwhile: the poll after its subscription stood, and one that fell due.
	if sent := scripts() - before; sent < 2*names || sent > 4*names {
		t.Errorf("requests for %d handovers on a Cluster: got %d, want %d, and at most two polls for each (W2)", names, sent, 2*names)
	}
}

// openClient opens a client, and closes it in the end.
func openClient(t testing.TB, url string, opts ...fencelock.ClientOption) *fencelock.Client {
	t.Helper()
	c, err := fencelock.Open(t.Context(), url, opts...)
	if err != nil {
		t.Fatalf("Open %s: got %v, want nil", url, err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
