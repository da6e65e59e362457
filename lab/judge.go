package lab

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/conformance/history"
)

// A Result is what one run has shown.
type Result struct {
	Backend  string
	Scenario string
	Seed     uint64
	Lanes    []*Lane
	// Late is how late a timer was, at most, while it ran.
	Late time.Duration
	// Unexpected says, one line each, where the run differs from what the scenario leads to expect of the backend.
	Unexpected []string `json:",omitempty"`
}

// A Lane is what one pair of holder and rival has shown.
type Lane struct {
	Name string
	// Void says why the lane counts for nothing; empty if it counts.
	Void string `json:",omitempty"`
	// Findings are how often it showed what.
	Findings map[Finding]int `json:",omitempty"`
	// Told says that a holder that was running learned of its loss, and Lead how long that was before the end of the
	// lease on the server, by what the holder knew. The least counts.
	Told bool
	Lead time.Duration
	// Next is the time from the fault to the rival's having the lock.
	Next time.Duration
	// Report is the judgement of the history, for people.
	Report string
	// History is all that happened. Times are on one clock.
	History history.History `json:"-"`
}

// lossTolerance is how late a loss may be told where timers are in time: the processes share the machine.
const lossTolerance = 250 * time.Millisecond

func judge(l *lane, h history.History, d *doubles, sc *Scenario, tolerance time.Duration) *Lane {
	out := &Lane{Name: l.name, History: h, Findings: map[Finding]int{}}
	var locks history.History // without the writes, which are judged here
	for _, e := range h {
		if e.Type != history.WriteAdmitted && e.Type != history.WriteRefused {
			locks = append(locks, e)
		}
	}
	report := history.Check(locks, history.Rules{LossTolerance: tolerance, Unfinished: true})
	out.Report = report.String()
	out.count(Overlap, report.Counts[history.L1])
	out.count(Disorder, report.Counts[history.T1]+report.Counts[history.T2]+report.Counts[history.T3])
	out.count(LateLoss, report.Counts[history.L2]+report.Counts[history.L3]+report.Counts[history.L4])
	for _, w := range history.StaleWrites(h) {
		switch w.Resource {
		case d.fenced(l.name):
			out.count(StaleFenced, 1)
		case d.open(l.name):
			out.count(StaleUnfenced, 1)
		default:
			out.count(StaleCode, 1)
		}
	}
	if sc.keeps {
		out.count(EarlyLoss, l.earlyLosses(h))
	}
	out.Told, out.Lead = lead(h)
	out.Next = next(h, l.process(rival), sc.Name)
	switch {
	case l.crash != nil:
		out.count(Crash, 1)
		out.Report = l.crash.Error()
	case l.err != nil:
		out.Void = strings.TrimPrefix(l.err.Error(), "lab: ")
	case report.Counts[history.IllFormed] > 0:
		out.Void = "the history makes no sense: " + out.Report
	case !slices.ContainsFunc(h, func(e history.Event) bool { return e.Type == history.FaultHit && e.Fault == l.name }):
		out.Void = "the fault did not hit"
	case out.Next == 0:
		out.Void = "the rival did not get the lock after the fault"
	}
	return out
}

// earlyLosses are the losses but for those of the holder that is cut off, from then on: the cut ends its lease, and leaves
// connections of which each may cost a request more.
func (l *lane) earlyLosses(h history.History) (n int) {
	cut := l.cutAt > 0 && len(l.lines[0].proxies) > 0
	for _, e := range h {
		if e.Type == history.LossTold && !(cut && e.Process == l.process(holder) && e.T > l.cutAt) {
			n++
		}
	}
	return n
}

func (l *Lane) count(f Finding, n int) {
	if n > 0 {
		l.Findings[f] += n
	}
}

// lead is the least time by which a loss was told before the end of the lease.
func lead(h history.History) (told bool, least time.Duration) {
	for _, b := range history.Beliefs(h) {
		if b.LeadKnown && (!told || b.Lead < least) {
			told, least = true, b.Lead
		}
	}
	return told, least
}

// next is the time from the beginning of the fault to the rival's first acquisition after it; 0 is never.
func next(h history.History, rival, fault string) time.Duration {
	began := int64(0)
	for _, e := range h {
		switch {
		case e.Type == history.FaultBegin && e.Fault == fault:
			began = e.T
		case e.Type == history.Acquired && e.Process == rival && began > 0:
			return time.Duration(e.T - began)
		}
	}
	return 0
}

// compare fills in what was not to be expected.
func (r *Result) compare(sc *Scenario) {
	shown := false
	for _, l := range r.Lanes {
		if l.Void != "" {
			continue
		}
		for _, f := range sortedFindings(l.Findings) {
			shown = shown || f == sc.shows
			if !sc.allows(f, r.Backend) {
				r.Unexpected = append(r.Unexpected, fmt.Sprintf("%s: %s (%d)\n%s", l.Name, f, l.Findings[f], l.Report))
			}
		}
	}
	if n := r.Valid(); 0 < n && 2*n < len(r.Lanes) {
		r.Unexpected = append(r.Unexpected, fmt.Sprintf("only %d of %d lanes count: %s", n, len(r.Lanes), r.void()))
	}
	if sc.shows != "" && !shown && r.Valid() > 0 {
		r.Unexpected = append(r.Unexpected, fmt.Sprintf("no lane showed: %s", sc.shows))
	}
}

func sortedFindings(m map[Finding]int) []Finding {
	all := make([]Finding, 0, len(m))
	for f := range m {
		all = append(all, f)
	}
	slices.Sort(all)
	return all
}

// Valid is how many lanes count.
func (r *Result) Valid() (n int) {
	for _, l := range r.Lanes {
		if l.Void == "" {
			n++
		}
	}
	return n
}

// void is why a lane does not count, empty if all do.
func (r *Result) void() string {
	for _, l := range r.Lanes {
		if l.Void != "" {
			return l.Void
		}
	}
	return ""
}

// Err says in one error whatever a test should fail for: a stale write that a guard or the code of the options let through, what was
// not to be expected of the backend, and that no lane counts, so that nothing is proven.
func (r *Result) Err() error {
	var errs []error
	if n := r.StaleWrites(); n > 0 {
		errs = append(errs, fmt.Errorf("lab: %s on %s: %d stale writes were let through", r.Scenario, r.Backend, n))
	}
	for _, u := range r.Unexpected {
		errs = append(errs, fmt.Errorf("lab: %s on %s: %s", r.Scenario, r.Backend, u))
	}
	if r.Valid() == 0 {
		errs = append(errs, fmt.Errorf("lab: %s on %s: no lane counts: %s", r.Scenario, r.Backend, r.void()))
	}
	return errors.Join(errs...)
}

// With is in how many of the lanes that count there was a finding.
func (r *Result) With(f Finding) (n int) {
	for _, l := range r.Lanes {
		if l.Void == "" && l.Findings[f] > 0 {
			n++
		}
	}
	return n
}

// StaleWrites is how many stale writes a guard or the code of the options let through, in all lanes.
func (r *Result) StaleWrites() (n int) {
	for _, l := range r.Lanes {
		n += l.Findings[StaleFenced] + l.Findings[StaleCode]
	}
	return n
}
