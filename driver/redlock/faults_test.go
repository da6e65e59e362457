package redlock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/history"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/conformance/worker"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/redlock"
	"github.com/fencelock/fencelock/internal/redisbackend"
	"github.com/fencelock/fencelock/internal/redlockbackend"
)

// wired is a driver with a network of its own to each of the masters.
func wired(t testing.TB, m redlockbackend.Masters, o *redlock.Options) (*redlockbackend.Owning, []*servers.Proxy) {
	t.Helper()
	var proxies []*servers.Proxy
	var addrs []string
	for _, s := range m {
		p, err := servers.NewProxy(s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		proxies, addrs = append(proxies, p), append(addrs, p.Addr())
	}
	return redlockbackend.Driver(t, addrs, o), proxies
}

// nothingLeft waits until no master has anything of the lock.
func nothingLeft(t testing.TB, m redlockbackend.Masters, name, when string) {
	t.Helper()
	for _, s := range m {
		eventually(t, "nothing left of "+name+" "+when+" (L7)", func() bool {
			return len(redlockbackend.Leftovers(t, s, "fencelock", redisbackend.LockName(name))) == 0
		})
	}
}

// names checks that the error says what became of the request on each node.
func names(t testing.TB, err error, addrs []string, when string) {
	t.Helper()
	var q *redlock.QuorumError
	if !errors.As(err, &q) || len(q.Nodes) != len(addrs) {
		t.Fatalf("error %s: got %v, want a QuorumError of %d nodes (F101)", when, err, len(addrs))
	}
	for _, a := range addrs {
		if !strings.Contains(err.Error(), a) {
			t.Errorf("error %s: got %v, want what became of it on %s (F101)", when, err, a)
		}
	}
}

// TestMajorityHangs: nothing is believed, each node is named, and nothing is left when they go on.
func TestMajorityHangs(t *testing.T) {
	t.Parallel()
	m := masters(t, 5)
	const timeout, ttl = time.Second, 20 * time.Second
	c, err := fencelock.New(newDriver(t, m, &redlock.Options{NodeTimeout: timeout}))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	before, err := c.TryLock(t.Context(), "before", fencelock.TTL(ttl))
	if err != nil {
		t.Fatal(err)
	}
	if err := before.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, s := range m[:3] {
		if err := s.Pause(); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	l, err := c.TryLock(t.Context(), "x", fencelock.TTL(ttl))
	took := time.Since(began)
	for _, s := range m[:3] {
		if err := s.Resume(); err != nil {
			t.Fatal(err)
		}
	}
	if err == nil || errors.Is(err, fencelock.ErrHeld) {
		t.Fatalf("TryLock while three of five nodes hang: got %v, %v, want a failure of the backend (L8)", l, err)
	}
	names(t, err, m.Addrs(), "while three of five nodes hang")
	t.Logf("TryLock while three of five nodes hang: took %v", took)
	if took < timeout || took > 5*timeout/2 { // the client libraries would wait for 3 s
		t.Errorf("TryLock while three of five nodes hang: took %v, want the node timeout, %v, and not much more", took, timeout)
	}
	nothingLeft(t, m, "x", "when the nodes go on")
	// Other clients need not wait for the TTL.
	r := request("x", time.Minute)
	lock(t, newDriver(t, m, nil), r, driver.Granted)
}

// TestOneWayPartition loses what one side says and not what the other does: a minority delays nobody, and a majority
// leaves nothing behind.
func TestOneWayPartition(t *testing.T) {
	t.Parallel()
	for what, lost := range map[string]servers.Direction{"requests are lost": servers.ToServer, "replies are lost": servers.ToClient} {
		t.Run(strings.ReplaceAll(what, " ", "-"), func(t *testing.T) {
			t.Parallel()
			m := masters(t, 5)
			d, proxies := wired(t, m, &redlock.Options{NodeTimeout: time.Second})
			other := newDriver(t, m, nil)
			held := request("held", time.Hour)
			lock(t, d, held, driver.Granted)
			everywhere(t, m, held)
			heal := func() {
				for _, p := range proxies {
					p.Pass(lost)
					p.Reset() // what was lost on a connection is never sent again
				}
			}
			for _, p := range proxies[:2] {
				p.Drop(lost)
			}
			r := request("x", time.Hour)
			token := lock(t, d, r, driver.Granted).Token
			extend(t, d, held, 2*time.Hour)
			lock(t, other, request("x", time.Hour), driver.Held)
			release(t, d, r)
			next := request("x", time.Hour)
			eventually(t, "Lock by another client", func() bool {
				a, err := other.Lock(t.Context(), next)
				if a.State == driver.Granted && a.Token <= token {
					t.Errorf("token after %v: got %v, want a greater one (T1)", token, a.Token)
				}
				return err == nil && a.State == driver.Granted
			})
			release(t, other, next)
			heal()
			nothingLeft(t, m, "x", "when two of five nodes are reached again")

			proxies[4].Drop(lost)
			for _, p := range proxies[:2] {
				p.Drop(lost)
			}
			y := request("y", time.Hour)
			a, err := d.Lock(t.Context(), y)
			if err == nil {
				t.Fatalf("Lock while %s of three of five nodes: got %v, want an error (L8)", what, a.State)
			}
			var addrs []string
			for _, p := range proxies {
				addrs = append(addrs, p.Addr())
			}
			names(t, err, addrs, "while "+what)
			if x := d.Extend(t.Context(), []driver.Extension{{Owner: held.Owner, TTL: 3 * time.Hour}})[0]; x.Err == nil {
				t.Errorf("Extend while %s of three of five nodes: got %v, want an error (L8)", what, x.State)
			}
			_, _ = d.Release(t.Context(), y.Owner) // as the engine does; it is tried again until it has reached all
			heal()
			nothingLeft(t, m, "y", "when three of five nodes are reached again")
			eventually(t, "Extend of what was held all the time", func() bool {
				x := d.Extend(t.Context(), []driver.Extension{{Owner: held.Owner, TTL: 3 * time.Hour}})[0]
				if x.Err == nil && x.State != driver.Granted {
					t.Fatalf("Extend after a partition: got %v, want granted", x.State)
				}
				return x.Err == nil
			})
		})
	}
}

// TestClockOfOneNode steps it by more than the lease, and back: that ends a lease on this node at most, and tokens rise.
func TestClockOfOneNode(t *testing.T) {
	t.Parallel()
	m := redlockbackend.Start(t, 5, &servers.RedisOptions{Clock: true})
	d, other := newDriver(t, m, nil), newDriver(t, m, nil)
	const ttl = time.Hour
	r := request("x", ttl)
	last := lock(t, d, r, driver.Granted).Token
	for i, step := range []time.Duration{ttl + time.Minute, -time.Minute, 0} {
		everywhere(t, m, r)
		if err := m[i].(*servers.Redis).SetClock(step); err != nil {
			t.Fatal(err)
		}
		if step > ttl {
			eventually(t, "end of the lease on the node", func() bool { return holder(t, m[i], "x") == "" })
		}
		lock(t, other, request("x", ttl), driver.Held)
		extend(t, d, r, ttl)
		release(t, d, r)
		nothingLeft(t, m, "x", "after a step of the clock")
		r = request("x", ttl)
		a := lock(t, other, r, driver.Granted)
		if a.Token <= last {
			t.Errorf("token after a clock was stepped by %v: got %v after %v, want a greater one (T1)", step, a.Token, last)
		}
		last = a.Token
		d, other = other, d
	}
	if ahead := time.Until(time.UnixMicro(int64(last))); ahead > time.Minute {
		t.Errorf("token with one clock ahead: got one that is %v ahead, want at most 1 min (T4)", ahead)
	}
}

// TestClientAhead: the tokens of a client whose clock is a year ahead of the nodes' keep to theirs.
func TestClientAhead(t *testing.T) {
	t.Parallel()
	const year = 365 * 24 * time.Hour
	m := redlockbackend.Start(t, 5, &servers.RedisOptions{Clock: true})
	for _, s := range m {
		if err := s.(*servers.Redis).SetClock(-year); err != nil {
			t.Fatal(err)
		}
	}
	d := newDriver(t, m, nil)
	last := driver.Token(0)
	for range 3 {
		r := request("x", time.Minute)
		token := lock(t, d, r, driver.Granted).Token
		if ahead := time.Until(time.UnixMicro(int64(token)).Add(year)); ahead > time.Minute || token <= last {
			t.Errorf("token by a client that is a year ahead: got %v after %v, %v ahead of the nodes, want at most 1 min and a greater one (T1, T4)", token, last, ahead)
		}
		last = token
		release(t, d, r)
	}
}

// TestOutOfMemory: a minority without memory stops nothing. A majority refuses, which is told and leaves nothing, and
// what is held can be extended and released.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	m := masters(t, 5)
	d := newDriver(t, m, nil)
	held := request("held", time.Minute)
	lock(t, d, held, driver.Granted)
	everywhere(t, m, held)
	full := func(s servers.Server, limit string) { do(t, s, "CONFIG", "SET", "maxmemory", limit) }
	full(m[0], "1")
	full(m[1], "1")
	r := request("x", time.Minute)
	lock(t, d, r, driver.Granted)
	release(t, d, r)
	full(m[2], "1")
	a, err := d.Lock(t.Context(), request("y", time.Minute))
	if !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), "OOM") {
		t.Errorf("Lock while three of five nodes are out of memory: got %v, %v, want ErrUnavailable with OOM (L8)", a.State, err)
	}
	nothingLeft(t, m, "y", "after it was refused")
	extend(t, d, held, time.Hour)
	release(t, d, held)
	nothingLeft(t, m, "held", "after its release")
}

// TestRefusals makes nodes refuse, in each of the ways there are. A minority of them stops
// nothing. A majority is told as an outage, never as contention or a loss, and leaves nothing; who held holds on.
func TestRefusals(t *testing.T) {
	t.Parallel()
	m := masters(t, 3)
	d := newDriver(t, m, nil)
	for _, refusal := range redisbackend.Refusals {
		if refusal.Code == "LOADING" { // TestNodesLoading
			continue
		}
		t.Run(refusal.Code, func(t *testing.T) {
			refuse := func(s servers.Server) (end func()) {
				return sync.OnceFunc(refusal.Refuse(t, redisbackend.Server{Redis: s.(*servers.Redis)}))
			}
			held, given := request("held-"+refusal.Code, time.Hour), request("given-"+refusal.Code, time.Hour)
			token := lock(t, d, held, driver.Granted).Token
			lock(t, d, given, driver.Granted)
			everywhere(t, m, held)
			everywhere(t, m, given)

			first := refuse(m[0])
			defer first()
			r, other := request("x-"+refusal.Code, time.Minute), newDriver(t, m, nil)
			lock(t, d, r, driver.Granted)
			lock(t, other, request(r.Name.Name, time.Minute), driver.Held)
			extend(t, d, held, 2*time.Hour)
			release(t, d, r)
			lock(t, other, request(r.Name.Name, time.Minute), driver.Granted)

			second := refuse(m[1])
			defer second()
			told := func(what string, err error, sure bool) {
				t.Helper()
				var q *redlock.QuorumError
				if !errors.As(err, &q) || errors.Is(err, driver.ErrUnavailable) != sure {
					t.Errorf("%s while two of three nodes refuse: got %v, want a QuorumError that is an ErrUnavailable: %v (L8)", what, err, sure)
					return
				}
				for _, n := range q.Nodes[:2] {
					// One that has been asked who it is says that instead.
					if text := fmt.Sprint(n.Err); !strings.Contains(text, refusal.Code) && !strings.Contains(text, "it is a replica") {
						t.Errorf("%s while two of three nodes refuse: got %v of %s, want %s (F101)", what, n.Err, n.Node, refusal.Code)
					}
				}
			}
			free := request("free-"+refusal.Code, time.Minute)
			_, err := d.Lock(t.Context(), free)
			told("Lock of a free name", err, true)
			nothingLeft(t, m[2:], free.Name.Name, "after it was refused")
			_, err = d.Lock(t.Context(), request(held.Name.Name, time.Minute))
			told("Lock by a rival", err, true)
			// From here on the third node has done it.
			x := d.Extend(t.Context(), []driver.Extension{{Owner: held.Owner, TTL: 3 * time.Hour}})[0]
			told("Extend", x.Err, false)
			_, err = d.NextToken(t.Context(), held.Name, 0)
			told("NextToken", err, false)
			_, err = d.Release(t.Context(), given.Owner) // it goes on with it
			told("Release", err, false)

			first()
			second()
			nothingLeft(t, m, given.Name.Name, "when the nodes do as they are told again")
			nothingLeft(t, m, free.Name.Name, "when the nodes do as they are told again")
			everywhere(t, m, held)
			x = d.Extend(t.Context(), []driver.Extension{{Owner: held.Owner, TTL: 3 * time.Hour}})[0]
			if x.Err != nil || x.State != driver.Granted || x.Token != token {
				t.Errorf("Extend when the nodes do as they are told again: got %+v, want granted with token %v (T3)", x, token)
			}
			lock(t, d, given, driver.Granted)
		})
	}
}

// TestNodesLoading: a node that is up again and still reads its data counts as one that is not there. Others go on, and
// without a majority that is an outage, never contention.
func TestNodesLoading(t *testing.T) {
	t.Parallel()
	m := redlockbackend.Start(t, 5, &servers.RedisOptions{AppendFsync: "always",
		Args: []string{"--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024"}})
	d := newDriver(t, m, nil)
	held := request("held", time.Hour)
	lock(t, d, held, driver.Granted)
	everywhere(t, m, held)
	const keys = 20_000 // which take it 40 s, unless it is told to hurry
	load := func(nodes ...servers.Server) (ready func()) {
		t.Helper()
		var all sync.WaitGroup
		for _, s := range nodes {
			do(t, s, "DEBUG", "POPULATE", strconv.Itoa(keys))
			do(t, s, "BGREWRITEAOF")
			eventually(t, "data on disk", func() bool {
				info, _ := do(t, s, "INFO", "persistence").(string)
				return strings.Contains(info, "aof_rewrite_in_progress:0") && strings.Contains(info, "aof_rewrite_scheduled:0")
			})
			if err := s.Kill(); err != nil {
				t.Fatal(err)
			}
			all.Go(func() {
				if err := s.Start(context.WithoutCancel(t.Context())); err != nil {
					t.Errorf("Start with much data: got %v, want nil", err)
				}
			})
			redisbackend.AwaitRefusal(t, s, "LOADING")
		}
		return func() {
			for _, s := range nodes {
				do(t, s, "CONFIG", "SET", "key-load-delay", "0")
			}
			all.Wait()
		}
	}
	loading := func(nodes ...servers.Server) {
		t.Helper()
		for _, s := range nodes {
			if _, err := s.(*servers.Redis).Do(t.Context(), "GET", "x"); err == nil || !strings.Contains(err.Error(), "LOADING") {
				t.Fatalf("void: a node that should be loading answered %v", err)
			}
		}
	}

	ready := load(m[:2]...)
	r := request("x", time.Minute)
	lock(t, d, r, driver.Granted)
	lock(t, newDriver(t, m, nil), request("x", time.Minute), driver.Held)
	extend(t, d, held, 2*time.Hour)
	release(t, d, r)
	loading(m[:2]...)

	others := load(m[2])
	for _, name := range []string{"held", "free"} {
		a, err := d.Lock(t.Context(), request(name, time.Minute))
		if !errors.Is(err, driver.ErrUnavailable) || a.State == driver.Held || strings.Count(err.Error(), "LOADING") != 3 {
			t.Errorf("Lock of %s while three of five nodes load their data: got %v, %v, want ErrUnavailable with LOADING of each (L8)", name, a.State, err)
		}
	}
	if x := d.Extend(t.Context(), []driver.Extension{{Owner: held.Owner, TTL: 3 * time.Hour}})[0]; x.Err == nil {
		t.Errorf("Extend while three of five nodes load their data: got %v, want an error (L8)", x.State)
	}
	loading(m[:3]...)
	nothingLeft(t, m[3:], "free", "while three of five nodes load their data")

	ready()
	others()
	everywhere(t, m, held) // they had it on disk
	extend(t, d, held, time.Hour)
	r = request("x", time.Minute)
	lock(t, d, r, driver.Granted)
	everywhere(t, m, r)
	release(t, d, r)
	release(t, d, held)
	nothingLeft(t, m, "held", "after its release")
}

// TestScriptsFlushed: a node that has forgotten the scripts is sent them again, in every step.
func TestScriptsFlushed(t *testing.T) {
	t.Parallel()
	m := masters(t, 3)
	d := newDriver(t, m, nil)
	flush := func() {
		for _, s := range m {
			do(t, s, "SCRIPT", "FLUSH")
		}
	}
	for range 3 {
		flush()
		r := request("x", time.Minute)
		lock(t, d, r, driver.Granted)
		flush()
		extend(t, d, r, time.Hour)
		flush()
		release(t, d, r)
	}
}

// TestRoleChanges: a node that becomes a replica while it is in use refuses, and does not count.
func TestRoleChanges(t *testing.T) {
	t.Parallel()
	m := masters(t, 3)
	d := newDriver(t, m, nil)
	r := request("x", time.Minute)
	lock(t, d, r, driver.Granted)
	everywhere(t, m, r)
	host, port, _ := strings.Cut(m[1].Addr(), ":")
	do(t, m[0], "REPLICAOF", host, port)
	extend(t, d, r, time.Hour)
	release(t, d, r)
	do(t, m[2], "REPLICAOF", host, port)
	a, err := d.Lock(t.Context(), request("y", time.Minute))
	if err == nil {
		t.Fatalf("Lock when two of three nodes are replicas: got %v, want an error (L8)", a.State)
	}
	names(t, err, m.Addrs(), "when two of three nodes are replicas")
}

// TestWarnings: of nodes that may evict or forget, and of no others.
func TestWarnings(t *testing.T) {
	t.Parallel()
	m := redlockbackend.Start(t, 3, &servers.RedisOptions{AppendFsync: "always"})
	do(t, m[1], "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
	do(t, m[2], "CONFIG", "SET", "appendfsync", "everysec")
	d := newDriver(t, m, nil)
	e := listen(d)
	lock(t, d, request("x", time.Minute), driver.Granted)
	eventually(t, "warnings", func() bool {
		return e.has(m[1].Addr(), "maxmemory-policy is allkeys-lru") && e.has(m[2].Addr(), "appendfsync")
	})
	if e.has(m[0].Addr()) {
		t.Errorf("warnings: got %q, want none of a node that neither evicts nor forgets", e.warnings)
	}
}

// TestAmnesia is what the authors of the debate about Redlock describe. One client reaches the nodes 0, 1 and 2, another
// one 2, 3 and 4, so what node 2 says decides.
func TestAmnesia(t *testing.T) {
	t.Parallel()
	const ttl = time.Hour
	refused := func(t *testing.T, b *redlockbackend.Owning, what string) {
		t.Helper()
		for range 5 {
			if a, err := b.Lock(t.Context(), request("x", ttl)); a.State == driver.Granted {
				t.Fatalf("Lock when node 2 %s: got %v, %v, want no grant (L1)", what, a.State, err)
			}
		}
	}
	// split makes both clients, of which the first one holds the lock.
	split := func(t *testing.T, o *servers.RedisOptions, second *redlock.Options) (m redlockbackend.Masters, b *redlockbackend.Owning, heard *events, token driver.Token) {
		t.Helper()
		m = redlockbackend.Start(t, 5, o)
		a, toA := wired(t, m, nil)
		b, toB := wired(t, m, second)
		heard = listen(b)
		if second == nil { // both know all nodes
			for _, d := range []*redlockbackend.Owning{a, b} {
				r := request("seen", ttl)
				lock(t, d, r, driver.Granted)
				everywhere(t, m, r)
				release(t, d, r)
				nothingLeft(t, m, "seen", "before the partition")
			}
		}
		for _, p := range slices.Concat(toA[3:], toB[:2]) {
			if err := p.Refuse(); err != nil {
				t.Fatal(err)
			}
			p.Reset()
		}
		r := request("x", ttl)
		token = lock(t, a, r, driver.Granted).Token
		eventually(t, "lock on node 2", func() bool { return holder(t, m[2], "x") != "" })
		refused(t, b, "is held by another client")
		if err := a.Close(); err != nil { // its holder is paused, and does not renew
			t.Fatal(err)
		}
		return m, b, heard, token
	}
	restart := func(t *testing.T, s servers.Server, start func(context.Context) error) {
		t.Helper()
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("RestartSeen", func(t *testing.T) {
		t.Parallel()
		m, b, heard, _ := split(t, nil, nil)
		restart(t, m[2], m[2].StartEmpty)
		refused(t, b, "has forgotten the holder")
		if !heard.has("may have forgotten") {
			t.Errorf("warnings: got %q, want that a node may have forgotten", heard.warnings)
		}
	})
	t.Run("RestartWait", func(t *testing.T) {
		t.Parallel()
		m, b, _, _ := split(t, nil, &redlock.Options{RestartWait: time.Hour})
		restart(t, m[2], m[2].StartEmpty)
		refused(t, b, "has forgotten the holder")
	})
	t.Run("RestartWithData", func(t *testing.T) {
		t.Parallel()
		m, b, _, _ := split(t, &servers.RedisOptions{AppendFsync: "always"}, nil)
		restart(t, m[2], m[2].Start)
		refused(t, b, "has restarted with its data")
	})
	// No driver can know that a clock was stepped: both believe, and the tokens tell who came later.
	t.Run("ClockJumps", func(t *testing.T) {
		t.Parallel()
		m, b, _, token := split(t, &servers.RedisOptions{Clock: true}, nil)
		if err := m[2].(*servers.Redis).SetClock(ttl + time.Minute); err != nil {
			t.Fatal(err)
		}
		if a := lock(t, b, request("x", ttl), driver.Granted); a.Token <= token {
			t.Errorf("token after a clock jumped: got %v after %v, want a greater one (T1, T2)", a.Token, token)
		}
	})
}

// TestRandomFaults lets clients take turns while at most two of five nodes hang, or are killed and come back with their
// data, and judges what they have recorded.
func TestRandomFaults(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	m := redlockbackend.Start(t, 5, &servers.RedisOptions{AppendFsync: "always"})
	rec := history.NewRecorder("", nil)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var loads sync.WaitGroup
	var clients []*worker.Recorded
	for i := range 3 {
		c, err := fencelock.New(newDriver(t, m, &redlock.Options{NodeTimeout: 500 * time.Millisecond}))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		client := worker.Record(c, fmt.Sprint("client ", i), rec, false)
		clients = append(clients, client)
		load := worker.Load{Seed: seed + uint64(i) + 1, Goroutines: 2, Attempts: 1 << 20, For: time.Hour, Locks: []string{"a", "b"},
			Permits: []worker.Permits{{Name: "p", Limits: []int{1, 2}}}, Tokens: true,
			TTL: time.Second, Hold: 10 * time.Millisecond, WaitFor: patience}
		loads.Go(func() { load.Run(ctx, client) })
	}
	taken := func() (n int) {
		for _, c := range clients {
			n += c.Taken()
		}
		return n
	}
	more := func(when string) {
		t.Helper()
		want := taken() + 10
		eventually(t, "leases "+when, func() bool { return taken() >= want })
	}
	more("before any fault")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	const faults = 6
	for range faults {
		hit := r.Perm(len(m))[:1+r.IntN(2)]
		kill := r.IntN(2) == 0
		rec.FaultBegin("nodes")
		for _, i := range hit {
			if kill {
				must(m[i].Kill())
			} else {
				must(m[i].Pause())
			}
			rec.FaultHit("nodes")
		}
		more(fmt.Sprintf("while nodes %v are away", hit))
		for _, i := range hit {
			if kill {
				must(m[i].Start(t.Context()))
			} else {
				must(m[i].Resume())
			}
		}
		rec.FaultEnd("nodes")
		more(fmt.Sprintf("after nodes %v have come back", hit))
	}
	stop()
	loads.Wait()
	// How late a loss is told is judged where the machine is not disturbed.
	report := history.Check(rec.History(), history.Rules{LossTolerance: patience,
		Faults: []history.FaultRule{{Name: "nodes", Hits: faults, AcquiredBefore: 10, AcquiredDuring: 10, AcquiredAfter: 10}}})
	if err := report.Err(); err != nil {
		t.Errorf("history with seed %d: got\n%v\nwant no violation", seed, err)
	}
}
