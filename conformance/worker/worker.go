package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/history"
)

const (
	startTimeout  = 30 * time.Second
	signalTimeout = 10 * time.Second // for a process to stop or to be gone after the signal
	closeTimeout  = 30 * time.Second
	logEnd        = 4 << 10 // bytes of each end of the standard error that are kept for messages
)

// ErrEnded says that the worker's process has ended before it answered.
var ErrEnded = errors.New("worker has ended")

// Options says what a worker is to be.
type Options struct {
	// URL of the backend, as for fencelock.Open.
	URL string
	// Process names the worker in histories; it must be unique in one history.
	Process string
	// RequestTimeout is that of its client; 0 = the default.
	RequestTimeout time.Duration
	// Longer is that of [Record].
	Longer bool
	// Clock gives it a wall clock that SetClock can set. That is possible on Linux on amd64 only, and where the system lets a
	// process write to the memory of one that it has started; else Start fails with an error that matches
	// [errors.ErrUnsupported].
	Clock bool
}

// A Worker is a process with one client. All methods are safe for concurrent use; Pause, Resume, SetClock,
// Kill and Close are done one after another.
type Worker struct {
	process string
	cmd     *exec.Cmd
	in      io.WriteCloser
	stderr  ends
	control *history.Recorder // what is done to the process
	exited  chan struct{}     // closed when it has ended and all that it wrote was read

	clock *clock // nil without Options.Clock

	signals sync.Mutex
	paused  bool

	mu      sync.Mutex
	last    uint64
	replies map[uint64]chan reply
	events  history.History
	waits   map[subject]int
	changed chan struct{} // closed and made anew when events or waits grow
	ended   bool          // its end is in the history
	failure error         // what went wrong with the process, once exited is closed
}

// Start starts a worker and returns when it has opened its backend; that takes at most 30 s. On Linux the
// worker dies with the process that started it, stopped or not; elsewhere it ends when it next runs.
func Start(ctx context.Context, o Options) (*Worker, error) {
	if !mainCalled.Load() {
		return nil, errors.New("worker: the TestMain of this test binary must call worker.Main first")
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("worker: %w", err)
	}
	w := &Worker{
		process: o.Process, cmd: exec.Command(exe, marker),
		control: history.NewRecorder(o.Process+" from outside", nil),
		exited:  make(chan struct{}), replies: make(map[uint64]chan reply),
		waits: make(map[subject]int), changed: make(chan struct{}),
	}
	w.cmd.Stderr = &w.stderr
	// By default the race detector makes every exit take a second.
	w.cmd.Env = append(os.Environ(), strings.TrimSpace("GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=20"))
	out, err := w.cmd.StdoutPipe()
	if err == nil {
		w.in, err = w.cmd.StdinPipe()
	}
	if err != nil {
		return nil, fmt.Errorf("worker: %w", err)
	}
	opened := make(chan reply, 1)
	w.replies[0] = opened
	if err := w.run(out, o.Clock); err != nil {
		return nil, fmt.Errorf("worker: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	err = w.write(setup{Process: o.Process, URL: o.URL, RequestTimeout: o.RequestTimeout, Longer: o.Longer})
	if err == nil {
		select {
		case r := <-opened:
			err = r.err()
		case <-w.exited:
			err = w.endedError()
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("worker %s: start: %w", o.Process, err), w.Kill())
	}
	return w, nil
}

// run starts the process and reads what it writes until it ends.
//
// The kernel sends the parent-death signal when the thread that started the process ends, so the goroutine
// keeps its thread to itself as long as the process lives.
func (w *Worker) run(out io.Reader, clock bool) error {
	dieWithParent(w.cmd)
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := w.start(clock)
		started <- err
		if err != nil {
			return
		}
		read := w.read(out)
		err = w.cmd.Wait()
		if w.clock != nil {
			err = errors.Join(err, w.clock.close())
		}
		w.mu.Lock()
		w.failure = errors.Join(err, read)
		w.mu.Unlock()
		close(w.exited)
	}()
	return <-started
}

// ClockError answers nil if [Options].Clock is possible here, and else the error that Start would answer.
func ClockError() error { return clockError() }

var clockError = sync.OnceValue(func() error {
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	w := &Worker{cmd: exec.Command(exe, marker)} // killed before it has begun
	dieWithParent(w.cmd)
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := w.start(true)
		if err == nil {
			_ = w.cmd.Process.Kill()
			_ = w.cmd.Wait()
			err = w.clock.close()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	return nil
})

// start starts the process, if asked with a clock that can be set.
func (w *Worker) start(clock bool) error {
	if !clock {
		return w.cmd.Start()
	}
	err := stopAtExec(w.cmd)
	if err == nil {
		if err := w.cmd.Start(); err != nil {
			return err
		}
		if w.clock, err = newClock(w.cmd.Process.Pid); err == nil {
			return nil
		}
		_ = w.cmd.Process.Kill()
		_ = w.cmd.Wait()
	}
	return fmt.Errorf("a wall clock that can be set: %w: %w", errors.ErrUnsupported, err)
}

// read takes what the worker writes, until the end; a line that a killed worker did not finish is none.
func (w *Worker) read(out io.Reader) error {
	lines := json.NewDecoder(out)
	for {
		var m message
		if err := lines.Decode(&m); err != nil {
			if err == io.EOF || err == io.ErrUnexpectedEOF {
				return nil
			}
			// The pipe must be read on, or the process would never end.
			_, _ = io.Copy(io.Discard, out)
			return err
		}
		w.take(m)
	}
}

func (w *Worker) take(m message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case m.Reply != nil:
		if to := w.replies[m.Reply.ID]; to != nil {
			delete(w.replies, m.Reply.ID)
			to <- *m.Reply
		}
		return
	case m.Event != nil:
		var e history.Event
		if err := json.Unmarshal(m.Event, &e); err == nil {
			w.events = append(w.events, e)
		}
	case m.Waits != nil:
		w.waits[*m.Waits]++
	}
	close(w.changed)
	w.changed = make(chan struct{})
}

func (r reply) err() error {
	if r.Error == nil {
		return nil
	}
	return r.Error
}

func (w *Worker) write(v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err = w.in.Write(append(line, '\n'))
	return err
}

func (w *Worker) endedError() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return fmt.Errorf("%w: %v; its standard error:\n%s", ErrEnded, w.failure, w.stderr.String())
}

// do sends an order and waits for its reply. When ctx ends first the order is cancelled, and the reply is
// waited for a little longer: a worker that is stopped will not give it.
func (w *Worker) do(ctx context.Context, q order) (reply, uint64, error) {
	answer := make(chan reply, 1)
	w.mu.Lock()
	w.last++
	q.ID = w.last
	w.replies[q.ID] = answer
	w.mu.Unlock()
	err := w.write(q)
	if err != nil {
		err = errors.Join(ErrEnded, err)
	} else {
		var patience <-chan time.Time
		done := ctx.Done()
		for {
			select {
			case r := <-answer:
				return r, q.ID, r.err()
			case <-w.exited:
				err = w.endedError()
			case <-done:
				done, patience = nil, time.After(time.Second)
				if w.write(order{Op: "cancel", Of: q.ID}) == nil {
					continue
				}
				err = ctx.Err()
			case <-patience:
				err = ctx.Err()
			}
			break
		}
	}
	w.mu.Lock()
	delete(w.replies, q.ID)
	w.mu.Unlock()
	return reply{}, q.ID, fmt.Errorf("worker %s: %s: %w", w.process, q.Op, err)
}

// Remote is a lease that a worker holds.
type Remote struct {
	w     *Worker
	id    uint64
	token fencelock.Token
}

// Take makes the worker take a lock or permit. Errors match those of fencelock, or [ErrEnded] if the
// process ended before it answered. If ctx ends while the worker is stopped it may still take it later.
func (w *Worker) Take(ctx context.Context, a Ask) (*Remote, error) {
	r, id, err := w.do(ctx, order{Op: "take", Ask: &a})
	if err != nil {
		return nil, err
	}
	return &Remote{w: w, id: id, token: r.Token}, nil
}

// NextToken makes the worker mint a token.
func (w *Worker) NextToken(ctx context.Context, name string) (fencelock.Token, error) {
	r, _, err := w.do(ctx, order{Op: "token", Ask: &Ask{Name: name}})
	return r.Token, err
}

// Run makes the worker carry out a load, and returns when that is done.
func (w *Worker) Run(ctx context.Context, l Load) error {
	_, _, err := w.do(ctx, order{Op: "load", Load: &l})
	return err
}

// Work makes the worker carry out a work, and returns when that is done. Errors are as of Take.
func (w *Worker) Work(ctx context.Context, k Work) error {
	_, _, err := w.do(ctx, order{Op: "work", Work: &k})
	return err
}

// Token is that of the lease.
func (l *Remote) Token() fencelock.Token { return l.token }

// Err asks the worker for the Err of the lease.
func (l *Remote) Err(ctx context.Context) error { return l.do(ctx, "err", 0) }

// Extend makes the worker extend the lease.
func (l *Remote) Extend(ctx context.Context, ttl time.Duration) error {
	return l.do(ctx, "extend", ttl)
}

// Release makes the worker release the lease.
func (l *Remote) Release(ctx context.Context) error { return l.do(ctx, "release", 0) }

func (l *Remote) do(ctx context.Context, op string, ttl time.Duration) error {
	_, _, err := l.w.do(ctx, order{Op: op, Of: l.id, TTL: ttl})
	return err
}

// PID is the worker's process id.
func (w *Worker) PID() int { return w.cmd.Process.Pid }

// History answers all that the worker has recorded up to now, and what was done to it.
func (w *Worker) History() history.History {
	w.mu.Lock()
	defer w.mu.Unlock()
	return history.Merge(w.events, w.control.History())
}

// AwaitRequests waits until n requests of the worker for that name have been answered otherwise than by a
// grant: so those that wait stand in the queue of a backend that has one. limit is 0 for the lock.
func (w *Worker) AwaitRequests(ctx context.Context, name string, limit, n int) error {
	s := subject{fencelock.KindLock, name}
	if limit > 0 {
		s.Kind = fencelock.KindPermit
	}
	return w.await(ctx, func() bool { return w.waits[s] >= n })
}

// AwaitEvent waits until the worker has recorded an event for which match answers true.
func (w *Worker) AwaitEvent(ctx context.Context, match func(history.Event) bool) error {
	seen := 0
	return w.await(ctx, func() bool {
		for ; seen < len(w.events); seen++ {
			if match(w.events[seen]) {
				return true
			}
		}
		return false
	})
}

func (w *Worker) await(ctx context.Context, reached func() bool) error {
	for {
		w.mu.Lock()
		ok, changed := reached(), w.changed
		w.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-w.exited:
			return fmt.Errorf("worker %s: %w", w.process, w.endedError())
		case <-ctx.Done():
			return fmt.Errorf("worker %s: %w", w.process, context.Cause(ctx))
		}
	}
}

// Pause stops the process (SIGSTOP), wherever it is, and returns when all its threads have stopped. On systems
// other than Linux it fails with an error matching [errors.ErrUnsupported], and so does PauseBetween.
func (w *Worker) Pause() error {
	return w.pause(func() error { return signalStop(w.cmd.Process) })
}

// PauseBetween is Pause at a moment when no request to the backend is under way: a process that is stopped in
// the middle of one may hold others up by what it has locked meanwhile, such as a file.
func (w *Worker) PauseBetween() error {
	return w.pause(func() error { return w.write(order{Op: "stop"}) })
}

func (w *Worker) pause(stop func() error) error {
	w.signals.Lock()
	defer w.signals.Unlock()
	if w.paused {
		return nil
	}
	w.control.Stopped(w.process)
	err := stop()
	if err == nil {
		err = awaitStopped(w.cmd.Process, w.exited)
	}
	if err != nil {
		err = errors.Join(err, resume(w.cmd.Process))
		w.control.Continued(w.process)
		return fmt.Errorf("worker %s: pause: %w", w.process, err)
	}
	w.paused = true
	return nil
}

// Resume lets a paused process go on.
func (w *Worker) Resume() error {
	w.signals.Lock()
	defer w.signals.Unlock()
	if !w.paused {
		return nil
	}
	if err := resume(w.cmd.Process); err != nil {
		return fmt.Errorf("worker %s: resume: %w", w.process, err)
	}
	w.control.Continued(w.process)
	w.paused = false
	return nil
}

// SetClock makes the process's wall clock run that much ahead of the system's, in whole seconds, or behind it if ahead is
// negative, from now on. Its monotonic clock is not changed. It fails if [Options].Clock was not set.
func (w *Worker) SetClock(ahead time.Duration) error {
	w.signals.Lock()
	defer w.signals.Unlock()
	err := errors.New("started without the option Clock")
	switch {
	case w.clock != nil && ahead%time.Second != 0:
		err = fmt.Errorf("%v: want whole seconds", ahead)
	case w.clock != nil:
		err = w.clock.set(ahead)
	}
	if err != nil {
		return fmt.Errorf("worker %s: set clock: %w", w.process, err)
	}
	return nil
}

// Kill ends the process (SIGKILL), paused or not, and returns when it is gone.
func (w *Worker) Kill() error {
	w.signals.Lock()
	defer w.signals.Unlock()
	return w.kill()
}

func (w *Worker) kill() error {
	w.noteEnd()
	if err := w.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("worker %s: kill: %w", w.process, err)
	}
	select {
	case <-w.exited:
		return nil
	case <-time.After(signalTimeout):
		return fmt.Errorf("worker %s: still there %v after SIGKILL", w.process, signalTimeout)
	}
}

// noteEnd records the end of the process, once.
func (w *Worker) noteEnd() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.ended = true
		w.control.Ended(w.process)
	}
}

// Close resumes the worker, makes it release its leases and close its client, and waits for its end. If it
// does not end within 30 s it is killed. It fails if the process ended in any other way than by Kill or
// Close, for example because the race detector found something; the error has the end of its standard
// error. After Kill, and a second time, it does nothing.
func (w *Worker) Close() error {
	resumed := w.Resume()
	w.signals.Lock()
	defer w.signals.Unlock()
	w.mu.Lock()
	ended := w.ended
	w.mu.Unlock()
	if ended {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_, _, err := w.do(ctx, order{Op: "close"})
	if err == nil {
		select {
		case <-w.exited:
			w.mu.Lock()
			err = w.failure
			w.mu.Unlock()
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if err != nil {
		err = fmt.Errorf("worker %s: close: %w; its standard error:\n%s", w.process, err, w.stderr.String())
	}
	return errors.Join(resumed, err, w.kill())
}

// ends keeps the beginning and the end of what is written to it: a crash tells its reason first.
type ends struct {
	mu          sync.Mutex
	first, last []byte
}

func (e *ends) Write(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := min(len(p), logEnd-len(e.first))
	e.first = append(e.first, p[:n]...)
	e.last = append(e.last, p[n:]...)
	e.last = e.last[max(0, len(e.last)-logEnd):]
	return len(p), nil
}

func (e *ends) String() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.last) < logEnd {
		return string(e.first) + string(e.last)
	}
	return string(e.first) + "\n...\n" + string(e.last)
}
