//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package main

import (
	"errors"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"
)

// group is a command in a process group of its own.
type group struct {
	id      int                     // also the process id of the command
	changes chan syscall.WaitStatus // when the command has stopped or, at last, ended
}

// startGroup starts the command; it gives its group the terminal if that is not nil.
//
// The kernel sends the parent-death signal when the thread that started the process ends. So the goroutine
// that starts it keeps its thread to itself, and stays. It also waits for all processes that become children
// of ours: where the system lets us, the orphans of the command, so that none stays a zombie.
func startGroup(path string, args, env []string, files []*os.File, give *terminal) (*group, error) {
	attr := &os.ProcAttr{Env: env, Files: files, Sys: &syscall.SysProcAttr{Setpgid: true}}
	if give != nil {
		attr.Sys.Foreground, attr.Sys.Ctty = true, give.fd
	}
	dieWithParent(attr.Sys)
	g := &group{changes: make(chan syscall.WaitStatus, 16)}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		adoptOrphans()
		p, err := os.StartProcess(path, args, attr)
		if err == nil {
			g.id = p.Pid
			_ = p.Release() // wait4 below waits for it
		}
		started <- err
		if err == nil {
			g.reap()
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return g, nil
}

// reap waits for children until there are none.
func (g *group) reap() {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WUNTRACED, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return
		case pid == g.id:
			g.changes <- status
		}
	}
}

// alive reports whether a process of the group is left.
func (g *group) alive() bool {
	return !errors.Is(syscall.Kill(-g.id, 0), syscall.ESRCH)
}

// signal sends to all processes of the group. That none is left is no error.
func (g *group) signal(sig syscall.Signal) error {
	if err := syscall.Kill(-g.id, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return os.NewSyscallError("kill", err)
	}
	return nil
}

func (g *group) resume() { _ = g.signal(syscall.SIGCONT) }

// signalCommand sends to the command alone, which must not have ended.
func (g *group) signalCommand(sig syscall.Signal) { _ = syscall.Kill(g.id, sig) }

// raiseInterrupt sends SIGINT with its default action to us, or to our whole process group if the id is 0, and so
// ends this process.
func raiseInterrupt(id int) {
	signal.Reset(syscall.SIGINT)
	_ = syscall.Kill(id, syscall.SIGINT)
	time.Sleep(time.Second) // the signal may be delivered to another thread
}
