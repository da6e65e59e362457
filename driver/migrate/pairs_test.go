package migrate_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/migrate"
)

// TestServerConformance runs the suite on phase both of a pair of real servers.
func TestServerConformance(t *testing.T) {
	conformance.Run(t, conformance.Harness{
		Provider: "process",
		AtOnce:   6, // as for driver/postgres, on twice as many connections
		New: func(t testing.TB) *conformance.Backend {
			url := migrateURL(backendURL(t, "redis"), backendURL(t, "postgres"), migrate.Both)
			return &conformance.Backend{
				Driver: func(t testing.TB) driver.Driver {
					d, err := driver.Open(context.WithoutCancel(t.Context()), url)
					if err != nil {
						t.Fatalf("Open: got %v, want nil", err)
					}
					return d
				},
				URL: url,
			}
		},
		Skips: map[conformance.Need]string{
			conformance.Wired:     "the suite disturbs each backend's own driver; TestBackendDown, TestModel and TestServerLost do it here",
			conformance.Server:    "as for the wire",
			conformance.Requests:  "they are on two servers; BenchmarkBoth compares",
			conformance.Leftovers: "they are on two servers; TestCancelledInBoth and TestModel look",
		},
	})
}

// TestPairs mixes clients of neighbouring phases on real servers, forth and back.
func TestPairs(t *testing.T) {
	for _, pair := range []struct{ from, to string }{{"redis", "etcd"}, {"redis", "postgres"}, {"file", "redis"}} {
		t.Run(pair.from+"-"+pair.to, func(t *testing.T) {
			t.Parallel()
			p := &pairRun{t: t, from: backendURL(t, pair.from), to: backendURL(t, pair.to)}
			for _, phases := range [][]migrate.Phase{
				{migrate.From}, {migrate.From, migrate.Both}, {migrate.Both}, {migrate.Both, migrate.To}, {migrate.To},
				{migrate.To, migrate.Both}, {migrate.Both, migrate.From},
			} {
				p.mix(phases)
			}
			if p.count < 7*20 {
				t.Fatalf("acquisitions: got %d, want at least 20 in each mix", p.count)
			}
			t.Logf("%d acquisitions", p.count)
		})
	}
}

// pairRun checks L1, S1 and T1 of what all clients do, one name and one semaphore.
type pairRun struct {
	t        *testing.T
	from, to string
	holds    atomic.Int32
	permits  atomic.Int32

	mu    sync.Mutex
	last  fencelock.Token
	count int
}

const pairLimit = 2

// mix lets three clients, of the phases in turn, take the lock and the semaphore until each has had both often enough, and
// closes them.
func (p *pairRun) mix(phases []migrate.Phase) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for i := range 3 {
		c, err := fencelock.Open(ctx, migrateURL(p.from, p.to, phases[i%len(phases)]))
		if err != nil {
			p.t.Fatalf("Open in phase %s: got %v, want nil", phases[i%len(phases)], err)
		}
		defer c.Close()
		all.Go(func() {
			for range 7 {
				if err := p.lock(ctx, c); err != nil {
					p.t.Errorf("phases %v: %v", phases, err)
					return
				}
			}
		})
		all.Go(func() {
			for range 7 {
				if err := p.acquire(ctx, c); err != nil {
					p.t.Errorf("phases %v: %v", phases, err)
					return
				}
			}
		})
	}
	all.Wait()
	if p.t.Failed() {
		p.t.FailNow()
	}
}

func (p *pairRun) lock(ctx context.Context, c *fencelock.Client) error {
	l, err := c.Lock(ctx, "x")
	if err != nil {
		return err
	}
	if n := p.holds.Add(1); n > 1 {
		return fmt.Errorf("the lock is held by %d (L1)", n)
	}
	p.mu.Lock()
	if l.Token() <= p.last {
		err = fmt.Errorf("token: got %d, want more than %d (T1)", l.Token(), p.last)
	}
	p.last = max(p.last, l.Token())
	p.count++
	p.mu.Unlock()
	p.holds.Add(-1)
	if err == nil {
		err = l.Release(ctx)
	}
	return err
}

func (p *pairRun) acquire(ctx context.Context, c *fencelock.Client) error {
	l, err := c.Acquire(ctx, "x", pairLimit)
	if err != nil {
		return err
	}
	if n := p.permits.Add(1); n > pairLimit {
		return fmt.Errorf("%d permits are held, of %d (S1)", n, pairLimit)
	}
	p.permits.Add(-1)
	return l.Release(ctx)
}

// TestServerLost: a server that is gone in phase both ends belief by the clock, and nothing is granted meanwhile.
func TestServerLost(t *testing.T) {
	for _, which := range []string{"old", "new"} {
		urls := map[string]string{"old": backendURL(t, "redis"), "new": "file://" + t.TempDir()}
		lost := newRedis(t)
		urls[which] = "redis://" + lost.Addr()
		c, err := fencelock.Open(t.Context(), migrateURL(urls["old"], urls["new"], migrate.Both))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		l, err := c.TryLock(t.Context(), "x", fencelock.TTL(3*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		if err := lost.Kill(); err != nil {
			t.Fatal(err)
		}
		if _, err := c.TryLock(t.Context(), "y", fencelock.TTL(time.Second)); err == nil || strings.Contains(err.Error(), "held") {
			t.Fatalf("TryLock while the %s server is gone: got %v, want an error of the backend (L8)", which, err)
		}
		select {
		case <-l.Done():
		case <-time.After(20 * time.Second):
			t.Fatalf("Done after the loss of the %s server: got none, want closed (L2)", which)
		}
	}
}
