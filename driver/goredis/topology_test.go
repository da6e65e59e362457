package goredis_test

import (
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
)

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
