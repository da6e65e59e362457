package redislua

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// Client is what a client library must be able to do. All methods may be called at the same time.
type Client interface {
	// Eval runs the call and fills in its results.
	Eval(ctx context.Context, c *Call)

	// EvalAll is Eval for each of the calls, sent together. One call's failure is no concern of the
	// others. None of them asks replicas.
	EvalAll(ctx context.Context, calls []*Call)

	// Listen subscribes to the channel, which on a Cluster is a sharded one. It calls up when the subscription stands and whenever it
	// stands again, and message with each payload, until ctx ends or it needs to be called anew. It
	// notices a silent connection that is dead.
	Listen(ctx context.Context, channel string, up func(), message func(payload string)) error

	// Scan calls page with the keys of the Redis type that match, of all servers, one page at a
	// time, until that fails.
	Scan(ctx context.Context, pattern, redisType string, page func(keys []string) error) error

	// Info calls each with the section of each server's INFO, possibly at the same time.
	Info(ctx context.Context, section string, each func(info string)) error

	// Config answers one of the settings of a client's only server.
	Config(ctx context.Context, parameter string) (string, error)

	// SameSlot says that the servers are a Cluster: one call may only take keys of one slot, and Listen is called
	// for each name that is waited for, at the same time.
	SameSlot() bool
	// Deadlines says what driver.Info.Deadlines does.
	Deadlines() bool

	// Close ends what the client opened.
	Close() error
}

// Call is one run of a script. It is made by newCall.
type Call struct {
	Script *Script
	Full   bool // send the script's text instead of its hash
	Keys   Words
	Args   Words // at least one

	// Replicas, if not 0, is how many replicas must have followed. Then, on the connection of the call and as the
	// next command on it, the client sends WAIT with this number and Patience, and fills in Acked.
	Replicas int
	Patience time.Duration
	// Acked is what WAIT answered, 0 if nothing is known.
	Acked int

	// Reply is an int64, a string, or a slice of such, of errors and of such slices.
	Reply any
	// Err is what the client library said, of any type.
	Err error
	// Refusal is the server's error as it wrote it, if Err is due to one.
	Refusal string
	// Sent counts how often the call was sent, for a client library may repeat it by itself. It is
	// too great rather than too small. A try that was refused by the server and then repeated, as after a
	// redirection, need not count: it surely did nothing, see [Refused].
	Sent int

	// Room for a call about one name of usual length.
	keyText          [192]byte
	argText          [96]byte
	keyEnds, argEnds [6]int
}

func newCall(s *Script) *Call {
	c := &Call{Script: s}
	c.Keys = Words{text: c.keyText[:0], ends: c.keyEnds[:0]}
	c.Args = Words{text: c.argText[:0], ends: c.argEnds[:0]}
	return c
}

// Beginnings of server errors that are dealt with, rather than passed on. The second one is our own: a step failed in
// its middle.
const (
	noScript = "NOSCRIPT"
	half     = "FENCELOCKHALF"
	tryAgain = "TRYAGAIN"
)

// Refused says that a step which the server answered with this error surely did nothing.
func Refused(refusal string) bool {
	return refusal != "" && !strings.HasPrefix(refusal, half)
}

// result puts the call's error into its class (L8): only what was never sent, or was sent once and
// refused as a whole, surely did not happen.
func (c *Call) result() error {
	switch {
	case c.Err == nil:
		return nil
	case c.Sure():
		return driver.Unavailable(c.Err)
	}
	return c.Err
}

// forgotten reports that the server did not know the script, and prepares the call to be sent with its
// text. What was answered so surely did nothing.
func (c *Call) forgotten() bool {
	if !c.Forgotten() {
		return false
	}
	c.Full, c.Err, c.Refusal = true, nil, ""
	c.Sent--
	return true
}

// A reply that no script of ours gives: something between us and the server is not what it seems.
func unexpected(reply any) error {
	return fmt.Errorf("redis: a script answered %.80q", fmt.Sprint(reply))
}

// Answers about an owner that holds nothing, as in prelude.lua.
var states = [...]driver.State{0: driver.Held, 1: driver.Waiting, 2: driver.Gone}

// answer reads a script's reply about one owner that asked for ttl.
func answer(reply any, ttl time.Duration) (driver.Answer, error) {
	switch r := reply.(type) {
	case int64:
		if r >= 0 && int(r) < len(states) {
			return driver.Answer{State: states[r]}, nil
		}
	case string:
		t, err := strconv.ParseUint(r, 10, 64)
		if err == nil {
			return driver.Answer{State: driver.Granted, Token: driver.Token(t), TTL: ttl}, nil
		}
	case []any:
		if len(r) == 2 {
			a, err := answer(r[0], ttl)
			left, ok := r[1].(int64)
			if err == nil && a.State == driver.Granted && ok {
				a.TTL = time.Duration(left) * time.Millisecond
				return a, nil
			}
		}
	}
	return driver.Answer{}, unexpected(reply)
}
