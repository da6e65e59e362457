package redlock_test

import (
	"context"
	"crypto/rand"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/driver/redlock"
	"github.com/fencelock/fencelock/internal/redisbackend"
	"github.com/fencelock/fencelock/internal/redlockbackend"
)

// patience is how long a test waits for what must happen some time.
const patience = 30 * time.Second

// masters starts servers that keep nothing on disk.
func masters(t testing.TB, count int) redlockbackend.Masters {
	t.Helper()
	return redlockbackend.Start(t, count, nil)
}

// do runs a command on one of the masters.
func do(t testing.TB, s servers.Server, args ...string) any {
	t.Helper()
	reply, err := s.(*servers.Redis).Do(context.WithoutCancel(t.Context()), args...)
	if err != nil {
		t.Fatalf("%s: got %v, want nil", strings.Join(args, " "), err)
	}
	return reply
}

func newDriver(t testing.TB, m redlockbackend.Masters, o *redlock.Options) *redlockbackend.Owning {
	t.Helper()
	return redlockbackend.Driver(t, m.Addrs(), o)
}

func request(name string, ttl time.Duration) driver.Request {
	return driver.Request{Owner: driver.Owner{Name: redisbackend.LockName(name), ID: rand.Text()}, TTL: ttl, Limit: 1, Holder: "me"}
}

func lock(t testing.TB, d *redlockbackend.Owning, r driver.Request, want driver.State) driver.Answer {
	t.Helper()
	a, err := d.Lock(t.Context(), r)
	if err != nil || a.State != want {
		t.Fatalf("Lock of %q: got %v, %v, want %v", r.Name.Name, a.State, err, want)
	}
	return a
}

func extend(t testing.TB, d *redlockbackend.Owning, r driver.Request, ttl time.Duration) {
	t.Helper()
	if x := d.Extend(t.Context(), []driver.Extension{{Owner: r.Owner, TTL: ttl}})[0]; x.Err != nil || x.State != driver.Granted {
		t.Fatalf("Extend of %q: got %v, %v, want granted", r.Name.Name, x.State, x.Err)
	}
}

func release(t testing.TB, d *redlockbackend.Owning, r driver.Request) {
	t.Helper()
	if found, err := d.Release(t.Context(), r.Owner); err != nil || !found {
		t.Fatalf("Release of %q: got %v, %v, want true", r.Name.Name, found, err)
	}
}

func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !done(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// holder answers what a master stores for the lock.
func holder(t testing.TB, s servers.Server, name string) string {
	t.Helper()
	text, _ := do(t, s, "GET", "fencelock:rl:"+name).(string)
	return text
}

// everywhere waits until all masters have the lock for the owner.
func everywhere(t testing.TB, m redlockbackend.Masters, r driver.Request) {
	t.Helper()
	eventually(t, "lock on all nodes", func() bool {
		return !slices.ContainsFunc(m, func(s servers.Server) bool { return !strings.Contains(holder(t, s, r.Name.Name), r.ID) })
	})
}

// events collects what the driver tells.
type events struct {
	sync.Mutex
	warnings []string
}

func listen(d *redlockbackend.Owning) *events {
	e := new(events)
	d.Notify(func(ev driver.Event) {
		if ev.Kind == driver.EventWarning {
			e.Lock()
			defer e.Unlock()
			e.warnings = append(e.warnings, ev.Err.Error())
		}
	})
	return e
}

func (e *events) has(parts ...string) bool {
	e.Lock()
	defer e.Unlock()
	return slices.ContainsFunc(e.warnings, func(w string) bool {
		return !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(w, p) })
	})
}

func TestOneTrip(t *testing.T) {
	t.Parallel()
	m := masters(t, 5)
	d := newDriver(t, m, nil)
	lock(t, d, request("first", time.Minute), driver.Granted)
	const pairs = 200
	before := make([]int, len(m))
	for i, s := range m {
		before[i] = redisbackend.Commands(t, s)["evalsha"]
	}
	for i := range pairs {
		r := request("x"+strconv.Itoa(i%7), time.Minute)
		lock(t, d, r, driver.Granted)
		release(t, d, r)
	}
	if err := d.Close(); err != nil { // nothing is on its way then
		t.Fatal(err)
	}
	for i, s := range m {
		if n := redisbackend.Commands(t, s)["evalsha"] - before[i]; n > pairs*2*105/100 {
			t.Errorf("requests to node %d for %d pairs: got %d, want two for each", i, pairs, n)
		}
	}
}

// TestNodesDown: a minority that hangs or is down delays nobody; without a majority the error says what each node did.
func TestNodesDown(t *testing.T) {
	t.Parallel()
	m := masters(t, 5)
	d := newDriver(t, m, &redlock.Options{NodeTimeout: time.Minute})
	lock(t, d, request("before", time.Minute), driver.Granted)
	if err := m[0].Pause(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		began := time.Now()
		r := request("x", time.Minute)
		lock(t, d, r, driver.Granted)
		extend(t, d, r, time.Minute)
		lock(t, d, request("x", time.Minute), driver.Held)
		release(t, d, r)
		if took := time.Since(began); took > patience {
			t.Fatalf("Lock, Extend and Release with a node that hangs: got %v, want less than the node timeout", took)
		}
	}
	if err := m[0].Resume(); err != nil {
		t.Fatal(err)
	}
	d = newDriver(t, m, nil)
	held := request("y", time.Minute)
	lock(t, d, held, driver.Granted)
	everywhere(t, m, held)
	for _, s := range m[:2] {
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	extend(t, d, held, time.Minute)
	lock(t, d, request("y", time.Minute), driver.Held)
	if err := m[2].Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "error that matches ErrUnavailable", func() bool {
		_, err := d.Lock(t.Context(), request("z", time.Minute))
		if err == nil {
			t.Fatal("Lock with three of five nodes down: got nil, want an error (L8)")
		}
		for _, s := range m {
			if !strings.Contains(err.Error(), s.Addr()) {
				t.Fatalf("error: got %v, want what became of it on %s (F101)", err, s.Addr())
			}
		}
		return errors.Is(err, driver.ErrUnavailable)
	})
	// It goes on with the release, so that may happen yet.
	if found, err := d.Release(t.Context(), held.Owner); err == nil || errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Release with three of five nodes down: got %v, %v, want an unknown outcome (L8)", found, err)
	}
	for _, s := range m[:3] {
		if err := s.StartEmpty(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "release of what is left", func() bool { return holder(t, m[3], "y") == "" && holder(t, m[4], "y") == "" })
}

// TestRefill: nodes that lack the lease are given it again with the same token, so that others may fail after them.
func TestRefill(t *testing.T) {
	t.Parallel()
	m := masters(t, 3)
	d := newDriver(t, m, nil)
	r := request("x", time.Minute)
	token := lock(t, d, r, driver.Granted).Token
	everywhere(t, m, r)
	for round := range 2 {
		for i, s := range m {
			if round == 0 {
				do(t, s, "DEL", "fencelock:rl:x")
			} else { // without its memory of the name as well, and without having been seen to forget
				do(t, s, "FLUSHALL")
			}
			extend(t, d, r, 10*time.Minute)
			everywhere(t, m, r)
			if text := holder(t, s, "x"); !strings.HasPrefix(text, token.String()+" ") || !strings.HasSuffix(text, " me") {
				t.Errorf("lease that node %d was given again: got %q, want token %v and the holder's data (T3)", i, text, token)
			}
			if left, _ := do(t, s, "PTTL", "fencelock:rl:x").(int64); left < 5*time.Minute.Milliseconds() {
				t.Errorf("lease that node %d was given again: got %d ms, want what the extension asked for", i, left)
			}
			fence, _ := do(t, s, "GET", "fencelock:rlf:x").(string)
			if f, err := strconv.ParseUint(fence, 10, 64); err != nil || f < uint64(token) {
				t.Errorf("fence of node %d: got %q, want at least %v (T1)", i, fence, token)
			}
		}
	}
	other := newDriver(t, m, nil)
	lock(t, other, request("x", time.Minute), driver.Held)
	if err := other.Close(); err != nil { // nothing is on its way then, which a node that has lost the lease would grant
		t.Fatal(err)
	}

	// What is not there on a majority is not given again to anybody (L3).
	for _, s := range m[:2] {
		do(t, s, "DEL", "fencelock:rl:x")
	}
	if x := d.Extend(t.Context(), []driver.Extension{{Owner: r.Owner, TTL: time.Minute}})[0]; x.Err != nil || x.State != driver.Gone {
		t.Errorf("Extend of a lease that one of three nodes has: got %v, %v, want gone (L3)", x.State, x.Err)
	}
	lock(t, d, request("x", time.Minute), driver.Granted)
}

// TestRefillKeepsFence: a node that is given a lease again keeps its greater memory of the name's tokens.
func TestRefillKeepsFence(t *testing.T) {
	t.Parallel()
	m := masters(t, 3)
	d := newDriver(t, m, nil)
	r := request("x", time.Minute)
	token := lock(t, d, r, driver.Granted).Token
	everywhere(t, m, r)
	later, err := d.NextToken(t.Context(), r.Name, token)
	if err != nil {
		t.Fatal(err)
	}
	fence := func() string {
		text, _ := do(t, m[0], "GET", "fencelock:rlf:x").(string)
		return text
	}
	eventually(t, "later token on the node", func() bool { return fence() == later.String() })
	do(t, m[0], "DEL", "fencelock:rl:x")
	extend(t, d, r, time.Minute)
	everywhere(t, m, r)
	if got := fence(); got != later.String() {
		t.Errorf("fence of a node that was given a lease with token %v again: got %s, want %v as before (T1)", token, got, later)
	}
}

// TestRestartedNodeIsRefilled: not before the next extension, but at once.
func TestRestartedNodeIsRefilled(t *testing.T) {
	t.Parallel()
	m := masters(t, 3)
	d := newDriver(t, m, nil)
	e := listen(d)
	r := request("x", time.Hour)
	lock(t, d, r, driver.Granted)
	everywhere(t, m, r)
	if err := m[0].Kill(); err != nil {
		t.Fatal(err)
	}
	if err := m[0].StartEmpty(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "lock on the node that has restarted", func() bool {
		_, _ = d.NextToken(t.Context(), redisbackend.LockName("another"), 0) // any request notices
		return strings.Contains(holder(t, m[0], "x"), r.ID)
	})
	if !e.has(m[0].Addr(), "may have forgotten") {
		t.Errorf("warnings: got %q, want that the node may have forgotten", e.warnings)
	}
}

// TestRestartedNodeDoesNotCount: what it has forgotten it cannot help to give away.
func TestRestartedNodeDoesNotCount(t *testing.T) {
	t.Parallel()
	m := masters(t, 3)
	mine, other := newDriver(t, m, nil), newDriver(t, m, nil)
	r := request("x", time.Hour)
	lock(t, other, request("seen", time.Hour), driver.Granted)
	lock(t, mine, r, driver.Granted)
	everywhere(t, m, r)
	if err := mine.Close(); err != nil { // it would give the lock to the nodes again
		t.Fatal(err)
	}
	for _, s := range m[:2] {
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := s.StartEmpty(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		if a, err := other.Lock(t.Context(), request("x", time.Minute)); a.State == driver.Granted {
			t.Fatalf("Lock after two of three nodes forgot the holder: got %v, %v, want no grant (L1)", a.State, err)
		}
	}
	// One that has not seen it happen must be told how long to wait.
	late := newDriver(t, m, &redlock.Options{RestartWait: time.Hour})
	if a, err := late.Lock(t.Context(), request("x", time.Minute)); a.State == driver.Granted {
		t.Fatalf("Lock soon after two of three nodes started: got %v, %v, want no grant (L1)", a.State, err)
	}
	lock(t, newDriver(t, redlockbackend.Start(t, 3, &servers.RedisOptions{AppendFsync: "always"}),
		&redlock.Options{RestartWait: time.Hour}), request("x", time.Minute), driver.Granted)
}

// TestTopology: what is not an independent master is refused, and does not count where nobody asked.
func TestTopology(t *testing.T) {
	t.Parallel()
	m := masters(t, 4)
	host, port, _ := strings.Cut(m[3].Addr(), ":")
	do(t, m[2], "REPLICAOF", host, port)
	cluster := redlockbackend.Start(t, 1, &servers.RedisOptions{Args: []string{"--cluster-enabled", "yes"}})[0]
	for what, test := range map[string]struct {
		addrs []string
		want  string
	}{
		"a server twice": {[]string{m[0].Addr(), m[1].Addr(), m[0].Addr()}, "same server"},
		"a replica":      {[]string{m[0].Addr(), m[2].Addr(), m[3].Addr()}, "replica"},
		"a Cluster":      {[]string{m[0].Addr(), m[1].Addr(), cluster.Addr()}, "Cluster"},
	} {
		d := redlockbackend.Driver(t, test.addrs, nil)
		e := listen(d)
		if err := d.Verify(t.Context()); !errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("Verify with %s: got %v, want ErrInvalid that says %q (F100)", what, err, test.want)
		}
		if !e.has(test.want) {
			t.Errorf("warnings with %s: got %q, want %q", what, e.warnings, test.want)
		}
		if _, err := driver.Open(t.Context(), "redlock://"+strings.Join(test.addrs, ",")); !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("Open with %s: got %v, want ErrInvalid (F100)", what, err)
		}
		r := request(what, time.Minute)
		lock(t, d, r, driver.Granted) // by the two others
		release(t, d, r)
	}
	d := redlockbackend.Driver(t, []string{m[0].Addr(), m[0].Addr(), m[0].Addr()}, nil)
	if a, err := d.Lock(t.Context(), request("y", time.Minute)); !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Lock on one server three times: got %v, %v, want ErrUnavailable", a.State, err)
	}
	if left := redlockbackend.Leftovers(t, m[0], "fencelock", redisbackend.LockName("y")); len(left) > 0 {
		t.Errorf("left behind: got %q, want nothing (L7)", left)
	}
}

// TestOneNodeFailsToExtend: the others do.
func TestOneNodeFailsToExtend(t *testing.T) {
	t.Parallel()
	m := masters(t, 5)
	d := newDriver(t, m, nil)
	r := request("x", time.Minute)
	lock(t, d, r, driver.Granted)
	everywhere(t, m, r)
	do(t, m[0], "DEL", "fencelock:rl:x")
	do(t, m[0], "LPUSH", "fencelock:rl:x", "foreign")
	extend(t, d, r, time.Hour)
	for _, s := range m[1:] {
		eventually(t, "extension", func() bool {
			left, _ := do(t, s, "PTTL", "fencelock:rl:x").(int64)
			return left > time.Minute.Milliseconds()
		})
	}
	do(t, m[0], "DEL", "fencelock:rl:x")
	release(t, d, r)
}

// TestCleanupReachesAll: also a node whose reply was lost.
func TestCleanupReachesAll(t *testing.T) {
	t.Parallel()
	m := masters(t, 5)
	d, proxies := wired(t, m, nil)
	first, last := proxies[0], proxies[4]
	other := newDriver(t, m, nil)
	r := request("x", time.Minute)
	lock(t, other, r, driver.Granted)
	everywhere(t, m, r)
	for _, s := range m[3:] {
		do(t, s, "DEL", "fencelock:rl:x")
	}
	ready := request("ready", time.Minute)
	lock(t, d, ready, driver.Granted)
	everywhere(t, m, ready)
	last.Drop(servers.ToClient)
	first.Delay(servers.ToClient, 300*time.Millisecond) // what is decided already is not sent to the others
	lock(t, d, request("x", time.Minute), driver.Held)
	first.Pass(servers.ToClient)
	eventually(t, "request of unknown outcome on the last node", func() bool { return holder(t, m[4], "x") != "" })
	last.Pass(servers.ToClient)
	last.Reset()
	eventually(t, "clean-up of both other nodes (F004)", func() bool { return holder(t, m[3], "x") == "" && holder(t, m[4], "x") == "" })
}

// TestNoVoteWithoutIdentity: a node that is not known to be a master is asked for nothing.
func TestNoVoteWithoutIdentity(t *testing.T) {
	t.Parallel()
	m := masters(t, 2)
	p, err := servers.NewProxy(m[1].Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	lost := p.DropNextReply(nil)
	go func() { // whatever the client library says first
		for range 20 {
			<-lost
			lost = p.DropNextReply(nil)
		}
	}()
	d, err := driver.Open(t.Context(), "redlock://"+m[0].Addr()+","+p.Addr()+","+redisbackend.Nobody(t)+"?node_timeout=300ms")
	if !errors.Is(err, driver.ErrUnavailable) {
		t.Fatalf("Open with one node that says who it is: got %v, %v, want ErrUnavailable", d, err)
	}
}

// TestHungNodeIsBounded: whatever is done meanwhile, little waits for it, and nothing is left in the end.
func TestHungNodeIsBounded(t *testing.T) {
	t.Parallel()
	m := masters(t, 3)
	d := newDriver(t, m, &redlock.Options{NodeTimeout: 100 * time.Millisecond})
	eventually(t, "identities of all nodes", func() bool { return d.Verify(t.Context()) == nil })
	if err := m[0].Pause(); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for k := range 8 {
		all.Go(func() {
			for i := range 250 {
				r := request("x"+strconv.Itoa(k*1000+i), 5*time.Second)
				if a, err := d.Lock(t.Context(), r); err != nil || a.State == driver.Granted {
					_, _ = d.Release(t.Context(), r.Owner)
				}
				if queued, _, _ := d.Outstanding(); queued > len(m)*redlock.MaxQueue {
					t.Errorf("requests that wait: got %d, want a bound", queued)
				}
			}
		})
	}
	all.Wait()
	if err := m[0].Resume(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nothing outstanding", func() bool {
		queued, owners, owed := d.Outstanding()
		return queued == 0 && owners == 0 && owed == 0
	})
	eventually(t, "nothing on the node that hung (L7)", func() bool {
		keys := redisbackend.Keys(t, m[0], "fencelock")
		return !slices.ContainsFunc(keys, func(k string) bool { return strings.HasPrefix(k, "fencelock:rl:x") })
	})
}

// TestThirdPermit: each node has a place for it, and yet there are two already.
func TestThirdPermit(t *testing.T) {
	t.Parallel()
	m := masters(t, 5)
	d := newDriver(t, m, nil)
	permit := func(limit int) driver.Request {
		r := request("", time.Minute)
		r.Name, r.Limit = redisbackend.PermitName("s"), limit
		return r
	}
	take := func(r driver.Request, want driver.State) {
		t.Helper()
		if a, err := d.Acquire(t.Context(), r); err != nil || a.State != want {
			t.Fatalf("Acquire with limit %d: got %v, %v, want %v (S1)", r.Limit, a.State, err, want)
		}
	}
	// leaves lets only some nodes have a permit.
	leaves := func(r driver.Request, nodes ...int) {
		t.Helper()
		for i, s := range m {
			slot := ""
			eventually(t, "permit on all nodes", func() bool {
				all, _ := do(t, s, "HGETALL", "fencelock:rpd:s").([]any)
				for k := 0; k+1 < len(all); k += 2 {
					if v, _ := all[k+1].(string); strings.Contains(v, r.ID) {
						slot, _ = all[k].(string)
					}
				}
				return slot != ""
			})
			if !slices.Contains(nodes, i) {
				do(t, s, "HDEL", "fencelock:rpd:s", slot)
				do(t, s, "ZREM", "fencelock:rp:s", slot)
			}
		}
	}
	first, second := permit(2), permit(2)
	take(first, driver.Granted)
	take(second, driver.Granted)
	leaves(first, 0, 1, 2)
	leaves(second, 0, 3, 4)
	for range 10 {
		take(permit(2), driver.Held)
	}
	take(permit(1), driver.Held)
	take(permit(3), driver.Granted)
}

// TestPermitOnOneSlot: a permit that was asked for twice may have different slots on different nodes, and is held only
// while a majority has one and the same.
func TestPermitOnOneSlot(t *testing.T) {
	t.Parallel()
	m := masters(t, 3)
	d, proxies := wired(t, m, nil)
	r := request("", time.Minute)
	r.Name, r.Limit = redisbackend.PermitName("s"), 1<<20
	slot := func(s servers.Server) string {
		all, _ := do(t, s, "HKEYS", "fencelock:rpd:s").([]any)
		if len(all) > 1 {
			t.Fatalf("slots of one permit on one node: got %q, want at most one", all)
		}
		if len(all) == 0 {
			return ""
		}
		text, _ := all[0].(string)
		return text
	}
	acquire := func() {
		t.Helper()
		if a, err := d.Acquire(t.Context(), r); err != nil || a.State != driver.Granted {
			t.Fatalf("Acquire: got %v, %v, want granted", a.State, err)
		}
	}
	if err := proxies[2].Refuse(); err != nil {
		t.Fatal(err)
	}
	acquire()
	eventually(t, "permit on two nodes", func() bool { return slot(m[0]) != "" && slot(m[0]) == slot(m[1]) })
	if err := proxies[2].Accept(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "permit on another slot of the last node", func() bool {
		acquire()
		return slot(m[2]) != ""
	})
	if slot(m[2]) == slot(m[0]) {
		t.Fatal("slots of a permit that was asked for twice: got one, want two by chance")
	}
	forget := func(s servers.Server) {
		do(t, s, "DEL", "fencelock:rpd:s", "fencelock:rp:s")
	}
	extend(t, d, r, time.Minute)
	eventually(t, "permit on the same slot of all nodes", func() bool { return slot(m[2]) == slot(m[0]) })

	forget(m[0])
	forget(m[2])
	text, _ := do(t, m[1], "HGET", "fencelock:rpd:s", slot(m[1])).(string)
	at, _ := do(t, m[1], "ZSCORE", "fencelock:rp:s", slot(m[1])).(string)
	do(t, m[2], "HSET", "fencelock:rpd:s", "another", text)
	do(t, m[2], "ZADD", "fencelock:rp:s", at, "another")
	if x := d.Extend(t.Context(), []driver.Extension{{Owner: r.Owner, TTL: time.Minute}})[0]; x.Err != nil || x.State != driver.Gone {
		t.Errorf("Extend of a permit on different slots of two of three nodes: got %v, %v, want gone (S1)", x.State, x.Err)
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	d := newDriver(t, masters(t, 3), nil)
	if err := d.Verify(t.Context()); err != nil {
		t.Errorf("Verify of independent masters: got %v, want nil", err)
	}
	for _, url := range []string{
		"redlock://a,b", "redlock://a", "redlock://a,b,c,d", "redlock://a,b,c?x=1", "redlock://a,b,c?node_timeout=1ms",
		"redlock://a,b,c?node_timeout=0s", "redlock://a,b,c?restart_wait=25h", "redlock://a,b,c?namespace=.x", "redlock://a,b,c?read_timeout=1s",
	} {
		if _, err := driver.Open(t.Context(), url); !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("Open %s: got %v, want ErrInvalid", url, err)
		}
	}
	for _, o := range []redlock.Options{{NodeTimeout: time.Millisecond}, {NodeTimeout: time.Hour}, {RestartWait: -1}, {Namespace: "a b"}} {
		if _, err := redlock.New(make([]redlock.Node, 3), &o); !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("New with %+v: got %v, want ErrInvalid", o, err)
		}
	}
}

// TestNodeTimeout: it is what an answer is waited for, however long the client library would.
func TestNodeTimeout(t *testing.T) {
	t.Parallel()
	m := masters(t, 3)
	var nodes []redlock.Node
	for _, s := range m {
		c := redis.NewClient(&redis.Options{Addr: s.Addr(), ReadTimeout: 2 * patience, MaxRetries: -1})
		n, err := goredis.NewNode(c)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		nodes = append(nodes, n)
	}
	d, err := redlock.New(nodes, &redlock.Options{NodeTimeout: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	held := request("x", time.Hour)
	lock(t, newDriver(t, m, nil), held, driver.Granted)
	eventually(t, "identities of all nodes", func() bool { return d.Verify(t.Context()) == nil })
	for _, s := range m {
		if err := s.Pause(); err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		for _, s := range m {
			_ = s.Resume()
		}
	}()
	for step, call := range map[string]func() error{
		"Lock": func() error { _, err := d.Lock(t.Context(), request("y", time.Hour)); return err },
		"Extend": func() error {
			return d.Extend(t.Context(), []driver.Extension{{Owner: held.Owner, TTL: time.Hour}})[0].Err
		},
		"Release":   func() error { _, err := d.Release(t.Context(), held.Owner); return err },
		"NextToken": func() error { _, err := d.NextToken(t.Context(), held.Name, 0); return err },
		"Advance":   func() error { return d.Advance(t.Context(), held.Name, 1) },
		"List":      func() error { return d.List(t.Context(), driver.Name{}, func(driver.Holding) bool { return true }) },
		"List one":  func() error { return d.List(t.Context(), held.Name, func(driver.Holding) bool { return true }) },
		"ForceUnlock": func() error {
			_, err := d.ForceUnlock(t.Context(), held.Name)
			return err
		},
		"Verify": func() error { return d.Verify(t.Context()) },
	} {
		began := time.Now()
		err := call()
		if err == nil {
			t.Errorf("%s while all nodes hang: got nil, want an error (L8)", step)
		}
		if took := time.Since(began); took > patience {
			t.Errorf("%s while all nodes hang: got its end after %v, want it soon after the node timeout", step, took)
		}
	}
}
