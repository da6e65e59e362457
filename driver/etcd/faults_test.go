package etcd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/internal/testcert"
)

// TestLeaderOfThePast: a keepalive counts only if nobody else has led since. A member that was stopped while it led answers in the
// belief that it still does (L2).
func TestLeaderOfThePast(t *testing.T) {
	t.Parallel()
	d := onServer(t, sharedServer(t)).driver()
	old := &leaderOfThePast{LeaseClient: d.leasing}
	d.leasing = old
	r := lockOf("a", 2*time.Second)
	asked(t, d, r, driver.Granted)
	d.mu.Lock()
	l := d.entries[r.Owner].lease
	granted := l.until
	d.mu.Unlock()

	old.answers.Store(1 << 30)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := d.keep(ctx, l); err == nil || l.until != granted {
		t.Errorf("keepalive of a leader of the past: got %v, and the lease %v longer, want an error and no change", err, time.Duration(l.until-granted))
	}
	old.answers.Store(1)
	if a := extended(t, d, r.Owner, 2*time.Second, driver.Granted); a.TTL <= time.Second {
		t.Errorf("Extend whose first keepalive is of the past: got TTL %v, want that of the next", a.TTL)
	}
	if left := old.answers.Load(); left >= 0 {
		t.Errorf("keepalives of an Extend whose first is of the past: got %d, want another", 1-left)
	}
}

// leaderOfThePast answers some keepalives in an earlier term.
type leaderOfThePast struct {
	pb.LeaseClient
	answers atomic.Int64
}

func (o *leaderOfThePast) LeaseKeepAlive(ctx context.Context, opts ...grpc.CallOption) (pb.Lease_LeaseKeepAliveClient, error) {
	stream, err := o.LeaseClient.LeaseKeepAlive(ctx, opts...)
	return pastStream{stream, o}, err
}

type pastStream struct {
	pb.Lease_LeaseKeepAliveClient
	of *leaderOfThePast
}

func (s pastStream) Recv() (*pb.LeaseKeepAliveResponse, error) {
	resp, err := s.Lease_LeaseKeepAliveClient.Recv()
	if err == nil && s.of.answers.Add(-1) >= 0 {
		resp.Header.RaftTerm--
	}
	return resp, err
}

// TestErrorClasses: only a refusal, or what never left, surely did not happen (L8).
func TestErrorClasses(t *testing.T) {
	gone := status.Error(codes.Unavailable, "transport is closing")
	for _, c := range []struct {
		err  error
		sure bool
	}{
		{unsent{gone}, true},
		{gone, false},
		{rpctypes.ErrGRPCNoLeader, true},
		{rpctypes.ErrGRPCPermissionDenied, true},
		{rpctypes.ErrGRPCAuthFailed, true},
		{rpctypes.ErrGRPCNoSpace, true},
		{rpctypes.ErrGRPCLeaseNotFound, true},
		{rpctypes.ErrGRPCTooManyOps, true},
		{rpctypes.ErrGRPCTimeout, false},
		{rpctypes.ErrGRPCTimeoutDueToLeaderFail, false},
		{rpctypes.ErrGRPCTimeoutDueToConnectionLost, false},
		{rpctypes.ErrGRPCStopped, false},
		{rpctypes.ErrGRPCLeaderChanged, false},
		{status.Error(codes.ResourceExhausted, "grpc: received message larger than max"), false},
		{status.Error(codes.DeadlineExceeded, "context deadline exceeded"), false},
		{context.DeadlineExceeded, false},
		{context.Canceled, false},
	} {
		if got := errors.Is(failure(c.err), driver.ErrUnavailable); got != c.sure {
			t.Errorf("class of %v: got unavailable %v, want %v (L8)", c.err, got, c.sure)
		}
	}
	if err := failure(rpctypes.ErrGRPCNoSpace); !errors.Is(err, rpctypes.ErrNoSpace) {
		t.Errorf("error of a full database: got %v, want one matching rpctypes.ErrNoSpace", err)
	}
}

// TestUserClosedItsClient: nothing can be sent any more, and that is known at once.
func TestUserClosedItsClient(t *testing.T) {
	f := onServer(t, sharedServer(t))
	client := newClient(t, f.addrs...)
	d := newDriver(t, client, f.namespace)
	given(t, d, lockOf("a", time.Minute).Owner, false)
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := d.Lock(t.Context(), lockOf("a", time.Minute))
	is(t, "Lock", err, driver.ErrUnavailable, "L8")
	_, err = d.Release(t.Context(), lockOf("a", time.Minute).Owner)
	is(t, "Release", err, driver.ErrUnavailable, "L8")
}

// TestNobodyListens: it is known at once that nothing happened.
func TestNobodyListens(t *testing.T) {
	p := newProxy(t, sharedServer(t).Addr())
	d := newDriver(t, newClient(t, p.Addr()), "nobody")
	r := lockOf("a", time.Minute)
	asked(t, d, r, driver.Granted)
	if err := p.Refuse(); err != nil {
		t.Fatal(err)
	}
	p.Reset()
	eventually(t, patience, func() error { // the first one may have been on its way
		_, err := d.Lock(t.Context(), lockOf("b", time.Minute))
		if !errors.Is(err, driver.ErrUnavailable) {
			return fmt.Errorf("Lock while nobody listens: got %v, want ErrUnavailable (L8)", err)
		}
		return nil
	})
	if x := d.Extend(t.Context(), []driver.Extension{{Owner: r.Owner, TTL: time.Minute}})[0]; x.Err == nil {
		t.Errorf("Extend while nobody listens: got %v, want an error (L8)", x.State)
	}
	if err := p.Accept(); err != nil {
		t.Fatal(err)
	}
	eventually(t, patience, func() error {
		_, err := d.Lock(t.Context(), lockOf("b", time.Minute))
		return err
	})
	given(t, d, r.Owner, true)

	u, _ := url.Parse("etcd://127.0.0.1:1")
	if _, err := open(t.Context(), u); !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Open while nobody listens: got %v, want ErrUnavailable", err)
	}
}

// TestRestore: when the store's past comes back, or another store, all leases are lost and tokens go on.
func TestRestore(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"OldDisk", "OtherCluster"} {
		t.Run(kind, func(t *testing.T) {
			s := newServer(t)
			f := onServer(t, s)
			d := f.driver()
			var mu sync.Mutex
			var warnings []error
			d.Notify(func(e driver.Event) {
				mu.Lock()
				defer mu.Unlock()
				if e.Kind == driver.EventWarning {
					warnings = append(warnings, e.Err)
				}
			})
			r := lockOf("a", time.Minute)
			asked(t, d, r, driver.Granted)
			saved := filepath.Join(t.TempDir(), "saved")
			if err := errors.Join(s.Kill(), s.CopyData(saved), s.Start(t.Context())); err != nil {
				t.Fatal(err)
			}
			var last driver.Token
			for range 100 {
				eventually(t, patience, func() (err error) {
					last, err = d.NextToken(t.Context(), r.Name, 0)
					return err
				})
			}
			if err := s.Kill(); err != nil {
				t.Fatal(err)
			}
			start := s.StartEmpty
			if kind == "OldDisk" {
				start = func(ctx context.Context) error { return s.StartCopy(ctx, saved) }
			}
			if err := start(t.Context()); err != nil {
				t.Fatal(err)
			}
			eventually(t, patience, func() error {
				x := d.Extend(t.Context(), []driver.Extension{{Owner: r.Owner, TTL: time.Minute}})[0]
				if x.Err != nil || x.State != driver.Gone {
					return fmt.Errorf("Extend after a restore: got %v, %v, want gone (L3)", x.State, x.Err)
				}
				return nil
			})
			var next driver.Token
			eventually(t, patience, func() (err error) {
				next, err = d.NextToken(t.Context(), r.Name, 0)
				return err
			})
			if next <= last {
				t.Errorf("token after a restore: got %v, want more than %v (T1)", next, last)
			}
			mu.Lock()
			if len(warnings) != 1 {
				t.Errorf("warnings of a restore: got %v, want one", warnings)
			}
			mu.Unlock()
			// What the old data hold of us must go, though nobody asks for it.
			eventually(t, patience, func() error {
				if left := f.keys("lock/"); len(left) > 0 {
					return fmt.Errorf("keys of the past: got %q, want none (L7)", left)
				}
				return nil
			})
			asked(t, d, lockOf("a", time.Minute), driver.Granted)
		})
	}
}

// TestWatchAfterRestore: when the revision has gone back, those who wait are pushed their grants all the same, and nobody
// asks in a circle.
func TestWatchAfterRestore(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	f := onServer(t, s)
	d := f.driver()
	granted := make(chan driver.Event, 10)
	d.Notify(func(e driver.Event) {
		if e.Kind == driver.EventGranted {
			granted <- e
		}
	})
	asked(t, f.driver(), lockOf("a", time.Minute), driver.Granted)
	asked(t, d, waiting(lockOf("a", time.Minute)), driver.Waiting)
	saved := filepath.Join(t.TempDir(), "saved")
	if err := errors.Join(s.Kill(), s.CopyData(saved), s.Start(t.Context())); err != nil {
		t.Fatal(err)
	}
	watches := func(revision int64) {
		t.Helper()
		eventually(t, patience, func() error {
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.listening.stands <= revision {
				return fmt.Errorf("watch: got one that stands at %d, want more than %d", d.listening.stands, revision)
			}
			return nil
		})
	}
	watches(0)
	var ahead int64 // of the revision that comes back
	for range 500 {
		eventually(t, patience, func() error {
			resp, err := f.raw.Put(t.Context(), d.prefix+"elsewhere", "")
			if err == nil {
				ahead = resp.Header.Revision
			}
			return err
		})
	}
	watched := waiting(lockOf("b", time.Minute))
	eventually(t, patience, func() error { // a driver that has seen the revision
		_, err := d.Lock(t.Context(), watched)
		return err
	})
	if err := errors.Join(s.Kill(), s.StartCopy(t.Context(), saved)); err != nil {
		t.Fatal(err)
	}
	other := f.driver()
	h, w := lockOf("c", time.Minute), waiting(lockOf("c", time.Minute))
	eventually(t, patience, func() error {
		a, err := other.Lock(t.Context(), h)
		if err == nil && a.State != driver.Granted {
			err = fmt.Errorf("Lock after a restore: got %v, want granted", a.State)
		}
		return err
	})
	eventually(t, patience, func() error {
		a, err := d.Lock(t.Context(), w)
		if err == nil && a.State != driver.Waiting {
			err = fmt.Errorf("Lock of one that is held: got %v, want waiting", a.State)
		}
		return err
	})
	watches(0)
	requests := func() int { return metrics(t, s, `grpc_server_started_total\{grpc_method="(Txn|Range)".*\}`) }
	before := requests()
	given(t, other, h.Owner, true)
	select {
	case e := <-granted:
		if e.Owner != w.Owner {
			t.Errorf("push after a restore: got one for %v, want %v", e.Owner, w.Owner)
		}
	case <-time.After(patience):
		t.Error("push after a restore: got none, want one (W1)")
	}
	if n := requests() - before; n > 20 {
		t.Errorf("requests until the push: got %d, want a few (W2)", n)
	}
	if resp, err := f.raw.Get(t.Context(), "x"); err != nil || resp.Header.Revision >= ahead {
		t.Fatalf("void: got %v, %v, want a revision before %d", resp, err, ahead)
	}
}

// TestNoSpace: a full database refuses new locks, and keeps and gives back those that are held.
func TestNoSpace(t *testing.T) {
	t.Parallel()
	s := newServer(t, "--quota-backend-bytes", "2000000")
	f := onServer(t, s)
	d := f.driver()
	r := lockOf("held", 2*time.Second)
	asked(t, d, r, driver.Granted)
	w := waiting(lockOf("held", time.Minute))
	asked(t, d, w, driver.Waiting)
	// The client that fills it up is told when it is full, or we are: etcd then has carried it out.
	// How big it is shows only when a batch of changes is committed, every 100 ms.
	full := false
	for i, deadline := 0, time.Now().Add(patience); !full && time.Now().Before(deadline); i++ {
		_, err := f.raw.Put(t.Context(), fmt.Sprint("fill/", i), strings.Repeat("x", 20_000))
		full = errors.Is(err, rpctypes.ErrNoSpace)
	}
	if !full {
		t.Fatal("void: the database is not full")
	}
	for i := range 5 {
		name := fmt.Sprint("new/", i)
		_, err := d.Lock(t.Context(), lockOf(name, 2*time.Second))
		is(t, "Lock when the database is full", err, driver.ErrUnavailable, "L8")
		is(t, "Lock when the database is full", err, rpctypes.ErrNoSpace, "L8")
		if left := f.keys("lock/" + escape(name)); len(left) > 0 {
			t.Errorf("keys after a refused Lock: got %q, want none (L7)", left)
		}
	}
	for range 3 {
		if a := extended(t, d, r.Owner, 2*time.Second, driver.Granted); a.TTL != 2*time.Second {
			t.Errorf("Extend when the database is full: got TTL %v, want 2s", a.TTL)
		}
	}
	given(t, d, r.Owner, true)
	if a := d.Poll(t.Context(), []driver.Poll{{Owner: w.Owner, TTL: w.TTL, Claim: w.Claim}})[0]; a.Err != nil || a.State != driver.Granted {
		t.Errorf("Poll when the database is full: got %v, %v, want granted", a.State, a.Err)
	}
	given(t, d, w.Owner, true)
}

// TestNoSpaceAfterTheDeed: what was written in spite of a refusal is removed before it is told. etcd carries out a write and
// says that the database is full if the write is on its way when it becomes full.
func TestNoSpaceAfterTheDeed(t *testing.T) {
	f := onServer(t, sharedServer(t))
	d := f.driver()
	asked(t, d, lockOf("warm", time.Minute), driver.Granted)
	var full atomic.Bool
	d.kv = hookedKV{d.kv, func(commit commit) (*clientv3.TxnResponse, error) {
		resp, err := commit()
		if err == nil && full.Swap(false) {
			return nil, rpctypes.ErrNoSpace
		}
		return resp, err
	}}
	for _, r := range []driver.Request{lockOf("a", time.Minute), waiting(lockOf("warm", time.Minute))} {
		before := f.keys("lock/")
		full.Store(true)
		_, err := d.Lock(t.Context(), r)
		is(t, "Lock that filled the database", err, driver.ErrUnavailable, "L8")
		if left := f.keys("lock/"); len(left) != len(before) {
			t.Errorf("keys after a Lock that was told to be refused: got %q, want %q (L7, L8)", left, before)
		}
	}
}

// mustWith makes a function that ends the test if a request failed.
func mustWith(t *testing.T) func(any, error) {
	return func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
}

// addRoot makes the user without whom authentication cannot be enabled.
func addRoot(t *testing.T, f *fixture) {
	t.Helper()
	must := mustWith(t)
	must(f.raw.UserAdd(t.Context(), "root", "rootpw"))
	must(f.raw.UserGrantRole(t.Context(), "root", "root"))
}

// TestAuth: tokens for authentication expire and are asked for again, passwords are checked, and a role for the
// namespace's prefix is all that is needed.
func TestAuth(t *testing.T) {
	t.Parallel()
	s := newServer(t, "--auth-token-ttl", "1", "--bcrypt-cost", "4")
	f := onServer(t, s)
	ctx := t.Context()
	must := mustWith(t)
	addRoot(t, f)
	must(f.raw.RoleAdd(ctx, "locks"))
	must(f.raw.RoleGrantPermission(ctx, "locks", "app/", clientv3.GetPrefixRangeEnd("app/"), clientv3.PermissionType(clientv3.PermReadWrite)))
	must(f.raw.UserAdd(ctx, "app", "s3cret/word"))
	must(f.raw.UserGrantRole(ctx, "app", "locks"))
	must(f.raw.AuthEnable(ctx))

	base := "@" + s.Addr() + "?namespace="
	_, err := fencelock.Open(ctx, "etcd://app:wr0ng"+base+"app")
	is(t, "Open with a wrong password", err, fencelock.ErrUnavailable, "L8")
	if strings.Contains(err.Error(), "wr0ng") {
		t.Errorf("Open with a wrong password: got %v, want no password in it", err)
	}
	_, err = fencelock.Open(ctx, "etcd://app:s3cret%2Fword"+base+"other")
	is(t, "Open of a namespace without permission", err, fencelock.ErrUnavailable, "L8")
	is(t, "Open of a namespace without permission", err, rpctypes.ErrPermissionDenied, "L8")
	if !strings.Contains(err.Error(), `prefix "`) {
		t.Errorf("Open of a namespace without permission: got %v, want one that says what is needed", err)
	}

	c, err := fencelock.Open(ctx, "etcd://app:s3cret%2Fword"+base+"app")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	other, err := fencelock.Open(ctx, "etcd://app:s3cret%2Fword"+base+"app")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	l, err := c.Lock(ctx, "a", fencelock.TTL(2*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		l, err := other.Lock(ctx, "a", fencelock.TTL(2*time.Second))
		if err == nil {
			err = l.Release(ctx)
		}
		done <- err
	}()
	// Several lives of an authentication token, each at most twice its TTL.
	for until := time.Now().Add(6 * time.Second); time.Now().Before(until); time.Sleep(50 * time.Millisecond) {
		if err := l.Err(); err != nil {
			t.Fatalf("Err while held: got %v, want nil", err)
		}
	}
	if err := l.Release(ctx); err != nil {
		t.Errorf("Release after tokens have expired: got %v, want nil", err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("waiting Lock after tokens have expired: got %v, want a lease", err)
		}
	case <-time.After(patience):
		t.Error("waiting Lock after tokens have expired: got nothing, want a lease")
	}
}

// TestAuthOverRestart: a member that restarts has forgotten the authentication tokens that it gave out, and a lease goes on
// to end when nobody extends it.
func TestAuthOverRestart(t *testing.T) {
	t.Parallel()
	s := newServer(t, "--bcrypt-cost", "4")
	f := onServer(t, s)
	ctx := t.Context()
	must := mustWith(t)
	addRoot(t, f)
	must(f.raw.AuthEnable(ctx))
	u := "etcd://root:rootpw@" + s.Addr() + "?namespace=app"
	dead, err := driver.Open(ctx, u)
	must(nil, err)
	asked(t, dead.(*Driver), lockOf("of the dead", 4*time.Second), driver.Granted)
	must(nil, dead.Close())
	c, err := fencelock.Open(ctx, u)
	must(nil, err)
	defer c.Close()
	l, err := c.Lock(ctx, "a", fencelock.TTL(15*time.Second))
	must(nil, err)
	must(nil, errors.Join(s.Kill(), s.Start(ctx)))
	after := time.Now().Add(15 * time.Second)
	next, err := c.Lock(ctx, "of the dead", fencelock.TTL(15*time.Second))
	for ; errors.Is(err, fencelock.ErrUncertain) || errors.Is(err, fencelock.ErrUnavailable); next, err = c.Lock(ctx, "of the dead", fencelock.TTL(15*time.Second)) {
		t.Logf("Lock over a restart, to be tried again: %v", err)
	}
	if err != nil {
		t.Fatalf("Lock whose holder died before a restart: got %v, want a lease (W3)", err)
	}
	if now := time.Now(); now.After(after) {
		t.Errorf("Lock whose holder died before a restart: got it %v late, want it by then (W3)", now.Sub(after))
	}
	eventually(t, patience, func() error {
		if err := l.Err(); err != nil {
			t.Fatalf("Err over a restart: got %v, want nil", err)
		}
		if d := l.Deadline(); !d.After(after) {
			return fmt.Errorf("Deadline over a restart: got %v, want it extended beyond %v", d, after)
		}
		return nil
	})
	must(nil, errors.Join(l.Release(ctx), next.Release(ctx)))
}

// TestWatchBroken: a broken watch costs no lock, and is made again.
func TestWatchBroken(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	f := onServer(t, s)
	p := newProxy(t, s.Addr())
	hit := newDriver(t, newClient(t, p.Addr()), f.namespace)
	c := locks(t, hit)
	d := f.driver()
	h := lockOf("a", time.Minute)
	asked(t, d, h, driver.Granted)
	held, err := c.Lock(t.Context(), "held", fencelock.TTL(6*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := c.Lock(t.Context(), "a", fencelock.TTL(time.Minute))
		done <- err
	}()
	eventually(t, patience, func() error { // the answer has come: a reset before leaves the outcome unknown
		hit.mu.Lock()
		defer hit.mu.Unlock()
		for _, e := range hit.entries {
			if e.waiter != nil && e.waiter.viewed > 0 {
				return nil
			}
		}
		return errors.New("queue: got no answer, want a place")
	})
	for range 3 {
		p.Reset()
	}
	if _, err := c.TryLock(t.Context(), "b"); err != nil && !errors.Is(err, fencelock.ErrUncertain) && !errors.Is(err, fencelock.ErrUnavailable) {
		t.Errorf("TryLock after resets: got %v, want a lease or a broken connection", err)
	}
	given(t, d, h.Owner, true)
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("Lock over a broken watch: got %v, want a lease", err)
		}
	case <-time.After(patience):
		t.Error("Lock over a broken watch: got nothing, want a lease")
	}
	if err := held.Err(); err != nil {
		t.Errorf("Err over a broken watch: got %v, want nil", err)
	}
}

// TestMemberThatHangs: a member that has connections and answers nothing costs no extension.
func TestMemberThatHangs(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	f := onServer(t, s)
	p := newProxy(t, s.Addr())
	d := newDriver(t, newClient(t, s.Addr(), p.Addr()), f.namespace)
	r := lockOf("a", time.Minute)
	asked(t, d, r, driver.Granted)
	eventually(t, patience, func() error {
		before := p.Stats().ToServer.Arrived
		extended(t, d, r.Owner, time.Minute, driver.Granted)
		if p.Stats().ToServer.Arrived == before {
			return errors.New("nothing is asked of the second address yet")
		}
		return nil
	})
	p.Hold(servers.ToClient)
	for range 4 {
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
		got := d.Extend(ctx, []driver.Extension{{Owner: r.Owner, TTL: time.Minute}})[0]
		cancel()
		if got.Err != nil || got.State != driver.Granted {
			t.Fatalf("Extend with one of two members silent: got %v, %v, want granted (L4)", got.State, got.Err)
		}
	}
	if p.Stats().ToClient.Held == 0 {
		t.Error("void: nothing was asked of the member that is silent")
	}
}

// TestCluster: the loss of one of three members, follower or leader, killed or paused, costs no lock; that of two
// costs belief in time, and no answer is a lie.
func TestCluster(t *testing.T) {
	t.Parallel()
	cluster := newCluster(t, 3)
	f := onServer(t, cluster.Members...)
	d := f.driver()
	if !d.Info().Replicated {
		t.Error("Info of a client with three endpoints: got not replicated, want replicated")
	}
	c, rival := locks(t, d), locks(t, f.driver())
	leader := func() *servers.Etcd {
		var l *servers.Etcd
		eventually(t, patience, func() error {
			if l = cluster.Leader(t.Context()); l == nil {
				return errors.New("cluster: got no leader, want one")
			}
			return nil
		})
		return l
	}
	follower := func() *servers.Etcd {
		l := leader()
		for _, m := range cluster.Members {
			if m != l {
				return m
			}
		}
		return nil
	}
	works := func(when string) driver.Token {
		t.Helper()
		var l *fencelock.Lease
		eventually(t, 2*patience, func() (err error) {
			if l, err = rival.TryLock(t.Context(), "other", fencelock.TTL(15*time.Second)); err != nil {
				return fmt.Errorf("TryLock %s: got %v, want a lease", when, err)
			}
			return nil
		})
		token := l.Token()
		eventually(t, 2*patience, func() error { return l.Release(t.Context()) })
		return token
	}
	// What a member was asked while the cluster elects a leader may have no answer.
	take := func(when string, ttl time.Duration) (l *fencelock.Lease) {
		t.Helper()
		eventually(t, 2*patience, func() (err error) {
			if l, err = c.Lock(t.Context(), "a", fencelock.TTL(ttl)); err != nil {
				return fmt.Errorf("Lock %s: got %v, want a lease", when, err)
			}
			return nil
		})
		return l
	}
	last := works("of a healthy cluster")

	for _, fault := range []struct {
		name          string
		victim        func() *servers.Etcd
		hit, recovers func(*servers.Etcd) error
	}{
		{"follower killed", follower, (*servers.Etcd).Kill, func(m *servers.Etcd) error { return m.Start(t.Context()) }},
		{"leader killed", leader, (*servers.Etcd).Kill, func(m *servers.Etcd) error { return m.Start(t.Context()) }},
		{"leader paused", leader, (*servers.Etcd).Pause, (*servers.Etcd).Resume},
	} {
		l := take("before "+fault.name, 15*time.Second)
		m := fault.victim()
		if err := fault.hit(m); err != nil {
			t.Fatal(err)
		}
		token := works("with a " + fault.name)
		if token <= last {
			t.Errorf("token with a %s: got %v, want more than %v (T1)", fault.name, token, last)
		}
		last = token
		before := l.Deadline()
		eventually(t, 30*time.Second, func() error {
			if err := l.Err(); err != nil {
				t.Fatalf("Err with a %s: got %v, want nil", fault.name, err)
			}
			if !l.Deadline().After(before) {
				return fmt.Errorf("Deadline with a %s: got no move, want it extended", fault.name)
			}
			return nil
		})
		if _, err := rival.TryLock(t.Context(), "a"); err == nil {
			t.Fatalf("rival TryLock with a %s: got a lease, want none (L1)", fault.name)
		}
		if err := fault.recovers(m); err != nil {
			t.Fatal(err)
		}
		eventually(t, patience, func() error { return l.Release(t.Context()) })
	}

	l := take("before a member is replaced", 15*time.Second)
	if err := cluster.Replace(t.Context(), follower()); err != nil {
		t.Fatal(err)
	}
	if token := works("with a member replaced"); token <= last {
		t.Errorf("token with a member replaced: got %v, want more than %v (T1)", token, last)
	}
	if err := l.Err(); err != nil {
		t.Fatalf("Err with a member replaced: got %v, want nil", err)
	}
	eventually(t, patience, func() error { return l.Release(t.Context()) })

	l = take("before a majority is paused", 4*time.Second)
	var lost []*servers.Etcd
	for _, m := range cluster.Members[:2] {
		if err := m.Pause(); err != nil {
			t.Fatal(err)
		}
		lost = append(lost, m)
	}
	_, err := rival.TryLock(t.Context(), "b", fencelock.TTL(4*time.Second))
	if err == nil || errors.Is(err, fencelock.ErrHeld) {
		t.Errorf("TryLock without a majority: got %v, want an error that is not ErrHeld (L8)", err)
	}
	select {
	case <-l.Done():
	case <-time.After(time.Until(l.Deadline()) + time.Second):
		t.Error("Done without a majority: got nothing, want it closed at the deadline (L2)")
	}
	is(t, "Err without a majority", l.Err(), fencelock.ErrLost, "L2")
	for _, m := range lost {
		if err := m.Resume(); err != nil {
			t.Fatal(err)
		}
	}
	if token := works("after the majority was back"); token <= last {
		t.Errorf("token after the majority was back: got %v, want more than %v (T1)", token, last)
	}
}

// TestURL: what is wrong is refused before anything is dialled, and no password is told.
func TestURL(t *testing.T) {
	for _, bad := range []string{
		"etcd://", "etcd://host/path", "etcd://host?nonsense=1", "etcd://host?namespace=a/b", "etcd://host?ca=x",
		"etcd://user@host", "etcd://user:@host", "etcd://host#x", "etcd://a,,b", "etcds://host?ca=/nowhere",
		"etcds://host?cert=/nowhere", "etcds://host?cert=/nowhere&key=/nowhere",
	} {
		_, err := driver.Open(t.Context(), bad)
		if !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("Open %q: got %v, want ErrInvalid", bad, err)
		}
	}
	_, err := driver.Open(t.Context(), "etcd://user:hunter2@127.0.0.1:1?nonsense=1")
	if err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("Open with a password: got %v, want an error without it", err)
	}
	if _, err := New(nil, nil); !errors.Is(err, driver.ErrInvalid) {
		t.Errorf("New(nil): got %v, want ErrInvalid", err)
	}
}

// TestTLS: etcds speaks TLS, with a certificate of its own if it has one.
func TestTLS(t *testing.T) {
	dir := t.TempDir()
	ca, cert := testcert.Write(t, dir, "etcd.test")
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2"},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: ca,
	})
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	defer conns.Wait()
	defer l.Close()
	addr := sharedServer(t).Addr()
	conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() { pipe(c, addr) })
		}
	})
	q := "?namespace=tls&server-name=etcd.test&ca=" + url.QueryEscape(filepath.Join(dir, "cert.pem"))
	withKey := q + "&cert=" + url.QueryEscape(filepath.Join(dir, "cert.pem")) + "&key=" + url.QueryEscape(filepath.Join(dir, "key.pem"))
	c, err := fencelock.Open(t.Context(), "etcds://"+l.Addr().String()+withKey)
	if err != nil {
		t.Fatalf("Open by etcds: got %v, want a client", err)
	}
	lease, err := c.TryLock(t.Context(), "a")
	if err != nil {
		t.Fatalf("TryLock by TLS: got %v, want a lease", err)
	}
	if err := errors.Join(lease.Release(t.Context()), c.Close()); err != nil {
		t.Errorf("Release and Close: got %v, want nil", err)
	}
	for what, u := range map[string]string{
		"without a certificate": "etcds://" + l.Addr().String() + q,
		"without TLS":           "etcd://" + l.Addr().String(),
		"with another name":     "etcds://" + l.Addr().String() + strings.Replace(withKey, "etcd.test", "other.test", 1),
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		if _, err := fencelock.Open(ctx, u); !errors.Is(err, fencelock.ErrUnavailable) {
			t.Errorf("Open %s: got %v, want ErrUnavailable", what, err)
		}
		cancel()
	}
}

func pipe(c net.Conn, addr string) {
	defer c.Close()
	s, err := net.Dial("tcp", addr)
	if err != nil {
		return
	}
	defer s.Close()
	var back sync.WaitGroup
	back.Go(func() {
		_, _ = io.Copy(c, s)
		c.Close()
	})
	_, _ = io.Copy(s, c)
	s.Close()
	back.Wait()
}
