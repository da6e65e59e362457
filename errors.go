package fencelock

import (
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// The errors of this package. Match them with [errors.Is]; each also unwraps to the driver's own error
// where there is one. Besides these, a wait that ended matches its context's error, and what a backend
// cannot do matches [errors.ErrUnsupported].
var (
	// ErrHeld says: surely not acquired. Someone else holds it or stands before us. Nothing is left
	// behind.
	ErrHeld = errors.New("held by another")

	// ErrUncertain says: the outcome of a request is unknown, because no answer came in time. If it
	// was an acquisition, a release of it was sent; [OpError.Until] tells until when something may
	// remain, at most one TTL.
	ErrUncertain = errors.New("outcome unknown")

	// ErrUnavailable says: the backend refused or could not be dialled. Surely not acquired.
	ErrUnavailable = driver.ErrUnavailable

	// ErrLost says: the lease ended before Release. It is the cause of the lease's context.
	ErrLost = errors.New("lease lost")

	// ErrNotHeld says: Release or Extend of a lease that is no longer ours. Exclusivity may have been
	// broken before the call.
	ErrNotHeld = errors.New("not held any more")

	// ErrReleased says that the lease was released by its own Release.
	ErrReleased = errors.New("lease released")

	// ErrInvalid says that an argument is wrong; the text names field and value.
	ErrInvalid = driver.ErrInvalid

	// ErrClosed says that the client was closed.
	ErrClosed = errors.New("client closed")
)

// OpError is the error of an operation on one name. It matches Err and Cause.
type OpError struct {
	Op   string // "lock", "acquire", "extend", "release", ...
	Kind Kind
	Name string

	// Err is one of this package's errors, or the error of the context that ended the wait.
	Err error

	// Cause is what the backend said, or nil.
	Cause error

	// Until is set if Err or Cause matches ErrUncertain: what may remain on the server ends by then.
	Until time.Time
}

// Error names operation and name, then what happened and why.
func (e *OpError) Error() string {
	s := fmt.Sprintf("fencelock: %s %.80q: ", e.Op, e.Name)
	if e.Cause == nil {
		return s + e.Err.Error()
	}
	if errors.Is(e.Cause, e.Err) {
		return s + e.Cause.Error()
	}
	return s + e.Err.Error() + ": " + e.Cause.Error()
}

// Unwrap makes errors.Is and errors.As see both.
func (e *OpError) Unwrap() []error {
	if e.Cause == nil {
		return []error{e.Err}
	}
	return []error{e.Err, e.Cause}
}
