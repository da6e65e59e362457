package history

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// A mutation breaks one law in a legal history, in place, and says so; ok is false where the history
// offers no place for it.
type mutation struct {
	name string
	law  Law
	do   func(m *mutant) (ok bool)
}

// mutant is a copy of a legal history, arranged, with what mutations look for.
type mutant struct {
	rng   *rand.Rand
	run   *run
	extra History
	drop  *Event
}

// pick returns a random attempt that fits.
func (m *mutant) pick(fits func(a *attempt) bool) *attempt {
	var all []*attempt
	for _, a := range m.run.attempts {
		if fits(a) {
			all = append(all, a)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return all[m.rng.IntN(len(all))]
}

// pair returns two random acquisitions of one resource that fit.
func (m *mutant) pair(fits func(a, b *attempt) bool) (a, b *attempt) {
	var all [][2]*attempt
	for _, res := range m.run.resources() {
		domain := m.run.domains[res]
		for _, a := range domain {
			for _, b := range domain {
				if a != b && a.lease() && b.lease() && fits(a, b) {
					all = append(all, [2]*attempt{a, b})
				}
			}
		}
	}
	if len(all) == 0 {
		return nil, nil
	}
	p := all[m.rng.IntN(len(all))]
	return p[0], p[1]
}

func (m *mutant) add(e Event) { m.extra = append(m.extra, e) }

// like is a new event of the attempt.
func like(a *attempt, typ Type, t int64) Event {
	return Event{
		T: t, Type: typ, Process: a.start.Process, Attempt: a.start.Attempt, Client: a.start.Client,
		Kind: a.start.Kind, Name: a.start.Name,
	}
}

func setToken(a *attempt, token uint64) {
	for _, e := range slices.Concat([]*Event{a.end}, a.extended, a.observed) {
		e.Token = token
	}
}

func steady(a *attempt) bool { return a.lease() && a.start.Process == "p1" } // neither stopped nor killed

// intrude adds a rival that is granted at once, at a moment of the belief of a.
func (m *mutant) intrude(a *attempt, limit int, token uint64) {
	t := a.begin + m.rng.Int64N(a.until-a.begin)
	e := Event{T: t, Type: Started, Process: "intruder", Attempt: 1, Kind: a.start.Kind, Name: a.start.Name, Limit: limit}
	m.add(e)
	e.Limit = 0
	for i, typ := range []Type{Acquired, ReleaseCalled, ReleaseReturned} {
		e.T, e.Type, e.Token, e.Result = t+int64(i), typ, 0, ""
		if typ == Acquired {
			e.Token = token
		}
		if typ == ReleaseReturned {
			e.Result = OK
		}
		m.add(e)
	}
}

// others counts the other permits of its resource that are believed all through the belief of a.
func (m *mutant) others(a *attempt) int {
	n := 0
	for _, o := range m.run.domains[resource{a.start.Kind, a.start.Name}] {
		if o != a && o.lease() && o.begin <= a.begin && o.until >= a.until {
			n++
		}
	}
	return n
}

func believes(a *attempt) bool { return a.lease() && a.begin < a.until }

var mutations = []mutation{
	{"a successor comes too early", L1, func(m *mutant) bool {
		a, b := m.pair(func(a, b *attempt) bool {
			return a.start.Kind == Lock && believes(a) && believes(b) && a.until <= b.begin
		})
		if a == nil {
			return false
		}
		b.end.T = a.begin + m.rng.Int64N(a.until-a.begin)
		b.start.T = min(b.start.T, b.end.T)
		return true
	}},
	{"a release comes too late", L1, func(m *mutant) bool {
		a, b := m.pair(func(a, b *attempt) bool {
			return a.start.Kind == Lock && believes(a) && believes(b) && a.until <= b.begin && steady(a) && len(a.releases) == 1 && a.lost == nil && a.v > b.begin
		})
		if a == nil {
			return false
		}
		a.releases[0].T = b.begin + 1
		if len(a.returns) > 0 {
			a.returns[0].T = max(a.returns[0].T, b.begin+1)
		}
		return true
	}},
	{"a rival holds as well", L1, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return believes(a) && a.start.Kind == Lock })
		if a == nil {
			return false
		}
		m.intrude(a, 0, a.end.Token+1)
		return true
	}},
	{"a permit above its limit", S1, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return believes(a) && a.start.Kind == Permit })
		if a == nil {
			return false
		}
		m.intrude(a, 1+m.rng.IntN(1+m.others(a)), a.end.Token+1)
		return true
	}},
	{"the limit was lower than granted", S1, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool {
			return believes(a) && a.start.Kind == Permit && a.start.Limit > 1 && m.full(a)
		})
		if a == nil {
			return false
		}
		a.start.Limit--
		return true
	}},
	{"a token is given again", T2, func(m *mutant) bool {
		a, b := m.pair(func(a, b *attempt) bool { return true })
		if a == nil {
			return false
		}
		setToken(a, b.end.Token)
		return true
	}},
	{"two tokens are swapped", T1, func(m *mutant) bool {
		a, b := m.pair(func(a, b *attempt) bool { return a.end.T < b.start.T })
		if a == nil {
			return false
		}
		x, y := a.end.Token, b.end.Token
		setToken(a, y)
		setToken(b, x)
		return true
	}},
	{"an extension changes the token", T3, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return len(a.extended) > 0 })
		if a == nil {
			return false
		}
		a.extended[m.rng.IntN(len(a.extended))].Token += 1 + m.rng.Uint64N(9)
		return true
	}},
	{"extended after the loss", L3, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return a.lost != nil })
		if a == nil {
			return false
		}
		e := like(a, Extended, a.lost.T+1+m.rng.Int64N(ms))
		e.Token, e.V, e.Called = a.end.Token, a.v, a.lost.T+1
		m.add(e)
		return true
	}},
	{"extended after the release", L3, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return a.lease() && len(a.releases) > 0 })
		if a == nil {
			return false
		}
		e := like(a, Extended, a.releases[0].T+1+m.rng.Int64N(ms))
		e.Token, e.V = a.end.Token, a.v
		m.add(e)
		return true
	}},
	{"V without a margin", L2, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return a.lease() && len(a.extended) == 0 })
		if a == nil {
			return false
		}
		from := a.end.T
		if a.end.Sent != 0 {
			from = a.end.Sent
		}
		a.end.V = from + int64(a.start.TTL)
		return true
	}},
	{"V moves by itself", L2, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return believes(a) && len(a.extended) == 0 })
		if a == nil {
			return false
		}
		e := like(a, Observed, a.begin+1)
		e.Result, e.Called, e.Token, e.V = Believed, a.begin, a.end.Token, a.v+2*ms+m.rng.Int64N(100*ms)
		if m.rng.IntN(2) == 0 {
			e.V = a.v - 2*ms - m.rng.Int64N(100*ms)
		}
		m.add(e)
		return true
	}},
	{"belief after V", L2, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return a.lease() })
		if a == nil {
			return false
		}
		e := like(a, Observed, a.v+2)
		e.Result, e.Called = Believed, a.v+1
		m.add(e)
		return true
	}},
	{"an extension shortens V", L4, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return believes(a) && len(a.extended) == 0 && a.until > a.begin+2 })
		if a == nil {
			return false
		}
		e := like(a, Extended, a.begin+1)
		e.Token, e.V = a.end.Token, a.v-1-m.rng.Int64N(ms)
		m.add(e)
		return true
	}},
	{"a loss is told late", L2, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return steady(a) && a.lost != nil })
		if a == nil {
			return false
		}
		a.lost.T = max(a.v, a.begin) + int64(lossTolerance) + 1
		for _, e := range slices.Concat(a.releases, a.returns) {
			e.T = a.lost.T
		}
		return true
	}},
	{"a loss is never told", L2, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return steady(a) && a.lost != nil && len(a.releases) == 0 })
		if a == nil {
			return false
		}
		m.drop = a.lost
		m.add(Event{T: max(a.v, a.begin) + int64(lossTolerance) + 1, Type: WriteRefused, Process: "p1", Resource: "r"})
		return true
	}},
	{"an attempt does not end", L7, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return a.end != nil && !a.acquired() && a.start.Process == "p1" })
		if a == nil {
			return false
		}
		m.drop = a.end
		return true
	}},
	{"a release does not return", L7, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return steady(a) && len(a.returns) > 0 })
		if a == nil {
			return false
		}
		m.drop = a.returns[0]
		return true
	}},
	{"a lease does not end", L7, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return steady(a) && a.lost != nil && len(a.releases) == 0 })
		if a == nil {
			return false
		}
		m.drop = a.lost
		return true
	}},
	{"a stale write is admitted", Guard, func(m *mutant) bool {
		for name, writes := range m.run.writes {
			w := writes[m.rng.IntN(len(writes))]
			m.add(Event{T: w.T + 1, Type: WriteAdmitted, Process: "resource", Resource: name, Token: w.Token - 1})
			return true
		}
		return false
	}},
}

// full says whether, at every moment of the attempt, all permits up to its own limit were believed:
// then it cannot have been granted at a lower one.
func (m *mutant) full(a *attempt) bool {
	others := 0
	for _, o := range m.run.domains[resource{a.start.Kind, a.start.Name}] {
		if o != a && believes(o) && o.begin < a.start.T && o.until > a.begin {
			others++
		}
	}
	return others+1 >= a.start.Limit
}

// mutate returns a broken copy of the history.
func mutate(h History, rng *rand.Rand, do func(m *mutant) bool) (History, bool) {
	h = slices.Clone(h)
	m := &mutant{rng: rng, run: arrange(h, func(text string, events ...*Event) { panic(text) })}
	if !do(m) {
		return nil, false
	}
	var out History
	for _, e := range m.run.events {
		if e != m.drop {
			out = append(out, *e)
		}
	}
	out = append(out, m.extra...)
	slices.SortStableFunc(out, func(a, b Event) int { return cmp.Compare(a.T, b.T) })
	if rng.IntN(2) == 0 { // histories of several processes may just be strung together
		slices.SortStableFunc(out, func(a, b Event) int { return cmp.Compare(a.Process, b.Process) })
	}
	return out, true
}

func TestMutationsAreCaught(t *testing.T) {
	for _, mut := range mutations {
		t.Run(strings.ReplaceAll(mut.name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			applied := 0
			seeds(t, 40, func(t *testing.T, seed uint64) {
				h, ok := mutate(simulate(seed, 9, 12, true), rand.New(rand.NewPCG(seed, 2)), mut.do)
				if !ok {
					return
				}
				applied++
				if rep := Check(h, Rules{}); rep.Counts[mut.law] == 0 || rep.Verdict() != Fail {
					t.Errorf("%s: got %v, want a violation of %s", mut.name, rep, mut.law)
				}
			})
			if applied < 15 {
				t.Errorf("%s: applied to %d histories, want at least 15", mut.name, applied)
			}
		})
	}
}

// Mutations of quiet runs that the model must catch; those of the first group escape Check.
var modelMutations = []mutation{
	{"refused though free", "", func(m *mutant) bool {
		last := m.run.last + int64(time.Hour)
		res := m.run.resources()[m.rng.IntN(len(m.run.resources()))]
		e := Event{T: last, Type: Started, Process: "late", Attempt: 1, Kind: res.kind, Name: res.name}
		if res.kind == Permit {
			e.Limit = 1
		}
		m.add(e)
		e.T, e.Type = last+1, Refused
		m.add(e)
		// A lease whose end is not known may last that long.
		for _, a := range m.run.domains[res] {
			if a.lease() && (len(a.returns) == 0 || a.returns[0].Result != OK) {
				return false
			}
		}
		return true
	}},
	{"the owner is told it does not hold", "", func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool {
			return len(a.returns) == 1 && a.returns[0].Result == OK && a.returns[0].T < a.v
		})
		if a == nil {
			return false
		}
		a.returns[0].Result = NotHeld
		return true
	}},
	{"a rival holds as well", L1, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool {
			return believes(a) && a.start.Kind == Lock && a.lost == nil && a.releases[0].T > a.begin+10
		})
		if a == nil {
			return false
		}
		m.intrude(a, 0, a.end.Token+1)
		return true
	}},
	{"a permit above its limit", S1, func(m *mutant) bool {
		a := m.pick(func(a *attempt) bool { return believes(a) && a.start.Kind == Permit && a.lost == nil })
		if a == nil {
			return false
		}
		m.intrude(a, 1+m.rng.IntN(1+m.others(a)), a.end.Token+1)
		return true
	}},
	{"two tokens are swapped", T1, func(m *mutant) bool {
		a, b := m.pair(func(a, b *attempt) bool { return a.start.Kind == Lock && a.end.T < b.start.T })
		if a == nil {
			return false
		}
		x, y := a.end.Token, b.end.Token
		setToken(a, y)
		setToken(b, x)
		return true
	}},
}

func TestModelCatchesMutations(t *testing.T) {
	for _, mut := range modelMutations {
		t.Run(strings.ReplaceAll(mut.name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			applied := 0
			seeds(t, 40, func(t *testing.T, seed uint64) {
				h, ok := mutate(simulate(seed, 5, 6, false), rand.New(rand.NewPCG(seed, 2)), mut.do)
				if !ok {
					return
				}
				applied++
				if rep := CheckModel(h, ModelRules{}); rep.Verdict != Fail || rep.Reason == "" {
					t.Errorf("%s: got %+v, want a failure", mut.name, rep)
				}
				rep := Check(h, Rules{})
				if got := rep.Verdict() == Fail; got != (mut.law != "") || got && rep.Counts[mut.law] == 0 {
					t.Errorf("%s: Check got %v, want %q", mut.name, rep, mut.law)
				}
			})
			if applied < 10 {
				t.Errorf("%s: applied to %d histories, want at least 10", mut.name, applied)
			}
		})
	}
}
