package goredis_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

func mustBeRefused(t *testing.T, what string, err error, code string) {
	t.Helper()
	if !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), code) {
		t.Errorf("%s: got %v, want ErrUnavailable with %s (L8)", what, err, code)
	}
}

// TestMigrationUnderLoad lets clients take turns at names while their slots go round the nodes. What a migration
// refuses is tried again; apart from that all must work.
func TestMigrationUnderLoad(t *testing.T) {
	t.Parallel()
	c := startCluster(t, 0)
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
			locks := openClient(t, c.url())
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
			eventually(t, "leases between migrations", func() bool { return before() > seen+names })
			to := c.Nodes[round]
			slot := c.slot(t, lockName(fmt.Sprintf("load/%d", i)))
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
	eventually(t, "leases after all migrations", func() bool { return before() > seen+names })
	stop()
	load.Wait()
	if moves < names {
		t.Errorf("void: %d migrations, want at least %d", moves, names)
	}
}

// openClient opens a client whose requests wait as long as a failover may take.
func openClient(t testing.TB, url string, opts ...fencelock.ClientOption) *fencelock.Client {
	t.Helper()
	c, err := fencelock.Open(t.Context(), url, opts...)
	if err != nil {
		t.Fatalf("Open %s: got %v, want nil", url, err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestClusterFailover hands the part of a primary to its replica, and then kills the new one: what is held stays held,
// both clients find the new primary, and the waiters' subscriptions do.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	c := startCluster(t, 1, "--cluster-node-timeout", "1000")
	ctx := t.Context()
	ds := map[string]*driverOf{"opened by URL": openDriver(t, c.url()), "of the user's client": newDriver(t, c.client(t))}
	events := map[string]events{}
	n := lockName("x")
	h := driver.Owner{Name: n, ID: newID()}
	var token driver.Token
	waiters := map[string]driver.Owner{}
	for what, d := range ds {
		events[what] = listenTo(d)
		if token == 0 {
			token = mustLock(t, d, request(n, h.ID, time.Hour), driver.Granted).Token
		}
		waiters[what] = driver.Owner{Name: n, ID: newID()}
		mustLock(t, d, waiting(n, waiters[what].ID, time.Hour), driver.Waiting)
		events[what].Next(t, driver.EventRecheck, "when the subscription stands")
	}
	works := func(what string, d *driverOf, after string) {
		t.Helper()
		eventually(t, "Extend "+after+" by a driver "+what, func() bool {
			r := d.Extend(ctx, []driver.Extension{{Owner: h, TTL: time.Hour}})[0]
			if r.Err == nil && (r.State != driver.Granted || r.Token != token) {
				t.Fatalf("Extend %s: got %+v, want granted with token %v: nothing was lost (T3)", after, r, token)
			}
			return r.Err == nil
		})
		mustLock(t, d, request(n, newID(), time.Minute), driver.Held)
		o := driver.Owner{Name: lockName("{x}" + newID()), ID: newID()}
		mustLock(t, d, request(o.Name, o.ID, time.Minute), driver.Granted)
		mustRelease(t, d, o)
	}
	first := c.primary(t, n)
	replica, err := c.Replica(ctx, first.Redis)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Failover(ctx, replica); err != nil {
		t.Fatal(err)
	}
	for what, d := range ds {
		works(what, d, "after a failover that was asked for")
	}
	eventually(t, "a replica again", func() bool { return c.Healthy(ctx, 3) == nil })

	if err := replica.Kill(); err != nil {
		t.Fatal(err)
	}
	for what, d := range ds {
		works(what, d, "after the primary was killed")
	}
	// A replica passes on what its primary publishes, so either will do.
	eventually(t, "both subscriptions at nodes that run", func() bool {
		channels := map[any]bool{}
		for _, s := range c.nodes() {
			if s.PID() != 0 {
				list, _ := s.do(t, "PUBSUB", "SHARDCHANNELS").([]any)
				for _, channel := range list {
					channels[channel] = true
				}
			}
		}
		return len(channels) == 2
	})
	for _, d := range ds {
		mustRelease(t, d, h)
		break
	}
	granted := ""
	for what := range ds {
		if r := ds[what].Poll(ctx, []driver.Poll{{Owner: waiters[what], TTL: time.Hour, Claim: time.Minute}})[0]; r.State == driver.Granted {
			granted = what
		}
	}
	if granted == "" {
		t.Fatal("Poll after the release: got nobody granted, want the first waiter (W4)")
	}
	if e := events[granted].Next(t, driver.EventGranted, "after a failover"); e.Owner != waiters[granted] || e.Token <= token {
		t.Errorf("event after a failover: got %+v, want %+v and a token above %v (T1)", e, waiters[granted], token)
	}
}

// sentinels is a Redis server with replicas under Sentinel, of one test.
type sentinels struct{ *servers.RedisSentinels }

func startSentinels(t testing.TB, opts *servers.RedisSentinelOptions) sentinels {
	t.Helper()
	s, err := servers.StartRedisSentinels(t.Context(), opts)
	if err != nil {
		t.Fatalf("start redis under sentinel: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("stop redis under sentinel: %v", err)
		}
	})
	return sentinels{s}
}

func (s sentinels) url() string {
	return "redis+sentinel://" + strings.Join(s.SentinelAddrs(), ",") + "/0?master=" + servers.RedisSentinelName
}

// await waits for the primary after another one.
func (s sentinels) await(t testing.TB, old *servers.Redis) server {
	t.Helper()
	p, err := s.AwaitPrimary(t.Context(), old)
	if err != nil {
		t.Fatal(err)
	}
	return server{p}
}

// TestFailoverLosesWrites promotes a replica that has not heard of a lock nor of its waiter (F109): the holder is told,
// the waiter queues again and gets the lock, and tokens go on rising.
func TestFailoverLosesWrites(t *testing.T) {
	t.Parallel()
	s := startSentinels(t, nil)
	ctx := t.Context()
	const ttl = 6 * time.Second
	own := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: servers.RedisSentinelName, SentinelAddrs: s.SentinelAddrs()})
	t.Cleanup(func() { own.Close() })
	second, err := fencelock.New(newDriver(t, own))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { second.Close() })
	first := openClient(t, s.url())
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
	old := server{s.Nodes[0]}
	eventually(t, "a waiter", func() bool { return old.do(t, "EXISTS", "fencelock:lq:{x}") == int64(1) })
	if err := old.Kill(); err != nil {
		t.Fatal(err)
	}
	now := s.await(t, old.Redis)
	if v := now.do(t, "EXISTS", "fencelock:l:{x}"); v == int64(1) {
		if holder, _ := now.do(t, "GET", "fencelock:l:{x}").(string); strings.HasPrefix(holder, fmt.Sprintf("%016d ", lost.Token())) {
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
	case <-time.After(time.Until(lost.Deadline()) + patience):
		t.Errorf("Done of a lease that a failover lost: not closed (L2)")
	}
	if !errors.Is(lost.Err(), fencelock.ErrLost) {
		t.Errorf("Err of a lease that a failover lost: got %v, want ErrLost", lost.Err())
	}
}

// TestFailoverKeepsLocks pauses the primary until another one is promoted: a lock stays held, its holder does not notice,
// its waiter keeps its place, and nobody gets it from the old primary, which is back before it knows.
func TestFailoverKeepsLocks(t *testing.T) {
	t.Parallel()
	s := startSentinels(t, &servers.RedisSentinelOptions{Redis: servers.RedisOptions{Password: "data-pw"}, SentinelPassword: "watch-pw"})
	ctx := t.Context()
	secret := func(data, watch, primary string) string {
		return strings.Replace(s.url(), "//", "//:"+data+"@", 1) + primary + "&sentinel_password=" + watch
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
	old := server{s.Nodes[0]}
	eventually(t, "a waiter, on all nodes", func() bool {
		for _, n := range s.Nodes {
			if (server{n}).do(t, "EXISTS", "fencelock:lq:{x}") != int64(1) {
				return false
			}
		}
		return true
	})
	if err := old.Pause(); err != nil {
		t.Fatal(err)
	}
	s.await(t, old.Redis)
	if err := old.Resume(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "an Extend after the failover", func() bool {
		err := lease.Extend(ctx, 30*time.Second)
		if errors.Is(err, fencelock.ErrLost) || errors.Is(err, fencelock.ErrNotHeld) {
			t.Fatalf("Extend after a failover that lost nothing: got %v, want nil", err)
		}
		return err == nil
	})
	held := 0
	eventually(t, "answers after the failover, with the old primary back", func() bool {
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
	case <-time.After(patience):
		t.Errorf("Lock of a waiter after the release: got nothing within %v (W1)", patience)
	}
}
