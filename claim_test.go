package fencelock_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/memory"
)

// A waiter whose latest polls got no answer knows less of its claim than one period more. It must not use up
// all of that before it extends.
func TestOldClaimIsExtendedInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl, period, latency = 6 * time.Second, time.Second, 300 * time.Millisecond
		s := memory.NewStore()
		a, _ := newClient(t, s)
		d := &deaf{Driver: memory.New(s), latency: latency}
		b, err := fencelock.New(d)
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		l := lock(t, a, "x")
		got := make(chan *fencelock.Lease)
		go func() { got <- lock(t, b, "x", fencelock.TTL(ttl)) }()
		time.Sleep(10*period + period/2)
		d.mute.Store(true)
		time.Sleep(period + period*3/10) // the latest poll that was answered is 1.8 periods old
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		m := <-got
		if left := time.Until(m.Deadline()); left < period || left > period+period/4 {
			t.Fatalf("claim whose latest answered poll was sent 1.8 periods ago: got %v left, want about 1.2 periods", left)
		}
		time.Sleep(ttl)
		wantErr(t, "Err of a lease whose extensions take 0.3 periods", m.Err(), nil)
		if err := m.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

// A process that stood still while it was served finds a grant whose time has passed. Lock goes on waiting.
func TestGrantThatIsOverIsNoError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ttl = 6 * time.Second
		s := memory.NewStore()
		a, _ := newClient(t, s)
		d := &deaf{Driver: memory.New(s)}
		b, err := fencelock.New(d, fencelock.WithRequestTimeout(time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		l := lock(t, a, "x")
		got := make(chan *fencelock.Lease)
		go func() { got <- lock(t, b, "x", fencelock.TTL(ttl)) }()
		time.Sleep(ttl / 12)
		d.noPush.Store(true)
		d.pollLatency.Store(int64(2 * ttl)) // the next poll says "granted" when that is over
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(ttl)
		d.pollLatency.Store(0)
		m := <-got
		wantErr(t, "Err of the lease", m.Err(), nil)
		time.Sleep(2 * ttl) // until the last late reply has come
		if err := m.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

// deaf is a driver with a slow and unreliable connection.
type deaf struct {
	*memory.Driver
	latency     time.Duration // of extensions
	mute        atomic.Bool   // polls fail
	noPush      atomic.Bool
	pollLatency atomic.Int64 // of replies to polls
}

func (d *deaf) Notify(sink func(driver.Event)) {
	d.Driver.Notify(func(e driver.Event) {
		if !d.noPush.Load() {
			sink(e)
		}
	})
}

func (d *deaf) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	time.Sleep(d.latency)
	return d.Driver.Extend(ctx, leases)
}

func (d *deaf) Poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	if d.mute.Load() {
		results := make([]driver.Result, len(waiters))
		for i := range results {
			results[i].Err = errors.New("no reply")
		}
		return results
	}
	results := d.Driver.Poll(ctx, waiters)
	time.Sleep(time.Duration(d.pollLatency.Load()))
	return results
}

// A driver that breaks its contract gets an error said about it, and no panic.
func TestDriverThatDoesNotQueueAsItShould(t *testing.T) {
	c, err := fencelock.New(&refusing{memory.New(memory.NewStore())})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Lock(t.Context(), "x")
	if err == nil || errors.Is(err, fencelock.ErrHeld) {
		t.Fatalf("Lock with a driver that has a queue and does not use it: got %v, want an error that says so", err)
	}
}

type refusing struct{ *memory.Driver }

func (refusing) Lock(context.Context, driver.Request) (driver.Answer, error) {
	return driver.Answer{State: driver.Held}, nil
}
