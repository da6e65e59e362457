// Package redlockbackend is what the tests of driver/redlock share: five masters for the conformance suite, whatever they
// run in, with nodes of both client libraries in one driver.
package redlockbackend

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	goclient "github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/driver/redlock"
	"github.com/fencelock/fencelock/driver/rueidis"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// Masters are independent servers.
type Masters []servers.Server

// Start runs as many servers as local processes, and closes them in the end.
func Start(tb testing.TB, count int, o *servers.RedisOptions) Masters {
	tb.Helper()
	m := make(Masters, count)
	var all sync.WaitGroup
	for i := range m {
		all.Go(func() {
			s, err := servers.StartRedis(tb.Context(), o)
			if err != nil {
				tb.Errorf("start redis: %v", err)
				return
			}
			m[i] = s
		})
	}
	all.Wait()
	tb.Cleanup(func() {
		for _, s := range m {
			if s != nil {
				if err := s.Close(); err != nil {
					tb.Errorf("stop redis: %v", err)
				}
			}
		}
	})
	if tb.Failed() {
		tb.FailNow()
	}
	return m
}

// Addrs are the addresses of the servers.
func (m Masters) Addrs() (addrs []string) {
	for _, s := range m {
		addrs = append(addrs, s.Addr())
	}
	return addrs
}

// Driver makes a driver whose nodes are at the addresses, every second one through rueidis, and which closes its clients.
func Driver(tb testing.TB, addrs []string, o *redlock.Options) *Owning {
	tb.Helper()
	return DriverOf(tb, addrs, "", "", o)
}

// DriverOf is Driver for a user of the servers.
func DriverOf(tb testing.TB, addrs []string, user, password string, o *redlock.Options) *Owning {
	tb.Helper()
	d := new(Owning)
	var nodes []redlock.Node
	for i, addr := range addrs {
		var n redlock.Node
		var err error
		if i%2 == 0 {
			c := goclient.NewClient(&goclient.Options{Addr: addr, Username: user, Password: password,
				ContextTimeoutEnabled: true, MaxRetries: -1})
			d.finish = append(d.finish, func() { c.Close() })
			n, err = goredis.NewNode(c)
		} else {
			c, failed := redisbackend.NewRueidis(redisbackend.Options{Addr: addr, Username: user, Password: password})
			if failed != nil {
				tb.Fatalf("NewClient: got %v, want nil", failed)
			}
			d.finish = append(d.finish, c.Close)
			n, err = rueidis.NewNode(c, addr)
		}
		if err != nil {
			tb.Fatalf("NewNode: got %v, want nil", err)
		}
		nodes = append(nodes, n)
	}
	var err error
	if d.Driver, err = redlock.New(nodes, o); err != nil {
		tb.Fatalf("New: got %v, want nil", err)
	}
	tb.Cleanup(func() { d.Close() })
	return d
}

// Owning is a driver that closes its clients as well.
type Owning struct {
	*redlock.Driver
	finish []func()
	once   sync.Once
}

// Close implements driver.Driver.
func (o *Owning) Close() error {
	err := o.Driver.Close()
	o.once.Do(func() {
		for _, f := range o.finish {
			f()
		}
	})
	return err
}

// Run runs the suite on masters made by start, which also closes them by t.Cleanup. atOnce is as in conformance.Harness.
func Run(t *testing.T, provider string, atOnce int, start func(testing.TB) Masters) {
	shared := start(t)
	conformance.Run(t, conformance.Harness{
		Provider:  provider,
		AtOnce:    atOnce,
		New:       func(t testing.TB) *conformance.Backend { return backend(shared) },
		NewServer: func(t testing.TB) *conformance.Backend { return backend(start(t)) },
		Skips: map[conformance.Need]string{
			conformance.Queueing: "there is no queue that all nodes agree on; the driver wakes a waiter and lets it try",
			conformance.Pushes:   "there is no queue",
		},
	})
}

// backend is a namespace of its own on the masters.
func backend(m Masters) *conformance.Backend {
	namespace := rand.Text()
	// A busy machine may be slow; the client libraries give up after 3 s.
	options := &redlock.Options{Namespace: namespace, NodeTimeout: 5 * time.Second}
	return &conformance.Backend{
		Driver:     func(t testing.TB) driver.Driver { return Driver(t, m.Addrs(), options) },
		TokenAhead: time.Minute,
		URL:        "redlock://" + strings.Join(m.Addrs(), ",") + "?node_timeout=5s&namespace=" + namespace,
		Wired: func(t testing.TB) (driver.Driver, conformance.Wire) {
			var w wires
			var addrs []string
			for _, s := range m {
				p, err := servers.NewProxy(s.Addr())
				if err != nil {
					t.Fatalf("NewProxy: got %v, want nil", err)
				}
				t.Cleanup(func() { p.Close() })
				w, addrs = append(w, p), append(addrs, p.Addr())
			}
			return Driver(t, addrs, options), conformance.StepsOnly(w, namespace+":")
		},
		Server: all(m),
		// A request goes to each of them.
		Requests: func(t testing.TB) (most int) {
			for _, s := range m {
				c := redisbackend.Commands(t, s)
				most = max(most, c["evalsha"]+c["eval"])
			}
			return most
		},
		Leftovers: func(t testing.TB, n driver.Name) (left []string) {
			for _, s := range m {
				left = append(left, Leftovers(t, s, namespace, n)...)
			}
			return left
		},
		Audit: func(t testing.TB) {
			for _, s := range m {
				redisbackend.Audit(t, s, namespace)
			}
		},
	}
}

// Leftovers lists the keys of the name on a server but for that of its last token.
func Leftovers(t testing.TB, s servers.Server, namespace string, n driver.Name) (left []string) {
	t.Helper()
	kind := map[driver.Kind]string{driver.KindLock: "rl", driver.KindPermit: "rp"}[n.Kind]
	for _, key := range redisbackend.Keys(t, s, namespace) {
		part, name, _ := strings.Cut(strings.TrimPrefix(key, namespace+":"), ":")
		if strings.HasPrefix(part, kind) && part != kind+"f" && name == n.Name {
			left = append(left, s.Addr()+" "+key)
		}
	}
	return left
}

// wires are the networks to all nodes as one.
type wires []*servers.Proxy

func (w wires) Pass(d servers.Direction) { w.each(func(p *servers.Proxy) { p.Pass(d) }) }
func (w wires) Hold(d servers.Direction) { w.each(func(p *servers.Proxy) { p.Hold(d) }) }
func (w wires) Drop(d servers.Direction) { w.each(func(p *servers.Proxy) { p.Drop(d) }) }
func (w wires) Delay(d servers.Direction, by time.Duration) {
	w.each(func(p *servers.Proxy) { p.Delay(d, by) })
}
func (w wires) Reset() { w.each((*servers.Proxy).Reset) }

func (w wires) each(f func(*servers.Proxy)) {
	for _, p := range w {
		f(p)
	}
}

func (w wires) Refuse() error { return w.try((*servers.Proxy).Refuse) }
func (w wires) Accept() error { return w.try((*servers.Proxy).Accept) }

func (w wires) try(f func(*servers.Proxy) error) (err error) {
	for _, p := range w {
		err = errors.Join(err, f(p))
	}
	return err
}

// DropNextReply loses the next reply of each node.
func (w wires) DropNextReply(o *servers.DropOptions) <-chan struct{} {
	var each []<-chan struct{}
	for _, p := range w {
		each = append(each, p.DropNextReply(o))
	}
	acted := make(chan struct{})
	go func() {
		for _, c := range each {
			<-c
		}
		close(acted)
	}()
	return acted
}

// all are the masters as one server.
type all Masters

func (a all) Addr() string                         { return a[0].Addr() }
func (a all) Pause() error                         { return a.each(servers.Server.Pause) }
func (a all) Resume() error                        { return a.each(servers.Server.Resume) }
func (a all) Kill() error                          { return a.each(servers.Server.Kill) }
func (a all) Close() error                         { return a.each(servers.Server.Close) }
func (a all) Start(ctx context.Context) error      { return a.start(ctx, servers.Server.Start) }
func (a all) StartEmpty(ctx context.Context) error { return a.start(ctx, servers.Server.StartEmpty) }

func (a all) start(ctx context.Context, f func(servers.Server, context.Context) error) error {
	return a.each(func(s servers.Server) error { return f(s, ctx) })
}

func (a all) each(f func(servers.Server) error) error {
	errs := make([]error, len(a))
	var done sync.WaitGroup
	for i, s := range a {
		done.Go(func() { errs[i] = f(s) })
	}
	done.Wait()
	return errors.Join(slices.DeleteFunc(errs, func(err error) bool { return err == nil })...)
}
