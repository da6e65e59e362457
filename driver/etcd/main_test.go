package etcd

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/conformance/worker"
	"github.com/fencelock/fencelock/driver"
)

// patience is how long a test waits for what must happen soon.
const patience = 20 * time.Second

// shared is the server of the tests that do no harm to it.
var shared struct {
	sync.Mutex
	server *servers.Etcd
}

func TestMain(m *testing.M) {
	worker.Main()
	code := m.Run()
	if shared.server != nil {
		if err := shared.server.Close(); err != nil {
			fmt.Fprintln(os.Stderr, "stop etcd:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// binaryVariable names the environment variable with another etcd program to test against.
const binaryVariable = "FENCELOCK_ETCD"

// etcdArgs: a killed process loses nothing that it has written, and the tests are not about the disk.
func etcdArgs(args ...string) *servers.EtcdOptions {
	return &servers.EtcdOptions{Binary: os.Getenv(binaryVariable), Args: append([]string{"--unsafe-no-fsync"}, args...)}
}

func sharedServer(tb testing.TB) *servers.Etcd {
	tb.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil {
		s, err := servers.StartEtcd(context.Background(), etcdArgs())
		if err != nil {
			tb.Fatalf("start etcd: %v", err)
		}
		shared.server = s
	}
	return shared.server
}

func newServer(tb testing.TB, args ...string) *servers.Etcd {
	tb.Helper()
	return newCluster(tb, 1, args...).Members[0]
}

func newCluster(tb testing.TB, members int, args ...string) *servers.EtcdCluster {
	tb.Helper()
	c, err := servers.StartEtcdCluster(tb.Context(), members, etcdArgs(args...))
	if err != nil {
		tb.Fatalf("start etcd: %v", err)
	}
	tb.Cleanup(func() {
		if err := c.Close(); err != nil {
			tb.Errorf("stop etcd: %v", err)
		}
	})
	return c
}

// newProxy is between a client and a server, until the client is closed.
func newProxy(tb testing.TB, addr string) *servers.Proxy {
	tb.Helper()
	p, err := servers.NewProxy(addr)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { p.Close() })
	return p
}

// newClient makes a client as a driver opened by URL has it.
func newClient(tb testing.TB, addrs ...string) *clientv3.Client {
	tb.Helper()
	cfg := clientConfig()
	cfg.Endpoints = addrs
	c, err := clientv3.New(cfg)
	if err != nil {
		tb.Fatalf("new etcd client: %v", err)
	}
	tb.Cleanup(func() { c.Close() })
	return c
}

func newDriver(tb testing.TB, c *clientv3.Client, namespace string) *Driver {
	tb.Helper()
	d, err := New(c, &Options{Namespace: namespace})
	if err != nil {
		tb.Fatalf("New: got %v, want nil", err)
	}
	tb.Cleanup(func() { d.Close() })
	return d
}

// locks makes a client of fencelock.
func locks(tb testing.TB, d driver.Driver, opts ...fencelock.ClientOption) *fencelock.Client {
	tb.Helper()
	c, err := fencelock.New(d, opts...)
	if err != nil {
		tb.Fatalf("New: got %v, want nil", err)
	}
	tb.Cleanup(func() { c.Close() })
	return c
}

// fixture is a namespace of its own on a server, with the user's own client to look in.
type fixture struct {
	tb        testing.TB
	namespace string
	raw       *clientv3.Client
	addrs     []string
}

func onServer(tb testing.TB, s ...*servers.Etcd) *fixture {
	tb.Helper()
	var addrs []string
	for _, m := range s {
		addrs = append(addrs, m.Addr())
	}
	return &fixture{tb: tb, namespace: rand.Text(), raw: newClient(tb, addrs...), addrs: addrs}
}

// driver makes a driver on a client of its own.
func (f *fixture) driver() *Driver {
	f.tb.Helper()
	return newDriver(f.tb, newClient(f.tb, f.addrs...), f.namespace)
}

func request(kind driver.Kind, name string, ttl time.Duration) driver.Request {
	return driver.Request{Owner: driver.Owner{Name: driver.Name{Kind: kind, Name: name}, ID: rand.Text()}, TTL: ttl, Limit: 1}
}

func lockOf(name string, ttl time.Duration) driver.Request {
	return request(driver.KindLock, name, ttl)
}

func waiting(r driver.Request) driver.Request {
	r.Wait, r.Claim = true, r.TTL/2
	return r
}

// asked makes the step Lock and checks how it stands.
func asked(tb testing.TB, d *Driver, r driver.Request, want driver.State) driver.Answer {
	tb.Helper()
	a, err := d.Lock(tb.Context(), r)
	if err != nil || a.State != want {
		tb.Fatalf("step Lock: got %v, %v, want %v", a.State, err, want)
	}
	return a
}

func given(tb testing.TB, d *Driver, o driver.Owner, want bool) {
	tb.Helper()
	found, err := d.Release(tb.Context(), o)
	if err != nil || found != want {
		tb.Fatalf("step Release: got %v, %v, want %v", found, err, want)
	}
}

func extended(tb testing.TB, d *Driver, o driver.Owner, ttl time.Duration, want driver.State) driver.Answer {
	tb.Helper()
	r := d.Extend(tb.Context(), []driver.Extension{{Owner: o, TTL: ttl}})[0]
	if r.Err != nil || r.State != want {
		tb.Fatalf("step Extend: got %v, %v, want %v", r.State, r.Err, want)
	}
	return r.Answer
}

// keys lists the keys of the namespace's queues.
func (f *fixture) keys(prefix string) (keys []string) {
	f.tb.Helper()
	resp, err := f.raw.Get(context.WithoutCancel(f.tb.Context()), f.namespace+"/"+prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		f.tb.Fatalf("list keys: %v", err)
	}
	for _, kv := range resp.Kvs {
		keys = append(keys, string(kv.Key))
	}
	return keys
}

// entryKey is the key of an owner's entry.
func (d *Driver) entryKey(o driver.Owner) string {
	kv, err := d.find(context.Background(), o, "")
	if err != nil || kv == nil {
		panic(fmt.Sprintf("entry of %v: got %v, %v, want one", o, kv, err))
	}
	return string(kv.Key)
}

// eventually waits until check answers nil.
func eventually(tb testing.TB, limit time.Duration, check func() error) {
	tb.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			tb.Fatalf("%v (waited %v)", err, limit)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// metrics reads the counters of a server that match, and adds them up.
func metrics(tb testing.TB, s *servers.Etcd, pattern string) (sum int) {
	tb.Helper()
	resp, err := http.Get("http://" + s.Addr() + "/metrics")
	if err != nil {
		tb.Fatalf("metrics: %v", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		tb.Fatalf("metrics: %v", err)
	}
	for _, m := range regexp.MustCompile(`(?m)^`+pattern+` (\S+)$`).FindAllSubmatch(text, -1) {
		v, err := strconv.ParseFloat(string(m[len(m)-1]), 64)
		if err != nil {
			tb.Fatalf("metrics: %v", err)
		}
		sum += int(v)
	}
	return sum
}

// proposals is how many raft proposals the server has applied.
func proposals(tb testing.TB, s *servers.Etcd) int {
	return metrics(tb, s, `etcd_server_proposals_applied_total`)
}

func is(tb testing.TB, what string, err, want error, law string) {
	tb.Helper()
	if !errors.Is(err, want) {
		tb.Fatalf("%s: got %v, want %v (%s)", what, err, want, law)
	}
}

// commit carries out a transaction.
type commit func() (*clientv3.TxnResponse, error)

// hookedKV has every transaction carried out by hook.
type hookedKV struct {
	clientv3.KV
	hook func(commit) (*clientv3.TxnResponse, error)
}

type hookedTxn struct {
	clientv3.Txn
	hook func(commit) (*clientv3.TxnResponse, error)
}

func (kv hookedKV) Txn(ctx context.Context) clientv3.Txn { return &hookedTxn{kv.KV.Txn(ctx), kv.hook} }

func (x *hookedTxn) If(cs ...clientv3.Cmp) clientv3.Txn     { x.Txn = x.Txn.If(cs...); return x }
func (x *hookedTxn) Then(ops ...clientv3.Op) clientv3.Txn   { x.Txn = x.Txn.Then(ops...); return x }
func (x *hookedTxn) Else(ops ...clientv3.Op) clientv3.Txn   { x.Txn = x.Txn.Else(ops...); return x }
func (x *hookedTxn) Commit() (*clientv3.TxnResponse, error) { return x.hook(x.Txn.Commit) }
