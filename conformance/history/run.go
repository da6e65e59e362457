package history

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"sort"
	"time"
)

const never = int64(math.MaxInt64)

// attempt is one attempt with all its events, each list ordered by time.
type attempt struct {
	start    *Event
	end      *Event // acquired, refused or failed
	extended []*Event
	observed []*Event
	lost     *Event // the first
	releases []*Event
	returns  []*Event
	died     *Event // the end of its process

	// Of a lease:
	begin, until int64 // belief: [begin, until)
	v            int64 // as last extended; 0 = unknown
}

func (a *attempt) acquired() bool { return a.end != nil && a.end.Type == Acquired }
func (a *attempt) lease() bool    { return a.acquired() && a.start.Kind != Token }

func (a *attempt) release() *Event {
	if len(a.releases) == 0 {
		return nil
	}
	return a.releases[0]
}

func (a *attempt) endTime() int64 {
	if a.end == nil {
		return never
	}
	return a.end.T
}

// resource is what excludes: a kind and a name. Bare tokens share the lock's domain.
type resource struct {
	kind Kind
	name string
}

// stop is a band of time in which a process did not run.
type stop struct{ from, to int64 }

// run is a history put in order.
type run struct {
	events   []*Event // by time
	attempts []*attempt
	domains  map[resource][]*attempt // by start
	writes   map[string][]*Event     // admitted, by resource
	stops    map[string][]stop
	faults   map[string]*band
	last     int64 // time of the last event
}

// band is all that is known of a named fault: the intervals in which it was on, in order, and its hits.
type band struct {
	from, to []int64
	hits     int
}

// meets says whether the fault was on at some moment of [start, end].
func (b *band) meets(start, end int64) bool {
	i := sort.Search(len(b.from), func(i int) bool { return b.from[i] > end })
	return i > 0 && b.to[i-1] >= start
}

// resources lists the domains in a fixed order, so that reports of one history are equal.
func (r *run) resources() []resource {
	return slices.SortedFunc(maps.Keys(r.domains), func(a, b resource) int {
		return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.kind, b.kind))
	})
}

// arrange groups the events; ill is called for each event that makes no sense where it stands.
func arrange(h History, ill func(text string, events ...*Event)) *run {
	r := &run{
		domains: map[resource][]*attempt{}, writes: map[string][]*Event{},
		stops: map[string][]stop{}, faults: map[string]*band{},
	}
	r.events = make([]*Event, len(h))
	for i := range h {
		r.events[i] = &h[i]
	}
	byTime := func(a, b *Event) int { return cmp.Compare(a.T, b.T) }
	if !slices.IsSortedFunc(r.events, byTime) {
		slices.SortStableFunc(r.events, byTime)
	}
	if n := len(r.events); n > 0 {
		r.last = r.events[n-1].T
	}

	type key struct {
		process string
		id      uint64
	}
	byKey := make(map[key]*attempt, len(h)/3)
	dead := map[string]*Event{}
	for _, e := range r.events {
		k := key{e.Process, e.Attempt}
		switch e.Type {
		case Started:
			if byKey[k] != nil {
				ill("an attempt started twice", byKey[k].start, e)
				continue
			}
			if e.Kind != Lock && e.Kind != Permit && e.Kind != Token {
				ill(fmt.Sprintf("kind %q: want lock, permit or token", e.Kind), e)
				continue
			}
			if e.Kind == Permit && e.Limit < 1 {
				ill("a permit without a limit", e)
				continue
			}
			a := &attempt{start: e}
			byKey[k] = a
			r.attempts = append(r.attempts, a)
			res := resource{e.Kind, e.Name}
			if res.kind == Token {
				res.kind = Lock
			}
			r.domains[res] = append(r.domains[res], a)
		case Acquired, Refused, Failed, Extended, LossTold, ReleaseCalled, ReleaseReturned, Observed:
			a := byKey[k]
			if a == nil {
				ill("an event of an attempt that never started", e)
				continue
			}
			a.add(e, ill)
		case WriteAdmitted:
			r.writes[e.Resource] = append(r.writes[e.Resource], e)
		case WriteRefused:
		case FaultBegin, FaultHit, FaultEnd:
			b := r.faults[e.Fault]
			if b == nil {
				b = &band{}
				r.faults[e.Fault] = b
			}
			open := len(b.from) > 0 && b.to[len(b.to)-1] == never
			switch {
			case e.Type == FaultHit:
				b.hits++
			case (e.Type == FaultBegin) == open:
				ill("a fault begins or ends twice in a row", e)
			case open:
				b.to[len(b.to)-1] = e.T
			default:
				b.from, b.to = append(b.from, e.T), append(b.to, never)
			}
		case ProcessStopped, ProcessContinued:
			s := r.stops[e.Process]
			open := len(s) > 0 && s[len(s)-1].to == never
			switch {
			case (e.Type == ProcessStopped) == open:
				ill("a process is stopped or continued twice in a row", e)
			case open:
				s[len(s)-1].to = e.T
			default:
				r.stops[e.Process] = append(s, stop{e.T, never})
			}
		case ProcessEnded:
			if dead[e.Process] == nil {
				dead[e.Process] = e
			}
		default:
			ill(fmt.Sprintf("unknown type %q", e.Type), e)
		}
	}
	for _, a := range r.attempts {
		a.died = dead[a.start.Process]
		if a.lease() {
			a.believe()
		}
	}
	return r
}

func (a *attempt) add(e *Event, ill func(text string, events ...*Event)) {
	switch e.Type {
	case Acquired, Refused, Failed:
		if a.end != nil {
			ill("an attempt ended twice", a.end, e)
			return
		}
		a.end = e
	case Extended:
		a.extended = append(a.extended, e)
	case Observed:
		a.observed = append(a.observed, e)
	case LossTold:
		if a.lost == nil {
			a.lost = e
		}
	case ReleaseCalled:
		a.releases = append(a.releases, e)
	case ReleaseReturned:
		if len(a.returns) == len(a.releases) {
			ill("a release returned that was not called", e)
			return
		}
		a.returns = append(a.returns, e)
	}
}

// believe works out V and the belief interval of a lease.
func (a *attempt) believe() {
	a.v = a.end.V
	for _, x := range a.extended {
		a.v = max(a.v, x.V)
	}
	a.begin, a.until = a.end.T, never
	if a.v != 0 {
		a.until = a.v
	}
	for _, e := range []*Event{a.release(), a.lost, a.died} {
		if e != nil {
			a.until = min(a.until, e.T)
		}
	}
}

// ender is the event at which belief ends; nil when that is V.
func (a *attempt) ender() *Event {
	for _, e := range []*Event{a.release(), a.lost, a.died} {
		if e != nil && e.T == a.until {
			return e
		}
	}
	return nil
}

// ran is how much of [from, to] the process of the attempt was not stopped.
func (r *run) ran(a *attempt, from, to int64) time.Duration {
	d := to - from
	for _, s := range r.stops[a.start.Process] {
		d -= max(0, min(s.to, to)-max(s.from, from))
	}
	return time.Duration(max(0, d))
}

// spans answers, for a set of intervals, how many of them reach into another one.
type spans struct{ from, to []int64 }

func (s *spans) add(from, to int64) {
	s.from, s.to = append(s.from, from), append(s.to, to)
}

func (s *spans) sort() {
	slices.Sort(s.from)
	slices.Sort(s.to)
}

// overlapping counts the intervals with from < end and to > start; each must have from <= to.
func (s *spans) overlapping(start, end int64) int {
	begun := sort.Search(len(s.from), func(i int) bool { return s.from[i] >= end })
	over := sort.Search(len(s.to), func(i int) bool { return s.to[i] > start })
	return begun - over
}
