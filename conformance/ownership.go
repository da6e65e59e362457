package conformance

import (
	"crypto/rand"
	"runtime"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var ownershipTests = []test{
	{name: "StepIgnoresForeignOwner", run: stepIgnoresForeignOwner, permit: true},
	{name: "StepIgnoresExpiredOwner", run: stepIgnoresExpiredOwner, permit: true},
	{name: "KindIsPartOfOwner", run: kindIsPartOfOwner, needs: []Need{Semaphores}},
	{name: "StaleReleaseTouchesNobody", run: staleReleaseTouchesNobody, permit: true},
	{name: "StaleExtendTouchesNobody", run: staleExtendTouchesNobody, permit: true},
	{name: "HandlesAreApart", run: handlesAreApart, permit: true},
	{name: "AnyGoroutineReleases", run: anyGoroutineReleases, permit: true},
	{name: "ReleaseWhileRivalTakes", run: releaseWhileRivalTakes, permit: true},
}

// stepIgnoresForeignOwner: the comparison happens on the server, in the step.
func stepIgnoresForeignOwner(t *T) {
	a, b := t.driver(), t.driver()
	r := t.request(t.key(), t.long())
	granted := t.asked(a, r, driver.Granted, "that is free", "L1")
	stranger := driver.Owner{Name: r.Name, ID: rand.Text()}
	t.give(b, stranger, false, "of an owner that never asked", "L4")
	if x := t.extend(b, stranger, t.long()); x.State != driver.Gone {
		t.Fatalf("step Extend of an owner that never asked: got %v, want gone (L4)", x.State)
	}
	t.asked(b, t.request(t.key(), t.long()), driver.Held, "after a stranger's release and extension", "L4")
	if x := t.extend(a, r.Owner, t.long()); x.State != driver.Granted || x.Token != granted.Token {
		t.Fatalf("step Extend of the holder: got %v with token %v, want granted with %v (T3)", x.State, x.Token, granted.Token)
	}
}

func stepIgnoresExpiredOwner(t *T) {
	a, b := t.driver(), t.driver()
	old := t.request(t.key(), t.short())
	first := t.asked(a, old, driver.Granted, "that is free", "L1")
	next := t.request(t.key(), t.long())
	second := t.takesOver(b, next, old.TTL)
	if second.Token <= first.Token {
		t.Fatalf("token after an expired lease with %v: got %v, want more (T1)", first.Token, second.Token)
	}
	if x := t.extend(a, old.Owner, t.long()); x.State != driver.Gone {
		t.Fatalf("step Extend after expiry: got %v, want gone (L3)", x.State)
	}
	t.give(a, old.Owner, false, "after expiry", "L4")
	t.asked(a, t.request(t.key(), t.long()), driver.Held, "after a stale release and extension", "L4")
	t.give(b, next.Owner, true, "of the successor", "L4")
}

func kindIsPartOfOwner(t *T) {
	d := t.driver()
	lock := t.request(t.key(), t.long())
	permit := lock
	permit.Name.Kind = driver.KindPermit
	t.asked(d, lock, driver.Granted, "that is free", "L1")
	t.give(d, permit.Owner, false, "of a permit with the id of a lock", "L4")
	if x := t.extend(d, permit.Owner, t.long()); x.State != driver.Gone {
		t.Fatalf("step Extend of a permit with the id of a lock: got %v, want gone (L4)", x.State)
	}
	t.asked(d, permit, driver.Granted, "with the id of a lock", "L1")
	t.give(d, lock.Owner, true, "of the lock", "L4")
	t.give(d, permit.Owner, true, "of the permit", "L4")
}

// stale makes a lease that expired, and its successor.
func (t *T) stale() (old, successor *fencelock.Lease, third fencelock.Locker) {
	t.Helper()
	a, b := t.locker(t.client()), t.locker(t.client())
	old = t.lock(a, t.key(), fencelock.TTL(t.short()), fencelock.NoRenew())
	successor = t.lockLater(t.Context(), b, t.key(), fencelock.TTL(t.long())).lease(t.short() + patience)
	return old, successor, t.locker(t.client())
}

func staleReleaseTouchesNobody(t *T) {
	old, successor, third := t.stale()
	t.is("Release after another one took over", old.Release(t.Context()), fencelock.ErrNotHeld, "L4")
	t.refused(third, t.key(), "after a stale release", "L4")
	t.held(successor, "of the successor after a stale release")
	t.is("second Release after another one took over", old.Release(t.Context()), fencelock.ErrNotHeld, "L4")
	t.release(successor)
}

func staleExtendTouchesNobody(t *T) {
	old, successor, third := t.stale()
	err := old.Extend(t.Context(), t.long())
	t.is("Extend after another one took over", err, fencelock.ErrLost, "L3")
	t.is("Extend after another one took over", err, fencelock.ErrNotHeld, "L3")
	t.is("Err after a stale Extend", old.Err(), fencelock.ErrLost, "L3")
	t.refused(third, t.key(), "after a stale extension", "L4")
	t.release(successor)
}

// handlesAreApart: what a goroutine holds is in its handle, not in the client.
func handlesAreApart(t *T) {
	const goroutines = 60
	l := t.locker(t.client())
	ctx := t.Context()
	var all sync.WaitGroup
	var inside sync.Mutex
	for range goroutines {
		all.Go(func() {
			lease, err := l.Lock(ctx, t.key(), fencelock.TTL(t.long()), fencelock.Backoff(time.Millisecond, 20*time.Millisecond))
			if err != nil {
				t.Errorf("Lock: got %v, want a lease", err)
				return
			}
			if !inside.TryLock() {
				t.Errorf("Lock of %d goroutines of one client: got a lease beside another, want one at a time (L1)", goroutines)
			} else {
				runtime.Gosched()
				inside.Unlock()
			}
			if err := lease.Release(ctx); err != nil {
				t.Errorf("Release of the own handle: got %v, want nil (L4)", err)
			}
		})
	}
	all.Wait()
	t.release(t.lock(l, t.key()))
}

func anyGoroutineReleases(t *T) {
	l := t.locker(t.client())
	leases := make(chan *fencelock.Lease)
	go func() {
		lease, err := l.Lock(t.Context(), t.key())
		if err != nil {
			t.Errorf("Lock: got %v, want a lease", err)
		}
		leases <- lease
	}()
	lease := <-leases
	if lease == nil {
		return
	}
	t.release(lease)
	t.release(t.lock(t.locker(t.client()), t.key()))
}

// releaseWhileRivalTakes: a rival that tries at the moment of the release never makes it fail.
func releaseWhileRivalTakes(t *T) {
	const rounds = 100
	a, b := t.locker(t.client()), t.locker(t.client())
	for round := range rounds {
		l := t.lock(a, t.key(), fencelock.TTL(t.long()))
		stop := make(chan struct{})
		taken := make(chan *fencelock.Lease)
		go func() {
			for {
				rival, err := b.TryLock(t.Context(), t.key(), fencelock.TTL(t.long()))
				if err == nil {
					taken <- rival
					return
				}
				t.checkIs("rival TryLock", err, fencelock.ErrHeld, "L8")
				select {
				case <-stop:
					taken <- nil
					return
				default:
				}
			}
		}()
		if err := l.Release(t.Context()); err != nil {
			t.Errorf("round %d: Release while a rival tries: got %v, want nil (L4)", round, err)
		}
		close(stop)
		if rival := <-taken; rival != nil {
			if rival.Token() <= l.Token() {
				t.Errorf("round %d: token after %v: got %v, want more (T1)", round, l.Token(), rival.Token())
			}
			if err := rival.Release(t.Context()); err != nil {
				t.Errorf("round %d: Release of the rival: got %v, want nil (L4)", round, err)
			}
		}
	}
}
