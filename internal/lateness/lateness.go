// Package lateness measures how busy a machine is while a test runs, so that what the machine did late is not held against
// what was tested.
package lateness

import "time"

// beat is how often a timer is set.
const beat = 5 * time.Millisecond

// Measure begins to measure how late timers are. The function that it answers ends that and answers the most; called again it
// answers the same. It must be called, by one goroutine at a time.
func Measure() (end func() time.Duration) {
	stop, result := make(chan struct{}), make(chan time.Duration)
	go func() {
		var most time.Duration
		for {
			due := time.Now().Add(beat)
			select {
			case <-stop:
				result <- most
				return
			case <-time.After(beat):
				most = max(most, time.Since(due))
			}
		}
	}()
	var most time.Duration
	ended := false
	return func() time.Duration {
		if !ended {
			ended = true
			close(stop)
			most = <-result
		}
		return most
	}
}
