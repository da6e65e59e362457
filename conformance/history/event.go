package history

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// Type says what happened in an Event.
type Type string

// The types of events.
const (
	Started         Type = "started"          // an attempt begins: stamped before Lock, TryLock, ... is called
	Acquired        Type = "acquired"         // the attempt returned a lease: stamped after the return
	Refused         Type = "refused"          // the attempt returned ErrHeld
	Failed          Type = "failed"           // the attempt returned another error; Result holds its class
	Extended        Type = "extended"         // an extension succeeded: stamped after the return
	LossTold        Type = "loss-told"        // the holder saw Done closed without having called Release
	ReleaseCalled   Type = "release-called"   // stamped before the call
	ReleaseReturned Type = "release-returned" // Result holds the outcome
	Observed        Type = "observed"         // a reading of the lease: Result Believed or Ended, and V
	WriteAdmitted   Type = "write-admitted"   // a guarded resource accepted a write with this token
	WriteRefused    Type = "write-refused"    // a guarded resource refused a write with this token

	FaultBegin       Type = "fault-begin"
	FaultHit         Type = "fault-hit" // the fault met a request, a connection, a process: it was not idle
	FaultEnd         Type = "fault-end"
	ProcessStopped   Type = "process-stopped"   // SIGSTOP was sent to Process
	ProcessContinued Type = "process-continued" // SIGCONT was sent to Process
	ProcessEnded     Type = "process-ended"     // Process is about to be killed, or has exited
)

// Kind is what an attempt asks for. A lock and a permit of one name are two names; a bare token belongs
// to the lock's domain of tokens.
type Kind string

// The kinds.
const (
	Lock   Kind = "lock"
	Permit Kind = "permit"
	Token  Kind = "token" // a fencing token without a lease
)

// Result is the class of an outcome.
type Result string

// The results.
const (
	OK          Result = "ok"
	NotHeld     Result = "not-held"    // release: exclusivity may have been broken
	Unavailable Result = "unavailable" // surely nothing was done
	Uncertain   Result = "uncertain"   // the outcome is unknown
	Context     Result = "context"     // the wait ended by its context; nothing is left behind
	Other       Result = "other"
	Believed    Result = "believed" // observed: Err() was nil
	Ended       Result = "ended"    // observed: Err() was not nil
)

// An Event is one line of a history. Times are nanoseconds on the clock of [Clock], 0 is "unknown".
// Which fields are set depends on Type. The attempt's own facts (client, kind, name, limit, TTL, wait)
// are read from its Started event; other events repeat client, kind and name for the reader.
type Event struct {
	T       int64  `json:"t"`
	Type    Type   `json:"type"`
	Process string `json:"process"`           // recorder's process, or the one a Process... event speaks of
	Attempt uint64 `json:"attempt,omitempty"` // with Process: identifies the attempt and the lease it got
	Client  string `json:"client,omitempty"`
	Kind    Kind   `json:"kind,omitempty"`
	Name    string `json:"name,omitempty"`
	Limit   int    `json:"limit,omitempty"` // permits: the limit of this attempt
	Wait    bool   `json:"wait,omitempty"`  // the attempt may wait (Lock, Acquire), not TryLock, TryAcquire
	Token   uint64 `json:"token,omitempty"`
	// TTL, V, Called and Sent: see Grant.
	TTL      time.Duration `json:"ttl,omitempty"`
	V        int64         `json:"v,omitempty"`
	Called   int64         `json:"called,omitempty"` // also of a write: before the request; 0 = T
	Sent     int64         `json:"sent,omitempty"`
	Result   Result        `json:"result,omitempty"`
	Fault    string        `json:"fault,omitempty"`
	Resource string        `json:"resource,omitempty"`
}

// String is the event in one line, for people; times in seconds.
func (e Event) String() string { return e.text(0) }

// text prints times relative to zero.
func (e Event) text(zero int64) string {
	var b strings.Builder
	at := func(t int64) string { return fmt.Sprintf("%.6fs", float64(t-zero)/1e9) }
	fmt.Fprintf(&b, "%s %s", at(e.T), e.Type)
	if e.Kind != "" {
		fmt.Fprintf(&b, " %s %q", e.Kind, e.Name)
	}
	if e.Fault != "" {
		fmt.Fprintf(&b, " %q", e.Fault)
	}
	if e.Resource != "" {
		fmt.Fprintf(&b, " resource %q", e.Resource)
	}
	if e.Limit != 0 {
		fmt.Fprintf(&b, " limit %d", e.Limit)
	}
	if e.Token != 0 {
		fmt.Fprintf(&b, " token %d", e.Token)
	}
	if e.Result != "" {
		fmt.Fprintf(&b, " %s", e.Result)
	}
	if e.TTL != 0 {
		fmt.Fprintf(&b, " TTL %v", e.TTL)
	}
	for _, f := range []struct {
		name string
		t    int64
	}{{"called", e.Called}, {"sent", e.Sent}, {"V", e.V}} {
		if f.t != 0 {
			fmt.Fprintf(&b, " %s %s", f.name, at(f.t))
		}
	}
	b.WriteString(" (")
	if e.Client != "" {
		fmt.Fprintf(&b, "client %s, ", e.Client)
	}
	fmt.Fprintf(&b, "process %s", e.Process)
	if e.Attempt != 0 {
		fmt.Fprintf(&b, ", attempt %d", e.Attempt)
	}
	b.WriteString(")")
	return b.String()
}

// A History is what happened in a run, in any order; only events of equal time must stand in theirs.
type History []Event

// Merge joins the histories of several recorders, of one or more processes of one machine, into one that
// is ordered by time. Events of equal time keep their order.
func Merge(parts ...History) History {
	all := slices.Concat(parts...)
	slices.SortStableFunc(all, func(a, b Event) int { return cmp.Compare(a.T, b.T) })
	return all
}

// Write writes the history as JSON lines, the form [Read] takes.
func (h History) Write(w io.Writer) error {
	buf := bufio.NewWriter(w)
	enc := json.NewEncoder(buf)
	for i := range h {
		if err := enc.Encode(&h[i]); err != nil {
			return fmt.Errorf("history: write event %d: %w", i+1, err)
		}
	}
	if err := buf.Flush(); err != nil {
		return fmt.Errorf("history: write: %w", err)
	}
	return nil
}

// Read reads JSON lines. A last line without its newline is dropped: it is what a process that was
// killed while writing leaves behind. On an error it returns the events before the bad line as well.
func Read(r io.Reader) (History, error) {
	var h History
	buf := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, err := buf.ReadBytes('\n')
		if err == io.EOF {
			return h, nil
		}
		if err != nil {
			return h, fmt.Errorf("history: read line %d: %w", n, err)
		}
		if line = bytes.TrimSpace(line); len(line) == 0 {
			continue
		}
		var e Event
		if err := json.Unmarshal(line, &e); err != nil {
			return h, fmt.Errorf("history: line %d: %w", n, err)
		}
		h = append(h, e)
	}
}
