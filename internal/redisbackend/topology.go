package redisbackend

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	client "github.com/redis/rueidis"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

func (b Driver) clusterURL(c *servers.RedisCluster) string {
	return b.Scheme + "+cluster://" + strings.Join(c.Addrs(), ",")
}

func (b Driver) sentinelURL(s *servers.RedisSentinels) string {
	return b.Scheme + "+sentinel://" + strings.Join(s.SentinelAddrs(), ",") + "/0?master=" + servers.RedisSentinelName
}

// startSentinels runs a primary with replicas under Sentinel.
func startSentinels(t testing.TB, o *servers.RedisSentinelOptions) *servers.RedisSentinels {
	t.Helper()
	s, err := servers.StartRedisSentinels(t.Context(), o)
	if err != nil {
		t.Fatalf("start redis under sentinel: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("stop redis under sentinel: %v", err)
		}
	})
	return s
}

// openClient opens a client, and closes it in the end.
func openClient(t testing.TB, url string) *fencelock.Client {
	t.Helper()
	c, err := fencelock.Open(t.Context(), url)
	if err != nil {
		t.Fatalf("Open %s: got %v, want nil", url, err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestMigrationUnderLoad lets clients take turns at names while their slots go round the nodes. What a migration
// refuses is tried again; apart from that all must work.
func (b Driver) TestMigrationUnderLoad(t *testing.T) {
	t.Parallel()
	c, _ := b.startCluster(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	const names = 4
	var load sync.WaitGroup
	var mu sync.Mutex
	taken := 0
	for i := range names {
		var inside sync.Mutex
		last := fencelock.Token(0)
		for range 2 {
			locks := openClient(t, b.clusterURL(c))
			load.Go(func() {
				for ctx.Err() == nil {
					l, err := locks.Lock(ctx, fmt.Sprintf("load/%d", i), fencelock.TTL(3*time.Second))
					switch {
					case ctx.Err() != nil:
						if err == nil {
							_ = l.Release(context.WithoutCancel(ctx))
						}
						return
					case errors.Is(err, fencelock.ErrUnavailable), errors.Is(err, fencelock.ErrUncertain):
						continue
					case err != nil:
						t.Errorf("Lock while slots migrate: got %v, want a lease or a failure of the backend (L8)", err)
						return
					}
					if !inside.TryLock() {
						t.Errorf("Lock of load/%d while slots migrate: got a lease while another one is believed (L1)", i)
						return
					}
					if l.Token() <= last {
						t.Errorf("token while slots migrate: got %v after %v, want a greater one (T1)", l.Token(), last)
					}
					last = l.Token()
					inside.Unlock()
					err = l.Release(context.WithoutCancel(ctx))
					if err != nil && !errors.Is(err, fencelock.ErrUnavailable) && !errors.Is(err, fencelock.ErrUncertain) {
						t.Errorf("Release while slots migrate: got %v, want nil or a failure of the backend (L8)", err)
						return
					}
					mu.Lock()
					taken++
					mu.Unlock()
				}
			})
		}
	}
	before := func() int {
		mu.Lock()
		defer mu.Unlock()
		return taken
	}
	moves := 0
	for round := range 3 {
		for i := range names {
			seen := before()
			Eventually(t, "leases between migrations", func() bool { return before() > seen+names })
			to := c.Nodes[round]
			slot, err := c.Slot(ctx, fmt.Sprintf("load/%d", i))
			if err != nil {
				t.Fatal(err)
			}
			if at, err := c.Primary(ctx, slot); err != nil {
				t.Fatal(err)
			} else if at == to {
				continue
			}
			if err := c.MigrateSlot(ctx, slot, to, nil); err != nil {
				t.Fatal(err)
			}
			moves++
		}
	}
	seen := before()
	Eventually(t, "leases after all migrations", func() bool { return before() > seen+names })
	stop()
	load.Wait()
	if moves < names {
		t.Errorf("void: %d migrations, want at least %d", moves, names)
	}
}

// TestClusterDown takes a slot from all nodes of a Cluster.
func (b Driver) TestClusterDown(t *testing.T) {
	t.Parallel()
	c, nodes := b.startCluster(t)
	ctx := t.Context()
	noNode := client.ErrNoSlot.Error() // says rueidis in place of the server, when it has asked who has which slots
	b.bothClients(t, c, func(t *testing.T, open func() Full) {
		d, n := open(), LockName(NewID())
		steps := StepsOn(t, d, n)
		slot, err := c.Slot(ctx, n.Name)
		if err != nil {
			t.Fatal(err)
		}
		owner, err := c.Primary(ctx, slot)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range nodes {
			s.Must(t, "CLUSTER", "DELSLOTS", fmt.Sprint(slot))
		}
		for _, step := range steps {
			err := step.Do(d)
			if !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), "CLUSTERDOWN") && !strings.Contains(err.Error(), noNode) {
				t.Errorf("%s when the Cluster is down: got %v, want ErrUnavailable with CLUSTERDOWN (L8)", step.What, err)
			}
		}
		b.On(owner).Must(t, "CLUSTER", "ADDSLOTS", fmt.Sprint(slot))
		Eventually(t, "a working cluster", func() bool { return c.Healthy(ctx, 0) == nil })
		for _, step := range steps {
			if err := step.Do(d); err != nil {
				t.Errorf("%s when the Cluster works again: got %v, want nil", step.What, err)
			}
		}
	})
}

// TestClusterLostReply loses replies of a node, and connections. repeats says that the client library sends a request again
// by itself.
func (b Driver) TestClusterLostReply(t *testing.T, repeats bool) {
	t.Parallel()
	c, _ := b.startCluster(t)
	proxies := map[string]*servers.Proxy{}
	for _, addr := range c.Addrs() {
		p, err := servers.NewProxy(addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		proxies[addr] = p
	}
	d := b.Connect(t, Options{Cluster: c.Addrs(), Dial: func(ctx context.Context, addr string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", proxies[addr].Addr())
	}})
	e := ListenTo(d)
	n := LockName("x")
	slot, err := c.Slot(t.Context(), n.Name)
	if err != nil {
		t.Fatal(err)
	}
	node, err := c.Primary(t.Context(), slot)
	if err != nil {
		t.Fatal(err)
	}
	o, w := driver.Owner{Name: n, ID: NewID()}, driver.Owner{Name: n, ID: NewID()}
	MustLock(t, d, Request(n, o.ID, time.Minute), driver.Granted)
	MustRelease(t, d, o) // the server knows the scripts now
	first := MustLock(t, d, Request(n, o.ID, time.Minute), driver.Granted)
	step := &servers.DropOptions{RequestWith: "fencelock:"} // not what the client says of its own
	done := proxies[node.Addr()].DropNextReply(step)
	if !repeats {
		a, err := d.Lock(t.Context(), Request(n, o.ID, time.Minute))
		if err == nil || errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("Lock whose reply is lost: got %v, %v, want an unknown outcome (L8)", a.State, err)
		}
	}
	if again := MustLock(t, d, Request(n, o.ID, time.Minute), driver.Granted); again.Token != first.Token {
		t.Errorf("Lock repeated: got token %v, want %v (L5)", again.Token, first.Token)
	}
	<-done
	done = proxies[node.Addr()].DropNextReply(step)
	found, err := d.Release(t.Context(), o)
	<-done
	if found || err == nil || errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Release whose reply is lost: got %v, %v, want an unknown outcome (L5, L8)", found, err)
	}

	MustLock(t, d, Request(n, o.ID, time.Minute), driver.Granted)
	MustLock(t, d, Waiting(n, w.ID, time.Minute), driver.Waiting)
	e.Next(t, driver.EventRecheck, "when the subscription stands")
	for range 3 {
		proxies[node.Addr()].Reset()
		e.Next(t, driver.EventRecheck, "after the connections to the node were reset")
	}
	Eventually(t, "a release", func() bool {
		_, err := d.Release(t.Context(), o)
		return err == nil
	})
	e.Next(t, driver.EventGranted, "on the new subscription")
}

// TestFailoverLosesWrites promotes a replica that has not heard of a lock nor of its waiter (F109): the holder is told,
// the waiter queues again and gets the lock, and tokens go on rising.
func (b Driver) TestFailoverLosesWrites(t *testing.T) {
	t.Parallel()
	s := startSentinels(t, nil)
	ctx := t.Context()
	const ttl = 6 * time.Second
	second, err := fencelock.New(b.Connect(t, Options{Sentinels: s.SentinelAddrs()}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { second.Close() })
	first := openClient(t, b.sentinelURL(s))
	l, err := first.Lock(ctx, "x")
	if err != nil {
		t.Fatalf("Lock by URL: got %v, want a lease", err)
	}
	known := l.Token()
	if err := l.Release(ctx); err != nil {
		t.Fatal(err)
	}

	if err := s.Detach(ctx); err != nil {
		t.Fatal(err)
	}
	lost, err := first.Lock(ctx, "x", fencelock.TTL(ttl))
	if err != nil {
		t.Fatalf("Lock: got %v, want a lease", err)
	}
	type result struct {
		lease *fencelock.Lease
		err   error
	}
	waiter := make(chan result, 1)
	go func() {
		l, err := second.Lock(ctx, "x", fencelock.TTL(ttl))
		waiter <- result{l, err}
	}()
	old := b.On(s.Nodes[0])
	Eventually(t, "a waiter", func() bool { return old.Must(t, "EXISTS", "fencelock:lq:{x}") == int64(1) })
	if err := old.Kill(); err != nil {
		t.Fatal(err)
	}
	promoted, err := s.AwaitPrimary(ctx, old.Redis)
	if err != nil {
		t.Fatal(err)
	}
	now := b.On(promoted)
	if v := now.Must(t, "EXISTS", "fencelock:l:{x}"); v == int64(1) {
		if holder, _ := now.Must(t, "GET", "fencelock:l:{x}").(string); strings.HasPrefix(holder, fmt.Sprintf("%016d ", lost.Token())) {
			t.Fatal("void: the failover lost nothing")
		}
	}
	select {
	case r := <-waiter:
		if r.err != nil {
			t.Fatalf("Lock of a waiter that the new primary does not know: got %v, want a lease", r.err)
		}
		if r.lease.Token() <= lost.Token() || lost.Token() <= known {
			t.Errorf("tokens: got %v, then %v lost in the failover, then %v, want them to rise (T1, T2)", known, lost.Token(), r.lease.Token())
		}
		if err := r.lease.Release(ctx); err != nil {
			t.Errorf("Release after a failover: got %v, want nil", err)
		}
	case <-time.After(4 * ttl):
		t.Fatalf("Lock of a waiter that the new primary does not know: got nothing within %v", 4*ttl)
	}
	select {
	case <-lost.Done():
	case <-time.After(time.Until(lost.Deadline()) + Patience):
		t.Errorf("Done of a lease that a failover lost: not closed (L2)")
	}
	if !errors.Is(lost.Err(), fencelock.ErrLost) {
		t.Errorf("Err of a lease that a failover lost: got %v, want ErrLost", lost.Err())
	}
}

// TestFailoverKeepsLocks pauses the primary until another one is promoted: a lock stays held, its holder does not notice,
// its waiter keeps its place, and nobody gets it from the old primary, which is back before it knows.
func (b Driver) TestFailoverKeepsLocks(t *testing.T) {
	t.Parallel()
	s := startSentinels(t, &servers.RedisSentinelOptions{Redis: servers.RedisOptions{Password: "data-pw"}, SentinelPassword: "watch-pw"})
	ctx := t.Context()
	secret := func(data, watch, primary string) string {
		return strings.Replace(b.sentinelURL(s), "//", "//:"+data+"@", 1) + primary + "&sentinel_password=" + watch
	}
	for _, bad := range []string{secret("data-pw", "wrong-pw", ""), secret("wrong-pw", "watch-pw", ""), secret("data-pw", "watch-pw", "-unknown")} {
		_, err := driver.Open(ctx, bad)
		if !errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("Open with a wrong password or name: got %v, want ErrUnavailable", err)
		}
		if err != nil && strings.Contains(err.Error(), "-pw") {
			t.Errorf("Open: the error tells a password: %v", err)
		}
	}
	url := secret("data-pw", "watch-pw", "")
	holder, rival := openClient(t, url), openClient(t, url)
	lease, err := holder.Lock(ctx, "x", fencelock.TTL(30*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	waiter := make(chan *fencelock.Lease, 1)
	waits, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		l, err := rival.Lock(waits, "x", fencelock.TTL(6*time.Second))
		if err != nil {
			t.Errorf("Lock during a failover: got %v, want a lease", err)
		}
		waiter <- l
	}()
	old := s.Nodes[0]
	Eventually(t, "a waiter, on all nodes", func() bool {
		for _, n := range s.Nodes {
			if b.On(n).Must(t, "EXISTS", "fencelock:lq:{x}") != int64(1) {
				return false
			}
		}
		return true
	})
	if err := old.Pause(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.AwaitPrimary(ctx, old); err != nil {
		t.Fatal(err)
	}
	if err := old.Resume(); err != nil {
		t.Fatal(err)
	}
	Eventually(t, "an Extend after the failover", func() bool {
		err := lease.Extend(ctx, 30*time.Second)
		if errors.Is(err, fencelock.ErrLost) || errors.Is(err, fencelock.ErrNotHeld) {
			t.Fatalf("Extend after a failover that lost nothing: got %v, want nil", err)
		}
		return err == nil
	})
	held := 0
	Eventually(t, "answers after the failover, with the old primary back", func() bool {
		l, err := rival.TryLock(ctx, "x")
		switch {
		case errors.Is(err, fencelock.ErrHeld):
			held++
		case !errors.Is(err, fencelock.ErrUnavailable) && !errors.Is(err, fencelock.ErrUncertain):
			t.Fatalf("TryLock of a lock that is held: got %v, %v, want ErrHeld, or a failure (L1)", l, err)
		}
		return held > 100
	})
	select {
	case l := <-waiter:
		t.Fatalf("Lock of a waiter while the lock is held: got %v, want none (L1)", l)
	default:
	}
	if err := lease.Release(ctx); err != nil {
		t.Fatalf("Release after a failover: got %v, want nil", err)
	}
	select {
	case l := <-waiter:
		if l == nil {
			return
		}
		if l.Token() <= lease.Token() {
			t.Errorf("token after a failover: got %v after %v, want a greater one (T1)", l.Token(), lease.Token())
		}
		if err := l.Release(ctx); err != nil {
			t.Errorf("Release by the waiter: got %v, want nil", err)
		}
	case <-time.After(Patience):
		t.Errorf("Lock of a waiter after the release: got nothing within %v (W1)", Patience)
	}
}
