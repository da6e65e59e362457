package driver

// EventKind tells the kinds of events apart.
type EventKind uint8

// The kinds of events.
const (
	// EventGranted: a step gave the lock to the waiter Owner with Token, as a claim.
	EventGranted EventKind = iota + 1
	// EventFreed: Owner.Name may have become free. Owner.ID is empty.
	EventFreed
	// EventRecheck: events may have been missed (a subscription began, or began again): every waiter
	// should ask now or, if Owner.Name is set, every waiter for that name.
	EventRecheck
	// EventWarning: Err tells something the operator should know about the backend, for example an
	// eviction policy that may drop locks. It is passed to the client's Observer.
	EventWarning
)

// Event is a message from the backend. For waiters it is a hint: correctness never depends on its
// arrival, and an event that is late, repeated or for an owner long gone is harmless (W1).
type Event struct {
	Kind  EventKind
	Owner Owner
	Token Token
	Err   error
}

// Notifier is implemented by drivers that can tell instead of being asked.
type Notifier interface {
	// Notify sets where events go. The client calls it once, before every other method. The driver
	// may call the sink from any goroutine; the sink does not block and does not call the driver.
	//
	// The driver subscribes at the latest when a request with Wait is first answered Waiting, must not delay
	// that answer for it, sends EventRecheck when the subscription stands, and again after it had broken. It uses one
	// subscription for all names, or one connection for each server where names are on several, and gives it up at
	// the latest one TTL after the last request of a waiter.
	Notify(sink func(Event))
}
