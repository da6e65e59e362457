package conformance

import (
	"fmt"
	"time"
)

// Servers count leases by the wall clock of the machine. Whoever runs the machine may set it while tests run, as when a
// virtual machine was paused and its clock is put right: leases end early then by as much, and what a test sees is what
// every backend's documentation excludes. A test that fails meanwhile is void, says so, and begins anew.

// voids is how often a test may be void before its failure counts.
const voids = 2

// setBy is how far the clock must have been set to be held responsible.
const setBy = 200 * time.Microsecond

var origin = time.Now()

// wallAhead answers by how much more than the monotonic clock the wall clock has moved since this process began.
func wallAhead() (most time.Duration) {
	// Both are read one after the other, the wall clock first. If something comes between, it seems behind.
	for i := range 5 {
		now := time.Now()
		ahead := now.Round(0).Sub(origin.Round(0)) - now.Sub(origin)
		if i == 0 || ahead > most {
			most = ahead
		}
	}
	return most
}

// excused reports whether a failure does not count, because the wall clock was set since the test began.
func (t *T) excused(failure string) bool {
	t.Helper()
	set := wallAhead() - t.ahead
	if t.tries >= voids || set.Abs() < setBy {
		return false
	}
	why := fmt.Sprintf("the machine's wall clock was set by %v meanwhile: %s", set, failure)
	t.TB.Logf("void, and begins anew: %s", why)
	t.void.CompareAndSwap(nil, &why)
	return true
}
