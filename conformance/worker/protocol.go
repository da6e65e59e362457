package worker

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
)

// marker is the first argument of a test binary that runs as a worker.
const marker = "fencelock-worker"

// setup is the first line that a worker reads. It is no argument, since a URL may hold a password.
type setup struct {
	Process        string
	URL            string
	RequestTimeout time.Duration
	Longer         bool
}

// order is each further line.
type order struct {
	ID   uint64
	Op   string // see serve
	Of   uint64 `json:",omitempty"` // the order whose lease is meant, or that is to be cancelled
	Ask  *Ask   `json:",omitempty"`
	Load *Load  `json:",omitempty"`
	Work *Work  `json:",omitempty"`
	TTL  time.Duration
}

// message is a line that a worker writes: one of its fields is set.
type message struct {
	Reply *reply `json:",omitempty"`
	// Event is one of history.
	Event json.RawMessage `json:",omitempty"`
	// Waits is a request of that kind and name that was answered, and not by a grant.
	Waits *subject `json:",omitempty"`
}

type subject struct {
	Kind fencelock.Kind
	Name string
}

type reply struct {
	ID    uint64
	Token fencelock.Token `json:",omitempty"`
	Error *remoteError    `json:",omitempty"`
}

// remoteError is an error of a worker. It matches the same errors of fencelock and context.
type remoteError struct {
	Text    string
	Matches []string
}

var sentinels = map[string]error{
	"held":        fencelock.ErrHeld,
	"uncertain":   fencelock.ErrUncertain,
	"unavailable": fencelock.ErrUnavailable,
	"lost":        fencelock.ErrLost,
	"not held":    fencelock.ErrNotHeld,
	"released":    fencelock.ErrReleased,
	"invalid":     fencelock.ErrInvalid,
	"closed":      fencelock.ErrClosed,
	"unsupported": errors.ErrUnsupported,
	"canceled":    context.Canceled,
	"deadline":    context.DeadlineExceeded,
}

func newRemoteError(err error) *remoteError {
	if err == nil {
		return nil
	}
	e := &remoteError{Text: err.Error()}
	for name, sentinel := range sentinels {
		if errors.Is(err, sentinel) {
			e.Matches = append(e.Matches, name)
		}
	}
	return e
}

func (e *remoteError) Error() string { return e.Text }

func (e *remoteError) Is(target error) bool {
	for _, name := range e.Matches {
		if sentinels[name] == target {
			return true
		}
	}
	return false
}

// output writes messages, each as one line in one call.
type output struct {
	mu sync.Mutex
	w  io.Writer
}

// send fails only when nobody reads any more, and then the worker is about to end.
func (o *output) send(m message) {
	line, err := json.Marshal(m)
	if err != nil {
		panic(err) // all of it is our own
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.w.Write(append(line, '\n'))
}

// Write takes an event of a history.Recorder.
func (o *output) Write(event []byte) (int, error) {
	o.send(message{Event: event})
	return len(event), nil
}
