package conformance_test

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/memory"
)

// Drivers that are unlike the others but keep the contract must pass.

func TestOdd(t *testing.T) {
	t.Parallel()
	for name, odd := range map[string]struct {
		wrap  func(*memory.Driver) driver.Driver
		skips map[conformance.Need]string
	}{
		"queue is hidden": {hideQueue, map[conformance.Need]string{
			conformance.Queueing: "hidden",
			conformance.Pushes:   "hidden",
		}},
		"grants more, answers slowly, pushes late and twice": {func(d *memory.Driver) driver.Driver { return &generous{d} }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			skips := map[conformance.Need]string{
				conformance.URL:       "the store lives in this process",
				conformance.Wired:     "nothing is sent",
				conformance.Server:    "there is none",
				conformance.Requests:  "nothing is sent",
				conformance.Leftovers: "the store is closed to this package",
			}
			for need, reason := range odd.skips {
				skips[need] = reason
			}
			conformance.Run(t, conformance.Harness{
				Provider: "odd",
				New: func(testing.TB) *conformance.Backend {
					store := memory.NewStore()
					return &conformance.Backend{
						Driver: func(testing.TB) driver.Driver { return odd.wrap(memory.New(store)) },
					}
				},
				Skips: skips,
			})
		})
	}
}

// hideQueue is a driver without a queue and without pushes: waiters of one client stand in a line of the
// engine's, and ask again and again.
func hideQueue(d *memory.Driver) driver.Driver {
	return struct {
		driver.Driver
		driver.Semaphore
		driver.FencingSource
		driver.Lister
		driver.ForceUnlocker
	}{d, d, d, d, d}
}

// generous grants leases that are longer than asked for, and says so. Its requests and replies are slow, some
// more than others, and it does not look at contexts meanwhile. Its pushes come late, twice, in any order, and
// after it was closed.
type generous struct {
	*memory.Driver
}

func longer(ttl time.Duration) time.Duration { return ttl + min(ttl/4, time.Second) }

func slow() { time.Sleep(rand.N(6 * time.Millisecond)) }

func (d *generous) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	r.TTL = longer(r.TTL)
	slow()
	defer slow()
	return d.Driver.Lock(ctx, r)
}

func (d *generous) Acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return d.Lock(ctx, r)
}

func (d *generous) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	more := make([]driver.Extension, len(leases))
	for i, l := range leases {
		l.TTL = longer(l.TTL)
		more[i] = l
	}
	slow()
	defer slow()
	return d.Driver.Extend(ctx, more)
}

func (d *generous) Release(ctx context.Context, o driver.Owner) (bool, error) {
	slow()
	defer slow()
	return d.Driver.Release(ctx, o)
}

func (d *generous) Poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	more := make([]driver.Poll, len(waiters))
	for i, w := range waiters {
		w.TTL = longer(w.TTL)
		more[i] = w
	}
	slow()
	defer slow()
	return d.Driver.Poll(ctx, more)
}

func (d *generous) Notify(sink func(driver.Event)) {
	d.Driver.Notify(func(e driver.Event) {
		for _, most := range []time.Duration{10 * time.Millisecond, time.Second} {
			time.AfterFunc(rand.N(most), func() { sink(e) })
		}
	})
}
