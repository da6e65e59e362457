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

// Rules say what a run is held to. The zero value judges all laws and demands no traffic.
type Rules struct {
	// Excuse lists laws that the run was made to break, such as L1 when a failover loses writes. Their
	// violations are reported apart and do not fail the run.
	Excuse []Law
	// Unfinished says that the history was cut off while clients were still at work: attempts, leases
	// and releases may be open at its end (L7 is not judged).
	Unfinished bool
	// LossTolerance is how long after V a loss may be told (L2), and how long after V an extension that
	// succeeded before it may be recorded (L3). 0 = 50 ms.
	LossTolerance time.Duration
	// SendDelay, when not 0, is the longest time that can pass between the call of a TryLock, TryAcquire
	// or extension and the leaving of its request: V must then not be later than call + SendDelay + TTL -
	// margin. It is how a V counted from the reply is caught when Grant.Sent is not known: choose it well
	// above scheduling delays, and delay the replies by more.
	SendDelay time.Duration

	// A run with less than this is void. Contended counts attempts that were refused or that met another
	// holder's belief.
	MinAcquired  int
	MinContended int
	// Faults that must have hit.
	Faults []FaultRule
}

// A FaultRule makes a run void unless the named fault began, and met what is asked for.
type FaultRule struct {
	Name string
	Hits int // FaultHit events
	// Acquisitions that returned before the fault first began.
	AcquiredBefore int
	// Attempts that were under way at some moment of the fault, and acquisitions that returned in it.
	AttemptsDuring int
	AcquiredDuring int
	// Acquisitions that returned after the fault had last ended.
	AcquiredAfter int
}

const lossTolerance = 50 * time.Millisecond

// readingError is by how much two readings of one V may differ.
const readingError = int64(time.Millisecond)

// Check judges a history, which may be in any order, and does not change it.
func Check(h History, rules Rules) Report {
	rep := Report{
		Counts: map[Law]int{}, ExcusedCounts: map[Law]int{}, Events: len(h), excuse: rules.Excuse,
	}
	if len(h) > 0 {
		rep.zero = slices.MinFunc(h, func(a, b Event) int { return cmp.Compare(a.T, b.T) }).T
	}
	c := checker{rep: &rep, rules: rules, tolerance: rules.LossTolerance}
	if c.tolerance == 0 {
		c.tolerance = lossTolerance
	}
	c.run = arrange(h, func(text string, events ...*Event) { c.broken(IllFormed, text, events...) })

	for _, a := range c.run.attempts {
		c.count(a)
		if c.formed(a) {
			c.lease(a)
		}
		c.leak(a)
	}
	for _, res := range c.run.resources() {
		all := c.run.domains[res]
		c.tokens(all)
		leases := believed(all)
		if res.kind == Lock {
			c.exclusion(leases)
		} else {
			c.bound(leases)
		}
		c.contention(all, leases)
	}
	for _, res := range slices.Sorted(maps.Keys(c.run.writes)) {
		c.guard(c.run.writes[res])
	}
	c.traffic()
	return rep
}

type checker struct {
	rep       *Report
	rules     Rules
	tolerance time.Duration
	run       *run
}

func (c *checker) broken(law Law, text string, events ...*Event) {
	c.rep.broken(law, func() (string, []*Event) { return text, events })
}

func (c *checker) brokenf(law Law, events []*Event, format string, args ...any) {
	c.rep.broken(law, func() (string, []*Event) { return fmt.Sprintf(format, args...), events })
}

func (c *checker) count(a *attempt) {
	c.rep.Attempts++
	if a.end == nil {
		return
	}
	switch a.end.Type {
	case Acquired:
		c.rep.Acquired++
	case Refused:
		c.rep.Refused++
	case Failed:
		c.rep.Failed++
	}
}

// formed says whether the attempt got a lease, and reports the events of one where there was none.
func (c *checker) formed(a *attempt) bool {
	if a.lease() {
		return true
	}
	for _, e := range []*Event{first(a.extended), first(a.observed), a.lost, a.release()} {
		if e != nil {
			c.broken(IllFormed, "an event of a lease that was never acquired", a.start, e)
			break
		}
	}
	return false
}

func first(events []*Event) *Event {
	if len(events) == 0 {
		return nil
	}
	return events[0]
}

// lease judges what concerns one lease alone: T3, L2, L3, L4.
func (c *checker) lease(a *attempt) {
	got := a.end
	for _, e := range slices.Concat(a.extended, a.observed) {
		if e.Token != got.Token && (e.Type == Extended || e.Token != 0) {
			c.brokenf(T3, []*Event{got, e}, "token of a lease changed: got %d, want %d", e.Token, got.Token)
		}
	}
	for _, e := range []*Event{a.lost, a.release()} {
		if e != nil && e.T < got.T {
			c.brokenf(L3, []*Event{e, got}, "acquired %v after %s", time.Duration(got.T-e.T), e.Type)
		}
	}
	for _, x := range a.extended {
		// One that was called before the loss may have returned before it, too, and be recorded late.
		if l := a.lost; l != nil && (called(x) > l.T || c.run.ran(a, l.T, x.T) > c.tolerance) {
			c.brokenf(L3, []*Event{l, x}, "extended %v after loss was told", time.Duration(x.T-l.T))
		}
		// One that was called before Release may return after it.
		if r := a.release(); r != nil && called(x) > r.T {
			c.brokenf(L3, []*Event{r, x}, "extended %v after Release was called", time.Duration(called(x)-r.T))
		}
	}
	if a.v == 0 {
		return
	}
	c.validUntil(a)
	c.readings(a)
	c.lossTold(a)
}

func called(e *Event) int64 {
	if e.Called != 0 {
		return e.Called
	}
	return e.T
}

// validUntil judges how V was set: never later than a request allows (L2), upwards only (L4), and not
// again once it had passed (L3).
func (c *checker) validUntil(a *attempt) {
	// An extension answers the V in force, which one called before it returned may have set, even if
	// that is recorded later. So the latest end that any of those allows is what counts.
	allowed, how := c.allowed(a, a.end)
	c.bounded(a, a.end, allowed, how)
	calls := a.extended
	if len(calls) > 1 {
		calls = slices.SortedFunc(slices.Values(calls), func(x, y *Event) int { return cmp.Compare(called(x), called(y)) })
	}
	prev := a.end
	for _, x := range a.extended {
		for len(calls) > 0 && called(calls[0]) <= x.T {
			if t, h := c.allowed(a, calls[0]); t > allowed {
				allowed, how = t, h
			}
			calls = calls[1:]
		}
		c.bounded(a, x, allowed, how)
		if x.V == 0 {
			continue
		}
		if called(x) > prev.T && x.V < prev.V {
			c.brokenf(L4, []*Event{prev, x}, "an extension shortened V by %v", time.Duration(prev.V-x.V))
		}
		if late := c.run.ran(a, prev.V, x.T); prev.V != 0 && late > c.tolerance {
			c.brokenf(L3, []*Event{prev, x}, "extended %v after V", late)
		}
		if x.V > prev.V {
			prev = x
		}
	}
}

// margin is what V stays away from the TTL's end.
func margin(ttl time.Duration) time.Duration { return max(ttl/100, 2*time.Millisecond) }

// allowed is the latest V that the request of this event can have set, and what it was counted from.
func (c *checker) allowed(a *attempt, e *Event) (v int64, how string) {
	ttl := cmp.Or(e.TTL, a.start.TTL)
	if ttl == 0 {
		return never, ""
	}
	sent, how := e.T, "returned"
	if e.Sent != 0 && e.Sent < sent {
		sent, how = e.Sent, "sent"
	}
	call := e.Called
	if e.Type == Acquired && !a.start.Wait {
		call = a.start.T
	}
	if t := call + int64(c.rules.SendDelay); c.rules.SendDelay > 0 && call != 0 && t < sent {
		sent, how = t, "called + send delay"
	}
	return sent + int64(ttl-margin(ttl)), how
}

func (c *checker) bounded(a *attempt, e *Event, allowed int64, how string) {
	if e.V > allowed {
		c.brokenf(L2, []*Event{a.start, e}, "V is %v later than %s + TTL - margin", time.Duration(e.V-allowed), how)
	}
}

// readings judges what the holder was told about its lease when it asked.
func (c *checker) readings(a *attempt) {
	if len(a.observed) == 0 {
		return
	}
	sets := append([]*Event{a.end}, a.extended...)
	force := slices.Clone(sets) // by time: the event that had set the V then in force
	for i := 1; i < len(force); i++ {
		if force[i].V < force[i-1].V {
			force[i] = force[i-1]
		}
	}
	slices.SortFunc(sets, func(x, y *Event) int { return cmp.Or(cmp.Compare(x.V, y.V), cmp.Compare(x.Called, y.Called)) })
	sets = slices.CompactFunc(sets, func(x, y *Event) bool { return x.V == y.V })
	for _, o := range a.observed {
		if o.Result == Believed && called(o) > a.v {
			c.brokenf(L2, []*Event{a.end, o}, "still believed %v after V", time.Duration(called(o)-a.v))
		}
		if o.V == 0 {
			continue
		}
		n := sort.Search(len(force), func(i int) bool { return force[i].T > called(o) })
		want := force[max(0, n-1)]
		legal := false
		// Some extension must have set it: one whose return may be recorded later, but whose call was not
		// later than the reading.
		for i := sort.Search(len(sets), func(i int) bool { return sets[i].V >= o.V-readingError }); i < len(sets) && sets[i].V <= o.V+readingError; i++ {
			legal = legal || sets[i].Called <= o.T
		}
		if !legal || o.V < want.V-readingError {
			c.brokenf(L2, []*Event{want, o}, "V moved by %v without an extension", time.Duration(o.V-want.V))
		}
	}
}

// lossTold judges that a lease which was not released before V was told lost in time. One that was
// acquired after its V can only be told lost from then on.
func (c *checker) lossTold(a *attempt) {
	due := max(a.v, a.end.T)
	end, told := c.run.last, false
	for _, e := range []*Event{a.died, a.release(), a.lost} {
		if e != nil && e.T <= end {
			end, told = e.T, e == a.lost
		}
	}
	if end <= due {
		return
	}
	late := c.run.ran(a, due, end)
	if told {
		c.rep.MaxLossLate = max(c.rep.MaxLossLate, late)
	}
	if late <= c.tolerance {
		return
	}
	if told {
		c.brokenf(L2, []*Event{a.lastSet(), a.lost}, "loss told %v after V, want at most %v", late, c.tolerance)
	} else {
		c.brokenf(L2, []*Event{a.lastSet(), a.release()}, "loss not told within %v after V, want at most %v", late, c.tolerance)
	}
}

// lastSet is the event that set the V in force.
func (a *attempt) lastSet() *Event {
	for _, x := range a.extended {
		if x.V == a.v {
			return x
		}
	}
	return a.end
}

// leak judges that nothing stays open (L7).
func (c *checker) leak(a *attempt) {
	if c.rules.Unfinished || a.died != nil {
		return
	}
	switch {
	case a.end == nil:
		c.broken(L7, "an attempt never ended", a.start)
	case len(a.returns) < len(a.releases):
		c.broken(L7, "a release never returned", a.end, a.releases[len(a.returns)])
	case a.lease() && a.lost == nil && len(a.releases) == 0:
		c.broken(L7, "a lease was neither released nor lost", a.end)
	}
}

// tokens judges T1 and T2 among all attempts of one domain, which are ordered by start.
func (c *checker) tokens(all []*attempt) {
	var got []*attempt
	for _, a := range all {
		if a.acquired() {
			got = append(got, a)
		}
	}
	byReturn := slices.SortedFunc(slices.Values(got), func(a, b *attempt) int { return cmp.Compare(a.end.T, b.end.T) })
	var highest *attempt
	for _, a := range got {
		for len(byReturn) > 0 && byReturn[0].end.T < a.start.T {
			if highest == nil || byReturn[0].end.Token > highest.end.Token {
				highest = byReturn[0]
			}
			byReturn = byReturn[1:]
		}
		if highest != nil && a.end.Token <= highest.end.Token {
			c.brokenf(T1, []*Event{highest.end, a.end}, "token of a later acquisition: got %d, want more than %d", a.end.Token, highest.end.Token)
		}
	}
	slices.SortStableFunc(got, func(a, b *attempt) int { return cmp.Compare(a.end.Token, b.end.Token) })
	for i := 1; i < len(got); i++ {
		if got[i].end.Token == got[i-1].end.Token {
			c.brokenf(T2, []*Event{got[i-1].end, got[i].end}, "two acquisitions got token %d", got[i].end.Token)
		}
	}
}

// believed returns the leases with a belief that is not empty, by its begin.
func believed(all []*attempt) []*attempt {
	var leases []*attempt
	for _, a := range all {
		if a.lease() && a.begin < a.until {
			leases = append(leases, a)
		}
	}
	slices.SortStableFunc(leases, func(a, b *attempt) int { return cmp.Compare(a.begin, b.begin) })
	return leases
}

// exclusion judges L1: no belief begins before all earlier ones have ended.
func (c *checker) exclusion(leases []*attempt) {
	var longest *attempt
	for _, a := range leases {
		if longest != nil && a.begin < longest.until {
			both := time.Duration(min(a.until, longest.until) - a.begin)
			c.brokenf(L1, []*Event{longest.end, longest.ender(), a.end, a.ender()},
				"two leases of lock %q believed together for %v", a.start.Name, both)
		}
		if longest == nil || a.until > longest.until {
			longest = a
		}
	}
}

// bound judges S1. The moment of a grant is only known to lie between start and return, and the order of
// grants that overlap is unknown, so it asks for two things that no correct semaphore fails:
//   - at some moment of [start, return] the others believed were fewer than the grant's limit;
//   - at no moment are more than x of the believed permits of a limit <= x, whatever x. (The last one
//     granted of those had a limit of x or less, and all of them were held at that moment.)
func (c *checker) bound(leases []*attempt) {
	var limits []int // a limit above the number of leases cannot be exceeded
	for _, a := range leases {
		if a.start.Limit < len(leases) {
			limits = append(limits, a.start.Limit)
		}
	}
	slices.Sort(limits)
	limits = slices.Compact(limits)
	within := make([]int, len(limits)) // believed permits with a limit <= limits[i]
	move := func(limit, by int) {
		for i := sort.SearchInts(limits, limit); i < len(limits); i++ {
			within[i] += by
		}
	}
	exceeded := func(limit int) (x int) {
		for i := sort.SearchInts(limits, limit); i < len(limits); i++ {
			if within[i] > limits[i] {
				return limits[i]
			}
		}
		return 0
	}

	byEnd := slices.SortedFunc(slices.Values(leases), func(a, b *attempt) int { return cmp.Compare(a.until, b.until) })
	held, low := 0, minima{}
	low.push(-never, 0)
	for _, a := range leases {
		for byEnd[0].until <= a.begin {
			held--
			low.push(byEnd[0].until, held)
			move(byEnd[0].start.Limit, -1)
			byEnd = byEnd[1:]
		}
		others := low.since(a.start.T)
		move(a.start.Limit, 1)
		if others >= a.start.Limit {
			c.overfull(leases, a, math.MaxInt, "granted at a limit of %d while at least %d others were held", a.start.Limit, others)
		} else if x := exceeded(a.start.Limit); x != 0 {
			c.overfull(leases, a, x, "more than %d permits of a limit <= %d are held", x, x)
		}
		held++
		low.push(a.begin, held)
	}
}

// overfull reports a together with some of the holders, of up to limit, that it found.
func (c *checker) overfull(leases []*attempt, a *attempt, limit int, format string, args ...any) {
	c.rep.broken(S1, func() (string, []*Event) {
		events := []*Event{a.start, a.end}
		for _, o := range leases {
			if o != a && o.begin <= a.begin && o.until > a.begin && o.start.Limit <= limit && len(events) < 12 {
				events = append(events, o.end, o.ender())
			}
		}
		return fmt.Sprintf("permit %q: ", a.start.Name) + fmt.Sprintf(format, args...), events
	})
}

// minima answers the least value since a moment, of a value that changes as time goes on. It keeps the
// values that nothing later undercuts: from upwards, each from the moment since when it is the least.
type minima struct {
	from  []int64
	value []int
}

func (m *minima) push(t int64, v int) {
	n := len(m.value)
	for n > 0 && m.value[n-1] >= v {
		n--
		t = m.from[n]
	}
	m.from, m.value = append(m.from[:n], t), append(m.value[:n], v)
}

// since includes the value that was in force just before t.
func (m *minima) since(t int64) int {
	i := sort.Search(len(m.from), func(i int) bool { return m.from[i] >= t })
	return m.value[max(0, i-1)]
}

// contention counts the attempts that were refused or met another's belief.
func (c *checker) contention(all, leases []*attempt) {
	var beliefs spans
	for _, a := range leases {
		beliefs.add(a.begin, a.until)
	}
	beliefs.sort()
	for _, a := range all {
		if a.start.Kind == Token {
			continue
		}
		if a.end != nil && a.end.Type == Refused || beliefs.overlapping(a.start.T, a.endTime()) > 0 {
			c.rep.Contended++
		}
	}
}

// guard judges that admitted tokens never decrease: a write called after another one was admitted has
// no lesser token.
func (c *checker) guard(writes []*Event) {
	stale(writes, func(highest, w *Event) {
		c.brokenf(Guard, []*Event{highest, w}, "resource %q admitted token %d after %d", w.Resource, w.Token, highest.Token)
	})
}

// stale calls found for each of the admitted writes of one resource, which are in order of time, that was called after
// one with a greater token had been admitted, with the greatest of those.
func stale(writes []*Event, found func(highest, w *Event)) {
	byCall := slices.SortedFunc(slices.Values(writes), func(a, b *Event) int { return cmp.Compare(called(a), called(b)) })
	var highest *Event
	for _, w := range byCall {
		for len(writes) > 0 && writes[0].T < called(w) {
			if highest == nil || writes[0].Token > highest.Token {
				highest = writes[0]
			}
			writes = writes[1:]
		}
		if highest != nil && w.Token < highest.Token {
			found(highest, w)
		}
	}
}

// traffic finds the reasons for which the run shows nothing.
func (c *checker) traffic() {
	atLeast := func(got, want int, format string, args ...any) {
		if got < want {
			c.rep.Void = append(c.rep.Void, fmt.Sprintf(format, args...)+fmt.Sprintf(": got %d, want at least %d", got, want))
		}
	}
	atLeast(c.rep.Acquired, c.rules.MinAcquired, "acquisitions")
	atLeast(c.rep.Contended, c.rules.MinContended, "contended attempts")
	for _, f := range c.rules.Faults {
		b := c.run.faults[f.Name]
		if b == nil || len(b.from) == 0 {
			c.rep.Void = append(c.rep.Void, fmt.Sprintf("fault %q never began", f.Name))
			continue
		}
		begun, over := b.from[0], b.to[len(b.to)-1]
		var before, during, attempts, after int
		for _, a := range c.run.attempts {
			if b.meets(a.start.T, a.endTime()) {
				attempts++
			}
			if !a.acquired() {
				continue
			}
			switch t := a.end.T; {
			case t < begun:
				before++
			case t > over:
				after++
			case b.meets(t, t):
				during++
			}
		}
		atLeast(b.hits, f.Hits, "hits of fault %q", f.Name)
		atLeast(before, f.AcquiredBefore, "acquisitions before fault %q", f.Name)
		atLeast(attempts, f.AttemptsDuring, "attempts during fault %q", f.Name)
		atLeast(during, f.AcquiredDuring, "acquisitions during fault %q", f.Name)
		atLeast(after, f.AcquiredAfter, "acquisitions after fault %q", f.Name)
	}
}
