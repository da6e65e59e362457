package servers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

const (
	startTimeout  = 30 * time.Second     // for a start, from exec to the first answer
	tryTimeout    = time.Second          // for one try of the protocol while starting
	tryInterval   = 5 * time.Millisecond // between two tries
	signalTimeout = 10 * time.Second     // for a process to stop or to be gone after the signal
	pollInterval  = time.Millisecond     // between two looks at the state of a process
	logTail       = 4 << 10              // bytes of log kept for messages
	portAttempts  = 10                   // ports tried before giving up
)

// A spec is what distinguishes one kind of server from another.
type spec struct {
	kind string // for messages, such as "redis"
	addr string // host:port that clients dial

	// command returns a new command that runs the server in the foreground with its data in the
	// directory data, which exists and is empty at the first start and after a wipe. A server that
	// must initialise its data does it here, within ctx. The command itself must outlive ctx.
	command func(ctx context.Context, data string) (*exec.Cmd, error)

	// ready makes one try to get an answer out of the server, and nil means that it came from the
	// process pid and from no other that happens to listen at the same address.
	ready func(ctx context.Context, pid int) error

	// release gives back what was reserved for the server, such as its ports. Close calls it when
	// the process is gone.
	release func() error
}

// A process is a [Server] that runs as a child process: all that does not depend on its protocol.
// The concrete servers embed it. It owns a directory with a log and the server's data.
type process struct {
	spec spec
	dir  string

	mu     sync.Mutex // held during each operation, so that two never overlap
	closed bool
	child  *child // the latest one, nil before the first start
	killed bool   // the latest one was ended by kill
	frozen []int  // the processes that Pause has stopped, nil if not paused

	pid atomic.Int64 // of the child, 0 when it was found or made dead

	logMu   sync.Mutex
	lastLog *string // set by Close, which removes the file
}

func newProcess(s spec) (*process, error) {
	dir, err := os.MkdirTemp("", "fencelock-server-")
	if err != nil {
		return nil, fmt.Errorf("servers: %s %s: %w", s.kind, s.addr, err)
	}
	return &process{spec: s, dir: dir}, nil
}

func (p *process) dataDir() string { return filepath.Join(p.dir, "data") }
func (p *process) logFile() string { return filepath.Join(p.dir, "log") }

func (p *process) errorf(op string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("servers: %s %s: %s: %w", p.spec.kind, p.spec.addr, op, err)
}

// Addr implements [Server].
func (p *process) Addr() string { return p.spec.addr }

// PID returns the process id of the server, or 0 if it was killed, closed or failed to start.
func (p *process) PID() int { return int(p.pid.Load()) }

// Log returns the last 4 KiB of what the server wrote to its log since the first start. It also
// works while another call is under way and after Close.
func (p *process) Log() string {
	p.logMu.Lock()
	defer p.logMu.Unlock()
	if p.lastLog != nil {
		return *p.lastLog
	}
	return p.readLog()
}

func (p *process) readLog() string {
	f, err := os.Open(p.logFile())
	if err != nil {
		return ""
	}
	defer f.Close()
	if size, err := f.Seek(0, io.SeekEnd); err == nil {
		f.Seek(max(0, size-logTail), io.SeekStart)
	}
	tail, _ := io.ReadAll(io.LimitReader(f, logTail))
	return string(tail)
}

// Pause implements [Server].
func (p *process) Pause() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.checkRunning(); err != nil {
		return p.errorf("pause", err)
	}
	if p.frozen != nil {
		return nil
	}
	tree, err := freeze(p.child.cmd.Process)
	if err != nil {
		return p.errorf("pause", errors.Join(err, thaw(p.child.cmd.Process, tree)))
	}
	p.frozen = tree
	return nil
}

// Resume implements [Server].
func (p *process) Resume() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.checkRunning(); err != nil {
		return p.errorf("resume", err)
	}
	if p.frozen == nil {
		return nil
	}
	if err := thaw(p.child.cmd.Process, p.frozen); err != nil {
		return p.errorf("resume", err)
	}
	p.frozen = nil
	return nil
}

// Kill implements [Server].
func (p *process) Kill() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.killed && !p.closed {
		return nil
	}
	if err := p.checkRunning(); err != nil {
		return p.errorf("kill", err)
	}
	return p.errorf("kill", p.kill())
}

// Start implements [Server].
func (p *process) Start(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.errorf("start", p.start(ctx, false))
}

// StartEmpty implements [Server].
func (p *process) StartEmpty(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.errorf("start empty", p.start(ctx, true))
}

// Close implements [Server].
func (p *process) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	// SIGKILL ends a stopped process too, so a paused server need not be resumed first.
	if p.child != nil && !p.child.hasExited() {
		if err := p.kill(); err != nil {
			return p.errorf("close", err)
		}
	}
	p.closed = true
	p.pid.Store(0)
	p.logMu.Lock()
	defer p.logMu.Unlock()
	tail := p.readLog()
	p.lastLog = &tail
	return p.errorf("close", errors.Join(os.RemoveAll(p.dir), p.spec.release()))
}

// checkRunning returns nil if the child lives, as far as is known. p.mu is held.
func (p *process) checkRunning() error {
	switch {
	case p.closed:
		return ErrClosed
	case p.child == nil || p.killed:
		return ErrNotRunning
	case p.child.hasExited():
		p.pid.Store(0)
		return fmt.Errorf("%w: %s; log:\n%s", ErrNotRunning, p.child.how(), p.Log())
	}
	return nil
}

// kill ends the child and everything it has started. p.mu is held.
func (p *process) kill() error {
	if err := killTree(p.child); err != nil {
		return err
	}
	p.pid.Store(0)
	p.killed, p.frozen = true, nil
	return nil
}

// start runs a new child and waits until it is ready. p.mu is held.
func (p *process) start(ctx context.Context, empty bool) error {
	if p.closed {
		return ErrClosed
	}
	if p.child != nil && !p.child.hasExited() {
		return ErrRunning
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := ctx.Err(); err != nil {
		return err
	}
	if empty {
		if err := os.RemoveAll(p.dataDir()); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(p.dataDir(), 0o700); err != nil {
		return err
	}
	cmd, err := p.spec.command(ctx, p.dataDir())
	if err != nil {
		return err
	}
	// A file and not a pipe: nothing has to read it, and it cannot fill up.
	log, err := os.OpenFile(p.logFile(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Dir, cmd.Stdout, cmd.Stderr = p.dataDir(), log, log
	child, err := startChild(cmd)
	if err != nil {
		return err
	}
	p.child, p.killed, p.frozen = child, false, nil
	p.pid.Store(int64(cmd.Process.Pid))
	if err := p.waitReady(ctx); err != nil {
		err = fmt.Errorf("%w; log:\n%s", err, p.Log())
		return errors.Join(err, p.kill())
	}
	return nil
}

// waitReady returns nil as soon as the child answers, an error when it ends or ctx does.
func (p *process) waitReady(ctx context.Context) error {
	var last error // of a try that was not cut short by the end of ctx
	for {
		try, cancel := context.WithTimeout(ctx, tryTimeout)
		err := p.spec.ready(try, p.child.cmd.Process.Pid)
		cancel()
		if err == nil {
			return nil
		}
		// A connection may notice the deadline before the context does.
		deadline, ok := ctx.Deadline()
		if cut := ctx.Err() != nil || ok && !time.Now().Before(deadline); last == nil || !cut {
			last = err
		}
		select {
		case <-p.child.exited:
			return fmt.Errorf("%w: %s", ErrNotRunning, p.child.how())
		case <-ctx.Done():
			return fmt.Errorf("not ready: %w: %w", ctx.Err(), last)
		case <-time.After(tryInterval):
		}
	}
}

// A child is one run of a command.
type child struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when the process has ended and was waited for
	err    error         // how it ended; valid once exited is closed
}

// startChild runs cmd and waits for its end in the background.
//
// The kernel sends the parent-death signal when the *thread* that started the process ends, which
// may be long before the program does. So the goroutine that starts the process keeps its thread to
// itself and stays until the process has ended.
func startChild(cmd *exec.Cmd) (*child, error) {
	dieWithParent(cmd)
	c := &child{cmd: cmd, exited: make(chan struct{})}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		c.err = cmd.Wait()
		close(c.exited)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return c, nil
}

func (c *child) hasExited() bool {
	select {
	case <-c.exited:
		return true
	default:
		return false
	}
}

// how says how an exited child ended.
func (c *child) how() string {
	if c.err != nil {
		return c.err.Error()
	}
	return "exit status 0"
}

// waitExited waits for the end of a child that was sent SIGKILL.
func (c *child) waitExited() error {
	select {
	case <-c.exited:
		return nil
	case <-time.After(signalTimeout):
		return fmt.Errorf("process %d still there %v after SIGKILL", c.cmd.Process.Pid, signalTimeout)
	}
}
