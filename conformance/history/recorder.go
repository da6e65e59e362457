package history

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A Recorder collects the events of one process. All its methods, and those of its attempts, may be
// called from any goroutine. Each event is stamped when its method is called, so call it at the moment
// the event's Type asks for: a stamp that errs on that side can hide a violation of a few microseconds,
// but never invents one.
type Recorder struct {
	process string
	next    atomic.Uint64
	w       io.Writer

	mu     sync.Mutex
	chunks [][]Event // fixed size, so that growing never copies while others wait
	err    error
}

const chunk = 1024

// NewRecorder returns a recorder for one process. process names it and must be unique among the
// recorders whose histories are merged; "" stands for the process id and a random suffix.
//
// With a nil w events are kept in memory for [Recorder.History]. Otherwise each event is written to w as
// one JSON line, in one call of Write, before the recording method returns, and is not kept: so a
// process that is killed leaves all it recorded, at the price of one write per event.
func NewRecorder(process string, w io.Writer) *Recorder {
	if process == "" {
		process = fmt.Sprintf("%d-%08x", os.Getpid(), rand.Uint32())
	}
	return &Recorder{process: process, w: w}
}

// Process returns the name under which this recorder's events appear.
func (r *Recorder) Process() string { return r.process }

// Err returns the first error of the writer; events from then on are lost.
func (r *Recorder) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// History returns a copy of the events kept so far, ordered by time.
func (r *Recorder) History() History {
	r.mu.Lock()
	defer r.mu.Unlock()
	return Merge(History(slices.Concat(r.chunks...)))
}

func (r *Recorder) add(e Event) {
	if e.Process == "" {
		e.Process = r.process
	}
	var line []byte
	if r.w != nil {
		var err error
		if line, err = json.Marshal(&e); err != nil {
			panic("history: an event is always valid JSON: " + err.Error())
		}
		line = append(line, '\n')
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.w != nil {
		if r.err == nil {
			_, r.err = r.w.Write(line)
		}
		return
	}
	last := len(r.chunks) - 1
	if last < 0 || len(r.chunks[last]) == chunk {
		r.chunks = append(r.chunks, make([]Event, 0, chunk))
		last++
	}
	r.chunks[last] = append(r.chunks[last], e)
}

// A Request is what an attempt asks for.
type Request struct {
	Client string
	Kind   Kind
	Name   string
	Limit  int           // permits only
	TTL    time.Duration // 0 = unknown
	Wait   bool          // Lock and Acquire wait; TryLock and TryAcquire do not
}

// An Attempt records one acquisition and, when that succeeds, the life of its lease.
type Attempt struct {
	r  *Recorder
	id Event // what every event of the attempt repeats
}

// Start records that an attempt begins. Call it just before Lock, TryLock, Acquire, TryAcquire or
// NextToken.
func (r *Recorder) Start(q Request) *Attempt {
	t := now()
	a := &Attempt{r: r, id: Event{Attempt: r.next.Add(1), Client: q.Client, Kind: q.Kind, Name: q.Name}}
	e := a.id
	e.T, e.Type, e.Limit, e.TTL, e.Wait = t, Started, q.Limit, q.TTL, q.Wait
	r.add(e)
	return a
}

// A Grant says what an acquisition or an extension returned.
type Grant struct {
	Token uint64
	// Until is V, the moment until which the holder believes (Lease.Deadline). Zero = unknown: then
	// belief ends only by release or loss, and L2 is not judged for this lease.
	Until time.Time
	// TTL as granted by the backend, where it differs from the one asked for. 0 = the attempt's.
	TTL time.Duration
	// Called is a moment before the extension was called; zero = when the event is recorded. An
	// acquisition has its Started event for that.
	Called time.Time
	// Sent is a moment at which the request had surely been sent, the earliest that is known: V must not
	// be later than Sent + TTL - margin. Zero = when the event is recorded, which catches little: see
	// Rules.SendDelay.
	Sent time.Time
}

func (a *Attempt) grant(t int64, typ Type, g Grant) {
	e := a.id
	e.T, e.Type, e.Token, e.TTL = t, typ, g.Token, g.TTL
	e.V, e.Called, e.Sent = Clock(g.Until), Clock(g.Called), Clock(g.Sent)
	a.r.add(e)
}

func (a *Attempt) event(t int64, typ Type, res Result) {
	e := a.id
	e.T, e.Type, e.Result = t, typ, res
	a.r.add(e)
}

// Acquired records that the attempt returned a lease.
func (a *Attempt) Acquired(g Grant) { a.grant(now(), Acquired, g) }

// Refused records that the attempt returned ErrHeld.
func (a *Attempt) Refused() { a.event(now(), Refused, "") }

// Failed records that the attempt returned another error: Unavailable, Uncertain, Context or Other.
func (a *Attempt) Failed(class Result) { a.event(now(), Failed, class) }

// Extended records a successful extension, by the holder or by renewal. Every extension that moves V
// must be recorded; failed ones are not.
func (a *Attempt) Extended(g Grant) { a.grant(now(), Extended, g) }

// Lost records that the holder saw Done closed without having called Release. Let a goroutine of its own
// wait for Done: L2 is judged by this stamp.
func (a *Attempt) Lost() { a.event(now(), LossTold, "") }

// ReleaseCalled records that Release is about to be called. Closing a client releases its leases: record
// it for each of them before the call of Close.
func (a *Attempt) ReleaseCalled() { a.event(now(), ReleaseCalled, "") }

// ReleaseReturned records the outcome of Release: OK, NotHeld, Uncertain, Unavailable or Other.
func (a *Attempt) ReleaseReturned(res Result) { a.event(now(), ReleaseReturned, res) }

// Observed records a reading of the lease made after the time called: whether Err() was nil, and what
// Token() and Deadline() said. A zero token or until is not judged.
func (a *Attempt) Observed(called time.Time, believed bool, token uint64, until time.Time) {
	e := a.id
	e.T, e.Type, e.Result, e.Token = now(), Observed, Ended, token
	e.V, e.Called = Clock(until), Clock(called)
	if believed {
		e.Result = Believed
	}
	a.r.add(e)
}

// Write records a write that a guarded resource admitted or refused. called is a moment before the
// write was requested; zero when Write is called by the resource itself, in the order in which it
// decides.
func (r *Recorder) Write(resource string, token uint64, called time.Time, admitted bool) {
	e := Event{T: now(), Type: WriteRefused, Resource: resource, Token: token, Called: Clock(called)}
	if admitted {
		e.Type = WriteAdmitted
	}
	r.add(e)
}

// FaultBegin records that the named fault starts; call it before the fault is switched on.
func (r *Recorder) FaultBegin(name string) { r.add(Event{T: now(), Type: FaultBegin, Fault: name}) }

// FaultHit records that the fault met something: a proxy dropped a reply, a server died.
func (r *Recorder) FaultHit(name string) { r.add(Event{T: now(), Type: FaultHit, Fault: name}) }

// FaultEnd records that the named fault is over; call it after the fault was switched off.
func (r *Recorder) FaultEnd(name string) { r.add(Event{T: now(), Type: FaultEnd, Fault: name}) }

// Stopped records that another process is about to be stopped (SIGSTOP): it cannot see a loss meanwhile.
func (r *Recorder) Stopped(process string) {
	r.add(Event{T: now(), Type: ProcessStopped, Process: process})
}

// Continued records that the process was sent SIGCONT; call it after sending.
func (r *Recorder) Continued(process string) {
	r.add(Event{T: now(), Type: ProcessContinued, Process: process})
}

// Ended records that another process is about to be killed, or has exited: call it just before SIGKILL
// is sent, or after waiting for the exit. From then on the process believes in nothing, and it need not
// end its attempts nor see its losses.
func (r *Recorder) Ended(process string) {
	r.add(Event{T: now(), Type: ProcessEnded, Process: process})
}
