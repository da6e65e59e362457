// Package leaseclock is the clock that belief in a lease is measured by: monotonic, and counting the time
// that the machine was suspended.
//
// Go's monotonic clock is CLOCK_MONOTONIC on Linux, which stands still while a machine sleeps. A holder
// that measured by it alone would still believe after waking up, though the server has counted on.
package leaseclock

import (
	"sync/atomic"
	"time"
)

// Clock counts nanoseconds from its making. Safe for concurrent use.
type Clock struct {
	clocks    func() (wall, mono int64)
	slept     func() int64
	sleptThen int64
	most      atomic.Int64 // the time suspended since began
	checked   atomic.Int64 // monotonic time of the latest look at it
	skew      atomic.Int64 // wall clock minus monotonic clock then
}

// A look at the time suspended takes two system calls, some microseconds. It is spared while the wall clock,
// which counts on during a suspension, keeps pace with the monotonic one. Since the wall clock can be set as
// well, even by as much as the machine slept, that is trusted for a short time only.
const (
	pace  = int64(time.Millisecond)
	trust = int64(100 * time.Millisecond)
)

// New makes a clock that stands at zero.
func New() *Clock {
	began := time.Now()
	return newClock(func() (wall, mono int64) {
		now := time.Now()
		return now.UnixNano(), int64(now.Sub(began))
	}, suspended)
}

func newClock(clocks func() (wall, mono int64), slept func() int64) *Clock {
	c := &Clock{clocks: clocks, slept: slept, sleptThen: max(slept(), slept(), slept())}
	c.checked.Store(-trust)
	return c
}

// Start reads the clock for the beginning of something, such as the sending of a request. It may lack a suspension that
// nobody has noticed yet: what is counted from it is then over too early, never too late.
func (c *Clock) Start() int64 {
	_, mono := c.clocks()
	return mono + c.most.Load()
}

// Now reads the clock. It never goes back.
func (c *Clock) Now() int64 {
	wall, mono := c.clocks()
	skew := wall - mono
	if d := skew - c.skew.Load(); d > -pace && d < pace && mono-c.checked.Load() < trust {
		return mono + c.most.Load()
	}
	// The two readings behind suspended are not taken at one instant, so its answer may be too small,
	// never too large: the greatest one counts. Less than a millisecond is no suspension.
	s := (c.slept() - c.sleptThen) / 1e6 * 1e6
	for {
		most := c.most.Load()
		if s <= most || c.most.CompareAndSwap(most, s) {
			break
		}
	}
	// Skew was read before the time suspended was: what happens in between shows as a change next time.
	c.skew.Store(skew)
	c.checked.Store(mono)
	return mono + c.most.Load()
}

// Time turns a reading into a time.Time with a monotonic reading of its own.
func (c *Clock) Time(reading int64) time.Time {
	return time.Now().Add(time.Duration(reading - c.Now()))
}
