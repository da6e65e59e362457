package migrate

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/internal/leaseclock"
)

// Status is where a migration stands. It is no snapshot.
type Status struct {
	// Phase is the one that [Advance] or [Rollback] recorded; without a record, the one furthest on of all clients;
	// without clients, From.
	Phase Phase

	// Clients are all that are live, in the order of phase, host, pid and id.
	Clients []Client

	// Old and New are the backends.
	Old, New Backend

	// Advance and Rollback say whether the next step and the step back are safe now.
	Advance, Rollback Step
}

// Client is one client of the migration.
type Client struct {
	ID    string
	Phase Phase
	Host  string
	PID   int
	Since time.Time // by its own wall clock

	// Heard is how long ago it renewed its phase lease, at least; Left is how long it counts as live.
	Heard, Left time.Duration
}

// String tells the phase, host and process.
func (c Client) String() string {
	return fmt.Sprintf("phase %s, host %s, pid %d", c.Phase, c.Host, c.PID)
}

// Backend is one of the two.
type Backend struct {
	// Name is its driver's: "redis", "etcd".
	Name string

	// Recorded is the phase recorded there, empty if none is.
	Recorded Phase

	// Held is what is held there, without phase leases. A waiter of phase both that has the old lock and not yet the
	// new one is among them.
	Held []driver.Holding
}

// Step is a move to a neighbouring phase.
type Step struct {
	// Target is the phase that the step leads to; empty if there is none further on.
	Target Phase

	// Safe says that no client two phases away is live. The step may still wait for a backend's clock, usually
	// a tenth of a second.
	Safe bool

	// Waits says what it waits for, empty if it is safe.
	Waits string
}

// ReadStatus reads where a migration stands. The drivers are those of the old and the new backend themselves, in the
// namespaces that the clients use; they stay the caller's, as in [Advance] and [Rollback]. Errors are as those of [New].
func ReadStatus(ctx context.Context, from, to driver.Driver) (*Status, error) {
	o, err := newOperator(from, to)
	if err != nil {
		return nil, err
	}
	return o.status(ctx)
}

// Advance records the next phase in both backends, from then on refuses new clients two phases away from it, and
// waits until none is left; a step to phase to also waits until the new backend's clock has passed the greatest token of
// the old one. Then clients of the phase it answers can be started. It may be repeated; each success is a step on.
//
// If ctx ends first, nothing is changed, and the error matches ctx.Err() and says what was waited for. In phase to
// there is no further step: the error matches [driver.ErrInvalid]. Others are as those of [New].
func Advance(ctx context.Context, from, to driver.Driver) (Phase, error) {
	return move(ctx, from, to, +1)
}

// Rollback is Advance in the other direction. A step back to phase from also waits until the old backend's clock has
// passed the greatest token of the new one.
func Rollback(ctx context.Context, from, to driver.Driver) (Phase, error) {
	return move(ctx, from, to, -1)
}

// recordTTL is how long a recorded phase is remembered. Safety does not rest on it: it lies in the phase leases of live
// clients.
const recordTTL = maxTTL

// An operation that waits looks again after these times, the latter after a while.
const (
	firstLook = 50 * time.Millisecond
	laterLook = time.Second
)

type operator struct{ old, young *backend }

func newOperator(from, to driver.Driver) (*operator, error) {
	old, young, err := newBackends(from, to)
	if err != nil {
		return nil, err
	}
	return &operator{old, young}, nil
}

var order = []Phase{From, Both, To}

func (p Phase) step(by int) Phase {
	if i := p.index() + by; i >= 0 && i < len(order) {
		return order[i]
	}
	return ""
}

// record is a recorded phase as it is stored.
type record struct {
	owner driver.Owner
	phase Phase
	token driver.Token
}

// seen is what the phase leases tell.
type seen struct {
	clients []Client
	records []record
	on      map[*backend]Phase // recorded there
}

// phase is the present one.
func (s *seen) phase() Phase {
	if len(s.records) > 0 {
		return s.records[len(s.records)-1].phase
	}
	p := From
	for _, c := range s.clients {
		if c.Phase.index() > p.index() {
			p = c.Phase
		}
	}
	return p
}

func (o *operator) look(ctx context.Context) (*seen, error) {
	s := &seen{on: make(map[*backend]Phase)}
	known := make(map[string]bool)
	for _, b := range []*backend{o.old, o.young} {
		newest := driver.Token(0)
		if err := b.list(ctx, phaseName, func(h driver.Holding) bool {
			c := readCard(h.Holder)
			if c.Record && h.Token > newest {
				newest, s.on[b] = h.Token, c.Phase
			}
			if c.Phase == "" || known[h.ID] {
				return true
			}
			known[h.ID] = true
			if c.Record {
				s.records = append(s.records, record{h.Owner, c.Phase, h.Token})
				return true
			}
			s.clients = append(s.clients, Client{ID: h.ID, Phase: c.Phase, Host: c.Host, PID: c.PID, Since: c.Since,
				Heard: max(0, time.Duration(c.TTL)*time.Millisecond-h.Left), Left: h.Left})
			return true
		}); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(s.records, func(a, b record) int { return cmp.Compare(a.token, b.token) })
	slices.SortFunc(s.clients, func(a, b Client) int {
		return cmp.Or(cmp.Compare(a.Phase.index(), b.Phase.index()), cmp.Compare(a.Host, b.Host), cmp.Compare(a.PID, b.PID), cmp.Compare(a.ID, b.ID))
	})
	return s, nil
}

func (o *operator) status(ctx context.Context) (*Status, error) {
	s, err := o.look(ctx)
	if err != nil {
		return nil, err
	}
	st := &Status{Phase: s.phase(), Clients: s.clients}
	for _, side := range []struct {
		b   *backend
		out *Backend
	}{{o.old, &st.Old}, {o.young, &st.New}} {
		side.out.Name, side.out.Recorded = side.b.Info().Backend, s.on[side.b]
		if err := side.b.list(ctx, driver.Name{}, func(h driver.Holding) bool {
			if !reserved(h.Name) {
				side.out.Held = append(side.out.Held, h)
			}
			return true
		}); err != nil {
			return nil, err
		}
	}
	for _, step := range []struct {
		by  int
		out *Step
	}{{+1, &st.Advance}, {-1, &st.Rollback}} {
		step.out.Target = st.Phase.step(step.by)
		if step.out.Target == "" {
			step.out.Waits = "there is no phase further on"
			continue
		}
		waits, err := o.waits(ctx, step.out.Target, nil)
		if err != nil {
			return nil, err
		}
		step.out.Safe, step.out.Waits = waits == "", waits
	}
	return st, nil
}

// waits says what stands in the way of clients in the phase, empty if nothing does. passed is the token that the clock of
// the phase's own backend must have passed, zero if it is to be asked for; nil: only clients matter.
func (o *operator) waits(ctx context.Context, target Phase, passed *driver.Token) (string, error) {
	uses, looks := target.backends(o.old, o.young)
	if len(looks) == 0 {
		return "", nil
	}
	s, err := o.look(ctx)
	if err != nil {
		return "", err
	}
	var apart []string
	for _, c := range s.clients {
		if target.apart(c.Phase) {
			apart = append(apart, c.String())
		}
	}
	if len(apart) > 0 {
		return fmt.Sprintf("clients two phases away: %s", strings.Join(apart, "; ")), nil
	}
	if passed == nil {
		return "", nil
	}
	if *passed == 0 {
		if *passed, err = greatest(ctx, looks[0]); err != nil {
			return "", err
		}
	}
	clock, err := uses[0].nextToken(ctx, clockName, 0)
	if err == nil && clock <= *passed && time.Now().UnixMicro() > int64(*passed) {
		// Tokens of etcd follow the clock only now and then, all together, or where a floor asks for it. Elsewhere a
		// floor is that of one name, and nothing comes of it.
		if err = uses[0].advance(ctx, floorName, *passed); err == nil {
			clock, err = uses[0].nextToken(ctx, clockName, 0)
		}
	}
	if err != nil {
		return "", err
	}
	if clock <= *passed {
		return fmt.Sprintf("the clock of the %s backend, which must pass the greatest token of the %s one, in %v",
			uses[0].which, looks[0].which, time.Duration(*passed-clock+1)*time.Microsecond), nil
	}
	return "", nil
}

// move takes a step.
func move(ctx context.Context, from, to driver.Driver, by int) (Phase, error) {
	o, err := newOperator(from, to)
	if err != nil {
		return "", err
	}
	before, err := o.look(ctx)
	if err != nil {
		return "", err
	}
	target := before.phase().step(by)
	if target == "" {
		return "", driver.Invalid("phase", string(before.phase()), "there is no phase further on")
	}
	uses, _ := target.backends(o.old, o.young)
	owner := driver.Owner{Name: phaseName, ID: rand.Text()}
	undo := func(err error) (Phase, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
		defer cancel()
		for _, b := range uses {
			if _, failed := b.release(ctx, owner); failed != nil {
				err = errors.Join(err, failed)
			}
		}
		return "", fmt.Errorf("migrate: phase %s: %w", target, err)
	}
	// Recorded first: from now on no client two phases away can begin.
	if _, err := join(ctx, leaseclock.New(), uses, driver.Request{
		Owner: owner, TTL: recordTTL, Limit: everybody, Holder: newCard(target, recordTTL, true).text(),
	}); err != nil {
		return undo(err)
	}
	var passed driver.Token
	last := "" // what was waited for
	for pause := firstLook; ; pause = min(2*pause, laterLook) {
		waits, err := o.waits(ctx, target, &passed)
		switch {
		case err == nil && waits == "":
		case err == nil && ctx.Err() == nil:
			last = waits
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
			continue
		case ctx.Err() != nil && last != "":
			return undo(fmt.Errorf("%w while waiting for %s", ctx.Err(), last))
		case err == nil:
			return undo(ctx.Err())
		default:
			return undo(err)
		}
		break
	}
	for _, r := range before.records {
		for _, b := range []*backend{o.old, o.young} {
			if _, err := b.release(ctx, r.owner); err != nil {
				return target, fmt.Errorf("migrate: phase %s is recorded, but the former one as well: %w", target, err)
			}
		}
	}
	return target, nil
}
