package conformance

import (
	"cmp"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// group is a chapter of the suite.
type group struct {
	name  string
	tests []test

	// heavy says that its tests keep the processors busy.
	heavy bool
}

// test is one test of a group.
type test struct {
	name  string
	run   func(t *T)
	needs []Need

	// permit runs the test a second time, over a semaphore of one permit.
	permit bool
	// alone runs it while no other test runs, because it measures.
	alone bool
	// limit is how long it may take, if that is not defaultLimit.
	limit time.Duration
}

// defaultLimit is when a test is thought to hang.
const defaultLimit = time.Minute

// phases are the parts of a run, one after the other: how many tests run at the same time, and which. Most
// tests wait.
var phases = []struct {
	atOnce int
	has    func(g group, c test) bool
}{
	{16, func(g group, c test) bool { return !c.alone && !g.heavy }},
	{4, func(g group, c test) bool { return !c.alone && g.heavy }},
	{1, func(g group, c test) bool { return c.alone }},
}

// suite answers all groups.
func suite() []group {
	return []group{
		{name: "Exclusion", tests: exclusionTests},
		{name: "Ownership", tests: ownershipTests},
		{name: "Expiry", tests: expiryTests},
		{name: "Renewal", tests: renewalTests},
		{name: "Loss", tests: lossTests},
		{name: "Release", tests: releaseTests},
		{name: "Cancellation", tests: cancellationTests},
		{name: "LostReply", tests: lostReplyTests},
		{name: "Waiting", tests: waitingTests},
		{name: "Validity", tests: validityTests},
		{name: "Reentrancy", tests: reentrancyTests},
		{name: "Semaphore", tests: semaphoreTests},
		{name: "Fencing", tests: fencingTests},
		{name: "Limits", tests: limitsTests},
		{name: "Inspect", tests: inspectTests},
		{name: "LockAll", tests: lockAllTests},
		{name: "Do", tests: doTests},
		{name: "Leaks", tests: leaksTests},
		{name: "Cost", tests: costTests},
		{name: "Concurrency", tests: concurrencyTests, heavy: true},
		{name: "Process", tests: processTests, heavy: true},
	}
}

// Run runs the suite on a backend, as subtests of t, and answers what ran.
//
// If the environment variable FENCELOCK_RESULTS names a directory, the report is also written there, as
// a line of JSON in a file of its own.
func Run(t *testing.T, h Harness) Report {
	t.Helper()
	began := time.Now()
	h.Skips = h.skips()
	present := h.check(t)
	r := newReport(t, h)
	slots := make([]chan struct{}, len(phases))
	ends := make([]sync.WaitGroup, len(phases))
	for i, p := range phases {
		slots[i] = make(chan struct{}, p.atOnce)
		if h.AtOnce > 0 {
			slots[i] = make(chan struct{}, min(p.atOnce, h.AtOnce))
		}
		ends[i].Add(len(suite()))
	}
	var groups sync.WaitGroup
	for _, g := range suite() {
		groups.Go(func() {
			ran := 0 // phases
			t.Run(g.name, func(t *testing.T) {
				for i, p := range phases {
					var tests sync.WaitGroup
					for _, c := range g.tests {
						if p.has(g, c) {
							tests.Go(func() {
								slots[i] <- struct{}{}
								defer func() { <-slots[i] }()
								runTest(t, h, present, g.name, c, r)
							})
						}
					}
					tests.Wait()
					ran++
					ends[i].Done()
					ends[i].Wait()
				}
			})
			for ; ran < len(phases); ran++ { // -run left the group out
				ends[ran].Done()
			}
		})
	}
	groups.Wait()
	r.Seconds = time.Since(began).Seconds()
	r.write(t)
	return r.Report
}

// skips answers what the harness has declared, and what the suite declares for this kind of system.
func (h Harness) skips() map[Need]string {
	all := maps.Clone(h.Skips)
	if all == nil {
		all = make(map[Need]string)
	}
	if _, declared := all[Clocks]; !declared && (runtime.GOOS != "linux" || runtime.GOARCH != "amd64") {
		all[Clocks] = "the wall clock of a process can be set on Linux on amd64 only"
	}
	return all
}

// check fails the test if the declared skips are not what is missing, and answers what is there.
func (h Harness) check(t *testing.T) map[Need]bool {
	t.Helper()
	present := h.present(t)
	for _, n := range slices.Sorted(maps.Keys(present)) {
		reason, declared := h.Skips[n]
		switch {
		case present[n] && declared:
			t.Errorf("skip of tests that need %q: got declared (%s), want none: it is there", n, reason)
		case !present[n] && !declared:
			t.Errorf("skip of tests that need %q: got none, want declared with a reason: it is missing", n)
		case declared && strings.TrimSpace(reason) == "":
			t.Errorf("skip of tests that need %q: got no reason, want one", n)
		}
	}
	for n := range h.Skips {
		if _, known := present[n]; !known {
			t.Errorf("skip of tests that need %q: no test needs that", n)
		}
	}
	return present
}

func runTest(t *testing.T, h Harness, present map[Need]bool, groupName string, c test, r *recorder) {
	name := groupName + "/" + c.name
	t.Run(c.name, func(t *testing.T) {
		why := missing(h, present, c.needs)
		if why != "" && c.permit {
			r.skip(name+"/Permit", why)
		}
		r.one(t, name, why, func() []string {
			return runOne(t, h, c, driver.KindLock)
		})
		if c.permit {
			t.Run("Permit", func(t *testing.T) {
				needs := append(slices.Clone(c.needs), Semaphores)
				r.one(t, name+"/Permit", missing(h, present, needs), func() []string {
					return runOne(t, h, c, driver.KindPermit)
				})
			})
		}
	})
}

// missing says what of a test's needs is missing and why; empty if nothing is.
func missing(h Harness, present map[Need]bool, needs []Need) string {
	for _, n := range needs {
		if !present[n] {
			return fmt.Sprintf("needs %s: %s", n, h.Skips[n])
		}
	}
	return ""
}

// runOne runs one variant of a test on a fresh backend, under a watchdog, and answers why it had to begin anew.
func runOne(tb testing.TB, h Harness, c test, kind driver.Kind) (void []string) {
	newBackend := h.New
	if slices.Contains(c.needs, Server) || slices.Contains(c.needs, Requests) && h.NewServer != nil {
		newBackend = h.NewServer
	}
	defer startPulse()()
	for {
		t := &T{TB: tb, Backend: newBackend(tb), kind: kind, over: new(atomic.Bool), tries: len(void), began: time.Now(), ahead: wallAhead()}
		if t.Audit != nil {
			tb.Cleanup(func() {
				if t.void.Load() == nil {
					t.Audit(tb)
				}
			})
		}
		if limit := cmp.Or(c.limit, defaultLimit); !within(limit, func() { c.run(t) }) {
			t.over.Store(true)
			tb.Errorf("%s: got no end within %v, want one: it hangs\n%s", tb.Name(), limit, stacks())
		}
		why := t.void.Load()
		if why == nil {
			return void
		}
		void = append(void, *why)
	}
}

// within runs f in a goroutine, because a test that hangs cannot be ended, and reports whether it ended
// in time.
func within(limit time.Duration, f func()) bool {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f()
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-ended:
		return true
	case <-timer.C:
		return false
	}
}

func stacks() string {
	buf := make([]byte, 1<<20)
	return string(buf[:runtime.Stack(buf, true)])
}
