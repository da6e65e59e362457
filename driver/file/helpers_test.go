package file

import (
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/state"
)

// fakeClock is set by the test. It begins at a plausible time, as tokens do.
type fakeClock struct{ lease, token atomic.Int64 }

func newFakeClock() *fakeClock {
	c := new(fakeClock)
	c.lease.Store(int64(time.Hour))
	c.token.Store(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro())
	return c
}

func (c *fakeClock) now() state.Now {
	return state.Now{Lease: c.lease.Load(), Token: c.token.Load()}
}

// pass lets time go by on both clocks.
func (c *fakeClock) pass(d time.Duration) {
	c.lease.Add(int64(d))
	c.stepWall(d)
}

// stepWall sets the wall clock only.
func (c *fakeClock) stepWall(d time.Duration) { c.token.Add(d.Microseconds()) }

func (c *fakeClock) in(boot string) system { return system{boot: boot, now: c.now} }

func openOn(t *testing.T, sys system, dir string) *Driver {
	t.Helper()
	d, err := newDriverOn(t.Context(), sys, dir, nil)
	if err != nil {
		t.Fatalf("open %s: got %v, want nil", dir, err)
	}
	t.Cleanup(func() { d.Close() })
	d.sweep.rest = 0
	return d
}

func openReal(t *testing.T, dir string) *Driver {
	t.Helper()
	d, err := New(dir, nil)
	if err != nil {
		t.Fatalf("New(%s): got %v, want nil", dir, err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

func lockName(name string) driver.Name { return driver.Name{Kind: driver.KindLock, Name: name} }

func owner(name string) driver.Owner { return driver.Owner{Name: lockName(name), ID: rand.Text()} }

func try(o driver.Owner, ttl time.Duration) driver.Request {
	return driver.Request{Owner: o, TTL: ttl, Limit: 1}
}

func wait(o driver.Owner, ttl, claim time.Duration) driver.Request {
	return driver.Request{Owner: o, TTL: ttl, Limit: 1, Wait: true, Claim: claim}
}

// mustLock takes the lock in one try.
func mustLock(t *testing.T, d *Driver, o driver.Owner, ttl time.Duration) driver.Token {
	t.Helper()
	a, err := d.Lock(t.Context(), try(o, ttl))
	if err != nil || a.State != driver.Granted {
		t.Fatalf("Lock %s: got %v, %v, want granted", o.Name.Name, a.State, err)
	}
	return a.Token
}

// mustState makes one request and compares the state of its answer.
func mustState(t *testing.T, d *Driver, r driver.Request, want driver.State, law string) driver.Answer {
	t.Helper()
	a, err := d.Lock(t.Context(), r)
	if err != nil || a.State != want {
		t.Fatalf("Lock %q: got %v, %v, want %v (%s)", r.Name.Name, a.State, err, want, law)
	}
	return a
}

func mustRelease(t *testing.T, d *Driver, o driver.Owner) {
	t.Helper()
	if found, err := d.Release(t.Context(), o); !found || err != nil {
		t.Fatalf("Release %s: got %v, %v, want true, nil", o.Name.Name, found, err)
	}
}

func mustUnavailable(t *testing.T, what string, err error, text string) {
	t.Helper()
	if !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), text) {
		t.Fatalf("%s: got error %v, want ErrUnavailable that names %s (L8)", what, err, text)
	}
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, within time.Duration, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(within); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, within)
		}
	}
}

// nameFiles lists the files of names in a namespace's directory.
func nameFiles(t *testing.T, d *Driver) (files []string) {
	t.Helper()
	entries, err := os.ReadDir(d.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			files = append(files, e.Name())
		}
	}
	return files
}

func sockets(t *testing.T, d *Driver) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(d.dir, ".push"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Type()&fs.ModeSocket != 0 {
			names = append(names, e.Name())
		}
	}
	return names
}

// listed lists all leases.
func listed(t *testing.T, d *Driver, n driver.Name) map[driver.Owner]driver.Holding {
	t.Helper()
	all := make(map[driver.Owner]driver.Holding)
	err := d.List(t.Context(), n, func(h driver.Holding) bool {
		if _, twice := all[h.Owner]; twice {
			t.Fatalf("List: got %v twice, want once", h.Owner)
		}
		all[h.Owner] = h
		return true
	})
	if err != nil {
		t.Fatalf("List: got %v, want nil", err)
	}
	return all
}

// client is a driver with as much of an engine as the tests need: it waits for what it is told or,
// every so often, asks.
type client struct {
	*Driver
	recheck chan struct{} // closed by the first EventRecheck

	mu      sync.Mutex
	once    sync.Once
	waiting map[string]chan driver.Token
	warned  []error
}

func newClient(d *Driver) *client {
	c := &client{Driver: d, recheck: make(chan struct{}), waiting: make(map[string]chan driver.Token)}
	d.Notify(c.event)
	return c
}

func (c *client) event(e driver.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch e.Kind {
	case driver.EventGranted:
		select {
		case c.waiting[e.Owner.ID] <- e.Token:
		default:
		}
	case driver.EventRecheck:
		c.once.Do(func() { close(c.recheck) })
	case driver.EventWarning:
		c.warned = append(c.warned, e.Err)
	}
}

// expect registers a waiter before its request is sent (W1).
func (c *client) expect(id string) (told <-chan driver.Token, forget func()) {
	ch := make(chan driver.Token, 1)
	c.mu.Lock()
	c.waiting[id] = ch
	c.mu.Unlock()
	return ch, func() {
		c.mu.Lock()
		delete(c.waiting, id)
		c.mu.Unlock()
	}
}

// lock waits until the request is granted and answers the token and how long it may be believed.
func (c *client) lock(ctx context.Context, r driver.Request) (driver.Token, time.Time, error) {
	r.Wait, r.Claim = true, r.TTL/2
	told, forget := c.expect(r.ID)
	defer forget()
	sent := time.Now()
	a, err := c.Lock(ctx, r)
	tick := time.NewTicker(r.Claim / 3)
	defer tick.Stop()
	for {
		if err != nil {
			return 0, time.Time{}, err
		}
		switch a.State {
		case driver.Granted:
			return a.Token, sent.Add(r.TTL - max(r.TTL/100, 2*time.Millisecond)), nil
		case driver.Waiting:
		default:
			return 0, time.Time{}, errors.New("waiter is " + a.State.String())
		}
		select {
		case <-ctx.Done():
			return 0, time.Time{}, ctx.Err()
		case <-told:
		case <-tick.C:
		}
		sent = time.Now()
		result := c.Poll(ctx, []driver.Poll{{Owner: r.Owner, TTL: r.TTL, Claim: r.Claim}})[0]
		a, err = result.Answer, result.Err
	}
}
