package conformance

import (
	"fmt"
	"time"
)

// What the suite says of time holds on a machine whose clock runs and whose processes run. Whoever runs the machine may set
// its wall clock while tests run, as when a virtual machine was paused and its clock is put right: servers count leases by it,
// so leases end early by as much. Or nothing runs for a while, and leases end that nobody could renew. A test that
// fails meanwhile is void, says so, and begins anew.

const (
	// voids is how often a test may be void before its failure counts.
	voids = 2
	// setBy is how far the wall clock must have been set to be held responsible.
	setBy = 200 * time.Microsecond
	// stoodFor is how late a plain signal must have been: what holds one up for so long may hold up several steps
	// in a row, and the shortest TTL of the suite is as long.
	stoodFor = 200 * time.Millisecond
)

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

// excused reports whether a failure does not count, because of what happened to the machine since the test began.
func (t *T) excused(failure string) bool {
	t.TB.Helper()
	set, late := wallAhead()-t.ahead, lateness(t.began)
	why := fmt.Sprintf("the machine's wall clock was set by %v, and plain signals were up to %v late, meanwhile", set, late)
	if t.tries >= voids || set.Abs() < setBy && late < stoodFor {
		t.TB.Log(why)
		return false
	}
	why += ": " + failure
	t.TB.Log("void, and begins anew:", why)
	t.void.CompareAndSwap(nil, &why)
	return true
}
