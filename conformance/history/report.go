package history

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Law names what a violation breaks: see the package comment.
type Law string

// The laws that Check judges by.
const (
	L1        Law = "L1"
	L2        Law = "L2"
	L3        Law = "L3"
	L4        Law = "L4"
	L7        Law = "L7"
	S1        Law = "S1"
	T1        Law = "T1"
	T2        Law = "T2"
	T3        Law = "T3"
	Guard     Law = "guard"
	IllFormed Law = "history"
)

// Verdict is the outcome of a check.
type Verdict string

// The verdicts.
const (
	Pass Verdict = "pass"
	Fail Verdict = "fail"
	Void Verdict = "void" // the run shows nothing: it did not meet its own conditions
)

// A Violation is one broken law, with the events that show it, mostly two.
type Violation struct {
	Law    Law
	Text   string
	Events []Event
	zero   int64
}

func (v Violation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", v.Law, v.Text)
	for _, e := range v.Events {
		fmt.Fprintf(&b, "\n    %s", e.text(v.zero))
	}
	return b.String()
}

// keep is how many violations of one law a report holds in full; the rest are counted.
const keep = 20

// A Report is what Check found.
type Report struct {
	// Violations holds, law by law, up to 20 each; Counts has the full numbers.
	Violations []Violation
	Counts     map[Law]int
	// Excused holds violations of the laws the rules excuse, likewise limited. They do not fail the run.
	Excused       []Violation
	ExcusedCounts map[Law]int
	// Void says, one reason each, which conditions of the rules the run did not meet.
	Void []string

	Events    int
	Attempts  int
	Acquired  int
	Refused   int
	Failed    int
	Contended int // attempts that were refused, or met another holder's belief
	// MaxLossLate is the longest time by which a loss was told after V, not counting time in which its
	// process was stopped; 0 when none was late. Losses never told are not in it.
	MaxLossLate time.Duration

	excuse []Law
	zero   int64 // of printed times: the first event
}

// Verdict is Fail with any violation (which is one even in a run too thin to pass), else Void with any
// reason, else Pass.
func (r Report) Verdict() Verdict {
	switch {
	case len(r.Violations) > 0:
		return Fail
	case len(r.Void) > 0:
		return Void
	}
	return Pass
}

// Err is nil for Pass; else an error whose text is the report.
func (r Report) Err() error {
	if r.Verdict() == Pass {
		return nil
	}
	return errors.New(r.String())
}

// String is the report for people: the verdict and numbers in the first line, then each violation with
// its events, times in seconds from the first event.
func (r Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d events, %d attempts, %d acquired, %d refused, %d failed, %d contended, loss told at most %v late",
		r.Verdict(), r.Events, r.Attempts, r.Acquired, r.Refused, r.Failed, r.Contended, r.MaxLossLate)
	for _, reason := range r.Void {
		fmt.Fprintf(&b, "\n  void: %s", reason)
	}
	list := func(word string, vs []Violation, counts map[Law]int) {
		if len(vs) == 0 {
			return
		}
		fmt.Fprintf(&b, "\n  %s:", word)
		for _, law := range slices.Sorted(maps.Keys(counts)) {
			fmt.Fprintf(&b, " %d of %s", counts[law], law)
		}
		for _, v := range vs {
			fmt.Fprintf(&b, "\n  %s", v)
		}
	}
	list("violations", r.Violations, r.Counts)
	list("excused", r.Excused, r.ExcusedCounts)
	return b.String()
}

// broken counts a violation and asks for its text only while it is going to be kept.
func (r *Report) broken(law Law, evidence func() (text string, events []*Event)) {
	list, counts := &r.Violations, r.Counts
	if slices.Contains(r.excuse, law) {
		list, counts = &r.Excused, r.ExcusedCounts
	}
	counts[law]++
	if counts[law] > keep {
		return
	}
	v := Violation{Law: law, zero: r.zero}
	var events []*Event
	v.Text, events = evidence()
	for _, e := range events {
		if e != nil {
			v.Events = append(v.Events, *e)
		}
	}
	slices.SortStableFunc(v.Events, func(a, b Event) int { return cmp.Compare(a.T, b.T) })
	*list = append(*list, v)
}
