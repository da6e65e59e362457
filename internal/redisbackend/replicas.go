package redisbackend

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// TestWaitReplicas takes, hands over and extends leases that a replica must confirm, with the replica there, and paused.
func (b Driver) TestWaitReplicas(t *testing.T) {
	t.Parallel()
	s, replica := b.Start(t), b.Start(t, "--repl-diskless-sync-delay", "0")
	s.Must(t, "CONFIG", "SET", "repl-diskless-sync-delay", "0")
	replica.Must(t, append([]string{"REPLICAOF"}, strings.Split(s.Addr(), ":")...)...)
	Eventually(t, "a replica in step", func() bool {
		info, _ := s.Must(t, "INFO", "replication").(string)
		return strings.Contains(info, "state=online")
	})
	url := b.Scheme + "://" + s.Addr() + "?wait_replicas="
	waitReplicas(t, b.open(t, url+"1"), func() {
		if err := replica.Pause(); err != nil {
			t.Fatal(err)
		}
	}, func() {
		if err := replica.Resume(); err != nil {
			t.Fatal(err)
		}
	}, s, replica)
	two := b.open(t, url+"2")
	if _, err := two.Lock(t.Context(), Request(LockName("url"), NewID(), 100*time.Millisecond)); !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Lock with wait_replicas=2 and one replica: got %v, want ErrUnavailable", err)
	}
}

// TestClusterWaitReplicas is TestWaitReplicas on a Cluster, where a call must wait at the node that has run it.
func (b Driver) TestClusterWaitReplicas(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, 1)
	d := b.open(t, b.Scheme+"+cluster://"+strings.Join(c.Addrs(), ",")+"?wait_replicas=1")
	slot, err := c.Slot(t.Context(), "{x}")
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.AwaitPrimary(t.Context(), slot)
	if err != nil {
		t.Fatal(err)
	}
	replica, err := c.Replica(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	// A replica that is killed is taken out of step at once, a paused one only after a while.
	waitReplicas(t, d, func() {
		if err := replica.Kill(); err != nil {
			t.Fatal(err)
		}
	}, func() {
		if err := replica.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}, b.On(p), b.On(replica))

	// After a failover the first try goes to the old primary.
	Eventually(t, "all replicas", func() bool { return c.Healthy(t.Context(), 3) == nil })
	if err := c.Failover(t.Context(), replica); err != nil {
		t.Fatal(err)
	}
	Eventually(t, "a confirmed Lock after a failover", func() bool {
		_, err := d.Lock(t.Context(), Request(LockName("x"), NewID(), time.Minute))
		return err == nil
	})
}

func waitReplicas(t *testing.T, d Full, stop, start func(), s, replica Server) {
	t.Helper()
	e := ListenTo(d)
	ctx := t.Context()
	n, free := LockName("x"), LockName("{x}free")
	h, w := driver.Owner{Name: n, ID: NewID()}, driver.Owner{Name: n, ID: NewID()}
	first := MustLock(t, d, Request(n, h.ID, time.Minute), driver.Granted)
	if keys, _ := replica.Must(t, "KEYS", "fencelock:l:{x}").([]any); len(keys) != 1 { // KEYS is not redirected
		t.Error("replica after a confirmed Lock: got no lease on it, want one")
	}
	MustLock(t, d, Waiting(n, w.ID, time.Minute), driver.Waiting)
	e.Next(t, driver.EventRecheck, "when the subscription stands")

	stop()
	extension := []driver.Extension{{Owner: h, TTL: 2 * time.Minute}}
	if r := d.Extend(ctx, extension)[0]; r.Err == nil || errors.Is(r.Err, driver.ErrUnavailable) {
		t.Errorf("Extend without the replica: got %+v, want an error that leaves open whether it was extended", r)
	}
	o := driver.Owner{Name: free, ID: NewID()}
	began := time.Now()
	if a, err := d.Lock(ctx, Request(free, o.ID, time.Minute)); !errors.Is(err, driver.ErrUnavailable) || errors.Is(err, driver.ErrInvalid) {
		t.Errorf("Lock without the replica: got %v, %v, want ErrUnavailable", a.State, err)
	}
	if took := time.Since(began); took < 900*time.Millisecond {
		t.Errorf("Lock without the replica: got an answer after %v, want it to wait a second", took)
	}
	if left := s.Must(t, "EXISTS", "fencelock:l:"+free.Name+"."); left != int64(0) {
		t.Errorf("Lock without the replica: got a lease left behind, want it given back (L7)")
	}
	began = time.Now()
	if _, err := d.Lock(ctx, Request(free, NewID(), 100*time.Millisecond)); !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Lock of 100ms without the replica: got %v, want ErrUnavailable", err)
	}
	// The replicas get a quarter of the TTL, and the rest is for a busy machine.
	if took := time.Since(began); took > Patience {
		t.Errorf("Lock of 100ms without the replica: took %v", took)
	}
	written := Request(LockName("{x}written"), NewID(), 100*time.Millisecond)
	if _, err := d.LockAndWrite(ctx, written, appending("{x}list", "")); err == nil || errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("LockAndWrite without the replica: got %v, want an error that leaves open whether it was written (L8)", err)
	}
	MustRelease(t, d, h)
	e.Next(t, driver.EventRecheck, "when the lock is handed over: nobody has confirmed it yet")
	poll := []driver.Poll{{Owner: w, TTL: time.Minute, Claim: 30 * time.Second}}
	if r := d.Poll(ctx, poll)[0]; r.Err == nil || errors.Is(r.Err, driver.ErrUnavailable) {
		t.Errorf("Poll of a new holder without the replica: got %+v, want an error", r)
	}

	start()
	Eventually(t, "a confirmed Poll with the replica", func() bool {
		r := d.Poll(ctx, poll)[0]
		if r.Err == nil && (r.State != driver.Granted || r.Token <= first.Token) {
			t.Fatalf("Poll with the replica: got %+v, want granted with a token above %v (T1)", r, first.Token)
		}
		return r.Err == nil
	})
	extension[0].Owner = w
	if r := d.Extend(ctx, extension)[0]; r.Err != nil || r.State != driver.Granted {
		t.Errorf("Extend with the replica: got %+v, want granted", r)
	}
	MustRelease(t, d, w)
}
