package redlock_test

import (
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/internal/redisbackend"
	"github.com/fencelock/fencelock/internal/redlockbackend"
)

// TestLeastRights does everything as a user who has on all nodes the rights which the package comment lists, and then
// without each of them in turn.
func TestLeastRights(t *testing.T) {
	t.Parallel()
	lists := redisbackend.Rights(t, "redlock.go")
	if len(lists) != 1 || len(lists[0]) < 20 {
		t.Fatalf("rights in the package comment: got %q", lists)
	}
	m := redlockbackend.Start(t, 3, &servers.RedisOptions{AppendFsync: "always"})
	var nodes []redisbackend.Server
	for _, s := range m {
		nodes = append(nodes, redisbackend.Server{Redis: s.(*servers.Redis)})
	}
	redisbackend.LeastRights(t, nodes, lists[0], func(missing string) error { return everything(t, m, missing) })
}

// everything does what a driver can do as the user app, and answers what went wrong.
func everything(t *testing.T, m redlockbackend.Masters, missing string) (err error) {
	opened, failed := driver.Open(t.Context(), "redlock://app:pw@"+strings.Join(m.Addrs(), ","))
	if failed == nil {
		opened.Close()
	}
	err = errors.Join(err, failed)
	d := redlockbackend.DriverOf(t, m.Addrs(), "app", "pw", nil)
	if missing != "+ping" { // which a subscription does that has been silent for a while
		defer d.Close()
	}
	subscribed, freed, warned := make(chan struct{}, 16), make(chan struct{}, 16), make(chan error, 16)
	d.Notify(func(ev driver.Event) {
		switch ev.Kind {
		case driver.EventRecheck:
			subscribed <- struct{}{}
		case driver.EventFreed:
			freed <- struct{}{}
		case driver.EventWarning:
			warned <- ev.Err
		}
	})
	tag := rand.Text()
	var holder driver.Request
	for _, n := range []driver.Name{redisbackend.PermitName(tag), redisbackend.LockName(tag)} {
		ask := func(what string, r driver.Request, want driver.State) {
			a, failed := d.Lock(t.Context(), r)
			if failed == nil && a.State != want {
				failed = fmt.Errorf("got %v, want %v", a.State, want)
			}
			if failed != nil {
				err = errors.Join(err, fmt.Errorf("%s of a %v: %w", what, n.Kind, failed))
			}
		}
		holder = redisbackend.Request(n, rand.Text(), time.Minute)
		ask("Lock", holder, driver.Granted)
		ask("Lock again", holder, driver.Granted)
		ask("Lock by one who waits", redisbackend.Waiting(n, rand.Text(), time.Minute), driver.Held)
		x := d.Extend(t.Context(), []driver.Extension{{Owner: holder.Owner, TTL: 2 * time.Minute}})[0]
		_, failed := d.NextToken(t.Context(), n, 0)
		err = errors.Join(err, x.Err, failed, d.Advance(t.Context(), n, 1))
		_, failed = d.ForceUnlock(t.Context(), n)
		err = errors.Join(err, failed)
		holder.ID = rand.Text()
		ask("Lock after ForceUnlock", holder, driver.Granted)
		ask("Lock by one who waits", redisbackend.Waiting(n, rand.Text(), time.Minute), driver.Held)
		for _, listed := range []driver.Name{n, {}} {
			if failed := d.List(t.Context(), listed, func(driver.Holding) bool { return true }); failed != nil {
				err = errors.Join(err, fmt.Errorf("List of %q: %w", listed.Name, failed))
			}
		}
		if n.Kind == driver.KindLock && (missing == "" || missing == "+unsubscribe") {
			select {
			case <-subscribed:
			case <-time.After(patience):
				t.Fatalf("subscription without %q: none within %v", missing, patience)
			}
			for len(freed) > 0 {
				<-freed
			}
		}
		if found, failed := d.Release(t.Context(), holder.Owner); failed != nil || !found {
			err = errors.Join(err, fmt.Errorf("Release of a %v: got %v, %w", n.Kind, found, failed))
		}
	}
	if missing != "" {
		return err
	}
	select {
	case <-freed:
	case <-time.After(patience):
		t.Fatalf("word of a release with the rights listed: none within %v", patience)
	}
	for len(warned) > 0 {
		err = errors.Join(err, <-warned)
	}
	return err
}
