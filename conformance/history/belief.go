package history

import (
	"slices"
	"time"
)

// A Belief is the time in which a lease was believed, by the rules of the package comment.
type Belief struct {
	Process  string
	Token    uint64
	From, To int64
	// Told is when the loss was told; 0 if it was not.
	Told int64
	// Lead is how long that was before the end of the lease on the server, which is at V and the margin. It is known if V
	// is, and unless the process was stopped at V: then nothing could be told.
	Lead      time.Duration
	LeadKnown bool
}

// Beliefs are those of all leases of a history, by their beginning. One that has not ended lasts until the last event.
func Beliefs(h History) []Belief {
	r := arrange(h, func(string, ...*Event) {})
	var all []Belief
	for _, a := range believed(r.attempts) {
		b := Belief{Process: a.start.Process, Token: a.end.Token, From: a.begin, To: min(a.until, r.last)}
		if a.lost != nil {
			b.Told = a.lost.T
			stopped := slices.ContainsFunc(r.stops[b.Process], func(s stop) bool { return s.from <= a.v && a.v <= s.to })
			if a.v != 0 && !stopped {
				b.Lead, b.LeadKnown = time.Duration(a.v-b.Told)+margin(a.start.TTL), true
			}
		}
		all = append(all, b)
	}
	return all
}

// StaleWrites are the admitted writes of a history that were called after one with a greater token had been admitted to
// the same resource, those that Check holds against a guard, ordered by time.
func StaleWrites(h History) History {
	var all History
	for _, writes := range arrange(h, func(string, ...*Event) {}).writes {
		stale(writes, func(_, w *Event) { all = append(all, *w) })
	}
	return Merge(all)
}
