// Package redisbackend is what the tests of the drivers for Redis share: a Redis or Valkey server for the conformance
// suite, whatever that runs in, and the tests of what such a server does to a driver, whatever client library that
// uses.
package redisbackend

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	client "github.com/redis/rueidis"

	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/driver/rueidis"
)

// Driver is a driver for Redis.
type Driver struct {
	// Scheme is that of its URLs; with an s after it they are for TLS.
	Scheme string
	// Connect makes a driver with a client of its own, as it would be if it were opened by URL, and closes both in the
	// end.
	Connect func(tb testing.TB, o Options) Full
}

// Options are those of a driver and its client.
type Options struct {
	Addr, Username, Password string
	Cluster                  []string      // addresses of nodes, in place of Addr
	Sentinels                []string      // addresses of sentinels without a password, in place of Addr
	Namespace                string        // empty for the default
	RESP2                    bool          // speak the older protocol
	Timeout                  time.Duration // how long an answer may take; zero for the default
	// Dial connects to a node of a Cluster; nil for the client's own way.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
}

// Full is a driver with all that drivers for Redis claim.
type Full interface {
	driver.Driver
	driver.Semaphore
	driver.FencingSource
	driver.Queue
	driver.Notifier
	driver.Lister
	driver.ForceUnlocker
	driver.Writer
}

// GoRedis is driver/goredis.
var GoRedis = Driver{"redis", func(tb testing.TB, o Options) Full {
	var client redis.UniversalClient = newClient(o)
	if o.Cluster != nil {
		options := &redis.ClusterOptions{Addrs: o.Cluster, Username: o.Username, Password: o.Password,
			Protocol: o.protocol(), ReadTimeout: o.Timeout, ContextTimeoutEnabled: true}
		if o.Dial != nil {
			options.Dialer = func(ctx context.Context, _, addr string) (net.Conn, error) { return o.Dial(ctx, addr) }
		}
		client = redis.NewClusterClient(options)
	}
	if o.Sentinels != nil {
		client = redis.NewFailoverClient(&redis.FailoverOptions{MasterName: servers.RedisSentinelName, SentinelAddrs: o.Sentinels})
	}
	d, err := goredis.New(client, &goredis.Options{Namespace: o.Namespace})
	if err != nil {
		tb.Fatalf("New: got %v, want nil", err)
	}
	tb.Cleanup(func() {
		d.Close()
		client.Close()
	})
	return d
}}

// newClient is as the driver's own would be if it were opened by URL.
func newClient(o Options) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: o.Addr, Username: o.Username, Password: o.Password, Protocol: o.protocol(),
		ReadTimeout: o.Timeout, ContextTimeoutEnabled: true, MaxRetries: -1})
}

func (o Options) protocol() int {
	if o.RESP2 {
		return 2
	}
	return 3
}

// Rueidis is driver/rueidis.
var Rueidis = Driver{"rueidis", func(tb testing.TB, o Options) Full {
	tb.Helper()
	client, err := NewRueidis(o)
	if err != nil {
		tb.Fatalf("NewClient: got %v, want nil", err)
	}
	d, err := rueidis.New(client, &rueidis.Options{Namespace: o.Namespace})
	if err != nil {
		tb.Fatalf("New: got %v, want nil", err)
	}
	both := owning{d, client}
	tb.Cleanup(func() { both.Close() })
	return both
}}

// NewRueidis makes a client as the driver's own would be if it were opened by URL.
func NewRueidis(o Options) (client.Client, error) {
	addrs := []string{o.Addr}
	if o.Cluster != nil {
		addrs = o.Cluster[:1] // with several, a client that is closed soon leaves connections behind
	}
	var sentinel client.SentinelOption
	if o.Sentinels != nil {
		addrs, sentinel.MasterSet = o.Sentinels, servers.RedisSentinelName
	}
	var dial func(context.Context, string, *net.Dialer, *tls.Config) (net.Conn, error)
	if o.Dial != nil {
		dial = func(ctx context.Context, addr string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
			return o.Dial(ctx, addr)
		}
	}
	return client.NewClient(client.ClientOption{
		Sentinel: sentinel, DialCtxFn: dial,
		InitAddress: addrs, Username: o.Username, Password: o.Password, AlwaysRESP2: o.RESP2,
		ConnWriteTimeout: cmp.Or(o.Timeout, 3*time.Second), DisableCache: true, DisableRetry: true, AlwaysPipelining: true,
		ForceSingleClient: o.Cluster == nil && o.Sentinels == nil,
	})
}

// owning is a driver that closes its client as well: that has goroutines of its own.
type owning struct {
	*rueidis.Driver
	client client.Client
}

// Close implements driver.Driver.
func (o owning) Close() error {
	defer o.client.Close()
	return o.Driver.Close()
}

// Run runs the suite on servers made by start, which also closes them by t.Cleanup. atOnce is as in
// conformance.Harness.
func (b Driver) Run(t *testing.T, provider string, atOnce int, start func(testing.TB) servers.Server) {
	shared := start(t)
	conformance.Run(t, conformance.Harness{
		Provider:  provider,
		AtOnce:    atOnce,
		New:       func(t testing.TB) *conformance.Backend { return b.backend(shared) },
		NewServer: func(t testing.TB) *conformance.Backend { return b.backend(start(t)) },
	})
}

// RunCluster runs the suite on a Cluster. What Run does to its server it does not do to this one: the driver's own
// tests do that.
func (b Driver) RunCluster(t *testing.T, provider string, c *servers.RedisCluster) {
	conformance.Run(t, conformance.Harness{
		Provider: provider,
		New: func(t testing.TB) *conformance.Backend {
			namespace := rand.Text()
			var clients atomic.Int64
			back := &conformance.Backend{
				Driver: func(t testing.TB) driver.Driver {
					return b.Connect(t, Options{Cluster: c.Addrs(), Namespace: namespace, RESP2: clients.Add(1)%2 == 0})
				},
				URL: b.Scheme + "+cluster://" + strings.Join(c.Addrs(), ",") + "?namespace=" + namespace,
			}
			var nodes []servers.Server
			for _, n := range c.Nodes {
				nodes = append(nodes, n)
			}
			look(back, namespace, nodes)
			return back
		},
		Skips: map[conformance.Need]string{
			conformance.Server:   "driver/goredis.TestClusterFailover and TestSlotMigration do to a Cluster what happens to one",
			conformance.Requests: "nodes that all tests share cannot tell them apart; driver/goredis.TestClusterCost counts",
			conformance.Wired:    "driver/goredis.TestClusterLostReply disturbs the network",
		},
	})
}

// backend is a namespace of its own on the server.
func (b Driver) backend(s servers.Server) *conformance.Backend {
	namespace := rand.Text()
	var clients atomic.Int64
	connect := func(t testing.TB, addr string) driver.Driver {
		return b.Connect(t, Options{Addr: addr, Namespace: namespace, RESP2: clients.Add(1)%2 == 0}) // RESP 2 and 3 in turn
	}
	back := &conformance.Backend{
		Driver: func(t testing.TB) driver.Driver { return connect(t, s.Addr()) },
		URL:    b.Scheme + "://" + s.Addr() + "/0?namespace=" + namespace,
		Wired: func(t testing.TB) (driver.Driver, conformance.Wire) {
			proxy, err := servers.NewProxy(s.Addr())
			if err != nil {
				t.Fatalf("NewProxy: got %v, want nil", err)
			}
			t.Cleanup(func() { proxy.Close() })
			return connect(t, proxy.Addr()), conformance.StepsOnly(proxy, namespace+":")
		},
		Server: s,
		Requests: func(t testing.TB) int {
			commands := Commands(t, s)
			return commands["eval"] + commands["evalsha"]
		},
	}
	look(back, namespace, []servers.Server{s})
	return back
}

// look lets the suite see the keys of a namespace on the servers that share them.
func look(b *conformance.Backend, namespace string, nodes []servers.Server) {
	b.Leftovers = func(t testing.TB, n driver.Name) (left []string) {
		for _, s := range nodes {
			left = append(left, Leftovers(t, s, namespace, n)...)
		}
		return left
	}
	b.Audit = func(t testing.TB) {
		for _, s := range nodes {
			Audit(t, s, namespace)
		}
	}
}

// Keys lists the keys of a namespace on the server.
func Keys(t testing.TB, s servers.Server, namespace string) []string {
	t.Helper()
	return query(t, s, func(ctx context.Context, c *redis.Client) ([]string, error) {
		return c.Keys(ctx, namespace+":*").Result()
	})
}

// Leftovers lists the keys of the name on the server but for that of its last token.
func Leftovers(t testing.TB, s servers.Server, namespace string, n driver.Name) (left []string) {
	t.Helper()
	kind := map[driver.Kind]string{driver.KindLock: "l", driver.KindPermit: "p"}[n.Kind]
	for _, key := range Keys(t, s, namespace) {
		part, _, _ := strings.Cut(strings.TrimPrefix(key, namespace+":"), ":")
		if strings.HasPrefix(part, kind) && part != kind+"f" && strings.HasSuffix(key, "{"+n.Name+"}") {
			left = append(left, key)
		}
	}
	return left
}

// Audit looks for keys that live for ever (L7, T5).
func Audit(t testing.TB, s servers.Server, namespace string) {
	t.Helper()
	for _, key := range Keys(t, s, namespace) {
		left := query(t, s, func(ctx context.Context, c *redis.Client) (int64, error) {
			return c.Do(ctx, "PTTL", key).Int64()
		})
		if left == -1 {
			t.Errorf("PTTL %q: got none, want an expiry (L7)", key)
		}
	}
}

// query asks the server over a connection of its own, once more if a fault of the test broke it.
func query[T any](t testing.TB, s servers.Server, ask func(context.Context, *redis.Client) (T, error)) T {
	t.Helper()
	client := newClient(Options{Addr: s.Addr()})
	defer client.Close()
	ctx := context.WithoutCancel(t.Context())
	answer, err := ask(ctx, client)
	if errors.Is(err, io.EOF) {
		answer, err = ask(ctx, client)
	}
	if err != nil {
		t.Fatalf("question to the server: got %v, want an answer", err)
	}
	return answer
}

// Commands counts what the server has executed, by command, in scripts as well as sent by a client.
func Commands(t testing.TB, s servers.Server) map[string]int {
	t.Helper()
	stats := query(t, s, func(ctx context.Context, c *redis.Client) (string, error) {
		return c.Info(ctx, "commandstats").Result()
	})
	counts := make(map[string]int)
	for line := range strings.Lines(stats) {
		name, rest, _ := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
		calls, _, _ := strings.Cut(rest, ",")
		if n, err := strconv.Atoi(calls); err == nil {
			counts[name] = n
		}
	}
	return counts
}
