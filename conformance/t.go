package conformance

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"path"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

// T is one test: a testing.TB, the backend that the test has to itself, and what most tests do with it. A
// test that is true of locks and of semaphores takes what it locks by [T.locker] and [T.lockStep].
type T struct {
	testing.TB
	*Backend
	kind driver.Kind
	over *atomic.Bool // the watchdog has given up: nobody listens any more

	tries int // that were void before this one
	began time.Time
	ahead time.Duration          // what wallAhead was when it began
	void  atomic.Pointer[string] // why it does not count
}

// Helper functions of testing.TB panic once a test is over; one that hung ends here instead.
func (t *T) alive() {
	if t.over.Load() {
		runtime.Goexit()
	}
}

// Errorf is as in [testing.TB].
func (t *T) Errorf(format string, args ...any) {
	t.alive()
	t.TB.Helper()
	if !t.excused(fmt.Sprintf(format, args...)) {
		t.TB.Errorf(format, args...)
	}
}

// Fatalf is as in [testing.TB].
func (t *T) Fatalf(format string, args ...any) {
	t.alive()
	t.TB.Helper()
	if t.excused(fmt.Sprintf(format, args...)) {
		runtime.Goexit()
	}
	t.TB.Fatalf(format, args...)
}

// Logf is as in [testing.TB].
func (t *T) Logf(format string, args ...any) { t.alive(); t.TB.Helper(); t.TB.Logf(format, args...) }

// Fatal is as in [testing.TB].
func (t *T) Fatal(args ...any) { t.TB.Helper(); t.Fatalf("%s", fmt.Sprint(args...)) }

// Error is as in [testing.TB].
func (t *T) Error(args ...any) { t.TB.Helper(); t.Errorf("%s", fmt.Sprint(args...)) }

// patience is how long something may take that has no bound by law: it only keeps a failure from being a
// hang.
const patience = 20 * time.Second

// key is the name that a test locks: its own, so that leftovers tell where they come from.
func (t *T) key() string {
	key := path.Base(t.Name())
	if t.tries > 0 { // what a void one has left may be there still
		key += fmt.Sprintf(" %d", t.tries+1)
	}
	return key
}

// ttl is d or, if the backend cannot count that, the next longer TTL that it can.
func (t *T) ttl(d time.Duration) time.Duration {
	if t.Unit > 0 {
		d = (d + t.Unit - 1) / t.Unit * t.Unit
	}
	return d
}

// The TTLs of tests: a test lets a short one pass, renews a steady one on however busy a machine, and is over
// before a long one passes.
func (t *T) short() time.Duration  { return t.ttl(400 * time.Millisecond) }
func (t *T) steady() time.Duration { return t.ttl(3 * time.Second) }
func (t *T) long() time.Duration   { return t.ttl(time.Minute) }

// slack is how much later than a TTL says a backend may notice that a lease has expired.
const slack = time.Second

// driver makes one more connection, closed at the end of the test.
func (t *T) driver() driver.Driver {
	t.Helper()
	d := t.Driver(t.TB)
	t.Cleanup(func() { d.Close() })
	return d
}

// client makes a client on a connection of its own, closed at the end of the test.
func (t *T) client(opts ...fencelock.ClientOption) *fencelock.Client {
	t.Helper()
	return t.clientOn(t.Driver(t.TB), opts...)
}

// requestTimeout is that of the suite's clients if a test says nothing else. The default is a third of the
// TTL, and TTLs here are so short that a busy machine could exceed it.
const requestTimeout = 3 * time.Second

// clientOn makes a client of the driver.
func (t *T) clientOn(d driver.Driver, opts ...fencelock.ClientOption) *fencelock.Client {
	t.Helper()
	c, err := fencelock.New(d, append([]fencelock.ClientOption{fencelock.WithRequestTimeout(requestTimeout)}, opts...)...)
	if err != nil {
		t.Fatalf("New: got %v, want a client", err)
	}
	tb := t.TB
	t.Cleanup(func() {
		if !within(patience, func() { c.Close() }) {
			tb.Errorf("Close of a client: got no return within %v, want one (L7)\n%s", patience, stacks())
		}
	})
	return c
}

// locker takes what this variant of the test is about: locks, or permits of a semaphore that has one.
func (t *T) locker(c *fencelock.Client) fencelock.Locker {
	if t.kind == driver.KindPermit {
		return fencelock.Permits(c, 1)
	}
	return c
}

// lock takes a lock that must be free. On a busy machine a request can take longer than a short TTL, and then its
// outcome is unknown; it is tried again.
func (t *T) lock(l fencelock.Locker, name string, opts ...fencelock.Option) *fencelock.Lease {
	t.Helper()
	lease, err := l.TryLock(t.Context(), name, opts...)
	for range 5 {
		if !errors.Is(err, fencelock.ErrUncertain) {
			break
		}
		t.Logf("TryLock of a free %q, to be tried again: %v", name, err)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		lease, err = l.Lock(ctx, name, opts...) // what the first one left may have to go
		cancel()
	}
	if err != nil {
		t.Fatalf("TryLock of a free %q: got %v, want a lease", name, err)
	}
	return lease
}

// release releases a lease that is held.
func (t *T) release(l *fencelock.Lease) {
	t.Helper()
	if err := l.Release(t.Context()); err != nil {
		t.Fatalf("Release of a held %q: got %v, want nil", l.Name(), err)
	}
}

// refused checks that the lock cannot be had.
func (t *T) refused(l fencelock.Locker, name, when, law string) {
	t.Helper()
	lease, err := l.TryLock(t.Context(), name)
	if err == nil {
		t.Fatalf("rival TryLock %s: got a lease with token %v, want ErrHeld (%s)", when, lease.Token(), law)
	}
	t.is("rival TryLock "+when, err, fencelock.ErrHeld, law)
}

// is checks an error.
func (t *T) is(op string, err, want error, law string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%s: got %v, want %v (%s)", op, orNil(err), want, law)
	}
}

// checkIs is is for other goroutines than the test's.
func (t *T) checkIs(op string, err, want error, law string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v (%s)", op, orNil(err), want, law)
	}
}

func orNil(err error) string {
	if err == nil {
		return "nil"
	}
	return err.Error()
}

// eventually waits until check answers nil, no longer than limit.
func (t *T) eventually(limit time.Duration, check func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	// Many tests wait at a time: what they ask must not keep the machine busy.
	for pause := time.Millisecond; ; pause = min(pause*3/2, 20*time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%v (waited %v)", err, limit)
		}
		time.Sleep(pause)
	}
}

// pending is a Lock that runs in a goroutine.
type pending struct {
	t      *T
	result chan locked
}

type locked struct {
	lease *fencelock.Lease
	err   error
}

// lockLater calls Lock in a goroutine.
func (t *T) lockLater(ctx context.Context, l fencelock.Locker, name string, opts ...fencelock.Option) *pending {
	p := &pending{t: t, result: make(chan locked, 1)}
	go func() {
		lease, err := l.Lock(ctx, name, opts...)
		p.result <- locked{lease, err}
	}()
	return p
}

// wait waits for what Lock returns.
func (p *pending) wait(limit time.Duration) (*fencelock.Lease, error) {
	p.t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case r := <-p.result:
		return r.lease, r.err
	case <-timer.C:
		p.t.Fatalf("Lock: got no return within %v, want one", limit)
		return nil, nil
	}
}

// lease waits for the lock.
func (p *pending) lease(limit time.Duration) *fencelock.Lease {
	p.t.Helper()
	l, err := p.wait(limit)
	if err != nil {
		p.t.Fatalf("Lock: got %v, want a lease", err)
	}
	return l
}

// What follows is for tests that speak to the driver itself.

// request asks for what this variant of the test is about, as a new owner.
func (t *T) request(name string, ttl time.Duration) driver.Request {
	return driver.Request{
		Owner: driver.Owner{Name: driver.Name{Kind: t.kind, Name: name}, ID: rand.Text()},
		TTL:   ttl, Limit: 1,
	}
}

// waiting is r of somebody who waits if he does not get it.
func waiting(r driver.Request, claim time.Duration) driver.Request {
	r.Wait, r.Claim = true, claim
	return r
}

// ask makes the step Lock or Acquire, as the request's kind says.
func (t *T) ask(d driver.Driver, r driver.Request) driver.Answer {
	t.Helper()
	step := d.Lock
	if r.Name.Kind == driver.KindPermit {
		s, ok := driver.As[driver.Semaphore](d)
		if !ok {
			t.Fatalf("driver: no Semaphore")
		}
		step = s.Acquire
	}
	a, err := step(t.Context(), r)
	if err != nil {
		t.Fatalf("%s: got %v, want an answer", r.Name.Kind, err)
	}
	return a
}

// asked is ask for a known answer.
func (t *T) asked(d driver.Driver, r driver.Request, want driver.State, when, law string) driver.Answer {
	t.Helper()
	a := t.ask(d, r)
	if a.State != want {
		t.Fatalf("step for a %s %s: got %v, want %v (%s)", r.Name.Kind, when, a.State, want, law)
	}
	if want == driver.Granted {
		t.plausible(a, r.TTL)
	}
	return a
}

// plausible checks what every grant must have.
func (t *T) plausible(a driver.Answer, ttl time.Duration) {
	t.Helper()
	if a.Token == 0 {
		t.Fatalf("grant: got token 0, want one (T1)")
	}
	if a.TTL <= 0 {
		t.Fatalf("grant for %v: got TTL %v, want more than 0 (L2)", ttl, a.TTL)
	}
}

// extend makes the step Extend for one owner.
func (t *T) extend(d driver.Driver, o driver.Owner, ttl time.Duration) driver.Answer {
	t.Helper()
	return t.one("Extend", d.Extend(t.Context(), []driver.Extension{{Owner: o, TTL: ttl}}))
}

// poll makes the step Poll for one waiter.
func (t *T) poll(d driver.Driver, r driver.Request) driver.Answer {
	t.Helper()
	q, ok := driver.As[driver.Queue](d)
	if !ok {
		t.Fatalf("driver: no Queue")
	}
	return t.one("Poll", q.Poll(t.Context(), []driver.Poll{{Owner: r.Owner, TTL: r.TTL, Claim: r.Claim}}))
}

func (t *T) one(op string, results []driver.Result) driver.Answer {
	t.Helper()
	if len(results) != 1 {
		t.Fatalf("%s of one: got %d results, want 1", op, len(results))
	}
	if err := results[0].Err; err != nil {
		t.Fatalf("%s: got %v, want an answer", op, err)
	}
	return results[0].Answer
}

// give makes the step Release.
func (t *T) give(d driver.Driver, o driver.Owner, want bool, when, law string) {
	t.Helper()
	found, err := d.Release(t.Context(), o)
	if err != nil {
		t.Fatalf("step Release %s: got %v, want %v (%s)", when, err, want, law)
	}
	if found != want {
		t.Fatalf("step Release %s: got %v, want %v (%s)", when, found, want, law)
	}
}

// takesOver asks again and again until the lease of somebody else, that had ttl left, has expired and r is
// granted.
func (t *T) takesOver(d driver.Driver, r driver.Request, ttl time.Duration) driver.Answer {
	t.Helper()
	var a driver.Answer
	t.inTime(fmt.Sprintf("taking over a %s whose holder had %v left", r.Name.Kind, ttl), ttl+slack, "W3", func() {
		t.eventually(ttl+patience, func() error {
			if a = t.ask(d, r); a.State != driver.Granted {
				return fmt.Errorf("step for a %s whose holder died, with %v left: got %v, want granted (W3)", r.Name.Kind, ttl, a.State)
			}
			return nil
		})
	})
	return a
}

// held checks that the lease is believed.
func (t *T) held(l *fencelock.Lease, when string) {
	t.Helper()
	if err := l.Err(); err != nil {
		t.Fatalf("Err %s: got %v, want nil", when, err)
	}
}

// passes calls check again and again until d has passed on the server's clock, which a lease tells that nobody
// extends.
func (t *T) passes(d time.Duration, check func()) {
	t.Helper()
	server := t.driver()
	name := driver.Name{Kind: driver.KindLock, Name: t.key() + "/clock/" + rand.Text()}
	clock := driver.Request{Owner: driver.Owner{Name: name, ID: rand.Text()}, TTL: d, Limit: 1}
	t.asked(server, clock, driver.Granted, "that tells the time", "L1")
	clock.ID, clock.TTL = rand.Text(), t.short()
	deadline := time.Now().Add(d + patience)
	for {
		check()
		if t.ask(server, clock).State == driver.Granted {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("step for a lock after its holder's TTL of %v: got held, want granted (W3)", d)
		}
		time.Sleep(40 * time.Millisecond)
	}
}

// moment calls check again and again for a time that has nothing to do with any TTL.
func (t *T) moment(d time.Duration, check func()) {
	t.Helper()
	for end := time.Now().Add(d); ; time.Sleep(10 * time.Millisecond) {
		check()
		if time.Now().After(end) {
			return
		}
	}
}

// await waits for a channel.
func (t *T) await(c <-chan struct{}, what string, limit time.Duration) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(limit):
		t.Fatalf("%s: got nothing within %v, want it", what, limit)
	}
}

// cancelled is a context that has ended.
func cancelled() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// nothingLeft checks on the server itself, if the harness can look there, that nothing of the name is left
// but the memory of its last token.
func (t *T) nothingLeft(n driver.Name, when string) {
	t.Helper()
	t.nothingLeftAfter(n, patience/4, when)
}

// nothingLeftAfter is nothingLeft where something may remain for a while.
func (t *T) nothingLeftAfter(n driver.Name, while time.Duration, when string) {
	t.Helper()
	if t.Leftovers == nil {
		return
	}
	t.eventually(while, func() error {
		if left := t.Leftovers(t.TB, n); len(left) > 0 {
			return fmt.Errorf("left on the server %s: got %q, want nothing (L7)", when, left)
		}
		return nil
	})
}

// name is the name of what this variant of the test locks.
func (t *T) name(key string) driver.Name { return driver.Name{Kind: t.kind, Name: key} }
