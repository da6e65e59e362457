package conformance

import (
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
)

// pulses measures, while tests run, how late signals are in this process: a timer fires, a goroutine hears it and
// tells another one. So a bound on the time of a signal can be held tight on a machine that is busy: what the
// simplest of signals takes cannot be the library's fault.
var pulses = struct {
	sync.Mutex
	tests int           // that run
	stop  chan struct{} // ends the measurement
	late  []beat        // those that were late, in order of time
	next  time.Time     // when the one under way is due; zero if there is none
}{}

type beat struct {
	at   time.Time
	late time.Duration
}

// hops is how many signals, each late like a plain one, may stand between a cause and what a test sees: a timer, the
// engine, the channel that it closes, the test's own goroutine.
const hops = 4

// startPulse measures until the function it answers is called.
func startPulse() (stop func()) {
	pulses.Lock()
	defer pulses.Unlock()
	if pulses.tests++; pulses.tests == 1 {
		pulses.stop = make(chan struct{})
		pulses.late = nil
		measure(pulses.stop)
	}
	return func() {
		pulses.Lock()
		defer pulses.Unlock()
		if pulses.tests--; pulses.tests == 0 {
			close(pulses.stop)
		}
	}
}

func measure(stop chan struct{}) {
	const interval = 2 * time.Millisecond
	signals := make(chan time.Time)
	go func() {
		defer close(signals)
		for {
			due := time.Now().Add(interval)
			pulses.Lock()
			pulses.next = due
			pulses.Unlock()
			select {
			case <-stop:
				return
			case <-time.After(interval):
				signals <- due
			}
		}
	}()
	go func() {
		for due := range signals {
			pulses.Lock()
			if late := time.Since(due); late > 2*time.Millisecond {
				pulses.late = append(pulses.late, beat{due, late})
			}
			if pulses.next.Equal(due) {
				pulses.next = time.Time{}
			}
			pulses.Unlock()
		}
	}()
}

// lateness answers by how much a plain signal was late at most since then.
func lateness(since time.Time) (worst time.Duration) {
	pulses.Lock()
	defer pulses.Unlock()
	if !pulses.next.IsZero() {
		worst = max(0, time.Since(pulses.next)) // whatever held up the caller may hold it up still
	}
	for i := len(pulses.late) - 1; i >= 0 && pulses.late[i].at.After(since.Add(-time.Second)); i-- {
		worst = max(worst, pulses.late[i].late)
	}
	return worst
}

// window is a span of time that began at a moment.
type window struct{ began time.Time }

// pulse begins a window.
func (t *T) pulse() window { return window{time.Now()} }

// end answers by how much a plain signal was late at most since the window began.
func (w window) end() time.Duration { return lateness(w.began) }

// inTime runs f and checks that it took no longer than the limit.
func (t *T) inTime(what string, limit time.Duration, law string, f func()) {
	t.Helper()
	began := time.Now()
	f()
	took := time.Since(began)
	if machine := lateness(began); took > limit+hops*machine {
		t.Fatalf("%s: got it after %v, want within %v (%s); plain signals were up to %v late", what, took, limit, law, machine)
	}
}

// lostInTime waits for the loss of leases that nothing extends any more, and checks that each is told at its
// deadline, no later than 50 ms after it (L2). A lease that is lost when this is called, because the machine
// is slow, is not measured.
func (t *T) lostInTime(leases ...*fencelock.Lease) {
	t.Helper()
	began := time.Now()
	wrong := make([]string, len(leases))
	var all sync.WaitGroup
	var mu sync.Mutex
	var late time.Duration
	for i, l := range leases {
		select {
		case <-l.Done():
			continue
		default:
		}
		all.Go(func() {
			select {
			case <-l.Done():
				after := time.Since(l.Deadline())
				mu.Lock()
				late = max(late, after)
				mu.Unlock()
				if after < -time.Millisecond {
					wrong[i] = fmt.Sprintf("closed %v before its deadline", -after)
				}
			case <-time.After(time.Until(l.Deadline()) + patience):
				wrong[i] = fmt.Sprintf("open %v after its deadline", patience)
			}
		})
	}
	all.Wait()
	for i, l := range leases {
		if wrong[i] != "" {
			t.Fatalf("Done of a lease that cannot be extended: got %s, want closed within 50ms after it (L2)", wrong[i])
		}
		t.is("Err of a lost lease", l.Err(), fencelock.ErrLost, "L2")
	}
	if machine := lateness(began); late > 50*time.Millisecond+hops*machine {
		t.Fatalf("Done of a lease that cannot be extended: got closed %v after its deadline, want within 50ms (L2); plain signals were up to %v late", late, machine)
	}
}
