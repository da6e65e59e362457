package etcd

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

func TestEscapeKeepsNamesApart(t *testing.T) {
	names := []string{"a", "a/", "a/b", "a%2Fb", "a%2fb", "%", "%25", "a\x00", "", "ä", "\xff", "a.b", "a b", "a+b", strings.Repeat("/", 512)}
	seen := make(map[string]string)
	for _, n := range names {
		e := escape(n)
		if other, taken := seen[e]; taken {
			t.Errorf("escape(%q): got %q as of %q, want another", n, e, other)
		}
		seen[e] = n
		if strings.Contains(e, "/") {
			t.Errorf("escape(%q): got %q, want no slash", n, e)
		}
		if back, ok := unescape(e); !ok || back != n {
			t.Errorf("unescape(%q): got %q, %v, want %q", e, back, ok, n)
		}
	}
	for _, bad := range []string{"%", "a%2", "%zz"} {
		if got, ok := unescape(bad); ok {
			t.Errorf("unescape(%q): got %q, want none", bad, got)
		}
	}
}

// TestProposals: TryLock and Release are one raft proposal each, and waiting costs none but to queue and to leave.
func TestProposals(t *testing.T) {
	s := newServer(t)
	f := onServer(t, s)
	d := f.driver()
	cycle := func() {
		r := lockOf("a", 30*time.Second)
		asked(t, d, r, driver.Granted)
		given(t, d, r.Owner, true)
	}
	cycle() // the first one also makes the base and the lease
	const rounds = 50
	before := proposals(t, s)
	for range rounds {
		cycle()
	}
	if n := proposals(t, s) - before; n > 2*rounds+2 {
		t.Errorf("%d times TryLock and Release: got %d raft proposals, want 2 each", rounds, n)
	}

	// A line of waiters, each a client of its own.
	const waiters = 16
	h := lockOf("b", 30*time.Second)
	asked(t, d, h, driver.Granted)
	var drivers []*Driver
	for range waiters {
		drivers = append(drivers, f.driver())
	}
	for range 2 { // each driver that opens may raise the base, which the others then must learn
		for _, w := range drivers {
			cycled := lockOf("warm", 30*time.Second)
			asked(t, w, cycled, driver.Granted)
			given(t, w, cycled.Owner, true)
		}
	}
	var clients []*fencelock.Client
	for _, w := range drivers {
		clients = append(clients, locks(t, w))
	}
	before = proposals(t, s)
	var all sync.WaitGroup
	for i, c := range clients {
		all.Go(func() {
			l, err := c.Lock(t.Context(), "b", fencelock.TTL(30*time.Second))
			if err != nil {
				t.Errorf("Lock: got %v, want a lease", err)
				return
			}
			if err := l.Release(t.Context()); err != nil {
				t.Errorf("Release: got %v, want nil", err)
			}
		})
		eventually(t, patience, func() error {
			if n := len(f.keys("lock/b/")); n != i+2 {
				return fmt.Errorf("queue: got %d entries, want %d", n, i+2)
			}
			return nil
		})
	}
	given(t, d, h.Owner, true)
	all.Wait()
	if n := proposals(t, s) - before; n > 2*waiters+1+2 {
		t.Errorf("%d waiters served: got %d raft proposals, want 2 each and 1 for the holder's release (W2)", waiters, n)
	}
}

// TestManyFirstSteps: a driver that begins with many steps at once raises the base once, not against itself.
func TestManyFirstSteps(t *testing.T) {
	s := newServer(t)
	d := onServer(t, s).driver()
	const steps = 300
	before := proposals(t, s)
	var all sync.WaitGroup
	for i := range steps {
		all.Go(func() {
			if a, err := d.Lock(t.Context(), lockOf(fmt.Sprint("a/", i), time.Minute)); err != nil || a.State != driver.Granted {
				t.Errorf("step Lock: got %v, %v, want granted", a.State, err)
			}
		})
	}
	all.Wait()
	if n := proposals(t, s) - before; n > steps+4 {
		t.Errorf("%d locks at once by a new driver: got %d raft proposals, want 1 each, one for the base and one for the lease", steps, n)
	}
}

// TestSharedLeaseEndsNobodyLate: locks of one TTL share an etcd lease, and one that is not extended ends nevertheless.
func TestSharedLeaseEndsNobodyLate(t *testing.T) {
	t.Parallel()
	f := onServer(t, sharedServer(t))
	d := f.driver()
	kept, dropped := lockOf("kept", 2*time.Second), lockOf("dropped", 2*time.Second)
	asked(t, d, kept, driver.Granted)
	asked(t, d, dropped, driver.Granted)
	var ids []int64
	for _, key := range f.keys("lock/") {
		resp, err := f.raw.Get(t.Context(), key)
		if err != nil || len(resp.Kvs) != 1 {
			t.Fatalf("Get %q: got %v, want a key", key, err)
		}
		ids = append(ids, resp.Kvs[0].Lease)
	}
	if len(ids) != 2 || ids[0] != ids[1] {
		t.Fatalf("leases of two locks of one TTL: got %x, want one and the same", ids)
	}
	rival := f.driver()
	began := time.Now()
	eventually(t, 2*time.Second+patience, func() error {
		extended(t, d, kept.Owner, 2*time.Second, driver.Granted)
		a, err := rival.Lock(t.Context(), lockOf("dropped", 2*time.Second))
		if err != nil || a.State != driver.Granted {
			return fmt.Errorf("rival of a lock that nobody extends: got %v, %v, want granted (W3)", a.State, err)
		}
		return nil
	})
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("rival of a lock with 2s left: got it after %v, want about 2s (W3)", took)
	}
	extended(t, d, dropped.Owner, 2*time.Second, driver.Gone)
	extended(t, d, kept.Owner, 2*time.Second, driver.Granted)
}

// TestOrphanOfLostReply: an entry whose reply was lost goes, though the client lives and its lease is kept
// alive, and nobody compensates.
func TestOrphanOfLostReply(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	f := onServer(t, s)
	p := newProxy(t, s.Addr())
	d := newDriver(t, newClient(t, p.Addr()), f.namespace)
	kept := lockOf("kept", 2*time.Second)
	asked(t, d, kept, driver.Granted)

	made := false
	for range 50 { // the server may say something else first, and then never gets to carry it out
		lost := waiting(lockOf("lost", 2*time.Second))
		dropped := p.DropNextReply(&servers.DropOptions{RequestWith: lost.ID})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		a, err := d.Lock(ctx, lost)
		cancel()
		if errors.Is(err, driver.ErrUnavailable) {
			continue // it was still connecting
		}
		if err == nil {
			t.Fatalf("Lock whose reply was lost: got %v, want an unknown outcome (L8)", a.State)
		}
		<-dropped
		if made = len(f.keys("lock/lost/")) > 0; made {
			break
		}
	}
	if !made {
		t.Fatalf("void: no entry was made, so nothing is shown")
	}
	eventually(t, 2*2*time.Second+patience/4, func() error {
		d.Extend(t.Context(), []driver.Extension{{Owner: kept.Owner, TTL: 2 * time.Second}})
		if left := f.keys("lock/lost/"); len(left) > 0 {
			return fmt.Errorf("entry whose reply was lost: got %q, want it gone (L7)", left)
		}
		return nil
	})
	extended(t, d, kept.Owner, 2*time.Second, driver.Granted)
}

// TestAuditFindsLateKeys: a request without an answer may be carried out after everything else was cleaned up.
func TestAuditFindsLateKeys(t *testing.T) {
	t.Parallel()
	f := onServer(t, sharedServer(t))
	d := f.driver()
	kept := lockOf("kept", 2*time.Second)
	asked(t, d, kept, driver.Granted)
	l, err := d.sharedLease(t.Context(), 2*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	never := lockOf("never", 2*time.Second)
	e, known, err := d.enter(never.Owner, l, 2*time.Second, false)
	if err != nil || known {
		t.Fatalf("enter: got %v, %v, want a new entry", known, err)
	}
	d.doubt(e, l, known, 0)
	eventually(t, patience, func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.entries[e.owner] != nil {
			return errors.New("books: got the doubted entry after its time, want it gone")
		}
		return nil
	})
	if _, err := f.raw.Put(t.Context(), e.key, record{ID: never.ID, Limit: 1}.text(), clientv3.WithLease(clientv3.LeaseID(l.id))); err != nil {
		t.Fatal(err)
	}
	eventually(t, 3*2*time.Second+patience/4, func() error {
		extended(t, d, kept.Owner, 2*time.Second, driver.Granted)
		if left := f.keys("lock/never/"); len(left) > 0 {
			return fmt.Errorf("key of a request that came late: got %q, want it gone (L7)", left)
		}
		return nil
	})
}

// TestAuditOfManyKeys: the list of the keys of one lease can be longer than what gRPC takes by default.
func TestAuditOfManyKeys(t *testing.T) {
	f := onServer(t, sharedServer(t))
	d := f.driver()
	l, err := d.sharedLease(t.Context(), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	put := func(name string) clientv3.Op {
		o := lockOf(name, time.Minute).Owner
		key := d.queueKey(o.Name) + "x"
		if name != "stray" {
			d.mu.Lock()
			d.entries[o] = &entry{owner: o, key: key, slot: -1, deadline: math.MaxInt64}
			d.mu.Unlock()
		}
		return clientv3.OpPut(key, record{ID: o.ID, Limit: 1}.text(), clientv3.WithLease(clientv3.LeaseID(l.id)))
	}
	ops := []clientv3.Op{put("stray")}
	for i := range 3000 { // of 1.5 kB
		ops = append(ops, put(strings.Repeat("/", 500)+strconv.Itoa(i)))
	}
	for part := range slices.Chunk(ops, opsAtOnce) {
		if _, err := f.raw.Txn(t.Context()).Then(part...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
	before := metrics(t, sharedServer(t), `etcd_mvcc_range_total`)
	d.audit(l)
	if n := metrics(t, sharedServer(t), `etcd_mvcc_range_total`) - before; n > 100 {
		t.Errorf("reads of the audit of a lease with %d keys, all but one in the books: got %d, want a few (W2)", len(ops), n)
	}
	if left := f.keys("lock/stray/"); len(left) > 0 {
		t.Errorf("key on a lease of many keys that nobody owns: got %q, want it gone (L7)", left)
	}
}

// TestTTLs: granted TTLs are whole seconds, and what the server grants is what is told.
func TestTTLs(t *testing.T) {
	t.Parallel()
	d := onServer(t, sharedServer(t)).driver()
	for ttl, want := range map[time.Duration]time.Duration{
		2 * time.Second: 2 * time.Second, 2500 * time.Millisecond: 3 * time.Second, 24 * time.Hour: 24 * time.Hour,
	} {
		if a := asked(t, d, lockOf(ttl.String(), ttl), driver.Granted); a.TTL > want || a.TTL < want-time.Second/2 {
			t.Errorf("grant for %v: got TTL %v, want %v", ttl, a.TTL, want)
		}
	}
	if m := d.Info().MinTTL; m != 2*time.Second {
		t.Errorf("MinTTL: got %v, want 2s", m)
	}

	slow := onServer(t, newServer(t, "--heartbeat-interval", "500", "--election-timeout", "5000")).driver()
	r := lockOf("a", 2*time.Second)
	if a := asked(t, slow, r, driver.Granted); a.TTL < 7*time.Second {
		t.Errorf("grant by a server whose election timeout is 5s: got TTL %v, want what it grants, 8s", a.TTL)
	}
	if a := extended(t, slow, r.Owner, 2*time.Second, driver.Granted); a.TTL < 7*time.Second {
		t.Errorf("extension by a server whose election timeout is 5s: got TTL %v, want what it grants, 8s", a.TTL)
	}
}

// TestExtendByAnotherTTL: for once the lease is long, then it lives as before.
func TestExtendByAnotherTTL(t *testing.T) {
	t.Parallel()
	f := onServer(t, sharedServer(t))
	d := f.driver()
	r := lockOf("a", 2*time.Second)
	first := asked(t, d, r, driver.Granted)
	a := extended(t, d, r.Owner, 5*time.Second, driver.Granted)
	if a.TTL != 5*time.Second || a.Token != first.Token {
		t.Errorf("Extend by 5s: got TTL %v, token %v, want 5s, %v (T3)", a.TTL, a.Token, first.Token)
	}
	d.mu.Lock()
	if d.leases.shared[5*time.Second] != nil {
		t.Errorf("lease after Extend by another TTL: got one that others may keep alive, want one of its own (W3)")
	}
	d.mu.Unlock()
	if a := extended(t, d, r.Owner, 2*time.Second, driver.Granted); a.TTL < 4*time.Second {
		t.Errorf("Extend by 2s after one by 5s: got TTL %v, want what is left of 5s (L4)", a.TTL)
	}
	eventually(t, patience, func() error {
		if a := extended(t, d, r.Owner, 2*time.Second, driver.Granted); a.TTL > 2*time.Second {
			return fmt.Errorf("Extend by 2s, again and again: got TTL %v, want 2s in the end", a.TTL)
		}
		return nil
	})
	d.mu.Lock()
	back := d.entries[r.Owner].lease == d.leases.shared[2*time.Second]
	d.mu.Unlock()
	if !back {
		t.Errorf("lease after a long extension has passed: got one of its own, want the shared one")
	}
}

// TestLeaseRevokedWhileHolding: the holder is told by its next extension, and the lock is not taken again.
func TestLeaseRevokedWhileHolding(t *testing.T) {
	f := onServer(t, sharedServer(t))
	c := locks(t, f.driver())
	l, err := c.Lock(t.Context(), "a", fencelock.TTL(2*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	f.revokeAll("lock/a/")
	select {
	case <-l.Done():
	case <-time.After(patience):
		t.Fatal("Done after the lease was revoked: got nothing, want it closed")
	}
	is(t, "Err after the lease was revoked", l.Err(), fencelock.ErrLost, "L3")
	is(t, "Release after the lease was revoked", l.Release(t.Context()), fencelock.ErrNotHeld, "L4")
	again, err := c.Lock(t.Context(), "a", fencelock.TTL(2*time.Second))
	if err != nil || again.Token() <= l.Token() {
		t.Fatalf("Lock after the lease was revoked: got %v, want a lease with a greater token (T1)", err)
	}
}

// revokeAll revokes the leases of all keys below the prefix.
func (f *fixture) revokeAll(prefix string) {
	f.tb.Helper()
	for _, key := range f.keys(prefix) {
		resp, err := f.raw.Get(f.tb.Context(), key)
		if err != nil {
			f.tb.Fatal(err)
		}
		for _, kv := range resp.Kvs {
			if _, err := f.raw.Revoke(f.tb.Context(), clientv3.LeaseID(kv.Lease)); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
				f.tb.Fatal(err)
			}
		}
	}
}

// TestLeaseRevokedWhileWaiting: whoever lost its place is not granted by it, and queues anew.
func TestLeaseRevokedWhileWaiting(t *testing.T) {
	f := onServer(t, sharedServer(t))
	d := f.driver()
	h := lockOf("a", time.Minute)
	asked(t, d, h, driver.Granted)
	c := locks(t, f.driver())
	type result struct {
		l   *fencelock.Lease
		err error
	}
	done := make(chan result, 1)
	go func() {
		l, err := c.Lock(t.Context(), "a", fencelock.TTL(2*time.Second))
		done <- result{l, err}
	}()
	var old []string
	eventually(t, patience, func() error {
		if old = f.keys("lock/a/"); len(old) != 2 {
			return fmt.Errorf("queue: got %d entries, want 2", len(old))
		}
		return nil
	})
	mine := d.entryKey(h.Owner)
	resp, err := f.raw.Get(t.Context(), old[(slices.Index(old, mine)+1)%2])
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.raw.Revoke(t.Context(), clientv3.LeaseID(resp.Kvs[0].Lease)); err != nil {
		t.Fatal(err)
	}
	given(t, d, h.Owner, true)
	r := <-done
	if r.err != nil {
		t.Fatalf("Lock whose entry was revoked: got %v, want a lease", r.err)
	}
	now := f.keys("lock/a/")
	if len(now) != 1 {
		t.Fatalf("keys of the holder: got %q, want one", now)
	}
	if own, err := f.raw.Get(t.Context(), now[0]); err != nil || own.Kvs[0].CreateRevision <= resp.Header.Revision {
		t.Fatalf("key of the holder: got %v, %v, want a new one", own, err)
	}
	if err := r.l.Release(t.Context()); err != nil {
		t.Fatalf("Release: got %v, want nil", err)
	}
}

// TestCompaction: nothing is read from the past.
func TestCompaction(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	f := onServer(t, s)
	d := f.driver()
	h := lockOf("a", time.Minute)
	asked(t, d, h, driver.Granted)
	p := newProxy(t, s.Addr())
	c := locks(t, newDriver(t, newClient(t, p.Addr()), f.namespace))
	done := make(chan error, 1)
	go func() {
		_, err := c.Lock(t.Context(), "a", fencelock.TTL(time.Minute))
		done <- err
	}()
	eventually(t, patience, func() error {
		if n := len(f.keys("lock/a/")); n != 2 {
			return fmt.Errorf("queue: got %d entries, want 2", n)
		}
		return nil
	})
	// The watch must begin anew after everything it knew has been compacted away.
	if err := p.Refuse(); err != nil {
		t.Fatal(err)
	}
	p.Reset()
	var rev int64
	for i := range 20 {
		resp, err := f.raw.Put(t.Context(), "elsewhere", fmt.Sprint(i))
		if err != nil {
			t.Fatal(err)
		}
		rev = resp.Header.Revision
	}
	if _, err := f.raw.Compact(t.Context(), rev, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	extended(t, d, h.Owner, time.Minute, driver.Granted)
	if err := p.Accept(); err != nil {
		t.Fatal(err)
	}
	given(t, d, h.Owner, true)
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("Lock over a compaction: got %v, want a lease", err)
		}
	case <-time.After(patience):
		t.Error("Lock over a compaction: got nothing, want a lease")
	}
}

// TestHandoverDoesNotWaitForTheWatch: etcd serves a watch that begins in the past every 100 ms only.
func TestHandoverDoesNotWaitForTheWatch(t *testing.T) {
	f := onServer(t, sharedServer(t))
	a, b := locks(t, f.driver()), locks(t, f.driver())
	stop := make(chan struct{})
	var traffic sync.WaitGroup
	traffic.Go(func() { // so that the present revision is always a new one
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				_, _ = f.raw.Put(context.Background(), f.namespace+"-elsewhere", "") //nolint:usetesting // ends with the test
			}
		}
	})
	defer traffic.Wait()
	defer close(stop)
	l, err := a.Lock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	var gaps, plain []time.Duration
	for range 30 {
		at := time.Now()
		if _, err := f.raw.Get(t.Context(), "x"); err != nil {
			t.Fatal(err)
		}
		plain = append(plain, time.Since(at))
		taken := make(chan *fencelock.Lease, 1)
		go func() {
			l, err := b.Lock(t.Context(), "a")
			if err != nil {
				t.Errorf("Lock: got %v, want a lease", err)
			}
			taken <- l
		}()
		eventually(t, patience, func() error {
			if n := len(f.keys("lock/a/")); n != 2 {
				return fmt.Errorf("queue: got %d entries, want 2", n)
			}
			return nil
		})
		at = time.Now()
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if l = <-taken; l == nil {
			return
		}
		gaps = append(gaps, time.Since(at))
		a, b = b, a
	}
	slices.Sort(gaps)
	slices.Sort(plain)
	t.Logf("handover: median %v; a plain read: %v", gaps[15], plain[15])
	if limit := 40*time.Millisecond + 10*plain[15]; gaps[15] > limit {
		t.Errorf("median of handovers: got %v, want at most %v", gaps[15], limit)
	}
}

// TestStrangerInTheQueue: what somebody else wrote there is neither contention nor ignored.
func TestStrangerInTheQueue(t *testing.T) {
	f := onServer(t, sharedServer(t))
	d := f.driver()
	if _, err := f.raw.Put(t.Context(), d.queueKey(driver.Name{Kind: driver.KindPermit, Name: "a"})+"x", "rubbish"); err != nil {
		t.Fatal(err)
	}
	_, err := d.Acquire(t.Context(), request(driver.KindPermit, "a", time.Minute))
	is(t, "Acquire with a stranger in the queue", err, driver.ErrUnavailable, "L8")
	if left := f.keys("semaphore/a/"); len(left) != 1 {
		t.Errorf("keys after a refused Acquire: got %q, want the stranger's only", left)
	}
}

// TestWaitersTokensPassMintedOnes: a token is fixed when its owner queues; one that is minted meanwhile
// must not be greater than the waiter's when it comes to hold.
func TestWaitersTokensPassMintedOnes(t *testing.T) {
	d := onServer(t, sharedServer(t)).driver()
	n := driver.Name{Kind: driver.KindLock, Name: "a"}
	h := lockOf("a", time.Minute)
	first := asked(t, d, h, driver.Granted)
	var queue []driver.Request
	for range 5 {
		w := waiting(lockOf("a", time.Minute))
		asked(t, d, w, driver.Waiting)
		queue = append(queue, w)
	}
	last, err := d.NextToken(t.Context(), n, 0)
	if err != nil || last <= first.Token {
		t.Fatalf("NextToken: got %v, %v, want more than the holder's %v (T1)", last, err, first.Token)
	}
	holder := h.Owner
	serve := func(w driver.Request) {
		t.Helper()
		given(t, d, holder, true)
		r := d.Poll(t.Context(), []driver.Poll{{Owner: w.Owner, TTL: w.TTL, Claim: w.Claim}})[0]
		if r.Err != nil || r.State != driver.Granted || r.Token <= last {
			t.Fatalf("waiter that is next: got %v, token %v, %v, want granted with more than %v (T1)", r.State, r.Token, r.Err, last)
		}
		last, holder = r.Token, w.Owner
	}
	serve(queue[0])
	floor, before := last+1000, last
	if err := d.Advance(t.Context(), n, floor); err != nil {
		t.Fatal(err)
	}
	if a := extended(t, d, holder, time.Minute, driver.Granted); a.Token != before {
		t.Errorf("holder's token after Advance: got %v, want %v (T3)", a.Token, before)
	}
	last = floor
	for _, w := range queue[1:] {
		serve(w)
	}
	given(t, d, holder, true)
	if a := asked(t, d, lockOf("a", time.Minute), driver.Granted); a.Token <= last {
		t.Errorf("token after all waiters: got %v, want more than %v (T1)", a.Token, last)
	}
}

// TestTokensAreUnique: no two of those minted and granted at once are equal (T2), in whatever way they came about.
func TestTokensAreUnique(t *testing.T) {
	f := onServer(t, sharedServer(t))
	n := driver.Name{Kind: driver.KindLock, Name: "a"}
	var mu sync.Mutex
	seen := make(map[driver.Token]string)
	take := func(token driver.Token, by string) {
		mu.Lock()
		defer mu.Unlock()
		if other, taken := seen[token]; taken {
			t.Errorf("token of %s: got %v, as %s has, want another (T2)", by, token, other)
		}
		seen[token] = by
	}
	var all sync.WaitGroup
	for i := range 4 {
		d := f.driver()
		c := locks(t, f.driver())
		all.Go(func() {
			for range 50 {
				token, err := d.NextToken(t.Context(), n, 0)
				if err != nil {
					t.Errorf("NextToken: got %v, want a token", err)
					return
				}
				take(token, fmt.Sprint("minter ", i))
			}
		})
		for j := range 3 {
			all.Go(func() {
				for range 15 {
					l, err := c.Lock(t.Context(), "a", fencelock.TTL(time.Minute))
					if err != nil {
						t.Errorf("Lock: got %v, want a lease", err)
						return
					}
					take(l.Token(), fmt.Sprint("locker ", i, " ", j))
					if err := l.Release(t.Context()); err != nil {
						t.Errorf("Release: got %v, want nil", err)
					}
				}
			})
		}
	}
	all.Wait()
	if len(seen) < 200 {
		t.Fatalf("void: %d tokens", len(seen))
	}
}

// TestFloorOfOneName: tokens far ahead of the clock are one name's own business, and end with it.
func TestFloorOfOneName(t *testing.T) {
	f := onServer(t, sharedServer(t))
	d := f.driver()
	n := driver.Name{Kind: driver.KindLock, Name: "a"}
	ahead := driver.Token(time.Now().Add(time.Hour).UnixMicro())
	if err := d.Advance(t.Context(), n, ahead); err != nil {
		t.Fatal(err)
	}
	other := f.driver()
	a := asked(t, other, lockOf("a", time.Minute), driver.Granted)
	if a.Token <= ahead || a.Token > ahead+driver.Token(time.Minute.Microseconds()) {
		t.Errorf("token after Advance to %v by another client: got %v, want a little more", ahead, a.Token)
	}
	resp, err := f.raw.Get(t.Context(), d.floorKey(n))
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatalf("floor's key: got %v, %v, want one", resp, err)
	}
	left, err := f.raw.TimeToLive(t.Context(), clientv3.LeaseID(resp.Kvs[0].Lease))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := time.Duration(left.TTL)*time.Second, 49*time.Hour; (got - want).Abs() > time.Minute {
		t.Errorf("life of a floor that is an hour ahead: got %v, want %v (T5)", got, want)
	}

	// One that the clock has passed goes, and the namespace takes over.
	n.Name = "b"
	soon := driver.Token(time.Now().Add(300 * time.Millisecond).UnixMicro())
	if err := d.Advance(t.Context(), n, soon); err != nil {
		t.Fatal(err)
	}
	if len(f.keys("floor/lock/b")) != 1 {
		t.Fatal("void: no floor was made")
	}
	eventually(t, patience, func() error {
		fresh := f.driver()
		if t1, err := fresh.NextToken(t.Context(), n, 0); err != nil || t1 <= soon {
			return fmt.Errorf("NextToken after Advance to %v: got %v, %v, want more (T1)", soon, t1, err)
		}
		if left := f.keys("floor/lock/b"); len(left) > 0 {
			return fmt.Errorf("floor that the clock has passed: got %q, want it gone (T5)", left)
		}
		return nil
	})
	token, err := d.NextToken(t.Context(), n, 0)
	if err != nil || token <= soon {
		t.Errorf("NextToken of a client that knew the floor: got %v, %v, want more than %v (T1)", token, err, soon)
	}
}

// TestTokensFollowTheClock: a client that opens lifts the base to its clock, and never lowers it.
func TestTokensFollowTheClock(t *testing.T) {
	f := onServer(t, sharedServer(t))
	before := driver.Token(time.Now().UnixMicro())
	a := asked(t, f.driver(), lockOf("a", time.Minute), driver.Granted)
	b := asked(t, f.driver(), lockOf("b", time.Minute), driver.Granted)
	after := driver.Token(time.Now().UnixMicro())
	if a.Token < before || b.Token <= a.Token || b.Token > after+1_000_000 {
		t.Errorf("tokens: got %v, %v, want them to rise, between %v and %v (T4)", a.Token, b.Token, before, after+1_000_000)
	}
}

// TestPushedTokenIsThePresentOne: what is pushed is the token that the waiter was given last.
func TestPushedTokenIsThePresentOne(t *testing.T) {
	f := onServer(t, sharedServer(t))
	d := f.driver()
	h := lockOf("a", time.Minute)
	asked(t, d, h, driver.Granted)
	c := locks(t, f.driver())
	tokens := make(chan fencelock.Token, 1)
	go func() {
		l, err := c.Lock(t.Context(), "a", fencelock.TTL(time.Minute))
		if err != nil {
			t.Errorf("Lock: got %v, want a lease", err)
			close(tokens)
			return
		}
		tokens <- l.Token()
	}()
	eventually(t, patience, func() error {
		if n := len(f.keys("lock/a/")); n != 2 {
			return fmt.Errorf("queue: got %d entries, want 2", n)
		}
		return nil
	})
	floor := driver.Token(time.Now().UnixMicro())
	if err := d.Advance(t.Context(), h.Name, floor); err != nil {
		t.Fatal(err)
	}
	given(t, d, h.Owner, true)
	if token := <-tokens; token <= floor {
		t.Errorf("token of a waiter after Advance to %v: got %v, want more (T1)", floor, token)
	}
}

// TestGapInTheWatch: who may have lost its place while the watch did not stand is not granted by what it tells then.
func TestGapInTheWatch(t *testing.T) {
	f := onServer(t, sharedServer(t))
	d := f.driver()
	h := lockOf("a", time.Minute)
	asked(t, d, h, driver.Granted)
	w := waiting(lockOf("a", time.Minute))
	var mu sync.Mutex
	kinds := make(map[driver.EventKind]int)
	d.Notify(func(e driver.Event) {
		mu.Lock()
		defer mu.Unlock()
		kinds[e.Kind]++
	})
	asked(t, d, w, driver.Waiting)
	header := func(later int64) pb.ResponseHeader {
		known := d.knownStore()
		return pb.ResponseHeader{ClusterId: known.cluster, Revision: known.revision + later}
	}
	gone := &clientv3.Event{Type: mvccpb.DELETE, Kv: &mvccpb.KeyValue{Key: []byte(d.entryKey(h.Owner)), ModRevision: header(20).Revision}}
	told := func() map[driver.EventKind]int {
		responses := make(chan clientv3.WatchResponse, 2)
		responses <- clientv3.WatchResponse{Header: header(10), Created: true}
		responses <- clientv3.WatchResponse{Header: header(20), Events: []*clientv3.Event{gone}}
		close(responses)
		d.hear(responses)
		mu.Lock()
		defer mu.Unlock()
		return kinds
	}
	if k := told(); k[driver.EventGranted] != 0 || k[driver.EventRecheck] == 0 {
		t.Errorf("events of a watch with a gap: got %v, want a recheck and no grant (L1)", k)
	}
}

// TestWatchThatStandsLate: a waiter that queued before the watch stood is told its grant without a poll.
func TestWatchThatStandsLate(t *testing.T) {
	f := onServer(t, sharedServer(t))
	for i := range 10 {
		name := fmt.Sprint("a/", i)
		d, other := f.driver(), f.driver()
		h := lockOf(name, time.Minute)
		asked(t, other, h, driver.Granted)
		granted, stands := make(chan driver.Event, 10), make(chan struct{}, 10)
		d.Notify(func(e driver.Event) {
			switch e.Kind {
			case driver.EventGranted:
				granted <- e
			case driver.EventRecheck:
				stands <- struct{}{}
			}
		})
		stop := make(chan struct{})
		var traffic sync.WaitGroup
		traffic.Go(func() { // so that the watch stands at a later revision
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = f.raw.Put(context.Background(), f.namespace+"-elsewhere", "") //nolint:usetesting // ends with the test
				}
			}
		})
		w := waiting(lockOf(name, time.Minute))
		asked(t, d, w, driver.Waiting)
		<-stands
		close(stop)
		traffic.Wait()
		given(t, other, h.Owner, true)
		select {
		case e := <-granted:
			if e.Owner != w.Owner {
				t.Fatalf("push: got one for %v, want %v", e.Owner, w.Owner)
			}
		case <-time.After(patience):
			t.Fatal("push to a waiter that queued before the watch stood: got none, want one (W1)")
		}
	}
}

// TestLongQueue: a waiter is not told of all that stand before it at once.
func TestLongQueue(t *testing.T) {
	f := onServer(t, sharedServer(t))
	d := f.driver()
	var mu sync.Mutex
	served := make(map[string]driver.Token)
	d.Notify(func(e driver.Event) {
		mu.Lock()
		defer mu.Unlock()
		if e.Kind == driver.EventGranted {
			served[e.Owner.ID] = e.Token
		}
	})
	var queue []driver.Request
	for range 2*aheadAtOnce + 10 {
		w := waiting(lockOf("a", time.Minute))
		if _, err := d.Lock(t.Context(), w); err != nil {
			t.Fatal(err)
		}
		queue = append(queue, w)
	}
	last := queue[len(queue)-1]
	poll := func() driver.Answer {
		t.Helper()
		r := d.Poll(t.Context(), []driver.Poll{{Owner: last.Owner, TTL: last.TTL, Claim: last.Claim}})[0]
		if r.Err != nil {
			t.Fatal(r.Err)
		}
		return r.Answer
	}
	for _, w := range queue[:len(queue)-1] {
		if a := poll(); a.State != driver.Waiting {
			t.Fatalf("Poll of the last of a queue: got %v, want waiting (L1)", a.State)
		}
		given(t, d, w.Owner, true)
	}
	eventually(t, patience, func() error {
		mu.Lock()
		defer mu.Unlock()
		if served[last.ID] == 0 {
			return errors.New("push to the last of a queue: got none, want one (W1)")
		}
		return nil
	})
	if a := poll(); a.State != driver.Granted || a.Token != served[last.ID] {
		t.Errorf("Poll of one that was served: got %v, token %v, want granted, %v (T3)", a.State, a.Token, served[last.ID])
	}
}

// TestTokensOfNewHoldersStay: a queue that is too long for one transaction gets its new tokens in several, and those who
// come to hold meanwhile keep the token that they hold with.
func TestTokensOfNewHoldersStay(t *testing.T) {
	f := onServer(t, sharedServer(t))
	d := f.driver()
	acquire := func(limit int, want driver.State) driver.Request {
		r := waiting(request(driver.KindPermit, "a", time.Minute))
		r.Limit = limit
		asked(t, d, r, want)
		return r
	}
	acquire(1, driver.Granted)
	head := acquire(1, driver.Waiting)
	last := driver.Request{}
	for range opsAtOnce + 10 {
		last = acquire(1000, driver.Waiting) // behind the head, though there is a permit
	}
	tokenOf := func(r driver.Request) driver.Token { // without a step that changes anything
		resp, err := f.raw.Get(t.Context(), d.entryKey(r.Owner))
		if err != nil || len(resp.Kvs) != 1 {
			t.Fatalf("Get of an entry: got %v, %v, want it", resp, err)
		}
		r1, err := readRecord(resp.Kvs[0])
		if err != nil {
			t.Fatal(err)
		}
		return r1.token(resp.Kvs[0])
	}
	other := f.driver()
	var token driver.Token
	d.kv = hookedKV{d.kv, func(commit commit) (*clientv3.TxnResponse, error) {
		resp, err := commit()
		if err != nil {
			return nil, err
		}
		for _, r := range resp.Responses {
			if token == 0 && len(r.GetResponseRange().GetKvs()) > opsAtOnce {
				given(t, other, head.Owner, true) // those who wait were read, and are now given new tokens
				token = tokenOf(last)
			}
		}
		return resp, nil
	}}
	if err := d.Advance(t.Context(), head.Name, driver.Token(time.Now().UnixMicro())); err != nil {
		t.Fatal(err)
	}
	if token == 0 {
		t.Fatal("void: nobody came to hold")
	}
	if now := tokenOf(last); now != token {
		t.Errorf("token of one who came to hold during Advance: got %v, want %v (T3)", now, token)
	}
}

// TestRevokedBeforeTheAnswer: an entry whose lease is revoked before the answer that it waits has come does not hold when those
// before it have gone.
func TestRevokedBeforeTheAnswer(t *testing.T) {
	f := onServer(t, sharedServer(t))
	other, d := f.driver(), f.driver()
	h, w := lockOf("a", time.Minute), waiting(lockOf("a", time.Minute))
	asked(t, other, h, driver.Granted)
	asked(t, d, lockOf("warm", time.Minute), driver.Granted)
	events := make(chan driver.Event, 100)
	d.Notify(func(e driver.Event) { events <- e })
	first := waiting(lockOf("warm", time.Minute)) // so that the watch stands
	asked(t, d, first, driver.Waiting)
	if e := <-events; e.Kind != driver.EventRecheck {
		t.Fatalf("event when the watch stands: got %+v, want a recheck", e)
	}
	before := d.entryKey(h.Owner)
	var once sync.Once
	d.kv = hookedKV{d.kv, func(commit commit) (*clientv3.TxnResponse, error) {
		resp, err := commit()
		once.Do(func() {
			entry, err := f.raw.Get(t.Context(), d.entryKey(w.Owner))
			if err == nil {
				_, err = f.raw.Revoke(t.Context(), clientv3.LeaseID(entry.Kvs[0].Lease))
			}
			if err != nil {
				t.Errorf("revoke: %v", err)
			}
			given(t, other, h.Owner, true)
			eventually(t, patience, func() error {
				d.mu.Lock()
				defer d.mu.Unlock()
				if d.entries[w.Owner].waiter.gone[before] == 0 {
					return errors.New("the watch has not told that the holder has gone")
				}
				return nil
			})
		})
		return resp, err
	}}
	asked(t, d, w, driver.Waiting)
	for {
		if e := <-events; e.Kind == driver.EventGranted && e.Owner == w.Owner {
			t.Fatalf("event for an entry that has gone: got %+v, want none (L1)", e)
		} else if e.Kind == driver.EventRecheck {
			break
		}
	}
	if r := d.Poll(t.Context(), []driver.Poll{{Owner: w.Owner, TTL: w.TTL, Claim: w.Claim}})[0]; r.State != driver.Gone || r.Err != nil {
		t.Errorf("Poll of an entry that has gone: got %v, %v, want gone", r.State, r.Err)
	}
}

// TestLateAnswerOfFirstTry: what a first try made, whose caller went, is deleted when its answer comes, but not if the
// owner has tried again and holds.
func TestLateAnswerOfFirstTry(t *testing.T) {
	for _, again := range []bool{false, true} {
		f := onServer(t, sharedServer(t))
		d := f.driver()
		asked(t, d, lockOf("warm", time.Minute), driver.Granted)
		var first atomic.Bool
		first.Store(true)
		acted, goOn := make(chan struct{}), make(chan struct{})
		d.kv = hookedKV{d.kv, func(commit commit) (*clientv3.TxnResponse, error) { // keeps the answer to the first back
			late := first.Swap(false)
			resp, err := commit()
			if late {
				close(acted)
				<-goOn
			}
			return resp, err
		}}
		r := lockOf("a", time.Minute)
		ctx, cancel := context.WithCancel(t.Context())
		left := make(chan error)
		go func() {
			_, err := d.Lock(ctx, r)
			left <- err
		}()
		<-acted
		cancel()
		if err := <-left; err == nil || errors.Is(err, driver.ErrUnavailable) {
			t.Fatalf("Lock that was cancelled under way: got %v, want an unknown outcome (L8)", err)
		}
		if again {
			asked(t, d, r, driver.Granted)
		}
		close(goOn)
		if !again {
			eventually(t, patience, func() error {
				if left := f.keys("lock/a/"); len(left) > 0 {
					return fmt.Errorf("key of one who has gone: got %q, want it gone (L7)", left)
				}
				return nil
			})
			continue
		}
		for range 50 {
			extended(t, d, r.Owner, time.Minute, driver.Granted)
		}
	}
}

// TestSecondTryOnAnotherLease: an owner whose first try made nothing, and whose second one is on another lease, ends like
// others when nobody extends it.
func TestSecondTryOnAnotherLease(t *testing.T) {
	t.Parallel()
	f := onServer(t, sharedServer(t))
	d := f.driver()
	const ttl = 2 * time.Second
	l, err := d.sharedLease(t.Context(), ttl)
	if err != nil {
		t.Fatal(err)
	}
	r := lockOf("a", ttl)
	e, known, err := d.enter(r.Owner, l, ttl, false)
	if err != nil {
		t.Fatal(err)
	}
	d.doubt(e, l, known, ttl)
	if _, err := f.raw.Revoke(t.Context(), clientv3.LeaseID(l.id)); err != nil {
		t.Fatal(err)
	}
	asked(t, d, r, driver.Granted)
	kept := lockOf("kept", ttl)
	asked(t, d, kept, driver.Granted)
	eventually(t, ttl+patience/4, func() error {
		extended(t, d, kept.Owner, ttl, driver.Granted)
		if left := f.keys("lock/a/"); len(left) > 0 {
			return fmt.Errorf("key that nobody extends: got %q, want it gone (L7, W3)", left)
		}
		return nil
	})
}

// TestWatchForgetsWhatWasBefore: a key that went and came back is not gone, however late the watch tells that it went.
func TestWatchForgetsWhatWasBefore(t *testing.T) {
	f := onServer(t, sharedServer(t))
	d := f.driver()
	d.Notify(func(e driver.Event) {
		if e.Kind == driver.EventGranted {
			t.Errorf("push: got one for %v, want none (L1)", e.Owner)
		}
	})
	h, w := lockOf("a", time.Minute), waiting(lockOf("a", time.Minute))
	asked(t, f.driver(), h, driver.Granted)
	asked(t, d, w, driver.Waiting)
	eventually(t, patience, func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if e := d.entries[w.Owner]; d.listening.stands == 0 || e.waiter == nil || e.waiter.viewed == 0 {
			return errors.New("watch: got none, want it to stand")
		}
		return nil
	})
	known := d.knownStore()
	before := &clientv3.Event{Type: mvccpb.DELETE, Kv: &mvccpb.KeyValue{Key: []byte(d.entryKey(h.Owner)), ModRevision: 2}}
	responses := make(chan clientv3.WatchResponse, 1)
	responses <- clientv3.WatchResponse{Header: pb.ResponseHeader{ClusterId: known.cluster, Revision: 2}, Events: []*clientv3.Event{before}}
	close(responses)
	d.hear(responses)
}

// TestKeyThatCameBack: a request that was repeated may be carried out late, when what the other one had made has been taken
// away. The key is there again then, but at another place: its owner does not hold by it (L1).
func TestKeyThatCameBack(t *testing.T) {
	f := onServer(t, sharedServer(t))
	for _, kind := range []driver.Kind{driver.KindLock, driver.KindPermit} {
		d, other := f.driver(), f.driver()
		r := request(kind, "a", 10*time.Second)
		asked(t, d, r, driver.Granted)
		w := waiting(request(kind, "a", 10*time.Second))
		asked(t, d, w, driver.Waiting)
		// Both were taken away.
		var values []*clientv3.GetResponse
		for _, o := range []driver.Owner{r.Owner, w.Owner} {
			key := d.entryKey(o)
			resp, err := f.raw.Get(t.Context(), key)
			if err != nil || len(resp.Kvs) != 1 {
				t.Fatalf("the key: got %v, %v", resp, err)
			}
			values = append(values, resp)
			if _, err := f.raw.Delete(t.Context(), key); err != nil {
				t.Fatal(err)
			}
		}
		next := request(kind, "a", 10*time.Second)
		asked(t, other, next, driver.Granted)
		for _, v := range values {
			kv := v.Kvs[0]
			if _, err := f.raw.Put(t.Context(), string(kv.Key), string(kv.Value), clientv3.WithLease(clientv3.LeaseID(kv.Lease))); err != nil {
				t.Fatal(err)
			}
		}
		extended(t, d, r.Owner, 10*time.Second, driver.Gone)
		p := d.Poll(t.Context(), []driver.Poll{{Owner: w.Owner, TTL: w.TTL, Claim: w.Claim}})[0]
		if p.Err != nil || p.State == driver.Granted {
			t.Errorf("Poll of a %v whose key came back behind a holder: got %v, %v, want not granted (L1)", kind, p.State, p.Err)
		}
		given(t, other, next.Owner, true)
	}
}

// TestKeysAreUsedAgain: etcd walks over every key that ever was, until a compaction, when it looks at a queue. So there are
// few, and what concerned an earlier owner of a key does not concern the present one.
func TestKeysAreUsedAgain(t *testing.T) {
	f := onServer(t, sharedServer(t))
	d := f.driver()
	first := lockOf("a", time.Minute)
	asked(t, d, first, driver.Granted)
	key := d.entryKey(first.Owner)
	d.mu.Lock()
	create := d.entries[first.Owner].create
	d.mu.Unlock()
	for range 20 {
		given(t, d, first.Owner, true)
		next := lockOf("a", time.Minute)
		asked(t, d, next, driver.Granted)
		if k := d.entryKey(next.Owner); k != key {
			t.Fatalf("key of the next lock: got %q, want %q again", k, key)
		}
		if found, err := d.delete(t.Context(), first.Owner, key, create); found || err != nil {
			t.Fatalf("late release of an earlier owner of the key: got %v, %v, want nothing found (L4)", found, err)
		}
		given(t, d, first.Owner, false)
		given(t, f.driver(), first.Owner, false)
		extended(t, d, first.Owner, time.Minute, driver.Gone)
		extended(t, d, next.Owner, time.Minute, driver.Granted)
		d.mu.Lock()
		create = d.entries[next.Owner].create
		d.mu.Unlock()
		first = next
	}
	given(t, d, first.Owner, true)

	// Something that came late, and that nobody knows of, is in the way.
	stray := record{ID: "stray", Limit: 1}.text()
	if _, err := f.raw.Put(t.Context(), key, stray); err != nil {
		t.Fatal(err)
	}
	asked(t, d, lockOf("a", time.Minute), driver.Held)
	w := waiting(lockOf("a", time.Minute))
	asked(t, d, w, driver.Waiting)
	if k := d.entryKey(w.Owner); k == key {
		t.Fatalf("key of one who waits behind a stray entry: got %q, want another", k)
	}
	if _, err := f.raw.Delete(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	extended(t, d, w.Owner, time.Minute, driver.Granted)
	given(t, d, w.Owner, true)

	p := request(driver.KindPermit, "a", time.Minute)
	p.Limit = 2
	asked(t, d, p, driver.Granted)
	key = d.entryKey(p.Owner)
	given(t, d, p.Owner, true)
	if _, err := f.raw.Put(t.Context(), key, stray); err != nil {
		t.Fatal(err)
	}
	// The stray entry has a permit, and there is another one: not at its key.
	asked(t, d, p, driver.Granted)
	if k := d.entryKey(p.Owner); k == key {
		t.Fatalf("key of a permit beside a stray entry: got %q, want another", k)
	}
}
