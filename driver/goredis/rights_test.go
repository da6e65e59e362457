package goredis_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// TestLeastRights does everything as a user that has the rights which the package comment lists, and then without each
// of them in turn: then the server must have denied it.
func TestLeastRights(t *testing.T) {
	lists := redisbackend.Rights(t, "goredis.go")
	if len(lists) != 2 {
		t.Fatalf("lists of rights in the package comment: got %d, want 2", len(lists))
	}
	alone := lists[0]
	channels := slices.Index(alone, "&fencelock:c:*")
	last := slices.Index(alone, "+info")
	if channels < 20 || last < channels {
		t.Fatalf("rights in the package comment: got %q", alone)
	}
	onCluster := slices.Concat(alone[:channels], lists[1], alone[last:])

	t.Run("Single", func(t *testing.T) {
		t.Parallel()
		s := startRedis(t, "--maxmemory-policy", "allkeys-lru")
		leastRights(t, []redisbackend.Server{s.shared()}, s.driver(t), "redis://app:pw@"+s.Addr(), alone, func() redis.UniversalClient {
			return redis.NewClient(&redis.Options{Addr: s.Addr(), MaxRetries: -1, Username: "app", Password: "pw"})
		})
	})
	t.Run("Cluster", func(t *testing.T) {
		t.Parallel()
		c := startCluster(t, 0, "--maxmemory-policy", "allkeys-lru")
		var nodes []redisbackend.Server
		for _, s := range c.nodes() {
			nodes = append(nodes, s.shared())
		}
		leastRights(t, nodes, newDriver(t, c.client(t)), strings.Replace(c.url(), "//", "//app:pw@", 1), onCluster, func() redis.UniversalClient {
			return redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.Addrs(), Username: "app", Password: "pw"})
		})
	})
}

func leastRights(t *testing.T, nodes []redisbackend.Server, admin *goredis.Driver, url string, rights []string, client func() redis.UniversalClient) {
	redisbackend.LeastRights(t, nodes, rights, func(missing string) error {
		// A subscription must stand before it can be ended.
		return everything(t, admin, url, client, missing == "" || strings.HasSuffix(missing, "unsubscribe"))
	})
}

// everything does what a driver can do, on names that the admin has prepared, and answers what went wrong. With all it
// expects to be told of a grant and of the policy.
func everything(t *testing.T, admin *goredis.Driver, url string, client func() redis.UniversalClient, all bool) (err error) {
	opened, err := driver.Open(t.Context(), url)
	if err != nil {
		return err
	}
	opened.Close()
	c := client()
	defer c.Close()
	d, err := goredis.New(c, nil)
	if err != nil {
		return err
	}
	defer d.Close() // which ends the subscription
	e := listenTo(d)
	tag := newID() // one slot, so that what is not done on one node of a Cluster is not missed
	for _, n := range []driver.Name{lockName("{" + tag + "}"), permitName("{" + tag + "}")} {
		steps := stepsOn(t, admin, n)
		for range 2 { // the waiter of the second time is this driver's own
			for _, step := range steps {
				if failed := step.Do(d); failed != nil {
					err = errors.Join(err, fmt.Errorf("%s of a %v: %w", step.What, n.Kind, failed))
				}
			}
		}
	}
	if failed := d.List(t.Context(), driver.Name{}, func(driver.Holding) bool { return true }); failed != nil {
		err = errors.Join(err, failed)
	}
	p := driver.Owner{Name: permitName("{" + tag + "}y"), ID: newID()} // the steps give back places in a queue only
	_, failed := d.Acquire(t.Context(), request(p.Name, p.ID, time.Minute))
	_, failed2 := d.Release(t.Context(), p)
	err = errors.Join(err, failed, failed2)
	n := lockName("{" + tag + "}y")
	h, w := driver.Owner{Name: n, ID: newID()}, driver.Owner{Name: n, ID: newID()}
	_, failed = d.Lock(t.Context(), request(n, h.ID, time.Minute))
	_, failed2 = d.Lock(t.Context(), waiting(n, w.ID, time.Minute))
	err = errors.Join(err, failed, failed2)
	if !all {
		return err
	}
	// In either order, and the subscription is one for all names, or of this one.
	for warned, subscribed := false, false; !warned || !subscribed; {
		select {
		case ev := <-e:
			warned = warned || ev.Kind == driver.EventWarning
			subscribed = subscribed || ev.Kind == driver.EventRecheck && (ev.Owner.Name.Name == "" || ev.Owner.Name == n)
		case <-time.After(patience):
			t.Fatalf("events with the rights listed: warned of the policy %v, subscribed %v, want both", warned, subscribed)
		}
	}
	if _, failed := d.Release(t.Context(), h); failed != nil {
		err = errors.Join(err, failed)
	}
	// The steps above have brought messages, too.
	for e.Next(t, driver.EventGranted, "with the rights listed").Owner != w {
	}
	return err
}
