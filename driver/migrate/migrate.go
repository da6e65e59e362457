// Package migrate moves an application from one backend to another while it runs: a driver over two
// drivers, in one of three phases.
//
//	from	everything on the old backend
//	both	a holder holds on both
//	to	everything on the new backend
//
// Clients of neighbouring phases share a backend, so they exclude each other: all clients are restarted, one
// after another, first from "from" to "both", and when none is left in "from", to "to"; the way back is the
// same. By URL, a client is opened with
//
//	migrate://?from=<URL, escaped>&to=<URL, escaped>&phase=both
//
// # Guarantees
//
// In phases from and to, those of the one backend. In phase both a lease is held on both backends and lost
// with either; its token is the new backend's, and is greater than all that the old one has given and less
// than all that it will give. So exclusion and tokens hold across the whole migration, forth and back. A
// client two phases away from a live one is refused when it opens, with an error matching [ErrPhase]. One
// that was stopped meanwhile, and wakes too late, has lost all leases and gets no new ones.
//
// # Options
//
// [Options], and as URL parameters from, to, phase and phase_ttl.
//
// # Errors
//
// Those of the two backends. In phase both every step fails if either backend does. What one backend refused
// after the other one has acted is of unknown outcome, unless it was undone.
//
// # Fencing
//
// Both backends must mint tokens. The floor, and the memory of the last token, pass from one to the other.
//
// # What it does not do
//
// It cannot see clients that use one of the backends by its own driver: before a migration begins, all are
// restarted with phase=from; after it has ended, all with the URL of the new backend. Both backends must
// answer when a client opens, in every phase. In phase both waiters are queued only if both backends do that; if not,
// a waiter may have to wait until the clients that queue on one backend leave a gap. On a semaphore of more than
// one permit, and from NextToken, a client in phase from and one in phase both may get the same token if both
// backends mint it in the same microsecond and the first gives it back at once. In phases from and to a token is passed on
// only if it is ahead of the client's own clock: where clients' clocks are ahead, which those of Redlock's tokens follow
// by up to a minute, take the next step later by as much.
package migrate

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/driver"
)

func init() { driver.Register("migrate", open) }

// Phase is how far a client has migrated.
type Phase string

// The phases, in their order.
const (
	From Phase = "from" // on the old backend
	Both Phase = "both" // on the old and the new backend
	To   Phase = "to"   // on the new backend
)

// ParsePhase reads a phase. Its error matches [driver.ErrInvalid].
func ParsePhase(s string) (Phase, error) {
	if p := Phase(s); p.index() >= 0 {
		return p, nil
	}
	return "", driver.Invalid("phase", s, "must be from, both or to")
}

// index is the phase's place in the order, negative if it is none.
func (p Phase) index() int {
	switch p {
	case From:
		return 0
	case Both:
		return 1
	case To:
		return 2
	}
	return -1
}

// backends answers those that clients of the phase use, and those that they only look at.
func (p Phase) backends(old, young *backend) (uses, looks []*backend) {
	switch p {
	case From:
		return []*backend{old}, []*backend{young}
	case To:
		return []*backend{young}, []*backend{old}
	}
	return []*backend{old, young}, nil
}

// apart reports whether clients of the two phases share no backend.
func (p Phase) apart(q Phase) bool { return p != Both && q != Both && p != q }

// ErrPhase says that a client is refused, or a step of the migration cannot be taken, because of live clients
// two phases away.
var ErrPhase = errors.New("clients two phases away are live")

// Options says how to migrate.
type Options struct {
	// Phase is that of this client. There is no default.
	Phase Phase

	// PhaseTTL is how long a client counts as live that does not say so any more, because it crashed for
	// example; it holds up the migration for so long. It is renewed every third of it. A lease with a longer
	// TTL makes it longer. Default 1 min, from 10 ms (or the backends' shortest TTL) to 24 h.
	PhaseTTL time.Duration
}

// DefaultPhaseTTL is the default of Options.PhaseTTL.
const DefaultPhaseTTL = time.Minute

const (
	minTTL = 10 * time.Millisecond
	maxTTL = 24 * time.Hour
)

// New makes a driver that migrates from one backend to another, and registers it as a client of the phase
// with both backends, for which ctx bounds the requests. Both drivers then belong to it: Close closes them.
//
// Errors match [ErrPhase] and [driver.ErrUnavailable] if a client two phases away is live, [driver.ErrInvalid]
// for wrong options, and [errors.ErrUnsupported] for a backend that has no semaphores, tokens or listing; others
// are the backends'. After an error the drivers are left as they are, with nothing stored on the backends for longer
// than one PhaseTTL.
func New(ctx context.Context, from, to driver.Driver, o *Options) (driver.Driver, error) {
	if o == nil {
		o = &Options{}
	}
	if _, err := ParsePhase(string(o.Phase)); err != nil {
		return nil, err
	}
	old, young, err := newBackends(from, to)
	if err != nil {
		return nil, err
	}
	d := &migration{old: old, young: young}
	uses, looks := o.Phase.backends(old, young)
	d.steps = uses[0]
	if o.Phase == Both {
		d.pair = newPair(old, young)
		d.steps = d.pair
	}
	d.info = info(uses)
	ttl := o.PhaseTTL
	if ttl == 0 {
		ttl = max(DefaultPhaseTTL, d.info.MinTTL)
	}
	if least := max(minTTL, d.info.MinTTL); ttl < least || ttl > maxTTL {
		return nil, driver.Invalid("PhaseTTL", ttl, fmt.Sprintf("must be %v to %v", least, maxTTL))
	}
	d.member = newMember(o.Phase, uses, looks, ttl)
	if err := d.member.open(ctx); err != nil {
		return nil, err
	}
	d.high.single = o.Phase != Both
	return d.layers(uses), nil
}

// info is what all of the backends promise.
func info(uses []*backend) driver.Info {
	all := uses[0].Info()
	for _, b := range uses[1:] {
		i := b.Info()
		all.MinTTL = max(all.MinTTL, i.MinTTL)
		all.Deadlines = all.Deadlines && i.Deadlines
		all.Durable = all.Durable && i.Durable
		all.Replicated = all.Replicated && i.Replicated
	}
	all.Backend = "migrate"
	return all
}

func open(ctx context.Context, u *url.URL) (driver.Driver, error) {
	p := driver.NewParams(u)
	from, to := p.String("from", ""), p.String("to", "")
	o := Options{Phase: Phase(p.String("phase", "")), PhaseTTL: p.Duration("phase_ttl", 0)}
	if err := p.Err(); err != nil {
		return nil, err
	}
	if u.Host != "" || u.Path != "" || u.User != nil || u.Opaque != "" || u.Fragment != "" {
		return nil, driver.Invalid("url", u.Scheme, "must be migrate://?from=...&to=...&phase=... with escaped URLs")
	}
	if _, err := ParsePhase(string(o.Phase)); err != nil {
		return nil, err
	}
	old, err := driver.Open(ctx, from)
	if err != nil {
		return nil, fmt.Errorf("url parameter from: %w", err)
	}
	young, err := driver.Open(ctx, to)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("url parameter to: %w", err), old.Close())
	}
	d, err := New(ctx, old, young, &o)
	if err != nil {
		return nil, errors.Join(err, young.Close(), old.Close())
	}
	return d, nil
}

// steps is what a phase does: on one backend or on the pair.
type steps interface {
	acquire(context.Context, driver.Request) (driver.Answer, error)
	extend(context.Context, []driver.Extension) []driver.Result
	release(context.Context, driver.Owner) (bool, error)
	poll(context.Context, []driver.Poll) []driver.Result
	nextToken(context.Context, driver.Name, driver.Token) (driver.Token, error)
	advance(context.Context, driver.Name, driver.Token) error
	list(context.Context, driver.Name, func(driver.Holding) bool) error
	forceUnlock(context.Context, driver.Name) (int, error)
	notify(func(driver.Event))
}

// migration is what every phase has; what only some backends can is added by layers.
type migration struct {
	steps
	pair       *pair // the steps of phase both; nil in the others
	old, young *backend
	info       driver.Info
	member     *member
	high       highMark
	closing    sync.Once
}

// layers adds what the backends can besides, each as a wrapper that [driver.As] looks through (C1).
func (d *migration) layers(uses []*backend) driver.Driver {
	queue, notify, force := true, true, true
	for _, b := range uses {
		queue = queue && b.queue != nil
		notify = notify && b.notifier != nil
		force = force && b.force != nil
	}
	for _, b := range uses {
		// Where only one of them queues, waiters stand nowhere, and nobody tells them.
		notify = notify && queue == (b.queue != nil)
	}
	var top driver.Driver = d
	if force {
		top = forcing{top, d}
	}
	if queue {
		top = queueing{top, d}
	}
	if notify {
		top = notifying{top, d}
	}
	return top
}

// Info implements driver.Driver.
func (d *migration) Info() driver.Info { return d.info }

// Close implements driver.Driver. It takes the client out of the phase and closes both drivers.
func (d *migration) Close() error {
	var err error
	d.closing.Do(func() {
		if d.pair != nil {
			d.pair.close()
		}
		d.member.close()
		err = errors.Join(d.young.Close(), d.old.Close())
	})
	return err
}

// Lock implements driver.Locker.
func (d *migration) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	if err := checkName(r.Name); err != nil {
		return driver.Answer{}, err
	}
	began := d.member.clock.Now()
	until, err := d.member.ensure(ctx, r.TTL)
	if err != nil {
		// Nothing was sent for this owner.
		return driver.Answer{}, driver.Unavailable(err)
	}
	r.Floor = max(r.Floor, driver.Token(d.member.floor.Load()))
	a, err := d.acquire(ctx, r)
	if err != nil || a.State != driver.Granted {
		return a, err
	}
	if err := d.high.note(ctx, d.steps, a.Token); err != nil {
		return driver.Answer{}, uncertain(err)
	}
	a.TTL = min(a.TTL, time.Duration(until-began))
	return a, nil
}

// Acquire implements driver.Semaphore.
func (d *migration) Acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return d.Lock(ctx, r)
}

// Extend implements driver.Locker.
func (d *migration) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	longest := time.Duration(0)
	for _, e := range leases {
		longest = max(longest, e.TTL)
	}
	return d.bounded(ctx, longest, len(leases), func() []driver.Result { return d.extend(ctx, leases) })
}

// Release implements driver.Locker.
func (d *migration) Release(ctx context.Context, o driver.Owner) (bool, error) {
	return d.release(ctx, o)
}

// bounded does a batch, and lets no lease live longer than the phase lease.
func (d *migration) bounded(ctx context.Context, ttl time.Duration, n int, batch func() []driver.Result) []driver.Result {
	began := d.member.clock.Now()
	until, err := d.member.ensure(ctx, ttl)
	if err != nil {
		results := make([]driver.Result, n)
		for i := range results {
			results[i].Err = driver.Unavailable(err)
		}
		return results
	}
	results := batch()
	for i := range results {
		r := &results[i]
		if r.Err != nil || r.State != driver.Granted {
			continue
		}
		if err := d.high.note(ctx, d.steps, r.Token); err != nil {
			*r = driver.Result{Err: uncertain(err)}
			continue
		}
		r.TTL = min(r.TTL, time.Duration(until-began))
	}
	return results
}

// NextToken implements driver.FencingSource.
func (d *migration) NextToken(ctx context.Context, n driver.Name, floor driver.Token) (driver.Token, error) {
	if err := checkName(n); err != nil {
		return 0, err
	}
	until, err := d.member.ensure(ctx, 0)
	if err != nil {
		return 0, driver.Unavailable(err)
	}
	t, err := d.nextToken(ctx, n, max(floor, driver.Token(d.member.floor.Load())))
	if err == nil {
		err = d.high.note(ctx, d.steps, t)
	}
	if err == nil && d.member.clock.Now() >= until {
		err = errors.New("the phase lease ended while the token was minted")
	}
	if err != nil {
		return 0, err
	}
	return t, nil
}

// Advance implements driver.FencingSource.
func (d *migration) Advance(ctx context.Context, n driver.Name, floor driver.Token) error {
	if err := checkName(n); err != nil {
		return err
	}
	return d.advance(ctx, n, floor)
}

// List implements driver.Lister. It leaves out what this package stores for itself.
func (d *migration) List(ctx context.Context, n driver.Name, yield func(driver.Holding) bool) error {
	return d.list(ctx, n, func(h driver.Holding) bool { return reserved(h.Name) || yield(h) })
}

// Unwrap of the layers leads to what is below.

type forcing struct {
	driver.Driver
	d *migration
}

func (l forcing) Unwrap() driver.Driver { return l.Driver }

// ForceUnlock implements driver.ForceUnlocker.
func (l forcing) ForceUnlock(ctx context.Context, n driver.Name) (int, error) {
	if err := checkName(n); err != nil {
		return 0, err
	}
	return l.d.forceUnlock(ctx, n)
}

type queueing struct {
	driver.Driver
	d *migration
}

func (l queueing) Unwrap() driver.Driver { return l.Driver }

// Poll implements driver.Queue.
func (l queueing) Poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	longest := time.Duration(0)
	for _, w := range waiters {
		longest = max(longest, w.TTL)
	}
	return l.d.bounded(ctx, longest, len(waiters), func() []driver.Result { return l.d.poll(ctx, waiters) })
}

type notifying struct {
	driver.Driver
	d *migration
}

func (l notifying) Unwrap() driver.Driver { return l.Driver }

// Notify implements driver.Notifier.
func (l notifying) Notify(sink func(driver.Event)) { l.d.notify(sink) }

// Names that this package uses for itself begin like this.
const prefix = "fencelock.migrate/"

var (
	phaseName = driver.Name{Kind: driver.KindPermit, Name: prefix + "phase"} // of phase leases
	clockName = driver.Name{Kind: driver.KindLock, Name: prefix + "clock"}   // its tokens tell the server's clock
	floorName = driver.Name{Kind: driver.KindLock, Name: prefix + "floor"}   // makes tokens follow the clock
	highName  = driver.Name{Kind: driver.KindLock, Name: prefix + "high"}    // its last token is not below those that ran ahead
)

func reserved(n driver.Name) bool { return strings.HasPrefix(n.Name, prefix) }

func checkName(n driver.Name) error {
	if reserved(n) {
		return driver.Invalid("name", n.Name, "names that begin with "+prefix+" are reserved")
	}
	return nil
}
