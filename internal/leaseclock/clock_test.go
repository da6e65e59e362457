package leaseclock

import (
	"testing"
	"time"
)

// machine is what a Clock looks at.
type machine struct {
	wall, mono, slept int64
	looks             int // at slept
}

func (m *machine) clock() *Clock {
	return newClock(func() (int64, int64) { return m.wall, m.mono }, func() int64 { m.looks++; return m.slept })
}

func (m *machine) passes(d time.Duration) {
	m.wall += int64(d)
	m.mono += int64(d)
}

func (m *machine) sleeps(d time.Duration) {
	m.wall += int64(d)
	m.slept += int64(d)
}

func TestSuspendedTimeCounts(t *testing.T) {
	m := &machine{wall: 17e17, slept: 5e9}
	c := m.clock()
	if got := c.Now(); got != 0 {
		t.Fatalf("new clock: got %v, want 0", time.Duration(got))
	}
	m.sleeps(time.Hour)
	if got := c.Now(); got != int64(time.Hour) {
		t.Fatalf("after an hour of suspension: got %v, want 1h (L2)", time.Duration(got))
	}
	if got := c.Start(); got != int64(time.Hour) {
		t.Fatalf("Start after Now: got %v, want 1h (L2)", time.Duration(got))
	}
	m.passes(time.Second)
	m.slept -= int64(time.Minute) // the two readings were taken apart
	if got := c.Now(); got != int64(time.Hour+time.Second) {
		t.Fatalf("after a reading that was too small: got %v, want 1h0m1s (L2)", time.Duration(got))
	}
}

// TestWallClockSetBack hides a suspension from the wall clock: it is found all the same, soon.
func TestWallClockSetBack(t *testing.T) {
	m := &machine{wall: 17e17}
	c := m.clock()
	c.Now()
	m.sleeps(time.Hour)
	m.wall -= int64(time.Hour)
	m.passes(time.Duration(trust))
	if got, want := c.Now(), int64(time.Hour)+trust; got != want {
		t.Fatalf("a suspension while the wall clock was set back: got %v, want %v (L2)", time.Duration(got), time.Duration(want))
	}
}

// TestWallClockDecidesNothing sets the wall clock: the time is what it was.
func TestWallClockDecidesNothing(t *testing.T) {
	m := &machine{wall: 17e17}
	c := m.clock()
	for _, step := range []time.Duration{time.Hour, -24 * time.Hour, time.Millisecond, -time.Microsecond} {
		before := c.Now()
		m.wall += int64(step)
		if got := c.Now(); got != before {
			t.Fatalf("wall clock set by %v: got %v, want %v (S2)", step, time.Duration(got), time.Duration(before))
		}
	}
}

// TestNowIsCheap reads the clock often: the system is asked ten times a second.
func TestNowIsCheap(t *testing.T) {
	m := &machine{wall: 17e17}
	c := m.clock()
	c.Now()
	before := m.looks
	for range 1000 {
		m.passes(time.Millisecond)
		c.Now()
	}
	if looks := m.looks - before; looks != 10 {
		t.Fatalf("1000 readings in a second: looked %d times at the time suspended, want 10", looks)
	}
}

func TestTime(t *testing.T) {
	c := New()
	if d := time.Until(c.Time(c.Now() + int64(time.Minute))); d < 59*time.Second || d > 61*time.Second {
		t.Fatalf("Time of now + 1m: got %v from now, want 1m", d)
	}
}

func TestSuspendedNeverRunsAhead(t *testing.T) {
	first := suspended()
	for range 100000 {
		if s := suspended(); s > first+int64(time.Millisecond) {
			t.Fatalf("suspended grew without a suspension: from %d to %d", first, s)
		}
	}
}
