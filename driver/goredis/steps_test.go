package goredis_test

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// All of driver's optional interfaces are claimed.
var _ redisbackend.Full = (*goredis.Driver)(nil)

// TestTokenTextIsExact takes two locks within the same microseconds, again and again: 14 digits would
// make their tokens equal (T2).
func TestTokenTextIsExact(t *testing.T) {
	s := startRedis(t)
	d := s.driver(t)
	n := lockName("x")
	seen := map[driver.Token]bool{}
	last := driver.Token(0)
	for range 300 {
		began := time.Now()
		o := driver.Owner{Name: n, ID: newID()}
		a := mustLock(t, d, request(n, o.ID, time.Minute), driver.Granted)
		if low, high := driver.Token(began.UnixMicro()), driver.Token(time.Now().UnixMicro()); a.Token < low || a.Token > high {
			t.Errorf("token: got %v, want the clock, %v to %v (T4)", a.Token, low, high)
		}
		if a.Token <= last || seen[a.Token] {
			t.Errorf("token: got %v after %v, want a greater one (T1, T2)", a.Token, last)
		}
		last, seen[a.Token] = a.Token, true
		mustRelease(t, d, o)
	}

	for _, floor := range []driver.Token{1<<47 + 1, 1<<50 + 12345, 1<<52 + 1, 1<<53 - 3} {
		next, err := d.NextToken(t.Context(), n, floor)
		want := max(floor, last) + 1
		if err != nil || floor > last && next != want {
			t.Errorf("NextToken above %v: got %v, %v, want %v (T4)", floor, next, err, want)
		}
		last = max(last, next)
	}
	o := driver.Owner{Name: n, ID: newID()}
	a := mustLock(t, d, request(n, o.ID, time.Minute), driver.Granted)
	if want := driver.Token(1<<53 - 1); a.Token != want {
		t.Errorf("token after %v: got %v, want %v, the last of 53 bits (T4)", last, a.Token, want)
	}
	mustRelease(t, d, o)
	if a, err := d.Lock(t.Context(), request(n, newID(), time.Minute)); err == nil {
		t.Errorf("Lock when there are no more tokens: got %v, want an error (T4)", a)
	}
	if v := s.do(t, "EXISTS", "fencelock:l:{x}"); v != int64(0) {
		t.Error("Lock when there are no more tokens: left a lease (L7)")
	}
}

// TestTokensInParallel mints from several clients at once.
func TestTokensInParallel(t *testing.T) {
	s := startRedis(t)
	var mu sync.Mutex
	seen := map[driver.Token]bool{}
	var all sync.WaitGroup
	for range 8 {
		d := s.driver(t)
		all.Go(func() {
			last := driver.Token(0)
			for range 200 {
				next, err := d.NextToken(t.Context(), lockName("x"), 0)
				if err != nil || next <= last {
					t.Errorf("NextToken after %v: got %v, %v, want a greater one (T1)", last, next, err)
					return
				}
				last = next
				mu.Lock()
				if seen[next] {
					t.Errorf("NextToken: got %v twice (T2)", next)
				}
				seen[next] = true
				mu.Unlock()
			}
		})
	}
	all.Wait()
}

// TestFenceOutlives looks at how long the last token is kept (T5).
func TestFenceOutlives(t *testing.T) {
	s := startRedis(t)
	d := s.driver(t)
	for _, floor := range []time.Duration{0, time.Hour} {
		n := lockName("x")
		now := time.Now()
		o := driver.Owner{Name: n, ID: newID()}
		r := request(n, o.ID, time.Minute)
		if floor > 0 {
			r.Floor = driver.Token(now.Add(floor).UnixMicro())
		}
		mustLock(t, d, r, driver.Granted)
		mustRelease(t, d, o)
		ms, _ := s.do(t, "PEXPIRETIME", "fencelock:lf:{x}").(int64)
		want := now.Add(floor + 48*time.Hour)
		if off := time.UnixMilli(ms).Sub(want); off < -2*time.Second || off > patience {
			t.Errorf("expiry of the last token, which is %v ahead: got %v, want %v (T5)", floor, time.UnixMilli(ms), want)
		}
	}
}

// TestRealExpiry waits for leases and queue entries to end.
func TestRealExpiry(t *testing.T) {
	bothKinds(t, func(t *testing.T, n driver.Name) {
		s := startRedis(t)
		d := s.driver(t)
		h, w := driver.Owner{Name: n, ID: newID()}, driver.Owner{Name: n, ID: newID()}
		began := time.Now()
		mustLock(t, d, request(n, h.ID, 300*time.Millisecond), driver.Granted)
		mustLock(t, d, waiting(n, w.ID, time.Minute), driver.Waiting)
		var got driver.Result
		eventually(t, "grant after expiry", func() bool {
			got = d.Poll(t.Context(), []driver.Poll{{Owner: w, TTL: 200 * time.Millisecond, Claim: time.Minute}})[0]
			return got.State == driver.Granted
		})
		if took := time.Since(began); took < 300*time.Millisecond {
			t.Errorf("Poll granted %v after a Lock for 300ms (L1)", took)
		}
		if r := d.Extend(t.Context(), []driver.Extension{{Owner: h, TTL: time.Minute}})[0]; r.State != driver.Gone || r.Err != nil {
			t.Errorf("Extend after expiry: got %+v, want gone (L3)", r)
		}
		if found, err := d.Release(t.Context(), h); found || err != nil {
			t.Errorf("Release after expiry: got %v, %v, want false (L4)", found, err)
		}
		// The claim of 30 s that the waiter asked for stays, for an extension never shortens.
		if got.TTL < 15*time.Second || got.TTL > 30*time.Second {
			t.Errorf("Poll that found a claim of 30s: got TTL %v, want what is left of it (L4)", got.TTL)
		}
		mustRelease(t, d, w)

		mustLock(t, d, request(n, newID(), 200*time.Millisecond), driver.Granted)
		mustLock(t, d, waiting(n, newID(), 200*time.Millisecond), driver.Waiting)
		eventually(t, "no key but the last token", func() bool {
			keys, _ := s.do(t, "KEYS", "*").([]any)
			return len(keys) == 1
		})
	})
}

// TestSemaphoreExpiry gives permits of different length: each ends by itself, and none with another.
func TestSemaphoreExpiry(t *testing.T) {
	s := startRedis(t)
	d := s.driver(t)
	n := permitName("x")
	acquire := func(ttl time.Duration, want driver.State) driver.Owner {
		t.Helper()
		r := request(n, newID(), ttl)
		r.Limit = 3
		if a, err := d.Acquire(t.Context(), r); err != nil || a.State != want {
			t.Fatalf("Acquire: got %v, %v, want %v (S1)", a.State, err, want)
		}
		return r.Owner
	}
	long := acquire(time.Minute, driver.Granted)
	acquire(200*time.Millisecond, driver.Granted)
	acquire(400*time.Millisecond, driver.Granted)
	began := time.Now()
	eventually(t, "a permit that ends first", func() bool {
		r := request(n, newID(), 100*time.Millisecond)
		r.Limit = 3
		a, err := d.Acquire(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		return a.State == driver.Granted
	})
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the permit of 200ms was free after %v", took)
	}
	eventually(t, "two permits ended", func() bool {
		live := 0
		if err := d.List(t.Context(), n, func(h driver.Holding) bool {
			live++
			return true
		}); err != nil {
			t.Fatal(err)
		}
		return live == 1
	})
	acquire(time.Minute, driver.Granted)
	acquire(time.Minute, driver.Granted)
	acquire(time.Minute, driver.Held)
	if r := d.Extend(t.Context(), []driver.Extension{{Owner: long, TTL: time.Second}})[0]; r.State != driver.Granted || r.TTL < 30*time.Second {
		t.Errorf("Extend with a shorter TTL: got %+v, want granted and not shortened (L4)", r)
	}
	ms, _ := s.do(t, "PTTL", "fencelock:p:{x}").(int64)
	if left := time.Duration(ms) * time.Millisecond; left < 50*time.Second {
		t.Errorf("expiry of the set of permits after a shorter extension: got %v, want the longest permit's", left)
	}
}

// TestNoLossInTheQueue lets many waiters of two clients take turns, and expects them in order.
func TestNoLossInTheQueue(t *testing.T) {
	s := startRedis(t)
	ds := []driver.Queue{s.driver(t), s.driver(t)}
	n := lockName("x")
	d := s.driver(t)
	h := driver.Owner{Name: n, ID: newID()}
	mustLock(t, d, request(n, h.ID, time.Minute), driver.Granted)
	var queue []string
	for range 100 {
		id := newID()
		mustLock(t, d, waiting(n, id, time.Minute), driver.Waiting)
		queue = append(queue, id)
	}
	slices.Reverse(queue[90:]) // the order in which they ask again does not count
	for _, id := range queue {
		mustLock(t, d, waiting(n, id, time.Minute), driver.Waiting)
	}
	slices.Reverse(queue[90:])
	for i, id := range queue {
		mustRelease(t, d, h)
		h.ID = id
		r := ds[i%2].Poll(t.Context(), []driver.Poll{{Owner: h, TTL: time.Minute, Claim: time.Minute}})[0]
		if r.State != driver.Granted || r.Err != nil {
			t.Fatalf("Poll of waiter %d when its turn has come: got %+v, want granted (W4)", i, r)
		}
	}
}
