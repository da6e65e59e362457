package fencelock

import (
	"sync"
	"time"
)

// EventKind tells the kinds of events apart.
type EventKind string

// The kinds of events.
const (
	// EventAcquired: a lock or permit was taken; Wait and Attempts say how.
	EventAcquired EventKind = "acquired"
	// EventRefused: it was not taken; Err says why.
	EventRefused EventKind = "refused"
	// EventRenewFailed: an extension got no answer or an error. It is tried again while the lease lives.
	EventRenewFailed EventKind = "renew failed"
	// EventReleased: Release returned; Err is its error.
	EventReleased EventKind = "released"
	// EventLost: a lease was lost; Err says why.
	EventLost EventKind = "lost"
	// EventWarning: the backend is set up in a way that the operator should know of; see Err.
	EventWarning EventKind = "warning"
	// EventCleanupFailed: what a failed acquisition may have left could not be removed; it ends by its TTL.
	EventCleanupFailed EventKind = "cleanup failed"
)

// Event tells an [Observer] what happened. Fields that do not apply are zero.
type Event struct {
	Kind     EventKind
	Time     time.Time
	Backend  string // as in driver.Info
	Of       Kind   // lock or semaphore
	Name     string
	Token    Token
	Wait     time.Duration // from the call to the grant or refusal
	Attempts int           // requests that asked for the grant: 1 uncontended
	Held     time.Duration // from the grant to release or loss
	Err      error
	Dropped  int // events that were dropped just before this one because the observer was slow
}

// Observer gets the events of a client, one at a time and in order, in a goroutine of its own: it may take
// its time without delaying locks. If more than 1024 events wait for it, further ones are dropped and
// counted.
type Observer func(Event)

// observing delivers events to the observer.
type observing struct {
	observer Observer
	backend  string
	events   chan Event
	done     chan struct{}

	mu      sync.Mutex
	dropped int
	closed  bool
}

// newObserving answers nil if there is nobody to tell; a nil *observing is ready to use.
func newObserving(o Observer, backend string) *observing {
	if o == nil {
		return nil
	}
	obs := &observing{observer: o, backend: backend, events: make(chan Event, 1024), done: make(chan struct{})}
	go func() {
		defer close(obs.done)
		for e := range obs.events {
			o(e)
		}
	}()
	return obs
}

func (o *observing) tell(e Event) {
	if o == nil {
		return
	}
	e.Time, e.Backend = time.Now(), o.backend
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return
	}
	e.Dropped = o.dropped
	select {
	case o.events <- e:
		o.dropped = 0
	default:
		o.dropped++
	}
}

// close ends the goroutine after the events that wait. It does not wait for a slow observer longer than
// patience.
func (o *observing) close(patience time.Duration) {
	if o == nil {
		return
	}
	o.mu.Lock()
	if !o.closed {
		o.closed = true
		close(o.events)
	}
	o.mu.Unlock()
	select {
	case <-o.done:
	case <-time.After(patience):
	}
}
