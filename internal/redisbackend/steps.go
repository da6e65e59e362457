package redisbackend

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver"
)

// OddNames are names that a key could be confused by.
func OddNames() []string {
	return []string{"a", "{a}", "{a}.", "a.", "{a}{b}", "}a{", "{}", "{}a", "{", "}", "%7Ba%7D", "%", "x{y}z", "x{y}z.",
		"a:b", ":", "*", "[a-z]", "?", " ", "a b", "\x00", "a\x00b", "\n", "ünïcode", "\xff\xfe", "名前",
		strings.Repeat("n", 512), strings.Repeat("{", 512), strings.Repeat("}", 512), "{" + strings.Repeat("t", 510) + "}"}
}

// TestOddNames holds and waits for all odd names of both kinds at once.
func (b Driver) TestOddNames(t *testing.T) {
	s := b.Start(t)
	d := s.Driver(t)
	e := ListenTo(d)
	var owners []driver.Owner
	for _, name := range OddNames() {
		for _, kind := range []driver.Kind{driver.KindLock, driver.KindPermit} {
			o := driver.Owner{Name: driver.Name{Kind: kind, Name: name}, ID: NewID()}
			MustLock(t, d, Request(o.Name, o.ID, time.Hour), driver.Granted)
			owners = append(owners, o)
		}
	}
	var leases []driver.Extension
	for _, o := range owners {
		leases = append(leases, driver.Extension{Owner: o, TTL: time.Hour})
	}
	for i, r := range d.Extend(t.Context(), leases) {
		if r.State != driver.Granted || r.Err != nil {
			t.Errorf("Extend of %v %q: got %+v, want granted", owners[i].Name.Kind, owners[i].Name.Name, r)
		}
	}
	listed := map[driver.Owner]int{}
	if err := d.List(t.Context(), driver.Name{}, func(h driver.Holding) bool { listed[h.Owner]++; return true }); err != nil {
		t.Errorf("List: got %v, want nil", err)
	}
	MustLock(t, d, Waiting(owners[0].Name, NewID(), time.Hour), driver.Waiting)
	e.Next(t, driver.EventRecheck, "when the subscription stands")
	for i, o := range owners {
		if listed[o] != 1 {
			t.Errorf("List: got %v %q %d times, want once", o.Name.Kind, o.Name.Name, listed[o])
		}
		if i == 0 {
			continue
		}
		w := driver.Owner{Name: o.Name, ID: NewID()}
		MustLock(t, d, Waiting(w.Name, w.ID, time.Hour), driver.Waiting)
		MustRelease(t, d, o)
		if got := e.Next(t, driver.EventGranted, "when a lock is handed over"); got.Owner != w {
			t.Errorf("event: got %+v, want %+v", got.Owner, w)
		}
	}
	if len(listed) != len(owners) {
		t.Errorf("List: got %d leases, want %d", len(listed), len(owners))
	}
}

// TestBigBatch extends and polls ten thousand leases, of which some are gone, and counts the requests.
func (b Driver) TestBigBatch(t *testing.T) {
	s := b.Start(t)
	// A busy machine may need longer for a batch of this size than a client usually waits.
	d := b.Connect(t, Options{Addr: s.Addr(), Timeout: time.Minute})
	const size = 10000
	leases := make([]driver.Extension, size)
	polls := make([]driver.Poll, size)
	pipe := s.Client(t).Pipeline()
	for i := range leases {
		o := driver.Owner{Name: LockName(fmt.Sprintf("n%d", i)), ID: NewID()}
		leases[i] = driver.Extension{Owner: o, TTL: time.Minute}
		polls[i] = driver.Poll{Owner: o, TTL: 2 * time.Minute, Claim: time.Minute}
		if i%10 != 3 {
			pipe.Set(t.Context(), "fencelock:l:{"+o.Name.Name+"}", fmt.Sprintf("%016d %s ", i+1, o.ID), time.Second*30)
		}
	}
	if _, err := pipe.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
	for what, run := range map[string]func() []driver.Result{
		"Extend": func() []driver.Result { return d.Extend(t.Context(), leases) },
		"Poll":   func() []driver.Result { return d.Poll(t.Context(), polls) },
	} {
		s.Must(t, "SCRIPT", "FLUSH")
		before := s.Commands(t)
		results := run()
		after := s.Commands(t)
		if sent := after["evalsha"] - before["evalsha"] + after["eval"] - before["eval"]; sent > 2*size/100 {
			t.Errorf("%s of %d with an empty script cache: got %d requests, want at most two for every 100 (W2)", what, size, sent)
		}
		if len(results) != size {
			t.Fatalf("%s: got %d results, want %d", what, len(results), size)
		}
		for i, r := range results {
			want := driver.Answer{State: driver.Granted, Token: driver.Token(i + 1)}
			if i%10 == 3 {
				want = driver.Answer{State: driver.Gone}
			}
			if r.Err != nil || r.State != want.State || r.Token != want.Token {
				t.Fatalf("%s of %d: got %+v, want %+v", what, i, r, want)
			}
		}
	}
}

// TestBatchItemsAreIndependent breaks one name of a batch.
func (b Driver) TestBatchItemsAreIndependent(t *testing.T) {
	BothKinds(t, func(t *testing.T, n driver.Name) {
		s := b.Start(t)
		d := s.Driver(t)
		var leases []driver.Extension
		for i := range 5 {
			o := driver.Owner{Name: driver.Name{Kind: n.Kind, Name: fmt.Sprint(i)}, ID: NewID()}
			MustLock(t, d, Request(o.Name, o.ID, time.Minute), driver.Granted)
			leases = append(leases, driver.Extension{Owner: o, TTL: time.Minute})
		}
		for _, letter := range []string{"l", "p"} {
			s.Must(t, "DEL", "fencelock:"+letter+":{2}")
			s.Must(t, "RPUSH", "fencelock:"+letter+":{2}", "app")
		}
		for i, r := range d.Extend(t.Context(), leases) {
			if (r.Err != nil) != (i == 2) || i != 2 && r.State != driver.Granted {
				t.Errorf("Extend %d of a batch of which 2 is broken: got %+v", i, r)
			}
		}
	})
}

// TestList finds each of many leases once, of both kinds, in this namespace only.
func (b Driver) TestList(t *testing.T) {
	s := b.Start(t)
	d := s.Driver(t)
	raw := s.Client(t)
	const locks, permits = 3000, 50
	pipe := raw.Pipeline()
	for i := range locks {
		pipe.Set(t.Context(), fmt.Sprintf("fencelock:l:{n%d}", i), fmt.Sprintf("%016d %s host %d", i+1, NewID(), i), time.Minute)
		pipe.Set(t.Context(), fmt.Sprintf("fencelock2:l:{n%d}", i), "0000000000000001 x ", time.Minute)
		pipe.Set(t.Context(), fmt.Sprintf("app:%d", i), "x", 0)
	}
	if _, err := pipe.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i := range permits {
		for range 3 {
			r := Request(PermitName(fmt.Sprintf("n%d", i)), NewID(), time.Minute)
			r.Limit, r.Holder = 3, "me"
			MustLock(t, d, r, driver.Granted)
		}
	}
	raw.ZAdd(t.Context(), "fencelock:p:{n0}", redis.Z{Score: 1, Member: "EXPIRED"})
	raw.Set(t.Context(), "fencelock:l:not ours", "x", time.Minute)

	seen := map[string]driver.Holding{}
	err := d.List(t.Context(), driver.Name{}, func(h driver.Holding) bool {
		if _, twice := seen[h.ID]; twice {
			t.Errorf("List: got %+v twice", h)
		}
		if h.Token == 0 || h.Left <= 0 || h.Left > time.Minute || h.Holder == "" {
			t.Errorf("List: got %+v, want a token, what is left of a minute, and a holder", h)
		}
		seen[h.ID] = h
		return true
	})
	if err != nil || len(seen) != locks+3*permits {
		t.Errorf("List of everything: got %d, %v, want %d", len(seen), err, locks+3*permits)
	}
	count := 0
	if err := d.List(t.Context(), driver.Name{}, func(driver.Holding) bool { count++; return count < 10 }); err != nil || count != 10 {
		t.Errorf("List until yield says no: got %d, %v, want 10, nil", count, err)
	}
	for n, want := range map[driver.Name]int{LockName("n7"): 1, PermitName("n7"): 3, LockName("none"): 0} {
		count := 0
		if err := d.List(t.Context(), n, func(h driver.Holding) bool {
			count++
			if h.Owner.Name != n {
				t.Errorf("List of %v: got %+v", n, h)
			}
			return true
		}); err != nil || count != want {
			t.Errorf("List of %v: got %d, %v, want %d", n, count, err, want)
		}
	}
}
