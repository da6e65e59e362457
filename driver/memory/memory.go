// Package memory keeps locks in the memory of one process: for the tests of code that uses fencelock,
// and as the reference that every other driver is held to.
//
// # Guarantees
//
// Exclusion, tokens, queue and semaphores are exact among all clients of one [Store], and end with the
// process. Time is the process's monotonic clock, so tests can run it under testing/synctest.
//
// # Options
//
// None. Clients that shall exclude each other share a Store. By URL, "memory:" is a store of its own,
// and "memory://name" one that all clients of the process share by that name.
//
// # Errors
//
// Only a closed driver fails, with an error matching [driver.ErrUnavailable].
//
// # Fencing
//
// Tokens never go back within one process. A store forgets a name as soon as it is idle and its last
// token lies below the clock, since its clock cannot go back.
//
// # What it does not do
//
// Exclude other processes, survive anything.
package memory

import (
	"context"
	"errors"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/state"
)

func init() { driver.Register("memory", open) }

// Store plays the server: all drivers made with [New] on one store see the same locks. It needs no
// closing. Safe for concurrent use.
type Store struct {
	began time.Time

	mu     sync.Mutex
	names  map[driver.Name]*state.Name
	driver map[string]*Driver // by the client id that waiters carry
	last   int
}

// NewStore makes an empty store.
func NewStore() *Store {
	return &Store{began: time.Now(), names: make(map[driver.Name]*state.Name), driver: make(map[string]*Driver)}
}

// New connects one more driver to the store, or to a store of its own if that is nil. It never fails.
func New(s *Store) *Driver {
	if s == nil {
		s = NewStore()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	d := &Driver{store: s, id: strconv.Itoa(s.last)}
	s.driver[d.id] = d
	return d
}

// Driver is one client's connection to a [Store]. It implements every optional interface of package
// driver.
type Driver struct {
	store *Store
	id    string
	sink  func(driver.Event) // guarded by store.mu
	leave func()             // gives up a shared store
}

var errClosed = driver.Unavailable(errors.New("memory: the driver is closed"))

// Info implements driver.Driver.
func (d *Driver) Info() driver.Info { return driver.Info{Backend: "memory"} }

// Close implements driver.Driver.
func (d *Driver) Close() error {
	d.store.mu.Lock()
	_, open := d.store.driver[d.id]
	delete(d.store.driver, d.id)
	d.store.mu.Unlock()
	if open && d.leave != nil {
		d.leave()
	}
	return nil
}

// Notify implements driver.Notifier.
func (d *Driver) Notify(sink func(driver.Event)) {
	d.store.mu.Lock()
	defer d.store.mu.Unlock()
	d.sink = sink
}

// step runs f on the name's state as the server would, and announces the grants it made.
func (d *Driver) step(ctx context.Context, n driver.Name, f func(now state.Now, s *state.Name) []state.Grant) error {
	if err := ctx.Err(); err != nil {
		return driver.Unavailable(err)
	}
	type push struct {
		sink  func(driver.Event)
		event driver.Event
	}
	var pushes []push

	s := d.store
	s.mu.Lock()
	if s.driver[d.id] == nil {
		s.mu.Unlock()
		return errClosed
	}
	now := s.now()
	st := s.names[n]
	if st == nil {
		st = new(state.Name)
		s.names[n] = st
	}
	for _, g := range f(now, st) {
		if to := s.driver[g.Client]; to != nil && to.sink != nil {
			pushes = append(pushes, push{to.sink, driver.Event{Kind: driver.EventGranted,
				Owner: driver.Owner{Name: n, ID: g.ID}, Token: g.Token}})
		}
	}
	s.sweep(now, n, st)
	s.mu.Unlock()

	for _, p := range pushes {
		p.sink(p.event)
	}
	return nil
}

func (s *Store) now() state.Now {
	age := time.Since(s.began)
	return state.Now{Lease: int64(age), Token: s.began.Add(age).UnixMicro()}
}

// sweep forgets the name if it can be forgotten, and a few others that expired without anybody asking:
// ranging over a map begins anywhere, so all get their turn.
func (s *Store) sweep(now state.Now, n driver.Name, st *state.Name) {
	if forgettable(now, st) {
		delete(s.names, n)
	}
	looks := 2
	for n, st := range s.names {
		if looks--; looks < 0 {
			break
		}
		if forgettable(now, st) {
			delete(s.names, n)
		}
	}
}

func forgettable(now state.Now, st *state.Name) bool {
	return st.Last < driver.Token(now.Token) && st.Idle(now)
}

// Lock implements driver.Locker.
func (d *Driver) Lock(ctx context.Context, r driver.Request) (a driver.Answer, err error) {
	err = d.step(ctx, r.Name, func(now state.Now, s *state.Name) (g []state.Grant) {
		a, g = s.Lock(now, r, d.id)
		return g
	})
	return a, err
}

// Acquire implements driver.Semaphore.
func (d *Driver) Acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return d.Lock(ctx, r)
}

// Extend implements driver.Locker.
func (d *Driver) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	results := make([]driver.Result, len(leases))
	for i, e := range leases {
		results[i].Err = d.step(ctx, e.Name, func(now state.Now, s *state.Name) []state.Grant {
			results[i].Answer = s.Extend(now, e.ID, e.TTL)
			return nil
		})
	}
	return results
}

// Release implements driver.Locker.
func (d *Driver) Release(ctx context.Context, o driver.Owner) (found bool, err error) {
	err = d.step(ctx, o.Name, func(now state.Now, s *state.Name) (g []state.Grant) {
		found, g = s.Release(now, o.ID)
		return g
	})
	return found, err
}

// Poll implements driver.Queue.
func (d *Driver) Poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	results := make([]driver.Result, len(waiters))
	for i, w := range waiters {
		results[i].Err = d.step(ctx, w.Name, func(now state.Now, s *state.Name) (g []state.Grant) {
			results[i].Answer, g = s.Poll(now, w)
			return g
		})
	}
	return results
}

// NextToken implements driver.FencingSource.
func (d *Driver) NextToken(ctx context.Context, n driver.Name, floor driver.Token) (t driver.Token, err error) {
	err = d.step(ctx, n, func(now state.Now, s *state.Name) []state.Grant {
		t = s.NextToken(now, floor)
		return nil
	})
	return t, err
}

// Advance implements driver.FencingSource.
func (d *Driver) Advance(ctx context.Context, n driver.Name, floor driver.Token) error {
	return d.step(ctx, n, func(_ state.Now, s *state.Name) []state.Grant {
		s.Advance(floor)
		return nil
	})
}

// List implements driver.Lister.
func (d *Driver) List(ctx context.Context, only driver.Name, yield func(driver.Holding) bool) error {
	if err := ctx.Err(); err != nil {
		return driver.Unavailable(err)
	}
	var held []driver.Holding
	d.store.mu.Lock()
	if d.store.driver[d.id] == nil {
		d.store.mu.Unlock()
		return errClosed
	}
	now := d.store.now()
	for n, s := range d.store.names {
		if only.Name != "" && n != only {
			continue
		}
		for _, h := range s.Live(now) {
			held = append(held, driver.Holding{Owner: driver.Owner{Name: n, ID: h.ID}, Token: h.Token,
				Left: time.Duration(h.Expires - now.Lease), Holder: h.Info})
		}
	}
	d.store.mu.Unlock()
	for _, h := range held {
		if !yield(h) {
			break
		}
	}
	return nil
}

// ForceUnlock implements driver.ForceUnlocker.
func (d *Driver) ForceUnlock(ctx context.Context, n driver.Name) (ended int, err error) {
	err = d.step(ctx, n, func(now state.Now, s *state.Name) (g []state.Grant) {
		ended, g = s.ForceUnlock(now)
		return g
	})
	return ended, err
}

// shared holds the stores that have a name. One is dropped when its last driver is closed.
var shared = struct {
	sync.Mutex
	stores map[string]*sharedStore
}{stores: make(map[string]*sharedStore)}

type sharedStore struct {
	*Store
	drivers int
}

func open(_ context.Context, u *url.URL) (driver.Driver, error) {
	if err := driver.NewParams(u).Err(); err != nil {
		return nil, err
	}
	if u.Path != "" || u.User != nil || u.Opaque != "" || u.Fragment != "" {
		return nil, driver.Invalid("url", u.Redacted(), "must be memory: or memory://name")
	}
	if u.Host == "" {
		return New(NewStore()), nil
	}
	shared.Lock()
	defer shared.Unlock()
	s := shared.stores[u.Host]
	if s == nil {
		s = &sharedStore{Store: NewStore()}
		shared.stores[u.Host] = s
	}
	s.drivers++
	d := New(s.Store)
	d.leave = func() {
		shared.Lock()
		defer shared.Unlock()
		if s.drivers--; s.drivers == 0 {
			delete(shared.stores, u.Host)
		}
	}
	return d, nil
}
