// Package etcdbackend gives the conformance suite an etcd server, whatever that runs in, through driver/etcd. It is for
// the suite's runs on local processes and on containers.
package etcdbackend

import (
	"context"
	"crypto/rand"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/etcd"
)

// Run runs the suite on servers made by start, which also closes them by t.Cleanup. atOnce is as in
// conformance.Harness.
func Run(t *testing.T, provider string, atOnce int, start func(testing.TB) servers.Server) {
	shared := start(t)
	conformance.Run(t, conformance.Harness{
		Provider:  provider,
		AtOnce:    atOnce,
		New:       func(t testing.TB) *conformance.Backend { return backend(t, shared) },
		NewServer: func(t testing.TB) *conformance.Backend { return backend(t, start(t)) },
	})
}

// backend is a namespace of its own on the server.
func backend(t testing.TB, s servers.Server) *conformance.Backend {
	t.Helper()
	namespace := rand.Text()
	raw := newClient(t, s.Addr())
	t.Cleanup(func() { raw.Close() })
	connect := func(t testing.TB, addr string) driver.Driver {
		t.Helper()
		client := newClient(t, addr)
		d, err := etcd.New(client, &etcd.Options{Namespace: namespace})
		if err != nil {
			t.Fatalf("New: got %v, want nil", err)
		}
		return closer{d, client}
	}
	return &conformance.Backend{
		Driver: func(t testing.TB) driver.Driver { return connect(t, s.Addr()) },
		Unit:   etcd.MinTTL,
		URL:    "etcd://" + s.Addr() + "?namespace=" + namespace,
		Wired: func(t testing.TB) (driver.Driver, conformance.Wire) {
			p, err := servers.NewProxy(s.Addr())
			if err != nil {
				t.Fatalf("NewProxy: got %v, want nil", err)
			}
			t.Cleanup(func() { p.Close() })
			return connect(t, p.Addr()), wire{p, raw, namespace}
		},
		Server: s,
		// A keepalive goes out beside the transaction of the same batch, and leases are there for many locks.
		Requests: func(t testing.TB) int { return requests(t, s) },
		Leftovers: func(t testing.TB, n driver.Name) (left []string) {
			for key := range keys(t, raw, namespace+"/"+n.Kind.String()+"/"+strings.ReplaceAll(n.Name, "/", "%2F")+"/") {
				left = append(left, key)
			}
			return left
		},
		// No key lives for ever but the base, and the one that is written to get a revision (L7, T5).
		Audit: func(t testing.TB) {
			for key, lease := range keys(t, raw, namespace+"/") {
				if own := strings.TrimPrefix(key, namespace+"/"); lease == 0 && own != "base" && own != "mint" {
					t.Errorf("lease of %q: got none, want one (L7)", key)
				}
			}
		},
	}
}

// newClient makes a client as a driver opened by URL has it, but for the first request.
func newClient(t testing.TB, addr string) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{
		Endpoints:   []string{addr},
		DialTimeout: 5 * time.Second, DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 3 * time.Second,
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		})},
		Logger: zap.NewNop(),
	})
	if err != nil {
		t.Fatalf("new etcd client: %v", err)
	}
	return client
}

// closer closes the client with the driver, as one opened by URL does.
type closer struct {
	*etcd.Driver
	client *clientv3.Client
}

func (c closer) Close() error {
	defer c.client.Close()
	return c.Driver.Close()
}

// keys answers the keys with the prefix, and their leases.
func keys(t testing.TB, raw *clientv3.Client, prefix string) map[string]int64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()
	resp, err := raw.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		t.Fatalf("list keys: %v", err)
	}
	keys := make(map[string]int64)
	for _, kv := range resp.Kvs {
		keys[string(kv.Key)] = kv.Lease
	}
	return keys
}

// requests counts those about keys that the server has begun.
func requests(t testing.TB, s servers.Server) (sum int) {
	t.Helper()
	resp, err := http.Get("http://" + s.Addr() + "/metrics")
	if err != nil {
		t.Fatalf("metrics: %v", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("metrics: %v", err)
	}
	for _, m := range started.FindAllSubmatch(text, -1) {
		v, err := strconv.ParseFloat(string(m[1]), 64)
		if err != nil {
			t.Fatalf("metrics: %v", err)
		}
		sum += int(v)
	}
	return sum
}

var started = regexp.MustCompile(`(?m)^grpc_server_started_total\{grpc_method="(?:Txn|Range|Put|DeleteRange)".*\} (\S+)$`)

// patience is how long something may take that has no bound by law.
const patience = 20 * time.Second

// wire is a proxy that knows a reply when it sees one: over HTTP/2 a server says other things before, and a connection
// that ends then takes the request with it.
type wire struct {
	*servers.Proxy
	raw       *clientv3.Client
	namespace string
}

// DropNextReply loses the reply to the next request that changes an entry: replies are late meanwhile, so that the change
// is seen before.
func (w wire) DropNextReply(*servers.DropOptions) <-chan struct{} {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	changes := w.raw.Watch(ctx, w.namespace+"/", clientv3.WithPrefix(), clientv3.WithCreatedNotify())
	<-changes
	w.Delay(servers.ToClient, 500*time.Millisecond)
	acted := make(chan struct{})
	go func() {
		defer cancel()
		defer close(acted)
		for resp := range changes {
			for _, e := range resp.Events {
				if key := strings.TrimPrefix(string(e.Kv.Key), w.namespace+"/"); strings.HasPrefix(key, "lock/") || strings.HasPrefix(key, "semaphore/") {
					w.Drop(servers.ToClient)
					w.Reset()
					w.Pass(servers.ToClient)
					return
				}
			}
		}
	}()
	return acted
}
