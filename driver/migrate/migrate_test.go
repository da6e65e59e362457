package migrate_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"crypto/rand"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/memory"
	"github.com/fencelock/fencelock/driver/migrate"
)

// fallible is a driver whose backend can be down or stopped, and whose steps can be watched.
type fallible struct {
	*memory.Driver
	mu   sync.Mutex
	down error
	stop chan struct{} // not nil: requests wait until it is closed
	hook func(step string, n driver.Name) error
}

func (f *fallible) set(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down = err
}

func (f *fallible) freeze() (thaw func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	stop := make(chan struct{})
	f.stop = stop
	return func() {
		f.mu.Lock()
		f.stop = nil
		f.mu.Unlock()
		close(stop)
	}
}

func (f *fallible) step(step string, n driver.Name) error {
	f.mu.Lock()
	down, stop, hook := f.down, f.stop, f.hook
	f.mu.Unlock()
	if stop != nil {
		<-stop
	}
	if down == nil && hook != nil {
		return hook(step, n)
	}
	return down
}

func (f *fallible) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	if err := f.step("Lock", r.Name); err != nil {
		return driver.Answer{}, err
	}
	return f.Driver.Lock(ctx, r)
}

func (f *fallible) Acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	if err := f.step("Lock", r.Name); err != nil {
		return driver.Answer{}, err
	}
	return f.Driver.Acquire(ctx, r)
}

func (f *fallible) Extend(ctx context.Context, all []driver.Extension) []driver.Result {
	if err := f.step("Extend", all[0].Name); err != nil {
		results := make([]driver.Result, len(all))
		for i := range results {
			results[i].Err = err
		}
		return results
	}
	return f.Driver.Extend(ctx, all)
}

func (f *fallible) Release(ctx context.Context, o driver.Owner) (bool, error) {
	if err := f.step("Release", o.Name); err != nil {
		return false, err
	}
	return f.Driver.Release(ctx, o)
}

func (f *fallible) Advance(ctx context.Context, n driver.Name, t driver.Token) error {
	if err := f.step("Advance", n); err != nil {
		return err
	}
	return f.Driver.Advance(ctx, n, t)
}

func (f *fallible) List(ctx context.Context, n driver.Name, yield func(driver.Holding) bool) error {
	if err := f.step("List", n); err != nil {
		return err
	}
	return f.Driver.List(ctx, n, yield)
}

// stores are the two backends of a test.
type stores struct{ old, young *memory.Store }

func newStores() stores { return stores{memory.NewStore(), memory.NewStore()} }

func (s stores) drivers() (old, young *fallible) {
	return &fallible{Driver: memory.New(s.old)}, &fallible{Driver: memory.New(s.young)}
}

func (s stores) client(t *testing.T, p migrate.Phase) *fencelock.Client {
	t.Helper()
	return client(t, open(t, memory.New(s.old), memory.New(s.young), p))
}

func client(t *testing.T, d driver.Driver) *fencelock.Client {
	t.Helper()
	c, err := fencelock.New(d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func request(name string, ttl time.Duration) driver.Request {
	return driver.Request{Owner: driver.Owner{Name: driver.Name{Kind: driver.KindLock, Name: name}, ID: rand.Text()}, TTL: ttl, Limit: 1}
}

func mustGrant(t *testing.T, d driver.Driver, r driver.Request) driver.Answer {
	t.Helper()
	a, err := d.Lock(t.Context(), r)
	if err != nil || a.State != driver.Granted {
		t.Fatalf("Lock: got %v, %v, want granted", a.State, err)
	}
	return a
}

// holders are those on one store, phase leases apart.
func holders(t *testing.T, s *memory.Store) (ids []string) {
	t.Helper()
	d := memory.New(s)
	defer d.Close()
	if err := d.List(t.Context(), driver.Name{}, func(h driver.Holding) bool {
		if !strings.HasPrefix(h.Name.Name, "fencelock.migrate/") {
			ids = append(ids, h.ID)
		}
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return ids
}

// TestTwoPhasesAway: neighbours mix, and a client two phases away from a live one is refused.
func TestTwoPhasesAway(t *testing.T) {
	for _, p := range []struct{ first, second migrate.Phase }{
		{migrate.From, migrate.To}, {migrate.To, migrate.From},
	} {
		s := newStores()
		first := open(t, memory.New(s.old), memory.New(s.young), p.first)
		both := open(t, memory.New(s.old), memory.New(s.young), migrate.Both)
		old, young := s.drivers()
		_, err := migrate.New(t.Context(), old, young, &migrate.Options{Phase: p.second})
		if !errors.Is(err, migrate.ErrPhase) || !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), "phase "+string(p.first)) {
			t.Fatalf("New in phase %s beside one in phase %s: got %v, want ErrPhase, ErrUnavailable and who it is", p.second, p.first, err)
		}
		first.Close()
		second := open(t, old, young, p.second)
		second.Close()
		both.Close()
	}
}

// TestTwoPhasesAwayAtOnce: of two that begin at one moment no two pass.
func TestTwoPhasesAwayAtOnce(t *testing.T) {
	for range 50 {
		s := newStores()
		var all sync.WaitGroup
		opened := make(chan driver.Driver, 2)
		for _, p := range []migrate.Phase{migrate.From, migrate.To} {
			all.Go(func() {
				d, err := migrate.New(t.Context(), memory.New(s.old), memory.New(s.young), &migrate.Options{Phase: p})
				if err == nil {
					opened <- d
				} else if !errors.Is(err, migrate.ErrPhase) {
					t.Errorf("New: got %v, want ErrPhase", err)
				}
			})
		}
		all.Wait()
		if n := len(opened); n > 1 {
			t.Fatalf("clients two phases apart that began at once: got %d opened, want at most one", n)
		}
		close(opened)
		for d := range opened {
			d.Close()
		}
	}
}

// TestBothHolds: a lease of phase both excludes clients of both neighbours, and its token lies between theirs (L1, T1).
func TestBothHolds(t *testing.T) {
	for _, p := range []migrate.Phase{migrate.From, migrate.To} {
		s := newStores()
		both, other := s.client(t, migrate.Both), s.client(t, p)
		last := fencelock.Token(0)
		for i := range 20 {
			holder, rival := both, other
			if i%2 == 1 {
				holder, rival = other, both
			}
			l, err := holder.TryLock(t.Context(), "x")
			if err != nil {
				t.Fatal(err)
			}
			if l.Token() <= last {
				t.Fatalf("token: got %v, want more than %v (T1)", l.Token(), last)
			}
			last = l.Token()
			if _, err := rival.TryLock(t.Context(), "x"); !errors.Is(err, fencelock.ErrHeld) {
				t.Fatalf("rival TryLock while held: got %v, want ErrHeld (L1)", err)
			}
			if err := l.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		minted, err := other.NextToken(t.Context(), "x")
		if err != nil || minted <= last {
			t.Fatalf("NextToken in phase %s: got %v, %v, want more than %v (T1)", p, minted, err, last)
		}
		if next, err := both.NextToken(t.Context(), "x"); err != nil || next <= minted {
			t.Fatalf("NextToken in phase both: got %v, %v, want more than %v (T1)", next, err, minted)
		}
	}
}

// TestAdvanceBeforeGranted: the old backend has confirmed the new token when the lock is answered granted, however far the
// new backend's tokens are ahead.
func TestAdvanceBeforeGranted(t *testing.T) {
	s := newStores()
	old, young := s.drivers()
	r := request("x", time.Minute)
	far := driver.Token(time.Now().Add(time.Hour).UnixMicro())
	if err := young.Driver.Advance(t.Context(), r.Name, far); err != nil {
		t.Fatal(err)
	}
	d := open(t, old, young, migrate.Both)
	defer d.Close()
	old.hook = func(step string, _ driver.Name) error {
		if step == "Advance" {
			return driver.Unavailable(errors.New("refused"))
		}
		return nil
	}
	if a, err := d.Lock(t.Context(), r); !errors.Is(err, driver.ErrUnavailable) {
		t.Fatalf("Lock whose Advance is refused: got %v, %v, want ErrUnavailable (L8)", a.State, err)
	}
	if left := append(holders(t, s.old), holders(t, s.young)...); len(left) > 0 {
		t.Fatalf("holders after a refused Lock: got %v, want none (L7)", left)
	}
	old.hook = nil
	a := mustGrant(t, d, r)
	if next, err := memory.New(s.old).NextToken(t.Context(), r.Name, 0); err != nil || next <= a.Token || a.Token <= far {
		t.Fatalf("next token of the old backend: got %v, %v, want more than %v, and that more than %v (T1)", next, err, a.Token, far)
	}
}

// TestBackendDown: in phase both a backend that cannot be reached fails a lock for sure, and one that does not answer
// leaves it uncertain; nothing is left on the other one.
func TestBackendDown(t *testing.T) {
	for _, which := range []string{"old", "new"} {
		for _, want := range []error{driver.ErrUnavailable, fencelock.ErrUncertain} {
			s := newStores()
			old, young := s.drivers()
			c := client(t, open(t, old, young, migrate.Both))
			f := map[string]*fallible{"old": old, "new": young}[which]
			if want == driver.ErrUnavailable {
				f.set(driver.Unavailable(errors.New("connection refused")))
			} else {
				f.set(errors.New("connection reset"))
			}
			if _, err := c.TryLock(t.Context(), "x", fencelock.TTL(time.Second)); !errors.Is(err, want) || errors.Is(err, fencelock.ErrHeld) {
				t.Fatalf("TryLock while the %s backend is down: got %v, want %v (L8)", which, err, want)
			}
			f.set(nil)
			l, err := c.Lock(t.Context(), "x", fencelock.TTL(time.Second)) // also waits for what the client still has to clean up
			if err != nil {
				t.Fatalf("Lock after the %s backend came back: got %v, want nil (L7)", which, err)
			}
			if err := l.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			if left := append(holders(t, s.old), holders(t, s.young)...); len(left) > 0 {
				t.Fatalf("holders: got %v, want none (L7)", left)
			}
		}
	}
}

// TestLossOfEither: a lease of phase both is lost with that of either backend, and the other one is given back.
func TestLossOfEither(t *testing.T) {
	for _, which := range []string{"old", "new"} {
		s := newStores()
		c := s.client(t, migrate.Both)
		l, err := c.TryLock(t.Context(), "x", fencelock.TTL(600*time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		thief := memory.New(map[string]*memory.Store{"old": s.old, "new": s.young}[which])
		if n, err := thief.ForceUnlock(t.Context(), driver.Name{Kind: driver.KindLock, Name: "x"}); n != 1 || err != nil {
			t.Fatalf("ForceUnlock on the %s backend: got %d, %v, want 1", which, n, err)
		}
		select {
		case <-l.Done():
		case <-time.After(20 * time.Second):
			t.Fatalf("Done after the loss on the %s backend: got none, want closed", which)
		}
		if !errors.Is(l.Err(), fencelock.ErrLost) {
			t.Fatalf("Err after the loss on the %s backend: got %v, want ErrLost", which, l.Err())
		}
		for began := time.Now(); len(holders(t, s.old))+len(holders(t, s.young)) > 0; time.Sleep(time.Millisecond) {
			if time.Since(began) > 20*time.Second {
				t.Fatalf("holders after the loss on the %s backend: want none (L7)", which)
			}
		}
	}
}

// TestWaitsInBoth: a waiter of phase both passes the old queue, then the new one, and holds the old lock meanwhile.
func TestWaitsInBoth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStores()
		to, both, next := s.client(t, migrate.To), s.client(t, migrate.Both), s.client(t, migrate.Both)
		held, err := to.Lock(t.Context(), "x")
		if err != nil {
			t.Fatal(err)
		}
		locked := make(chan *fencelock.Lease)
		for _, c := range []*fencelock.Client{both, next} {
			go func() {
				l, err := c.Lock(t.Context(), "x")
				if err != nil {
					t.Errorf("Lock: got %v, want nil", err)
				}
				locked <- l
			}()
			synctest.Wait()
		}
		time.Sleep(10 * time.Minute) // twenty TTLs: both stay where they are
		synctest.Wait()
		if got := holders(t, s.old); len(got) != 1 {
			t.Fatalf("holders of the old lock while the new one is held: got %d, want the first waiter", len(got))
		}
		last := held.Token()
		if err := held.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			l := <-locked
			if l.Token() <= last {
				t.Fatalf("token: got %v, want more than %v (T1)", l.Token(), last)
			}
			last = l.Token()
			if err := l.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestCancelledInBoth: whoever stops waiting, wherever it stands, leaves nothing (L7).
func TestCancelledInBoth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, p := range []migrate.Phase{migrate.From, migrate.To} {
			s := newStores()
			holder, both := s.client(t, p), s.client(t, migrate.Both)
			held, err := holder.Lock(t.Context(), "x")
			if err != nil {
				t.Fatal(err)
			}
			if _, err := both.Lock(t.Context(), "x", fencelock.WaitFor(time.Second)); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("Lock for a second: got %v, want the deadline", err)
			}
			if err := held.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if left := append(holders(t, s.old), holders(t, s.young)...); len(left) > 0 {
				t.Fatalf("holders after a cancelled wait behind one in phase %s: got %v, want none (L7)", p, left)
			}
		}
	})
}

// TestStoppedInFrom: a client that was stopped in phase from wakes when others are in phase to. It believes in nothing,
// and gets nothing.
func TestStoppedInFrom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStores()
		old, young := s.drivers()
		stopped, err := migrate.New(t.Context(), old, young, &migrate.Options{Phase: migrate.From})
		if err != nil {
			t.Fatal(err)
		}
		defer stopped.Close()
		r := request("x", 10*time.Minute) // longer than a phase lease
		a := mustGrant(t, stopped, r)
		granted := time.Now()
		thaw := old.freeze()
		a1, b1 := memory.New(s.old), memory.New(s.young)
		for range 2 {
			if _, err := migrate.Advance(t.Context(), a1, b1); err != nil {
				t.Fatal(err)
			}
		}
		if ended := granted.Add(a.TTL); time.Now().Before(ended) {
			t.Fatalf("Advance to phase to: got it %v before a stopped client's belief ended, want after (L1)", time.Until(ended))
		}
		to := s.client(t, migrate.To)
		l, err := to.TryLock(t.Context(), "x")
		if err != nil || l.Token() <= a.Token {
			t.Fatalf("TryLock in phase to: got %v, want one with a token above %v (T1)", err, a.Token)
		}
		thaw()
		synctest.Wait()
		if a, err := stopped.Lock(t.Context(), request("x", time.Second)); !errors.Is(err, migrate.ErrPhase) || !errors.Is(err, driver.ErrUnavailable) {
			t.Fatalf("Lock of the client that was stopped: got %v, %v, want ErrPhase and ErrUnavailable", a.State, err)
		}
		if x := stopped.Extend(t.Context(), []driver.Extension{{Owner: r.Owner, TTL: 10 * time.Minute}})[0]; x.Err == nil && x.State == driver.Granted {
			t.Fatalf("Extend of the client that was stopped: got granted, want none (L3)")
		}
	})
}

// TestStoppedDuringLock: a grant that comes when the phase lease has ended counts for nothing.
func TestStoppedDuringLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStores()
		old, young := s.drivers()
		stopped, err := migrate.New(t.Context(), old, young, &migrate.Options{Phase: migrate.From, PhaseTTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		defer stopped.Close()
		old.hook = func(step string, n driver.Name) error {
			if n.Name == "x" && step == "Lock" {
				thaw := old.freeze() // the phase lease neither
				time.Sleep(time.Hour)
				thaw()
			}
			return nil
		}
		sent := time.Now()
		a, err := stopped.Lock(t.Context(), request("x", 30*time.Minute))
		if err == nil && sent.Add(a.TTL).After(time.Now()) {
			t.Fatalf("Lock of a client that was stopped on its way: got granted for %v more, want nothing (L2)", time.Until(sent.Add(a.TTL)))
		}
	})
}

// TestAdvanceAndRollback: the steps, what status says of them, and that the recorded phase shuts out who is two phases away.
func TestAdvanceAndRollback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStores()
		old, young := memory.New(s.old), memory.New(s.young)
		first := open(t, memory.New(s.old), memory.New(s.young), migrate.From)
		step := func(what func(context.Context, driver.Driver, driver.Driver) (migrate.Phase, error), want migrate.Phase) {
			t.Helper()
			if p, err := what(t.Context(), old, young); p != want || err != nil {
				t.Fatalf("step: got %q, %v, want %s", p, err, want)
			}
		}
		status := func() *migrate.Status {
			t.Helper()
			st, err := migrate.ReadStatus(t.Context(), old, young)
			if err != nil {
				t.Fatal(err)
			}
			return st
		}
		mustGrant(t, first, request("x", time.Hour))
		time.Sleep(30 * time.Second)
		st := status()
		if len(st.Clients) != 1 || st.Clients[0].Phase != migrate.From || st.Clients[0].PID == 0 || st.Clients[0].Heard > 20*time.Second || len(st.Old.Held) != 1 || len(st.New.Held) != 0 {
			t.Fatalf("status: got %+v, want one client in phase from that holds one lock", st)
		}
		if st.Phase != migrate.From || st.Advance.Target != migrate.Both || !st.Advance.Safe || st.Rollback.Target != "" || st.Rollback.Safe {
			t.Fatalf("status: got %+v, want phase from and a safe step to both", st)
		}
		step(migrate.Advance, migrate.Both)
		if st := status(); st.Phase != migrate.Both || st.Advance.Safe || !strings.Contains(st.Advance.Waits, "phase from") || st.Old.Recorded != migrate.Both || st.New.Recorded != migrate.Both {
			t.Fatalf("status: got %+v, want recorded phase both and a step to phase to that waits for a client", st)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if _, err := migrate.Advance(ctx, old, young); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "phase from") {
			t.Fatalf("Advance beside a client in phase from: got %v, want the deadline and who it is", err)
		}
		cancel()
		if st := status(); st.Phase != migrate.Both {
			t.Fatalf("phase after a step that was given up: got %s, want both", st.Phase)
		}
		first.Close()
		step(migrate.Advance, migrate.To)
		if _, err := migrate.New(t.Context(), memory.New(s.old), memory.New(s.young), &migrate.Options{Phase: migrate.From}); !errors.Is(err, migrate.ErrPhase) {
			t.Fatalf("New in phase from after a step to phase to: got %v, want ErrPhase", err)
		}
		if _, err := migrate.Advance(t.Context(), old, young); !errors.Is(err, driver.ErrInvalid) {
			t.Fatalf("Advance in phase to: got %v, want ErrInvalid", err)
		}
		last := open(t, memory.New(s.old), memory.New(s.young), migrate.To)
		step(migrate.Rollback, migrate.Both)
		last.Close()
		step(migrate.Rollback, migrate.From)
		open(t, memory.New(s.old), memory.New(s.young), migrate.From).Close()
	})
}

// TestRollbackWaitsForTheClock: tokens of the new backend may run ahead of the old one's clock; clients go back to the
// old one only when it has passed them, also for names that nobody locked in phase both (T1).
func TestRollbackWaitsForTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStores()
		old, young := memory.New(s.old), memory.New(s.young)
		x := driver.Name{Kind: driver.KindLock, Name: "x"}
		if err := young.Advance(t.Context(), x, driver.Token(time.Now().Add(time.Minute).UnixMicro())); err != nil {
			t.Fatal(err)
		}
		d := open(t, memory.New(s.old), memory.New(s.young), migrate.To)
		r := request("x", time.Minute)
		a := mustGrant(t, d, r)
		if _, err := d.Release(t.Context(), r.Owner); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if _, err := migrate.Rollback(t.Context(), old, young); err != nil {
				d.Close() // the first step is to both
				t.Fatal(err)
			}
			d.Close()
		}
		from := open(t, memory.New(s.old), memory.New(s.young), migrate.From)
		defer from.Close()
		if b := mustGrant(t, from, request("x", time.Minute)); b.Token <= a.Token {
			t.Fatalf("token after the way back: got %v, want more than %v (T1)", b.Token, a.Token)
		}
	})
}

// TestURL opens by URL, and says what is wrong with one.
func TestURL(t *testing.T) {
	c, err := fencelock.Open(t.Context(), "migrate://?from=memory%3A%2F%2Fmigrate-a&to=memory%3A%2F%2Fmigrate-b&phase=both&phase_ttl=30s",
		fencelock.Require(fencelock.Semaphores, fencelock.Queueing, fencelock.Listing, fencelock.ForceUnlocks))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	l, err := c.TryAcquire(t.Context(), "x", 2)
	if err != nil {
		t.Fatal(err)
	}
	if held, err := c.List(t.Context()); err != nil || len(held) != 1 || held[0].Token != l.Token() {
		t.Fatalf("List: got %+v, %v, want the permit once and no phase lease", held, err)
	}
	if n, err := c.ForceUnlock(t.Context(), fencelock.KindPermit, "x"); n != 1 || err != nil {
		t.Fatalf("ForceUnlock: got %d, %v, want 1", n, err)
	}
	if _, err := c.TryLock(t.Context(), "fencelock.migrate/phase"); !errors.Is(err, fencelock.ErrInvalid) {
		t.Fatalf("TryLock of a reserved name: got %v, want ErrInvalid", err)
	}
	for _, url := range []string{
		"migrate://?from=memory%3A&to=memory%3A", "migrate://?from=memory%3A&to=memory%3A&phase=half", "migrate://?phase=both&to=memory%3A",
		"migrate://?from=memory%3A&phase=both", "migrate://?from=memory%3A&to=memory%3A&phase=to&x=1", "migrate://h?from=memory%3A&to=memory%3A&phase=to",
		"migrate://?from=memory%3A&to=memory%3A&phase=to&phase_ttl=1ms",
	} {
		if c, err := fencelock.Open(t.Context(), url); !errors.Is(err, fencelock.ErrInvalid) {
			t.Errorf("Open %s: got %v, want ErrInvalid", url, err)
			if err == nil {
				c.Close()
			}
		}
	}
}

// TestRequire: a phase promises only what all its backends do.
func TestRequire(t *testing.T) {
	s := newStores()
	d, err := migrate.New(t.Context(), memory.New(s.old), poor{memory.New(s.young)}, &migrate.Options{Phase: migrate.Both})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, ok := driver.As[driver.Queue](d); ok {
		t.Error("Queue over a backend without: got one, want none (C1)")
	}
	if _, ok := driver.As[driver.ForceUnlocker](d); ok {
		t.Error("ForceUnlocker over a backend without: got one, want none (C1)")
	}
	if _, err := migrate.New(t.Context(), memory.New(s.old), struct{ driver.Driver }{memory.New(s.young)}, &migrate.Options{Phase: migrate.Both}); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("New over a backend without semaphores: got %v, want unsupported", err)
	}
}

// poor has only what is demanded.
type poor struct{ d *memory.Driver }

func (p poor) Info() driver.Info { return p.d.Info() }
func (p poor) Close() error      { return p.d.Close() }
func (p poor) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return p.d.Lock(ctx, r)
}
func (p poor) Acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return p.d.Acquire(ctx, r)
}
func (p poor) Extend(ctx context.Context, l []driver.Extension) []driver.Result {
	return p.d.Extend(ctx, l)
}
func (p poor) Release(ctx context.Context, o driver.Owner) (bool, error) { return p.d.Release(ctx, o) }
func (p poor) NextToken(ctx context.Context, n driver.Name, t driver.Token) (driver.Token, error) {
	return p.d.NextToken(ctx, n, t)
}
func (p poor) Advance(ctx context.Context, n driver.Name, t driver.Token) error {
	return p.d.Advance(ctx, n, t)
}
func (p poor) List(ctx context.Context, n driver.Name, yield func(driver.Holding) bool) error {
	return p.d.List(ctx, n, yield)
}
