package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

// The steps of a driver, by the names that faults and counts go by. Acquire counts as Lock.
const (
	stepLock        = "Lock"
	stepExtend      = "Extend"
	stepRelease     = "Release"
	stepPoll        = "Poll"
	stepNextToken   = "NextToken"
	stepAdvance     = "Advance"
	stepList        = "List"
	stepForceUnlock = "ForceUnlock"
)

// faults is a driver that passes each step on to another one, counts it, and does to it what a test says:
// so the faults that need no wire can be had on every driver. It has the optional interfaces that the other
// one has, each in a link of its own that [driver.As] finds.
type faults struct {
	inner driver.Driver
	next  driver.Driver // the first link, or nil

	mu       sync.Mutex
	rules    map[string][]*fault
	calls    map[string]int
	owners   map[string]int             // calls, a batch counting each of its owners
	answered map[string]int             // calls that got a reply
	running  map[string]int             // calls under way
	most     map[string]int             // the most calls that were under way at a time
	extended map[string]int             // extensions by owner id
	last     driver.Owner               // who asked for a lock last
	onPush   func(driver.Event) []event // nil: pass it on
	sink     func(driver.Event)
	healed   chan struct{} // closed when all faults end
}

type event = driver.Event

// fault is what happens to a step.
type fault struct {
	times int // how many calls it hits; 0 is all

	before <-chan struct{} // the request arrives at the server when this is closed, whatever its context says
	skip   bool            // the request never arrives
	after  <-chan struct{} // the reply arrives at the client when this is closed, whatever its context says
	silent bool            // no reply: the call ends with its context
	err    error           // what the client gets instead of the reply

	hits int
	at   time.Time     // when the first call that it hits came
	came chan struct{} // closed then
	hit  chan struct{} // closed when that call has been executed, or has been kept from it
}

var errNoReply = errors.New("the connection broke before the reply came")
var errRefused = driver.Unavailable(errors.New("the server refuses everything"))

// The faults: the server executed the step or not, and the client gets what.
func lostReply() *fault   { return &fault{err: errNoReply} }
func lostRequest() *fault { return &fault{skip: true, err: errNoReply} }
func refusal() *fault     { return &fault{skip: true, err: errRefused} }
func silence() *fault     { return &fault{skip: true, silent: true} }

// hang is a client library that does not look at the context: the call ends with heal.
func (f *faults) hang() *fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &fault{skip: true, after: f.healed, err: errNoReply}
}

// late delays the request, and lateReply the reply, until the channel is closed.
func late(until <-chan struct{}) *fault      { return &fault{before: until} }
func lateReply(until <-chan struct{}) *fault { return &fault{after: until} }

// once limits a fault to the next call.
func once(f *fault) *fault {
	f.times = 1
	return f
}

// newFaults wraps d.
func newFaults(d driver.Driver) *faults {
	f := &faults{inner: d, rules: make(map[string][]*fault), calls: make(map[string]int),
		owners: make(map[string]int), answered: make(map[string]int), running: make(map[string]int), most: make(map[string]int),
		extended: make(map[string]int), healed: make(chan struct{})}
	if x, ok := driver.As[driver.Semaphore](d); ok {
		f.next = &semaphoreLink{link{f, f.next}, x}
	}
	if x, ok := driver.As[driver.FencingSource](d); ok {
		f.next = &fencingLink{link{f, f.next}, x}
	}
	if x, ok := driver.As[driver.Queue](d); ok {
		f.next = &queueLink{link{f, f.next}, x}
	}
	if x, ok := driver.As[driver.Notifier](d); ok {
		f.next = &notifierLink{link{f, f.next}, x}
	}
	if x, ok := driver.As[driver.Lister](d); ok {
		f.next = &listerLink{link{f, f.next}, x}
	}
	if x, ok := driver.As[driver.ForceUnlocker](d); ok {
		f.next = &forceLink{link{f, f.next}, x}
	}
	return f
}

// faulty makes a client whose driver can be disturbed. All faults end with the test.
func (t *T) faulty(opts ...fencelock.ClientOption) (*fencelock.Client, *faults) {
	t.Helper()
	return t.faultyOn(t.Driver(t.TB), opts...)
}

func (t *T) faultyOn(d driver.Driver, opts ...fencelock.ClientOption) (*fencelock.Client, *faults) {
	t.Helper()
	f := newFaults(d)
	c := t.clientOn(f, opts...)
	t.Cleanup(f.heal)
	return c, f
}

// on adds a fault. Of several for one step the first that is not used up hits.
func (f *faults) on(step string, x *fault) *fault {
	x.came, x.hit = make(chan struct{}), make(chan struct{})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules[step] = append(f.rules[step], x)
	return x
}

// all adds a fault to each step of several.
func (f *faults) all(make func() *fault, steps ...string) {
	for _, s := range steps {
		f.on(s, make())
	}
}

// heal ends all faults; what hangs goes on.
func (f *faults) heal() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = make(map[string][]*fault)
	close(f.healed)
	f.healed = make(chan struct{})
}

// count answers how often a step was called.
func (f *faults) count(step string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[step]
}

// awaitReply waits until a step has been answered so many times.
func (t *T) awaitReply(f *faults, step string, times int) {
	t.Helper()
	t.eventually(patience, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if n := f.answered[step]; n < times {
			return fmt.Errorf("replies to step %s: got %d, want %d", step, n, times)
		}
		return nil
	})
}

// requests answers how many steps were called.
func (f *faults) requests() (sum int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, n := range f.calls {
		sum += n
	}
	return sum
}

// extensions answers how often an owner was asked to be extended.
func (f *faults) extensions(o driver.Owner) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.extended[o.ID]
}

// atOnce answers how many calls of a step were under way at the same time.
func (f *faults) atOnce(step string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.most[step]
}

// owner answers who asked for a lock last.
func (f *faults) owner() driver.Owner {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last
}

// pushes sets what becomes of an event; nil passes it on.
func (f *faults) pushes(change func(driver.Event) []event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.onPush = change
}

// noEvents drops everything that the server tells.
func noEvents(driver.Event) []event { return nil }

// push gives an event to the client as the driver would.
func (f *faults) push(e driver.Event) {
	f.mu.Lock()
	sink := f.sink
	f.mu.Unlock()
	if sink != nil {
		sink(e)
	}
}

// rule counts a call and answers the fault that hits it.
func (f *faults) rule(step string, owners int) *fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[step]++
	f.owners[step] += owners
	f.running[step]++
	f.most[step] = max(f.most[step], f.running[step])
	for _, x := range f.rules[step] {
		if x.times == 0 || x.hits < x.times {
			if x.hits++; x.hits == 1 {
				x.at = time.Now()
				close(x.came)
			}
			return x
		}
	}
	return nil
}

// through passes a step on as the fault says.
func through[R any](ctx context.Context, f *faults, step string, owners int, run func(context.Context) (R, error)) (r R, err error) {
	var none R
	x := f.rule(step, owners)
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.running[step]--
		if err == nil {
			f.answered[step]++
		}
	}()
	if x == nil {
		return run(ctx)
	}
	if x.before != nil {
		<-x.before
		ctx = context.WithoutCancel(ctx)
	}
	if !x.skip {
		r, err = run(ctx)
	}
	f.mu.Lock()
	select {
	case <-x.hit:
	default:
		close(x.hit)
	}
	f.mu.Unlock()
	if x.after != nil {
		<-x.after
	}
	if x.silent {
		<-ctx.Done()
		return none, ctx.Err()
	}
	if x.err != nil {
		return none, x.err
	}
	return r, err
}

// batch is through for a step that answers results.
func (f *faults) batch(ctx context.Context, step string, owners int, run func(context.Context) []driver.Result) []driver.Result {
	results, err := through(ctx, f, step, owners, func(ctx context.Context) ([]driver.Result, error) { return run(ctx), nil })
	if err != nil {
		results = make([]driver.Result, owners)
		for i := range results {
			results[i].Err = err
		}
	}
	return results
}

func (f *faults) Unwrap() driver.Driver { return f.next }
func (f *faults) Close() error          { return f.inner.Close() }

// Info is the driver's, but for what a fault does not keep to.
func (f *faults) Info() driver.Info {
	i := f.inner.Info()
	i.Deadlines = false
	return i
}

func (f *faults) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	f.note(r)
	return through(ctx, f, stepLock, 1, func(ctx context.Context) (driver.Answer, error) { return f.inner.Lock(ctx, r) })
}

func (f *faults) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	f.mu.Lock()
	for _, l := range leases {
		f.extended[l.ID]++
	}
	f.mu.Unlock()
	return f.batch(ctx, stepExtend, len(leases), func(ctx context.Context) []driver.Result { return f.inner.Extend(ctx, leases) })
}

func (f *faults) Release(ctx context.Context, o driver.Owner) (bool, error) {
	return through(ctx, f, stepRelease, 1, func(ctx context.Context) (bool, error) { return f.inner.Release(ctx, o) })
}

func (f *faults) note(r driver.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last = r.Owner
}

// link is a driver that adds one optional interface to faults.
type link struct {
	*faults
	then driver.Driver
}

func (l link) Unwrap() driver.Driver { return l.then }

type semaphoreLink struct {
	link
	s driver.Semaphore
}

func (l *semaphoreLink) Acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	l.note(r)
	return through(ctx, l.faults, stepLock, 1, func(ctx context.Context) (driver.Answer, error) { return l.s.Acquire(ctx, r) })
}

type fencingLink struct {
	link
	s driver.FencingSource
}

func (l *fencingLink) NextToken(ctx context.Context, n driver.Name, floor driver.Token) (driver.Token, error) {
	return through(ctx, l.faults, stepNextToken, 1, func(ctx context.Context) (driver.Token, error) {
		return l.s.NextToken(ctx, n, floor)
	})
}

func (l *fencingLink) Advance(ctx context.Context, n driver.Name, floor driver.Token) error {
	_, err := through(ctx, l.faults, stepAdvance, 1, func(ctx context.Context) (any, error) {
		return nil, l.s.Advance(ctx, n, floor)
	})
	return err
}

type queueLink struct {
	link
	q driver.Queue
}

func (l *queueLink) Poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	return l.batch(ctx, stepPoll, len(waiters), func(ctx context.Context) []driver.Result { return l.q.Poll(ctx, waiters) })
}

type notifierLink struct {
	link
	n driver.Notifier
}

func (l *notifierLink) Notify(sink func(driver.Event)) {
	l.mu.Lock()
	l.sink = sink
	l.mu.Unlock()
	l.n.Notify(func(e driver.Event) {
		l.mu.Lock()
		change := l.onPush
		l.mu.Unlock()
		if change == nil {
			sink(e)
			return
		}
		for _, e := range change(e) {
			sink(e)
		}
	})
}

type listerLink struct {
	link
	l driver.Lister
}

func (l *listerLink) List(ctx context.Context, n driver.Name, yield func(driver.Holding) bool) error {
	_, err := through(ctx, l.faults, stepList, 1, func(ctx context.Context) (any, error) {
		return nil, l.l.List(ctx, n, yield)
	})
	return err
}

type forceLink struct {
	link
	f driver.ForceUnlocker
}

func (l *forceLink) ForceUnlock(ctx context.Context, n driver.Name) (int, error) {
	return through(ctx, l.faults, stepForceUnlock, 1, func(ctx context.Context) (int, error) { return l.f.ForceUnlock(ctx, n) })
}

// bare hides all optional interfaces of a driver: what is left is a driver that only locks, to which the
// engine must do without queue and pushes.
type bare struct{ d driver.Driver }

func (b bare) Info() driver.Info { return b.d.Info() }
func (b bare) Close() error      { return b.d.Close() }
func (b bare) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return b.d.Lock(ctx, r)
}
func (b bare) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	return b.d.Extend(ctx, leases)
}
func (b bare) Release(ctx context.Context, o driver.Owner) (bool, error) { return b.d.Release(ctx, o) }

// permitsOnly is bare with semaphores.
type permitsOnly struct {
	bare
	driver.Semaphore
}

// withoutQueue makes a driver that neither queues nor tells, of a new connection.
func (t *T) withoutQueue() driver.Driver {
	d := t.Driver(t.TB)
	if s, ok := driver.As[driver.Semaphore](d); ok {
		return permitsOnly{bare{d}, s}
	}
	return bare{d}
}
