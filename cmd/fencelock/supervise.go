//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package main

import (
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/fencelock/fencelock"
)

// toGroup are the signals that are passed on to the whole process group: those that a terminal sends to a
// group too, and those that mean "end".
var toGroup = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}

// toCommand are those that only the command itself gets: they mean something to the process they are sent
// to, and kill others that do not expect them.
var toCommand = []os.Signal{syscall.SIGUSR1, syscall.SIGUSR2}

// notify begins to catch the signals that end a wait and are passed on to a command. Those that whoever
// started us had ignored (nohup, the "&" of a script) stay ignored, for the command as well.
func notify(signals chan<- os.Signal) {
	for _, sig := range append(toGroup, toCommand...) {
		if !signal.Ignored(sig) {
			signal.Notify(signals, sig)
		}
	}
	// A reader of our output that goes away must end neither us nor the command. Not ignored but caught, since
	// the command would inherit the former.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
}

// supervisor watches over the command: it passes signals on, does the job control of the terminal, and ends
// the command when the lease is lost. All is done by the goroutine that calls wait.
type supervisor struct {
	c       *cli
	what    target
	lease   *fencelock.Lease
	grace   time.Duration
	signals chan os.Signal
	group   *group
	tty     *terminal // nil without a controlling terminal

	ended       bool // the command, but perhaps not yet its group
	status      syscall.WaitStatus
	lost        bool
	gave        bool // the group was given the terminal, and it was not taken back
	wants       bool // the group is to have the terminal whenever the job has it
	passed      bool // a SIGINT of our own to the group
	interrupt   int  // whom the SIGINT that ended the command is still to reach, as in kill(2): our group, or us
	interrupted bool // the command was ended by a SIGINT that was passed on, or by Ctrl-C while it had the terminal
}

func superviseCommand(c *cli, what target, lease *fencelock.Lease, grace time.Duration, signals chan os.Signal,
	path string, args, env []string) (*supervisor, error) {
	s := &supervisor{c: c, what: what, lease: lease, grace: grace, signals: signals, tty: openTerminal()}
	files := []*os.File{c.stdin, c.stdout, c.stderr}
	// A command that has the terminal to itself gets it at once, since some look whether they have it. If a part of
	// our own process group may use it (a pager at the end of a pipe), the command gets it when it asks.
	var give *terminal
	if s.tty.isOurs() && s.tty.isAllOf(files) {
		give, s.gave, s.wants = s.tty, true, true
	}
	group, err := startGroup(path, args, env, files, give)
	if err != nil {
		s.tty.close()
		return nil, err
	}
	s.group = group
	signal.Notify(signals, syscall.SIGTSTP, syscall.SIGCONT, syscall.SIGWINCH)
	// From here on nothing is started that would inherit this. It lets us give and take the terminal, and write to
	// it, when we do not have it.
	signal.Ignore(syscall.SIGTTIN, syscall.SIGTTOU)
	return s, nil
}

// wait returns when no process of the group is left.
func (s *supervisor) wait() {
	defer s.tty.close()
	lost := s.lease.Done()
	var killAt <-chan time.Time
	var poll <-chan time.Time
	for {
		if s.lost && lost != nil {
			lost = nil
			killAt = time.After(s.grace)
		}
		select {
		case <-lost:
			s.lose()
		case <-killAt:
			killAt = nil
			if err := s.group.signal(syscall.SIGKILL); err != nil {
				s.c.console.say("cannot kill the command: %v", err)
			} else {
				s.c.console.say("the command did not end within %v: killed it", s.grace)
			}
		case sig := <-s.signals:
			s.pass(sig.(syscall.Signal))
		case change := <-s.group.changes:
			if change.Stopped() {
				s.stopped(change.StopSignal())
				continue
			}
			s.ended, s.status = true, change
			s.interrupted = (s.gave || s.passed) && change.Signaled() && change.Signal() == syscall.SIGINT
			if !s.gave { // the rest of our group has had it
				s.interrupt = syscall.Getpid()
			}
			s.takeTerminal()
			if !s.group.alive() {
				return
			}
			s.c.console.say("the command has ended; waiting for the processes that it has left in its group (%d)", s.group.id)
			ticker := time.NewTicker(groupPoll)
			defer ticker.Stop()
			poll = ticker.C
		case <-poll:
			if !s.group.alive() {
				return
			}
		}
	}
}

// groupPoll is how often a group whose command has ended is looked at.
const groupPoll = 20 * time.Millisecond

// lose tells the command that the lease is lost. First of all, since every millisecond counts.
func (s *supervisor) lose() {
	if s.lost {
		return
	}
	s.lost = true
	err := s.group.signal(syscall.SIGTERM)
	s.resume() // a stopped process does not see the signal
	s.c.console.say("%s", lossText(s.what, s.lease))
	if err != nil {
		s.c.console.say("cannot end the command: %v", err)
	}
}

// pass passes a signal on.
func (s *supervisor) pass(sig syscall.Signal) {
	switch sig {
	case syscall.SIGCONT:
		s.continued()
	case syscall.SIGUSR1, syscall.SIGUSR2:
		if !s.ended {
			s.group.signalCommand(sig)
		}
	case syscall.SIGTSTP:
		switch {
		case s.lost: // it shall end, not stop
		case s.ended && s.tty != nil: // there is no command that could come back as stopped
			s.suspend()
		default: // it comes back as a change of the command, if the command obeys
			_ = s.group.signal(sig)
		}
	default:
		s.passed = s.passed || sig == syscall.SIGINT
		_ = s.group.signal(sig)
		if s.ended { // what it has left may have been stopped by the terminal
			s.group.resume()
		}
	}
}

// stopped is called when the command was stopped. If it was by the terminal, the whole job stops.
func (s *supervisor) stopped(sig syscall.Signal) {
	switch {
	case s.tty == nil:
		return
	case sig == syscall.SIGTTIN || sig == syscall.SIGTTOU:
		s.wants = true
		if s.giveTerminal() {
			s.group.resume()
			return
		}
	case sig != syscall.SIGTSTP:
		return // somebody has stopped the command alone; the lock stays
	}
	if s.lost { // it shall end, not stop; if it does not, it will be killed
		return
	}
	s.suspend()
	if sig == syscall.SIGTSTP && !haveShell() {
		s.group.resume()
	}
}

// haveShell reports whether there is a shell that could continue us. The kernel stops no process group without.
func haveShell() bool { return syscall.Getpgrp() != session() }

// suspend stops the whole job: the group, whatever else is in our own group, and us.
func (s *supervisor) suspend() {
	if !haveShell() {
		return
	}
	// Whatever of the command has not stopped must, since we shall not renew any more.
	_ = s.group.signal(syscall.SIGSTOP)
	s.takeTerminal()
	signal.Ignore(syscall.SIGTSTP)
	_ = syscall.Kill(0, syscall.SIGTSTP)
	_ = syscall.Kill(syscall.Getpid(), syscall.SIGSTOP)
}

// continued is called when we were continued, or might have been. The command goes on only if the lease has
// outlived the stop.
func (s *supervisor) continued() {
	signal.Notify(s.signals, syscall.SIGTSTP)
	if s.lease.Err() != nil {
		s.lose()
		return
	}
	s.resume()
}

// resume continues the group, with the terminal if it needs that: without it would stop again.
func (s *supervisor) resume() {
	if s.wants && !s.ended {
		s.giveTerminal()
	}
	s.group.resume()
}

// giveTerminal makes the command's group the one that has the terminal, if our own has it, and reports
// whether the command's group has it now.
func (s *supervisor) giveTerminal() bool {
	if s.tty.isOurs() && s.tty.give(s.group.id) == nil {
		s.gave = true
	}
	return s.tty.owner() == s.group.id
}

// takeTerminal takes the terminal back.
func (s *supervisor) takeTerminal() {
	if s.gave {
		s.gave = false
		_ = s.tty.give(syscall.Getpgrp()) // it fails if the terminal has gone away
	}
}

// exit is the result that the command's status makes.
func (s *supervisor) exit() error {
	switch code := s.status.ExitStatus(); {
	case s.status.Signaled():
		return &exitError{code: exitSignal + int(s.status.Signal())}
	case code != 0:
		return &exitError{code: code}
	}
	return nil
}
