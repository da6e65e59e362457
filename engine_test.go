package fencelock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/memory"
)

// These tests run the engine over driver/memory in a bubble of testing/synctest, where time passes only when
// all goroutines wait: whatever they say about times is exact.

// counting counts the requests that reach the driver, and can be told to fail or to hang.
type counting struct {
	*memory.Driver
	locks, extends, extended, polls, releases atomic.Int64
	onExtend                                  atomic.Pointer[func(context.Context) error]
	onRelease                                 atomic.Pointer[func(context.Context) error]
}

func (d *counting) Unwrap() driver.Driver { return d.Driver }

func (d *counting) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	d.locks.Add(1)
	return d.Driver.Lock(ctx, r)
}

func (d *counting) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	d.extends.Add(1)
	d.extended.Add(int64(len(leases)))
	once := make(map[string]bool, len(leases))
	for _, e := range leases {
		if once[e.ID] {
			panic("an owner is twice in one batch")
		}
		once[e.ID] = true
	}
	if f := d.onExtend.Load(); f != nil {
		if err := (*f)(ctx); err != nil {
			results := make([]driver.Result, len(leases))
			for i := range results {
				results[i].Err = err
			}
			return results
		}
	}
	return d.Driver.Extend(ctx, leases)
}

func (d *counting) Poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	d.polls.Add(1)
	return d.Driver.Poll(ctx, waiters)
}

func (d *counting) Release(ctx context.Context, o driver.Owner) (bool, error) {
	d.releases.Add(1)
	if f := d.onRelease.Load(); f != nil {
		if err := (*f)(ctx); err != nil {
			return false, err
		}
	}
	return d.Driver.Release(ctx, o)
}

func hang(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

func newClient(t *testing.T, s *memory.Store, opts ...fencelock.ClientOption) (*fencelock.Client, *counting) {
	t.Helper()
	d := &counting{Driver: memory.New(s)}
	c, err := fencelock.New(d, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("Close: got %v, want nil", err)
		}
	})
	return c, d
}

func lock(t *testing.T, l fencelock.Locker, name string, opts ...fencelock.Option) *fencelock.Lease {
	t.Helper()
	lease, err := l.Lock(t.Context(), name, opts...)
	if err != nil {
		t.Fatalf("Lock %q: got %v, want a lease", name, err)
	}
	return lease
}

func wantErr(t *testing.T, what string, err error, want ...error) {
	t.Helper()
	for _, w := range want {
		if !errors.Is(err, w) {
			t.Errorf("%s: got %v, want an error matching %v", what, err, w)
		}
	}
}

func TestHeldLeaseRenewsUntilReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		a, _ := newClient(t, s)
		b, _ := newClient(t, s)
		l := lock(t, a, "x", fencelock.TTL(6*time.Second))
		for range 100 {
			time.Sleep(time.Second)
			if _, err := b.TryLock(t.Context(), "x"); !errors.Is(err, fencelock.ErrHeld) {
				t.Fatalf("rival TryLock while held: got %v, want ErrHeld (L1)", err)
			}
			if err := l.Err(); err != nil {
				t.Fatalf("Err while renewing: got %v, want nil", err)
			}
		}
		if err := l.Release(t.Context()); err != nil {
			t.Fatalf("Release: got %v, want nil", err)
		}
		m, err := b.TryLock(t.Context(), "x")
		if err != nil {
			t.Fatalf("TryLock after release: got %v, want nil", err)
		}
		if m.Token() <= l.Token() {
			t.Errorf("token after %v: got %v, want a greater one (T1)", l.Token(), m.Token())
		}
	})
}

func TestHandoverIsImmediateAndBecomesAFullLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		a, _ := newClient(t, s)
		b, bd := newClient(t, s)
		for _, opts := range [][]fencelock.Option{{}, {fencelock.NoRenew()}} {
			opts = append(opts, fencelock.TTL(6*time.Second))
			l := lock(t, a, "x")
			got := make(chan *fencelock.Lease)
			go func() { got <- lock(t, b, "x", opts...) }()
			time.Sleep(time.Minute + 300*time.Millisecond) // not at the moment of a poll
			before := bd.extended.Load()
			if err := l.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			at := time.Now()
			m := <-got
			if d := time.Since(at); d != 0 {
				t.Errorf("handover: took %v, want no time: the grant is pushed", d)
			}
			// A claim of 3 s, of which at most one period of polling has passed.
			if d := time.Until(m.Deadline()); d < 1900*time.Millisecond || d > 3*time.Second {
				t.Errorf("deadline of a claim of 3s: got %v from now, want 2s to 3s", d)
			}
			time.Sleep(1500 * time.Millisecond)
			if n := bd.extended.Load() - before; n != 1 {
				t.Errorf("extensions in the first 1.5s after a handover: got %d, want 1, which makes the claim a lease", n)
			}
			if d := time.Until(m.Deadline()); d < 5*time.Second {
				t.Errorf("deadline after the first extension: got %v from now, want more than 5s", d)
			}
			if err := m.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestLossComesBeforeTheLeaseEnds(t *testing.T) {
	for name, broken := range map[string]func(*counting){
		"NoRenew":     func(*counting) {},
		"ExtendHangs": func(d *counting) { f := hang; d.onExtend.Store(&f) },
		"ExtendFails": func(d *counting) {
			f := func(context.Context) error { return errors.New("reset") }
			d.onExtend.Store(&f)
		},
		"ServerDenies": func(d *counting) {
			f := func(context.Context) error { return driver.Unavailable(errors.New("no")) }
			d.onExtend.Store(&f)
		},
		"NoLookAtContext": func(d *counting) {
			f := func(context.Context) error { time.Sleep(time.Minute); return errors.New("late") }
			d.onExtend.Store(&f)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := memory.NewStore()
				a, d := newClient(t, s)
				b, _ := newClient(t, s)
				opts := []fencelock.Option{fencelock.TTL(2 * time.Second)}
				if name == "NoRenew" {
					opts = append(opts, fencelock.NoRenew())
				}
				broken(d)
				taken := time.Now()
				l := lock(t, a, "x", opts...)
				ctx, cancel := l.Context(t.Context())
				defer cancel()
				<-l.Done()
				if d := time.Since(taken); d != 1980*time.Millisecond {
					t.Errorf("Done: closed after %v, want 1.98s = TTL - margin (L2)", d)
				}
				wantErr(t, "Err", l.Err(), fencelock.ErrLost)
				<-ctx.Done()
				wantErr(t, "cause of the lease's context", context.Cause(ctx), fencelock.ErrLost)
				m := lock(t, b, "x")
				if d := time.Since(taken); d > 2*time.Second {
					t.Errorf("successor: got the lock after %v, want by 2s", d)
				}
				wantErr(t, "Release of a lost lease", l.Release(t.Context()), fencelock.ErrNotHeld, fencelock.ErrLost)
				wantErr(t, "Extend of a lost lease", l.Extend(t.Context(), time.Second), fencelock.ErrLost, fencelock.ErrNotHeld)
				if err := m.Err(); err != nil {
					t.Errorf("successor after the stale handle was used: got %v, want nil (L4)", err)
				}
				if name == "NoLookAtContext" {
					time.Sleep(2 * time.Minute) // lets the driver's calls end
				}
			})
		})
	}
}

func TestExtensionIsRetriedInsideTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, d := newClient(t, memory.NewStore())
		var tries atomic.Int64
		f := func(context.Context) error {
			if tries.Add(1)%3 != 0 {
				return errors.New("reset")
			}
			return nil
		}
		d.onExtend.Store(&f)
		l := lock(t, a, "x", fencelock.TTL(3*time.Second))
		time.Sleep(time.Minute)
		if err := l.Err(); err != nil {
			t.Fatalf("Err when two of three extensions fail: got %v, want nil", err)
		}
	})
}

func TestSlowAnswersDoNotPileUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, d := newClient(t, memory.NewStore())
		var under, most atomic.Int64
		f := func(context.Context) error {
			if n := under.Add(1); n > most.Load() {
				most.Store(n)
			}
			time.Sleep(2 * time.Second) // twice the interval
			under.Add(-1)
			return nil
		}
		d.onExtend.Store(&f)
		l := lock(t, a, "x", fencelock.TTL(3*time.Second), fencelock.MaxHold(time.Minute))
		<-l.Done()
		if most.Load() > 6 { // one every half interval, as long as an answer takes, and the next
			t.Errorf("extensions under way at once with slow answers: got %d, want at most 6", most.Load())
		}
		time.Sleep(time.Minute)
	})
}

func TestMaxHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		a, _ := newClient(t, s)
		b, _ := newClient(t, s)
		taken := time.Now()
		l := lock(t, a, "x", fencelock.TTL(3*time.Second), fencelock.MaxHold(10*time.Second))
		if err := l.Extend(t.Context(), time.Hour); err != nil {
			t.Fatal(err)
		}
		<-l.Done()
		if d := time.Since(taken); d != 10*time.Second {
			t.Errorf("Done with MaxHold 10s: closed after %v", d)
		}
		wantErr(t, "Err", l.Err(), fencelock.ErrLost)
		synctest.Wait()
		if _, err := b.TryLock(t.Context(), "x"); err != nil {
			t.Errorf("TryLock after MaxHold: got %v, want nil: a release is sent", err)
		}
	})
}

func TestExtend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, d := newClient(t, memory.NewStore())
		l := lock(t, a, "x", fencelock.TTL(10*time.Second), fencelock.NoRenew())
		token := l.Token()
		if err := l.Extend(t.Context(), time.Second); err != nil {
			t.Fatal(err)
		}
		if left := time.Until(l.Deadline()); left != 9900*time.Millisecond {
			t.Errorf("deadline after a shorter extension: got %v from now, want the old 9.9s (L4)", left)
		}
		if err := l.Extend(t.Context(), time.Minute); err != nil {
			t.Fatal(err)
		}
		if left := time.Until(l.Deadline()); left != 59400*time.Millisecond {
			t.Errorf("deadline after Extend(1m): got %v from now, want 59.4s", left)
		}
		if l.Token() != token {
			t.Errorf("token after Extend: got %v, want %v (T3)", l.Token(), token)
		}
		wantErr(t, "Extend by nothing", l.Extend(t.Context(), 0), fencelock.ErrInvalid)

		f := hang
		d.onExtend.Store(&f)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wantErr(t, "Extend that gets no answer", l.Extend(ctx, time.Minute), context.DeadlineExceeded, fencelock.ErrUncertain)
		if err := l.Err(); err != nil {
			t.Errorf("Err after an extension without answer: got %v, want nil until the deadline", err)
		}
		d.onExtend.Store(nil)
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantErr(t, "Extend after Release", l.Extend(t.Context(), time.Minute), fencelock.ErrReleased)
		wantErr(t, "Err after Release", l.Err(), fencelock.ErrReleased)
	})
}

func TestReleaseIsFinal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, d := newClient(t, memory.NewStore())
		ctx, cancel := context.WithCancel(t.Context())
		l := lock(t, a, "x", fencelock.TTL(3*time.Second))
		cancel()
		if err := l.Release(ctx); err != nil {
			t.Fatalf("Release with a cancelled context: got %v, want nil (L6)", err)
		}
		requests := d.releases.Load() + d.extends.Load()
		if err := l.Release(ctx); err != nil {
			t.Fatalf("second Release: got %v, want nil", err)
		}
		time.Sleep(time.Minute)
		if n := d.releases.Load() + d.extends.Load(); n != requests {
			t.Errorf("requests after Release returned nil: got %d, want none (L3)", n-requests)
		}
	})
}

func TestReleaseWithoutAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, d := newClient(t, memory.NewStore())
		l := lock(t, a, "x", fencelock.TTL(30*time.Second))

		// The request is carried out, the answer is lost.
		f := func(ctx context.Context) error {
			_, err := d.Driver.Release(ctx, driverOwner(t, d, "x"))
			if err != nil {
				t.Error(err)
			}
			return errors.New("reset")
		}
		d.onRelease.Store(&f)
		err := l.Release(t.Context())
		wantErr(t, "Release whose answer is lost", err, fencelock.ErrUncertain)
		var op *fencelock.OpError
		if !errors.As(err, &op) || op.Until.IsZero() || time.Until(op.Until) > 30*time.Second {
			t.Errorf("Until: got %+v, want at most one TTL from now", op)
		}
		wantErr(t, "Err after it", l.Err(), fencelock.ErrReleased)
		d.onRelease.Store(nil)
		if err := l.Release(t.Context()); err != nil {
			t.Errorf("repeated Release that finds the id gone before the deadline: got %v, want nil (L5)", err)
		}

		l = lock(t, a, "x", fencelock.TTL(3*time.Second))
		d.onRelease.Store(&f)
		wantErr(t, "Release", l.Release(t.Context()), fencelock.ErrUncertain)
		d.onRelease.Store(nil)
		time.Sleep(3 * time.Second)
		wantErr(t, "repeated Release after the deadline", l.Release(t.Context()), fencelock.ErrUncertain)
	})
}

// driverOwner finds who holds the name.
func driverOwner(t *testing.T, d *counting, name string) (o driver.Owner) {
	err := d.List(context.Background(), driver.Name{Kind: driver.KindLock, Name: name}, func(h driver.Holding) bool {
		o = h.Owner
		return false
	})
	if err != nil {
		t.Error(err)
	}
	return o
}

func TestManyLeasesRenewInFewBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, d := newClient(t, memory.NewStore())
		const n = 3000
		leases := make([]*fencelock.Lease, n)
		for i := range leases {
			leases[i] = lock(t, a, fmt.Sprint("name ", i), fencelock.TTL(6*time.Second))
			if i%30 == 0 {
				time.Sleep(17 * time.Millisecond) // spread over 1.7 s
			}
		}
		time.Sleep(6 * time.Second)
		batches, extended := d.extends.Load(), d.extended.Load()
		time.Sleep(20 * time.Second)
		batches, extended = d.extends.Load()-batches, d.extended.Load()-extended
		if batches > 20 { // one per interval of 2 s, and some
			t.Errorf("batches in 20 s with TTL 6s: got %d, want at most 20 (W2)", batches)
		}
		if extended < 9*n || extended > 12*n {
			t.Errorf("extensions in 20 s: got %d, want about 10 each", extended)
		}
		for _, l := range leases {
			if err := l.Err(); err != nil {
				t.Fatalf("lease %q: got %v, want nil", l.Name(), err)
			}
		}
	})
}

func TestWaitersAtRestPollInOneBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		a, _ := newClient(t, s)
		b, d := newClient(t, s)
		const n = 100
		ctx, cancel := context.WithCancel(t.Context())
		var waiting sync.WaitGroup
		for i := range n {
			name := fmt.Sprint("name ", i)
			lock(t, a, name)
			waiting.Go(func() {
				_, err := b.Lock(ctx, name, fencelock.TTL(4*time.Second))
				wantErr(t, "Lock whose context is cancelled", err, context.Canceled)
				if errors.Is(err, fencelock.ErrHeld) || errors.Is(err, fencelock.ErrUncertain) {
					t.Errorf("Lock whose context is cancelled: got %v, want only the context's error", err)
				}
			})
			time.Sleep(7 * time.Millisecond)
		}
		time.Sleep(4 * time.Second)
		before := d.polls.Load()
		time.Sleep(20 * time.Second)
		if polls := d.polls.Load() - before; polls < 20 || polls >= 40 {
			t.Errorf("poll batches of %d waiters in 20 s: got %d, want 20 to 39 (W2)", n, polls)
		}
		if d.locks.Load() != n {
			t.Errorf("requests to enqueue: got %d, want %d", d.locks.Load(), n)
		}
		cancel()
		waiting.Wait()
	})
}

func TestHolderIsReentrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		a, d := newClient(t, s)
		b, _ := newClient(t, s)
		first := lock(t, a, "x", fencelock.Holder("me"), fencelock.TTL(3*time.Second))
		second := lock(t, a, "x", fencelock.Holder("me"))
		if second.Token() != first.Token() {
			t.Errorf("token of the second handle: got %v, want %v (T3)", second.Token(), first.Token())
		}
		if d.locks.Load() != 1 {
			t.Errorf("requests: got %d, want 1", d.locks.Load())
		}
		for _, opts := range [][]fencelock.Option{nil, {fencelock.Holder("you")}} {
			if _, err := a.TryLock(t.Context(), "x", opts...); !errors.Is(err, fencelock.ErrHeld) {
				t.Errorf("TryLock of another holder of the client: got %v, want ErrHeld (L1)", err)
			}
		}
		if _, err := b.TryLock(t.Context(), "x", fencelock.Holder("me")); !errors.Is(err, fencelock.ErrHeld) {
			t.Errorf("TryLock of the same holder in another client: got %v, want ErrHeld", err)
		}
		if err := first.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantErr(t, "Err of the released handle", first.Err(), fencelock.ErrReleased)
		if err := second.Err(); err != nil || d.releases.Load() != 0 {
			t.Errorf("second handle after the first was released: got %v and %d releases, want nil and none", err, d.releases.Load())
		}
		if err := first.Release(t.Context()); err != nil {
			t.Errorf("second Release of the first handle: got %v, want nil", err)
		}
		time.Sleep(10 * time.Second)
		if err := second.Release(t.Context()); err != nil || d.releases.Load() != 1 {
			t.Errorf("last Release: got %v and %d releases, want nil and 1", err, d.releases.Load())
		}
		third := lock(t, a, "x", fencelock.Holder("me"), fencelock.TTL(3*time.Second), fencelock.NoRenew())
		if third.Token() <= second.Token() {
			t.Errorf("token after the last release: got %v, want more than %v (T1)", third.Token(), second.Token())
		}
		time.Sleep(5 * time.Second) // lost
		fourth := lock(t, a, "x", fencelock.Holder("me"))
		if fourth.Token() <= third.Token() {
			t.Errorf("token after a loss: got %v, want more than %v (T1)", fourth.Token(), third.Token())
		}
		wantErr(t, "old handle after a new start", third.Err(), fencelock.ErrLost)
		wantErr(t, "Release of the old handle", third.Release(t.Context()), fencelock.ErrNotHeld)
		if err := fourth.Err(); err != nil {
			t.Errorf("new handle: got %v, want nil", err)
		}
	})
}

func TestHolderCallsAtOnceShareOneLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		a, d := newClient(t, s)
		b, _ := newClient(t, s)
		rival := lock(t, b, "x")
		var handles sync.WaitGroup
		var tokens sync.Map
		for range 20 {
			handles.Go(func() {
				l := lock(t, a, "x", fencelock.Holder("me"))
				tokens.Store(l.Token(), true)
				time.Sleep(time.Second)
				if err := l.Release(t.Context()); err != nil {
					t.Errorf("Release: got %v, want nil", err)
				}
			})
		}
		time.Sleep(time.Second)
		if err := rival.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		handles.Wait()
		n := 0
		tokens.Range(func(any, any) bool { n++; return true })
		if n != 1 || d.locks.Load() != 1 || d.releases.Load() != 1 {
			t.Errorf("20 calls of one holder: got %d tokens, %d acquires, %d releases, want 1 of each", n, d.locks.Load(), d.releases.Load())
		}
	})
}

func TestLockAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		a, d := newClient(t, s)
		b, _ := newClient(t, s)
		set, err := a.LockAll(t.Context(), []string{"c", "a", "b", "a"}, fencelock.TTL(3*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, l := range set.Leases() {
			names = append(names, l.Name())
		}
		if got := strings.Join(names, " "); got != "a b c" {
			t.Errorf("names: got %q, want sorted and once each", got)
		}
		if set.Lease("b") == nil || set.Lease("z") != nil {
			t.Errorf("Lease(b), Lease(z): got %v, %v", set.Lease("b"), set.Lease("z"))
		}
		if _, err := b.TryLockAll(t.Context(), []string{"0", "b"}); !errors.Is(err, fencelock.ErrHeld) {
			t.Errorf("TryLockAll with one held: got %v, want ErrHeld", err)
		}
		if l, err := b.TryLock(t.Context(), "0"); err != nil {
			t.Errorf("TryLock of what a failed TryLockAll had taken: got %v, want nil (L7)", err)
		} else if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}

		// It waits for b while it holds 0, which renews meanwhile although NoRenew is asked for.
		got := make(chan *fencelock.LeaseSet)
		go func() {
			set, err := b.LockAll(t.Context(), []string{"b", "0"}, fencelock.TTL(3*time.Second), fencelock.NoRenew())
			if err != nil {
				t.Errorf("LockAll: got %v, want nil", err)
			}
			got <- set
		}()
		time.Sleep(time.Minute)
		if err := set.Err(); err != nil {
			t.Errorf("Err of the set: got %v, want nil", err)
		}
		select {
		case <-set.Done():
			t.Error("Done of the set: closed, want open")
		default:
		}
		before := d.releases.Load()
		if err := set.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-set.Done()
		if n := d.releases.Load() - before; n != 3 {
			t.Errorf("releases of the set: got %d, want one each", n)
		}
		second := <-got
		began := time.Now()
		<-second.Done()
		if d := time.Since(began); d > 3*time.Second {
			t.Errorf("NoRenew set: lived %v, want at most its TTL", d)
		}
		wantErr(t, "Err of the set", second.Err(), fencelock.ErrLost)

		wantErr(t, "LockAll of nothing", errOf(a.LockAll(t.Context(), nil)), fencelock.ErrInvalid)
		wantErr(t, "LockAll with an empty name", errOf(a.LockAll(t.Context(), []string{"a", ""})), fencelock.ErrInvalid)
	})
}

func errOf[T any](_ T, err error) error { return err }

func TestLockAllEndsWhenOneIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		a, _ := newClient(t, s)
		b, _ := newClient(t, s)
		rival := lock(t, a, "b")
		go func() {
			time.Sleep(10 * time.Second)
			if n, err := a.ForceUnlock(t.Context(), fencelock.KindLock, "a"); n != 1 || err != nil {
				t.Errorf("ForceUnlock: got %d, %v, want 1, nil", n, err)
			}
		}()
		_, err := b.LockAll(t.Context(), []string{"a", "b"}, fencelock.TTL(3*time.Second))
		wantErr(t, "LockAll that lost its first lease", err, fencelock.ErrLost)
		if err := rival.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := a.TryLock(t.Context(), "b"); err != nil {
			t.Errorf("TryLock after the wait ended: got %v, want nil: it must have left the queue (L7)", err)
		}
	})
}

func TestDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		a, d := newClient(t, s)
		errWork := errors.New("work failed")

		var token fencelock.Token
		err := fencelock.Do(t.Context(), a, "x", func(ctx context.Context, l *fencelock.Lease) error {
			token = l.Token()
			return errWork
		})
		if !errors.Is(err, errWork) || errors.Is(err, fencelock.ErrLost) || token == 0 {
			t.Errorf("Do whose work fails: got %v and token %v", err, token)
		}

		err = fencelock.Do(t.Context(), a, "x", func(ctx context.Context, l *fencelock.Lease) error {
			time.Sleep(time.Minute) // does not look at ctx
			return nil
		}, fencelock.TTL(2*time.Second), fencelock.NoRenew())
		wantErr(t, "Do whose lease was lost before fn returned nil", err, fencelock.ErrLost)

		err = fencelock.Do(t.Context(), a, "x", func(ctx context.Context, l *fencelock.Lease) error {
			<-ctx.Done()
			return context.Cause(ctx)
		}, fencelock.TTL(2*time.Second), fencelock.NoRenew())
		wantErr(t, "Do whose work ends by the lease's context", err, fencelock.ErrLost)

		f := hang
		d.onRelease.Store(&f)
		err = fencelock.Do(t.Context(), a, "x", func(context.Context, *fencelock.Lease) error { return errWork })
		wantErr(t, "Do whose work and release fail", err, errWork, fencelock.ErrUncertain)
		if !strings.HasPrefix(err.Error(), errWork.Error()) {
			t.Errorf("Do: got %q, want the work's error first", err)
		}
		d.onRelease.Store(nil)
		time.Sleep(time.Minute)

		func() {
			defer func() {
				if r := recover(); r != "boom" {
					t.Errorf("recovered %v, want boom", r)
				}
			}()
			_ = fencelock.Do(t.Context(), a, "x", func(context.Context, *fencelock.Lease) error { panic("boom") })
		}()
		l, err := a.TryLock(t.Context(), "x")
		if err != nil {
			t.Fatalf("TryLock after a panic in Do: got %v, want nil", err)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}

		a.Close()
		err = fencelock.Do(t.Context(), a, "x", func(context.Context, *fencelock.Lease) error {
			t.Error("Do called fn without the lock (L8)")
			return nil
		})
		wantErr(t, "Do on a closed client", err, fencelock.ErrClosed)
	})
}

func TestCloseEndsBeliefThenReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		a, d := newClient(t, s)
		b, _ := newClient(t, s)
		var leases []*fencelock.Lease
		for i := range 50 {
			leases = append(leases, lock(t, a, fmt.Sprint(i)))
		}
		lock(t, b, "rival")
		waited := make(chan error)
		go func() {
			_, err := a.Lock(t.Context(), "rival")
			waited <- err
		}()
		synctest.Wait()
		f := func(context.Context) error {
			for _, l := range leases {
				if l.Err() == nil {
					t.Errorf("release sent by Close while %q was believed", l.Name())
				}
			}
			return nil
		}
		d.onRelease.Store(&f)
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		wantErr(t, "Lock that waited when the client was closed", <-waited, fencelock.ErrClosed)
		for _, l := range leases {
			wantErr(t, "Err after Close", l.Err(), fencelock.ErrLost, fencelock.ErrClosed)
			if _, err := b.TryLock(t.Context(), l.Name()); err != nil {
				t.Errorf("TryLock of %q after Close: got %v, want nil", l.Name(), err)
			}
		}
		if held, err := b.Inspect(t.Context(), fencelock.KindLock, "rival"); err != nil || len(held) != 1 {
			t.Errorf("Inspect: got %v, %v, want one holder", held, err)
		}
		wantErr(t, "Lock on a closed client", errOf(a.Lock(t.Context(), "x")), fencelock.ErrClosed)
		wantErr(t, "NextToken on a closed client", errOf(a.NextToken(t.Context(), "x")), fencelock.ErrClosed)
		if err := a.Close(); err != nil {
			t.Errorf("second Close: got %v, want nil", err)
		}
	})
}

func TestCloseWithAServerThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, d := newClient(t, memory.NewStore())
		for i := range 100 {
			lock(t, a, fmt.Sprint(i))
		}
		f := hang
		d.onRelease.Store(&f)
		began := time.Now()
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(began); d > 6*time.Second {
			t.Errorf("Close with a server that hangs: took %v, want about the request timeout of 5s", d)
		}
	})
}

func TestSlowObserverDelaysNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var events []fencelock.Event
		a, _ := newClient(t, memory.NewStore(), fencelock.WithObserver(func(e fencelock.Event) {
			time.Sleep(10 * time.Second)
			mu.Lock()
			events = append(events, e)
			mu.Unlock()
		}))
		l := lock(t, a, "x", fencelock.TTL(3*time.Second))
		m := lock(t, a, "y", fencelock.TTL(3*time.Second), fencelock.NoRenew())
		<-m.Done()
		_, err := a.TryLock(t.Context(), "x")
		wantErr(t, "TryLock", err, fencelock.ErrHeld)
		time.Sleep(2 * time.Minute)
		if err := l.Err(); err != nil {
			t.Errorf("lease while the observer sleeps: got %v, want nil", err)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		var kinds []string
		for _, e := range events {
			kinds = append(kinds, string(e.Kind)+" "+e.Name)
		}
		if got, want := strings.Join(kinds, ", "), "acquired x, acquired y, lost y, refused x, released x"; got != want {
			t.Errorf("events: got %s, want %s", got, want)
		}
		if last := events[len(events)-1]; last.Held < 2*time.Minute || last.Token != l.Token() || last.Backend != "memory" {
			t.Errorf("event of the release: got %+v, want how long it was held, token and backend", last)
		}
	})
}

// bare hides all that is optional.
type bare struct{ driver.Driver }

type bareSemaphore struct {
	driver.Driver
	driver.Semaphore
	locks atomic.Int64
}

func (d *bareSemaphore) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	d.locks.Add(1)
	return d.Driver.Lock(ctx, r)
}

func TestWaitersWithoutAQueueStandInOneLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		rival, _ := newClient(t, s)
		inner := memory.New(s)
		d := &bareSemaphore{Driver: inner, Semaphore: inner}
		c, err := fencelock.New(d)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		held := lock(t, rival, "x")
		const n = 50
		var all sync.WaitGroup
		for range n {
			all.Go(func() {
				l := lock(t, c, "x", fencelock.TTL(time.Minute), fencelock.Backoff(time.Second, time.Second))
				if err := l.Release(t.Context()); err != nil {
					t.Errorf("Release: got %v, want nil", err)
				}
			})
		}
		time.Sleep(20 * time.Second)
		if asked := d.locks.Load(); asked < 10 || asked > 100 {
			t.Errorf("requests of %d waiters in 20 s of polling about twice a second: got %d, want those of one (W2)", n, asked)
		}
		before := d.locks.Load()
		if err := held.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		all.Wait()
		if asked := d.locks.Load() - before; asked > 2*n+2 {
			t.Errorf("requests to pass the lock through %d waiters: got %d, want at most two each", n, asked)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		lock(t, rival, "x")
		wantErr(t, "Lock whose context ends", errOf(c.Lock(ctx, "x")), context.DeadlineExceeded)
		wantErr(t, "Lock with Fair", errOf(c.Lock(t.Context(), "x", fencelock.Fair())), errors.ErrUnsupported)
	})
}

func TestWhatABackendLacksIsUnsupported(t *testing.T) {
	c, err := fencelock.New(bare{memory.New(memory.NewStore())})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := t.Context()
	wantErr(t, "Acquire", errOf(c.Acquire(ctx, "x", 3)), errors.ErrUnsupported)
	wantErr(t, "NextToken", errOf(c.NextToken(ctx, "x")), errors.ErrUnsupported)
	wantErr(t, "List", errOf(c.List(ctx)), errors.ErrUnsupported)
	wantErr(t, "ForceUnlock", errOf(c.ForceUnlock(ctx, fencelock.KindLock, "x")), errors.ErrUnsupported)
	wantErr(t, "Lock with Fair", errOf(c.Lock(ctx, "x", fencelock.Fair())), errors.ErrUnsupported)
	wantErr(t, "TryLock with Write", errOf(c.TryLock(ctx, "x", fencelock.Write(driver.Write{Keys: []string{"k"}}))), errors.ErrUnsupported)
	lock(t, c, "x")
	for _, what := range fencelock.Capabilities() {
		if c.Supports(what) {
			t.Errorf("Supports(%s): got true, want false", what)
		}
		_, err := fencelock.New(bare{memory.New(memory.NewStore())}, fencelock.Require(what))
		wantErr(t, "New with Require", err, errors.ErrUnsupported)
	}
	full, err := fencelock.New(memory.New(memory.NewStore()), fencelock.Require(fencelock.Semaphores, fencelock.Queueing))
	if err != nil {
		t.Fatalf("New with Require of what memory has: got %v, want nil", err)
	}
	full.Close()
}

func TestBadArguments(t *testing.T) {
	c, d := newClient(t, memory.NewStore())
	ctx := t.Context()
	for what, opts := range map[string][]fencelock.Option{
		"TTL 0":            {fencelock.TTL(0)},
		"TTL 1ns":          {fencelock.TTL(1)},
		"TTL -1s":          {fencelock.TTL(-time.Second)},
		"TTL 500us":        {fencelock.TTL(500 * time.Microsecond)},
		"TTL 25h":          {fencelock.TTL(25 * time.Hour)},
		"MaxHold 0":        {fencelock.MaxHold(0)},
		"WaitFor 0":        {fencelock.WaitFor(0)},
		"Backoff 0":        {fencelock.Backoff(0, 0)},
		"Backoff reversed": {fencelock.Backoff(2, 1)},
		"Label too long":   {fencelock.Label(strings.Repeat("x", 257))},
		"Label no UTF-8":   {fencelock.Label("\xff")},
		"Holder empty":     {fencelock.Holder("")},
		"nil option":       {nil},
	} {
		_, err := c.Lock(ctx, "x", opts...)
		wantErr(t, "Lock with "+what, err, fencelock.ErrInvalid)
	}
	wantErr(t, "Lock of an empty name", errOf(c.Lock(ctx, "")), fencelock.ErrInvalid)
	wantErr(t, "Lock of a long name", errOf(c.Lock(ctx, strings.Repeat("x", 513))), fencelock.ErrInvalid)
	wantErr(t, "Acquire with limit 0", errOf(c.Acquire(ctx, "x", 0)), fencelock.ErrInvalid)
	wantErr(t, "Acquire with Holder", errOf(c.Acquire(ctx, "x", 1, fencelock.Holder("me"))), fencelock.ErrInvalid)
	var none context.Context
	wantErr(t, "Lock with a nil context", errOf(c.Lock(none, "x")), fencelock.ErrInvalid)
	if d.locks.Load() != 0 {
		t.Errorf("requests for bad arguments: got %d, want none", d.locks.Load())
	}
	for what, opt := range map[string]fencelock.ClientOption{
		"WithTTL 0":             fencelock.WithTTL(0),
		"WithRequestTimeout 0":  fencelock.WithRequestTimeout(0),
		"WithRequestTimeout 2m": fencelock.WithRequestTimeout(2 * time.Minute),
	} {
		_, err := fencelock.New(memory.New(memory.NewStore()), opt)
		wantErr(t, "New with "+what, err, fencelock.ErrInvalid)
	}
	wantErr(t, "New without a driver", errOf(fencelock.New(nil)), fencelock.ErrInvalid)
}

func TestOpen(t *testing.T) {
	ctx := t.Context()
	_, err := fencelock.Open(ctx, "nosuch://user:secret@host/")
	wantErr(t, "Open of an unknown scheme", err, fencelock.ErrInvalid)
	if !strings.Contains(err.Error(), "memory") || strings.Contains(err.Error(), "secret") {
		t.Errorf("Open of an unknown scheme: got %q, want the known ones and no password", err)
	}
	_, err = fencelock.Open(ctx, "memory:?tll=3s")
	wantErr(t, "Open with an unknown parameter", err, fencelock.ErrInvalid)
	if !strings.Contains(err.Error(), "tll") {
		t.Errorf("Open with an unknown parameter: got %q, want its name", err)
	}
	_, err = fencelock.Open(ctx, "me\x7f://user:secret@")
	wantErr(t, "Open of no URL", err, fencelock.ErrInvalid)
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("Open of no URL: got %q, want no password", err)
	}
	_, err = fencelock.Open(ctx, "memory:", fencelock.Require(fencelock.Replication))
	wantErr(t, "Open with a guarantee that memory lacks", err, errors.ErrUnsupported)

	a, err := fencelock.Open(ctx, "memory://TestOpen")
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	b, err := fencelock.Open(ctx, "memory://TestOpen")
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	other, err := fencelock.Open(ctx, "memory:")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	lock(t, a, "x")
	wantErr(t, "TryLock through a second client of one store", errOf(b.TryLock(ctx, "x")), fencelock.ErrHeld)
	lock(t, other, "x")
}

func TestListAndInspect(t *testing.T) {
	c, _ := newClient(t, memory.NewStore())
	l := lock(t, c, "x", fencelock.Label("nightly \"job\" \n"))
	if _, err := c.Acquire(t.Context(), "x", 2); err != nil {
		t.Fatal(err)
	}
	all, err := c.List(t.Context())
	if err != nil || len(all) != 2 {
		t.Fatalf("List: got %v, %v, want two", all, err)
	}
	one, err := c.Inspect(t.Context(), fencelock.KindLock, "x")
	if err != nil || len(one) != 1 {
		t.Fatalf("Inspect: got %v, %v, want one", one, err)
	}
	h := one[0]
	if h.Token != l.Token() || h.Holder.Label != "nightly \"job\" \n" || h.Holder.PID == 0 ||
		time.Since(h.Holder.Since) > time.Minute || h.Left <= 0 || h.Left > fencelock.DefaultTTL {
		t.Errorf("Inspect: got %+v", h)
	}
}

func TestHolderSinceIsWhenItWasServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memory.NewStore()
		a, _ := newClient(t, s)
		b, _ := newClient(t, s)
		l := lock(t, a, "x")
		go func() {
			time.Sleep(time.Hour)
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}()
		lock(t, b, "x")
		time.Sleep(time.Minute)
		held, err := b.Inspect(t.Context(), fencelock.KindLock, "x")
		if err != nil || len(held) != 1 {
			t.Fatalf("Inspect: got %v, %v, want one", held, err)
		}
		if age := time.Since(held[0].Holder.Since).Round(time.Second); age != time.Minute {
			t.Errorf("age of a lease that was waited for: got %v, want 1m, since the grant", age)
		}
	})
}

func TestStripe(t *testing.T) {
	seen := make(map[string]bool)
	for i := range 1000 {
		seen[fencelock.Stripe("users", fmt.Sprint(i), 16)] = true
	}
	if len(seen) != 16 {
		t.Errorf("names of 16 stripes: got %d", len(seen))
	}
	if got := fencelock.Stripe("users", "ada", 64); got != "users/59" {
		t.Errorf("Stripe of a known key: got %q, want users/59 for ever", got)
	}
}

// writing is a driver that can write, and counts it.
type writing struct {
	driver.Driver
	writes int
}

func (d *writing) Unwrap() driver.Driver { return d.Driver }

func (d *writing) LockAndWrite(ctx context.Context, r driver.Request, w driver.Write) (driver.Answer, error) {
	a, err := d.Lock(ctx, r)
	if a.State == driver.Granted {
		d.writes++
	}
	return a, err
}

// TestWriteIsForTryLock refuses a write wherever it could not be part of one grant, rather than to leave it out.
func TestWriteIsForTryLock(t *testing.T) {
	d := &writing{Driver: memory.New(memory.NewStore())}
	c, err := fencelock.New(d)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, write := t.Context(), fencelock.Write(driver.Write{Keys: []string{"k"}})
	set, err := c.TryLockAll(ctx, []string{"x"}, write)
	if set != nil {
		t.Errorf("TryLockAll with Write: got leases, want none")
	}
	for what, err := range map[string]error{
		"Lock":                errOf(c.Lock(ctx, "x", write)),
		"Acquire":             errOf(c.Acquire(ctx, "x", 2, write)),
		"TryAcquire":          errOf(c.TryAcquire(ctx, "x", 2, write)),
		"TryLock with Holder": errOf(c.TryLock(ctx, "x", write, fencelock.Holder("h"))),
		"TryLock of no keys":  errOf(c.TryLock(ctx, "x", fencelock.Write(driver.Write{}))),
		"TryLockAll":          err,
	} {
		wantErr(t, what+" with Write", err, fencelock.ErrInvalid)
	}
	if d.writes != 0 {
		t.Errorf("writes: got %d, want none", d.writes)
	}
	for i := range 2 {
		if _, err := c.TryLock(ctx, "x", write); (i == 0) != (err == nil) || d.writes != 1 {
			t.Errorf("TryLock %d with Write: got %v and %d writes, want the first to be granted and one write", i+1, err, d.writes)
		}
	}
}
