package fencelock_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/memory"
)

// punctual is a driver that heeds the deadlines of contexts, and keeps those it was given.
type punctual struct {
	*memory.Driver
	given []context.Context
	hangs bool
}

func (d *punctual) Info() driver.Info {
	i := d.Driver.Info()
	i.Deadlines = true
	return i
}

func (d *punctual) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	d.given = append(d.given, ctx)
	if d.hangs {
		<-ctx.Done()
		return driver.Answer{}, ctx.Err()
	}
	return d.Driver.Lock(ctx, r)
}

// TestRequestsShareDeadlines: requests whose caller never gives up are bounded all the same, each by about the
// request timeout, and carry their caller's values.
func TestRequestsShareDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const timeout = 640 * time.Millisecond
		d := &punctual{Driver: memory.New(memory.NewStore())}
		c, err := fencelock.New(d, fencelock.WithRequestTimeout(timeout))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		type key struct{}
		for i := range 100 {
			ctx := context.Background()
			if i%2 == 1 {
				ctx = context.WithValue(ctx, key{}, i)
			}
			l, err := c.TryLock(ctx, "x")
			if err != nil {
				t.Fatalf("TryLock: got %v, want nil", err)
			}
			given := d.given[i]
			if deadline, ok := given.Deadline(); !ok || time.Until(deadline) > timeout || time.Until(deadline) < timeout-timeout/32 {
				t.Fatalf("deadline of request %d: got in %v, want in about %v (L6)", i, time.Until(deadline), timeout)
			}
			if got, _ := given.Value(key{}).(int); got != i*(i%2) {
				t.Fatalf("value that request %d carries: got %v, want its caller's %d", i, got, i*(i%2))
			}
			if err := l.Release(ctx); err != nil {
				t.Fatalf("Release: got %v, want nil", err)
			}
			time.Sleep(timeout / 100)
		}
		if d.given[0].Done() != d.given[1].Done() {
			t.Errorf("two requests sent at about the same time: got a timer each, want one")
		}

		d.hangs = true
		for _, ctx := range []context.Context{context.Background(), context.WithValue(context.Background(), key{}, 1)} {
			began := time.Now()
			_, err := c.TryLock(ctx, "x")
			wantErr(t, "TryLock while the backend hangs", err, fencelock.ErrUncertain)
			if took := time.Since(began); took > timeout+50*time.Millisecond {
				t.Errorf("TryLock while the backend hangs: took %v, want %v", took, timeout)
			}
		}
	})
}

// TestOtherTimeoutsLeaveNoTimers: leases of several TTLs, so with several timeouts, in turn. Only bounds that may be shared
// outlive their request.
func TestOtherTimeoutsLeaveNoTimers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &punctual{Driver: memory.New(memory.NewStore())}
		c, err := fencelock.New(d)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		timeouts := map[time.Duration]time.Duration{3 * time.Second: time.Second, 30 * time.Second: 5 * time.Second}
		for i := range 100 {
			ttl := []time.Duration{3 * time.Second, 30 * time.Second}[i%2]
			l, err := c.TryLock(context.Background(), "x", fencelock.TTL(ttl))
			if err != nil {
				t.Fatalf("TryLock: got %v, want nil", err)
			}
			want := timeouts[ttl]
			if deadline, ok := d.given[i].Deadline(); !ok || time.Until(deadline) > want || time.Until(deadline) < want-want/32 {
				t.Fatalf("deadline of a request for TTL %v: got in %v, want in about %v (L6)", ttl, time.Until(deadline), want)
			}
			if err := l.Release(context.Background()); err != nil {
				t.Fatalf("Release: got %v, want nil", err)
			}
		}
		live := make(map[<-chan struct{}]bool)
		for _, ctx := range d.given {
			if ctx.Err() == nil {
				live[ctx.Done()] = true
			}
		}
		if len(live) != 1 {
			t.Errorf("timers of 100 requests that are over, sent at one moment: got %d, want the one that is shared", len(live))
		}
	})
}
