package history

import "time"

// base ties this process's monotonic clock to the clock all histories of one machine share. It is read
// once: afterwards a stamp costs one reading of Go's own monotonic clock, which on Linux is the same
// CLOCK_MONOTONIC, so the two never drift apart.
var base = readBase()

type clockBase struct {
	at time.Time // carries a monotonic reading
	ns int64     // what the shared clock showed at that moment
}

// Clock returns t on the clock of histories, in nanoseconds; 0 for the zero time, which stands for
// "unknown" in an Event.
//
// On Linux the clock is CLOCK_MONOTONIC, common to all processes of one machine (and of one time
// namespace), and Clock is right to within a microsecond or so. On other systems the clock is the wall
// clock as it stood when the process started, moved on by the monotonic clock: there histories of
// several processes are comparable only as far as the wall clock was not stepped between their starts.
//
// t must carry its monotonic reading (as time.Now and Add return it); without one the result is wrong
// by whatever the wall clock was stepped since the process started. Inside a testing/synctest bubble
// the clock is the bubble's, consistent with itself and with nothing else.
func Clock(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return base.ns + int64(t.Sub(base.at))
}

func now() int64 { return base.ns + int64(time.Since(base.at)) }

func wallBase() clockBase {
	t := time.Now()
	return clockBase{at: t, ns: t.UnixNano()}
}
