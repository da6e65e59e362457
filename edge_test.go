package fencelock_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/memory"
)

var bg = context.Background()

func TestEdgeMaxHoldOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := newClient(t, memory.NewStore())
		time.Sleep(time.Second)
		_, err := c.TryLock(bg, "a", fencelock.MaxHold(math.MaxInt64))
		if err != nil {
			t.Fatalf("MaxHold(MaxInt64): %v", err)
		}
	})
}

func TestEdgeLockAllNoRenewStopsSharedRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := newClient(t, memory.NewStore())
		l := lock(t, c, "a", fencelock.Holder("x"))
		s, err := c.LockAll(bg, []string{"a", "b"}, fencelock.Holder("x"), fencelock.NoRenew())
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Release(bg); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Minute)
		if err := l.Err(); err != nil {
			t.Fatalf("first handle, renewing, after the set's release: %v", err)
		}
	})
}

func TestEdgeTryLockAllWaitFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := newClient(t, memory.NewStore())
		if _, err := c.TryLock(bg, "a", fencelock.WaitFor(1)); err != nil {
			t.Fatal("TryLock:", err)
		}
		if _, err := c.TryLockAll(bg, []string{"b"}, fencelock.WaitFor(1)); err != nil {
			t.Fatal("TryLockAll:", err)
		}
	})
}

type bareMin struct{ d driver.Driver }

func (b bareMin) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	r.Wait = false
	return b.d.Lock(ctx, r)
}
func (b bareMin) Extend(ctx context.Context, l []driver.Extension) []driver.Result {
	return b.d.Extend(ctx, l)
}
func (b bareMin) Release(ctx context.Context, o driver.Owner) (bool, error) {
	return b.d.Release(ctx, o)
}
func (b bareMin) Info() driver.Info { return driver.Info{Backend: "bare", MinTTL: time.Second} }
func (b bareMin) Close() error      { return b.d.Close() }

func TestEdgeBackoffOverflow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		c, _ := fencelock.New(bareMin{memory.New(s)})
		defer c.Close()
		o, _ := newClient(t, s)
		l := lock(t, o, "a")
		defer l.Release(bg)
		defer func() {
			if p := recover(); p != nil {
				t.Fatalf("Lock panicked: %v", p)
			}
		}()
		_, err := c.Lock(bg, "a", fencelock.Backoff(20*time.Second, 20*time.Second), fencelock.WaitFor(time.Hour))
		wantErr(t, "Lock", err, context.DeadlineExceeded)
	})
}

func TestEdgeExtendBelowMinTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := fencelock.New(bareMin{memory.New(memory.NewStore())})
		defer c.Close()
		l := lock(t, c, "a", fencelock.TTL(2*time.Second))
		if err := l.Extend(bg, 10*time.Millisecond); !errors.Is(err, fencelock.ErrInvalid) {
			t.Fatalf("Extend below Info.MinTTL: %v, driver was handed a TTL it may not get", err)
		}
	})
}

func TestEdgeReleaseUntilAfterExtend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		c, d := newClient(t, s)
		l := lock(t, c, "a", fencelock.TTL(time.Second))
		if err := l.Extend(bg, time.Hour); err != nil {
			t.Fatal(err)
		}
		h := hang
		d.onRelease.Store(&h)
		err := l.Release(bg)
		var e *fencelock.OpError
		if !errors.As(err, &e) {
			t.Fatal(err)
		}
		c2, _ := newClient(t, s)
		time.Sleep(time.Until(e.Until) + time.Second)
		if _, err := c2.TryLock(bg, "a"); err != nil {
			t.Fatalf("after Until=%v the lock is still held: %v", time.Until(e.Until), err)
		}
	})
}

func TestEdgeExtendOfNoRenewClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		c, _ := newClient(t, s)
		c2, _ := newClient(t, s)
		l := lock(t, c, "a")
		go func() { time.Sleep(time.Second); l.Release(bg) }()
		w := lock(t, c2, "a", fencelock.NoRenew()) // 30 s
		if err := w.Extend(bg, 10*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Second)
		if err := w.Err(); err != nil {
			t.Fatalf("NoRenew lease of 30s with one Extend(10ms), after 20s: %v", err)
		}
	})
}

// A clean-up must not wait for others that are in their pause.
func TestEdgeCleanersAllAsleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		base := &counting{Driver: memory.New(s)}
		d := &failNames{counting: base}
		c, err := fencelock.New(d)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		o, _ := newClient(t, s)
		for i := range 9 {
			lock(t, o, fmt.Sprint("bad", i))
		}
		lock(t, o, "good")
		var wg sync.WaitGroup
		for i := range 9 {
			wg.Go(func() { c.Lock(bg, fmt.Sprint("bad", i), fencelock.WaitFor(time.Second)) })
		}
		wg.Wait()
		time.Sleep(2 * time.Second)
		n := d.good.Load()
		began := time.Now()
		_, err = c.Lock(bg, "good", fencelock.WaitFor(100*time.Millisecond))
		for d.good.Load() == n {
			time.Sleep(time.Millisecond)
		}
		if took := time.Since(began) - 100*time.Millisecond; took > 20*time.Millisecond {
			t.Fatalf("clean-up of a healthy name was first sent after %v; Lock: %v", took, err)
		}
	})
}

type failNames struct {
	*counting
	good atomic.Int64
}

func (f *failNames) Release(ctx context.Context, o driver.Owner) (bool, error) {
	if o.Name.Name == "good" {
		f.good.Add(1)
		return f.counting.Release(ctx, o)
	}
	return false, driver.Unavailable(errors.New("this shard is down"))
}

// polls do their work and lose the reply; the last one is refused.
type lossy struct {
	*counting
	mode atomic.Int32
}

func (f *lossy) Poll(ctx context.Context, w []driver.Poll) []driver.Result {
	switch f.mode.Load() {
	case 1:
		r := f.counting.Poll(ctx, w)
		for i := range r {
			r[i] = driver.Result{Err: errors.New("reply lost")}
		}
		return r
	case 2:
		r := make([]driver.Result, len(w))
		for i := range r {
			r[i].Err = driver.Unavailable(errors.New("refused"))
		}
		return r
	}
	return f.counting.Poll(ctx, w)
}
func (f *lossy) Notify(func(driver.Event)) {}
func (f *lossy) Release(ctx context.Context, o driver.Owner) (bool, error) {
	if f.mode.Load() == 2 {
		return false, driver.Unavailable(errors.New("refused"))
	}
	return f.counting.Release(ctx, o)
}

func TestEdgeUnavailableThoughGranted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		d := &lossy{counting: &counting{Driver: memory.New(s)}}
		c, err := fencelock.New(d)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		o, _ := newClient(t, s)
		l := lock(t, o, "a")
		go func() {
			time.Sleep(time.Second)
			d.mode.Store(1)
			time.Sleep(24 * time.Second)
			l.Release(bg) // c's waiter is served here, and its polls make it a full lease
			time.Sleep(4 * time.Second)
			d.mode.Store(2)
		}()
		_, err = c.Lock(bg, "a")
		held, _ := o.Inspect(bg, fencelock.KindLock, "a")
		if errors.Is(err, fencelock.ErrUnavailable) && !errors.Is(err, fencelock.ErrUncertain) && len(held) > 0 {
			t.Fatalf("Lock: %v (surely not acquired), but the server has our lease for %v more", err, held[0].Left)
		}
		t.Log(err, held)
	})
}

// Two Releases at once of a lease that was taken away: both should not say nil.
func TestEdgeTwoReleasesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		c, d := newClient(t, s)
		o, _ := newClient(t, s)
		l := lock(t, c, "a")
		o.ForceUnlock(bg, fencelock.KindLock, "a")
		lock(t, o, "a")
		slow := func(context.Context) error { time.Sleep(10 * time.Millisecond); return nil }
		d.onRelease.Store(&slow)
		errs := make(chan error, 2)
		go func() { errs <- l.Release(bg) }()
		go func() { errs <- l.Release(bg) }()
		a, b := <-errs, <-errs
		if a == nil || b == nil {
			t.Fatalf("two releases at once of a lease that was taken away: %v, %v; third: %v", a, b, l.Release(bg))
		}
	})
}

// LockAll with NoRenew: an extension under way that fails resumes renewal.
func TestEdgeStopRenewalResumed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		c, d := newClient(t, s)
		o, _ := newClient(t, s)
		b := lock(t, o, "b")
		fail := func(context.Context) error { time.Sleep(2 * time.Second); return errors.New("no") }
		d.onExtend.Store(&fail)
		go func() { time.Sleep(11 * time.Second); b.Release(bg) }()
		set, err := c.LockAll(bg, []string{"a", "b"}, fencelock.NoRenew())
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(500 * time.Millisecond)
		var before = set.Lease("a").Deadline()
		time.Sleep(1 * time.Second)
		ok := func(context.Context) error { return nil }
		d.onExtend.Store(&ok)
		time.Sleep(12 * time.Second)
		if now := set.Lease("a").Deadline(); now.After(before) {
			t.Fatalf("a lease with NoRenew was renewed: deadline moved by %v", now.Sub(before))
		}
	})
}
