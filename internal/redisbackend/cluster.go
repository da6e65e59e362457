package redisbackend

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

// startCluster runs three primaries that share all slots.
func (b Driver) startCluster(t *testing.T) (c *servers.RedisCluster, nodes []Server) {
	t.Helper()
	c = StartCluster(t, 0)
	for _, n := range c.Nodes {
		nodes = append(nodes, b.On(n))
	}
	return c, nodes
}

// StartCluster runs three primaries that share all slots, with so many replicas each.
func StartCluster(t testing.TB, replicas int, args ...string) *servers.RedisCluster {
	t.Helper()
	c, err := servers.StartRedisCluster(t.Context(), 3, replicas, &servers.RedisOptions{Args: args})
	if err != nil {
		t.Fatalf("start redis cluster: %v", err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("stop redis cluster: %v", err)
		}
	})
	return c
}

// subscribed counts the connections that subscribe to anything.
func subscribed(t *testing.T, nodes []Server) (sum int) {
	t.Helper()
	for _, s := range nodes {
		sum += s.ClientsOfType(t, "pubsub")
	}
	return sum
}

// bothClients runs a test on drivers opened by URL and on such that have the user's client.
func (b Driver) bothClients(t *testing.T, c *servers.RedisCluster, f func(t *testing.T, open func() Full)) {
	t.Run("URL", func(t *testing.T) {
		f(t, func() Full { return b.open(t, b.Scheme+"+cluster://"+strings.Join(c.Addrs(), ",")) })
	})
	t.Run("Client", func(t *testing.T) {
		f(t, func() Full { return b.Connect(t, Options{Cluster: c.Addrs()}) })
	})
}

// TestCluster runs everything on three primaries: names of all slots, batches over all of them, lists,
// messages, scripts forgotten by one node.
func (b Driver) TestCluster(t *testing.T) {
	t.Parallel()
	c, nodes := b.startCluster(t)
	d := b.Connect(t, Options{Cluster: c.Addrs()})
	e := ListenTo(d)
	ctx := context.WithoutCancel(t.Context())
	var names []driver.Name
	for _, name := range append(OddNames(), "{t}1", "{t}2", "{t}3") {
		names = append(names, LockName(name), PermitName(name))
	}
	for i := range 50 {
		names = append(names, LockName(fmt.Sprint(i)), PermitName(fmt.Sprint(i)))
	}
	leases := make([]driver.Extension, len(names))
	for i, n := range names {
		leases[i] = driver.Extension{Owner: driver.Owner{Name: n, ID: NewID()}, TTL: time.Minute}
		MustLock(t, d, Request(n, leases[i].ID, time.Minute), driver.Granted)
	}
	nodes[1].Must(t, "SCRIPT", "FLUSH")
	for i, r := range d.Extend(ctx, leases) {
		if r.Err != nil || r.State != driver.Granted {
			t.Errorf("Extend of %v on a Cluster: got %+v, want granted (F112)", names[i], r)
		}
	}
	var listed []driver.Name
	if err := d.List(ctx, driver.Name{}, func(h driver.Holding) bool { listed = append(listed, h.Name); return true }); err != nil {
		t.Errorf("List on a Cluster: got %v, want nil", err)
	}
	for _, n := range names {
		if i := slices.Index(listed, n); i < 0 || slices.Contains(listed[i+1:], n) {
			t.Errorf("List on a Cluster: got %v not once", n)
		}
	}

	polls := make([]driver.Poll, len(names))
	for i, n := range names {
		polls[i] = driver.Poll{Owner: driver.Owner{Name: n, ID: NewID()}, TTL: time.Minute, Claim: 30 * time.Second}
		MustLock(t, d, Waiting(n, polls[i].ID, time.Minute), driver.Waiting)
	}
	for waits := len(names); waits > 0; waits-- {
		e.Next(t, driver.EventRecheck, "when the subscriptions stand")
	}
	for i, r := range d.Poll(ctx, polls) {
		if r.Err != nil || r.State != driver.Waiting {
			t.Errorf("Poll of %v on a Cluster: got %+v, want waiting (F112)", names[i], r)
		}
	}
	if got := subscribed(t, nodes); got != len(nodes) {
		t.Errorf("subscribed connections of a client that waits for %d names on a Cluster: got %d, want one for each node (F074)", len(names), got)
	}
	for i := range names {
		MustRelease(t, d, leases[i].Owner)
		if got := e.Next(t, driver.EventGranted, "on a Cluster"); got.Owner != polls[i].Owner {
			t.Errorf("event on a Cluster: got %+v, want %+v", got.Owner, polls[i].Owner)
		}
		if ended, err := d.ForceUnlock(ctx, names[i]); ended != 1 || err != nil {
			t.Errorf("ForceUnlock of %v on a Cluster: got %v, %v, want 1", names[i], ended, err)
		}
	}
	for _, s := range nodes {
		keys, _ := s.Must(t, "KEYS", "*").([]any)
		if len(keys) == 0 {
			t.Error("void: a node has no keys")
		}
		for _, key := range keys {
			if !strings.Contains(key.(string), "f:") {
				t.Errorf("key left when nobody holds: got %q, want only last tokens (L7)", key)
			}
		}
	}
}

// TestSlotMigration moves the slot of a name that is held and waited for. While it is on its way, steps whose keys are all
// on one node are done and others are refused; nothing is taken for contention or for a loss, and all goes on afterwards.
func (b Driver) TestSlotMigration(t *testing.T) {
	t.Parallel()
	c, _ := b.startCluster(t)
	b.bothClients(t, c, func(t *testing.T, open func() Full) {
		ctx := t.Context()
		holder, waiter := open(), open()
		events := ListenTo(waiter)
		tag := NewID()
		n, other := LockName("{"+tag+"}a"), LockName("{"+tag+"}b")
		h, w := driver.Owner{Name: n, ID: NewID()}, driver.Owner{Name: n, ID: NewID()}
		token := MustLock(t, holder, Request(n, h.ID, time.Minute), driver.Granted).Token
		MustLock(t, waiter, Waiting(n, w.ID, time.Minute), driver.Waiting)
		events.Next(t, driver.EventRecheck, "when the subscription stands")
		slot, err := c.Slot(ctx, n.Name)
		if err != nil {
			t.Fatal(err)
		}
		from, err := c.Primary(ctx, slot)
		if err != nil {
			t.Fatal(err)
		}
		to := c.Nodes[0]
		if to == from {
			to = c.Nodes[1]
		}
		err = c.MigrateSlot(ctx, slot, to, func(moved bool) error {
			when := fmt.Sprintf("while a slot migrates, keys moved: %v", moved)
			gone := driver.Owner{Name: other, ID: NewID()}
			results := holder.Extend(ctx, []driver.Extension{{Owner: h, TTL: 2 * time.Minute}, {Owner: gone, TTL: time.Minute}})
			if r := results[0]; r.Err != nil || r.State != driver.Granted || r.Token != token {
				t.Errorf("Extend %s: got %+v, want granted with token %v (T3)", when, r, token)
			}
			if r := results[1]; r.Err != nil || r.State != driver.Gone {
				t.Errorf("Extend of nothing in one batch with it %s: got %+v, want gone", when, r)
			}
			MustLock(t, holder, Request(n, NewID(), time.Minute), driver.Held)
			if a, err := holder.Lock(ctx, Request(other, NewID(), time.Minute)); err == nil {
				t.Errorf("void: Lock of a free name %s: got %v, want it refused", when, a.State)
			} else {
				if !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), "TRYAGAIN") {
					t.Errorf("Lock of a free name %s: got %v, want ErrUnavailable with TRYAGAIN (L8)", when, err)
				}
			}
			if r := waiter.Poll(ctx, []driver.Poll{{Owner: w, TTL: time.Minute, Claim: 30 * time.Second}})[0]; r.Err != nil || r.State != driver.Waiting {
				t.Errorf("Poll %s: got %+v, want waiting", when, r)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range []Full{holder, waiter} {
			if a := MustLock(t, d, Request(n, h.ID, time.Minute), driver.Granted); a.Token != token {
				t.Errorf("Lock repeated after a migration: got token %v, want %v (T3)", a.Token, token)
			}
		}
		// The subscription ended with the slot, and comes back where that is now.
		events.Next(t, driver.EventRecheck, "after the slot of the channel has moved")
		MustRelease(t, holder, h)
		if e := events.Next(t, driver.EventGranted, "on the new node"); e.Owner != w || e.Token <= token {
			t.Errorf("event: got %+v, want owner %+v and a token above %v (T1)", e, w, token)
		}
		MustRelease(t, waiter, w)
		MustLock(t, holder, Request(other, NewID(), time.Minute), driver.Granted)
	})
}
