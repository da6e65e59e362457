//go:build linux

package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

// onTerminal is a program that has a terminal of its own: it leads the terminal's session.
type onTerminal struct {
	t      *testing.T
	cmd    *exec.Cmd
	keys   *os.File
	screen *buffer
	done   chan struct{}
}

// openPTY opens a pseudo terminal so many columns wide. It translates no line ends and echoes nothing.
func openPTY(t *testing.T, columns int) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	var locked, number int32
	size := struct{ rows, columns, x, y uint16 }{24, uint16(columns), 0, 0}
	for _, c := range []struct {
		request uintptr
		arg     unsafe.Pointer
	}{
		{syscall.TIOCSPTLCK, unsafe.Pointer(&locked)},
		{syscall.TIOCGPTN, unsafe.Pointer(&number)},
		{syscall.TIOCSWINSZ, unsafe.Pointer(&size)},
	} {
		if err := ioctl(master.Fd(), c.request, c.arg); err != nil {
			t.Fatal(err)
		}
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { slave.Close() })
	var mode syscall.Termios
	if err := ioctl(slave.Fd(), syscall.TCGETS, unsafe.Pointer(&mode)); err != nil {
		t.Fatal(err)
	}
	mode.Oflag &^= syscall.ONLCR
	mode.Lflag &^= syscall.ECHO
	if err := ioctl(slave.Fd(), syscall.TCSETS, unsafe.Pointer(&mode)); err != nil {
		t.Fatal(err)
	}
	return master, slave
}

// startOnTerminal starts a command on a new terminal. What it has as stdout already is left alone.
func startOnTerminal(t *testing.T, cmd *exec.Cmd, columns int) *onTerminal {
	t.Helper()
	master, slave := openPTY(t, columns)
	o := &onTerminal{t: t, cmd: cmd, keys: master, screen: newBuffer(), done: make(chan struct{})}
	cmd.Stdin, cmd.Stderr = slave, slave
	if cmd.Stdout == nil {
		cmd.Stdout = slave
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	slave.Close()
	read := make(chan struct{})
	go func() {
		io.Copy(o.screen, master) // until all who have the terminal have ended
		close(read)
	}()
	go func() {
		cmd.Wait()
		close(o.done)
	}()
	t.Cleanup(func() {
		select {
		case <-o.done:
		case <-time.After(patience):
			cmd.Process.Kill()
			t.Errorf("%q still runs; screen: %q", cmd.Args, o.screen)
		}
		select {
		case <-read:
		case <-time.After(patience):
			t.Errorf("a process that %q has started still has its terminal", cmd.Args)
		}
	})
	return o
}

func (o *onTerminal) press(keys string) {
	o.t.Helper()
	if _, err := io.WriteString(o.keys, keys); err != nil {
		o.t.Fatal(err)
	}
}

func (o *onTerminal) await(texts ...string) {
	o.t.Helper()
	o.screen.await(o.t, texts...)
}

// number waits for a text and answers the number that follows it.
func (o *onTerminal) number(text string) (n int) {
	o.t.Helper()
	eventually(o.t, func() error {
		_, rest, _ := strings.Cut(o.screen.String(), text)
		if !strings.ContainsAny(rest, " \n") {
			return fmt.Errorf("screen: got %q, want a number after %q", o.screen, text)
		}
		_, err := fmt.Sscan(rest, &n)
		return err
	})
	return n
}

func (o *onTerminal) ends(code int) {
	o.t.Helper()
	select {
	case <-o.done:
	case <-time.After(patience):
		o.t.Fatalf("%q did not end; screen: %q", o.cmd.Args, o.screen)
	}
	if got := exitCode(o.cmd); got != code {
		o.t.Fatalf("%q: got exit code %d, want %d; screen: %q", o.cmd.Args, got, code, o.screen)
	}
}

const (
	ctrlC = "\x03"
	ctrlD = "\x04"
	ctrlZ = "\x1a"
)

// script is a shell with a script that uses the program as $F and a child of the mode as $C.
func (p place) script(shell, mode, text string) *exec.Cmd {
	cmd := p.command()
	cmd.Path, cmd.Args = "/bin/"+shell, []string{shell, "-c", text}
	cmd.Env = append(cmd.Env, "F="+binary, "C="+os.Args[0], childEnv+"="+mode)
	return cmd
}

func TestTerminalProgress(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	holder, _ := p.hold(t, "plain", "--name", "x", "--label", "nightly")
	const columns = 60
	o := startOnTerminal(t, p.command("run", "--name", "x", "--", "echo", "finished"), columns)
	o.await("fencelock: waiting 0s for x, held by nightly (host", "waiting 1s", "waiting 2s")
	holder.finishes(0)
	o.ends(0)
	o.await("finished\n")
	before, after, _ := strings.Cut(o.screen.String(), "finished")
	if after != "\n" || !strings.HasSuffix(before, "\r\x1b[K") || strings.Contains(before, "\n") {
		t.Errorf("progress on a terminal: got %q, want one line that is removed", o.screen)
	}
	for line := range strings.SplitSeq(before, "\r\x1b[K") {
		if n := len([]rune(line)); n >= columns {
			t.Errorf("progress line: got %d columns of %d: %q", n, columns, line)
		}
	}
	p.isFree(t, "x")
}

// TestTerminalForeground has the command look whether it has the terminal.
func TestTerminalForeground(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	for pipe, want := range map[string]string{"": "yes", " | cat": "no"} {
		o := startOnTerminal(t, p.script("bash", "", `"$F" run --name x -- sh -c '
			set -- $(cat /proc/$$/stat); test $5 = $8 && echo foreground yes || echo foreground no'`+pipe), 80)
		o.await("foreground " + want)
		o.ends(0)
	}
}

// TestTerminalInterruptOnce presses Ctrl-C: the command must get each once, whether it has the terminal or not.
func TestTerminalInterruptOnce(t *testing.T) {
	t.Parallel()
	for _, foreground := range []bool{true, false} {
		t.Run(fmt.Sprintf("foreground=%v", foreground), func(t *testing.T) {
			t.Parallel()
			p := newPlace(t)
			p.env = append(p.env, childEnv+"=stubborn")
			cmd := p.command("run", "--name", "x", "--", os.Args[0])
			out := newBuffer()
			if !foreground {
				cmd.Stdout = out // so the program takes itself for part of a pipe
			}
			o := startOnTerminal(t, cmd, 80)
			if foreground {
				out = o.screen
			}
			out.await(t, "start ")
			const presses = 20
			for i := range presses {
				o.press(ctrlC)
				eventually(t, func() error {
					if n := strings.Count(out.String(), "signal 2 "); n <= i {
						return fmt.Errorf("Ctrl-C %d: the command got %d", i+1, n)
					}
					return nil
				})
			}
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil { // comes after whatever is still to come
				t.Fatal(err)
			}
			out.await(t, "signal 15 ")
			if n := strings.Count(out.String(), "signal 2 "); n != presses {
				t.Errorf("Ctrl-C pressed %d times: the command got %d", presses, n)
			}
			o.press(ctrlD) // the command's read takes the terminal
			o.ends(0)
			p.isFree(t, "x")
		})
	}
}

// TestTerminalInterruptEndsScript has the script around the program go on in a loop, unless Ctrl-C reaches it.
func TestTerminalInterruptEndsScript(t *testing.T) {
	t.Parallel()
	for _, shell := range []string{"bash", "dash"} {
		for _, pipe := range []string{"", " | cat"} {
			t.Run(shell+pipe, func(t *testing.T) {
				t.Parallel()
				p := newPlace(t)
				o := startOnTerminal(t, p.script(shell, "plain",
					`while :; do "$F" run --name x -- "$C"`+pipe+`; echo again; done`), 80)
				o.await("start ")
				o.press(ctrlC)
				o.ends(128 + 2)
				if strings.Contains(o.screen.String(), "again") {
					t.Errorf("Ctrl-C in a script: it went on: %q", o.screen)
				}
				p.isFree(t, "x")
			})
		}
	}
}

// TestTerminalSuspend presses Ctrl-Z and lets the shell continue the job, in time or too late.
func TestTerminalSuspend(t *testing.T) {
	t.Parallel()
	for _, pipe := range []string{"", " | cat"} {
		for _, inTime := range []bool{true, false} {
			t.Run(fmt.Sprintf("inTime=%v%s", inTime, pipe), func(t *testing.T) {
				t.Parallel()
				ttl, code := "5s", exitLost
				if inTime {
					ttl, code = "1m", 0
				}
				p := newPlace(t)
				o := startOnTerminal(t, p.script("bash", "stubborn", `set -m -o pipefail
					"$F" run --name x --ttl `+ttl+` --grace 1s -- "$C"`+pipe+`
					echo "stopped $?"; read line; fg; echo "ended $?"`), 80)
				pid := o.number("start ")
				held := p.listed(t)
				if len(held) != 1 {
					t.Fatalf("ls: got %+v", held)
				}
				o.press(ctrlZ)
				o.await("stopped 14") // 128 and SIGSTOP or SIGTSTP
				isStopped(t, pid)
				isStopped(t, held[0].PID)
				if !inTime {
					rival, _ := p.hold(t, "plain", "--name", "x", "--ttl", "6s") // so that it polls every second
					rival.finishes(0)
				}
				o.press("\n")
				if inTime {
					eventually(t, func() error {
						if s := state(pid); s == "T" || s == "" {
							return fmt.Errorf("continued in time: got state %q of the command; screen: %q", s, o.screen)
						}
						return nil
					})
					p.isHeld(t, "x")
					o.press(ctrlD)
				}
				o.await(fmt.Sprintf("ended %d\n", code))
				o.ends(0)
				if told := strings.Contains(o.screen.String(), "signal 15 "); told == inTime {
					t.Errorf("continued in time %v: told of a loss %v; screen: %q", inTime, told, o.screen)
				}
				isGone(t, pid)
				p.isFree(t, "x")
			})
		}
	}
}

// TestTerminalSuspendWithoutShell presses Ctrl-Z where nobody could continue the job.
func TestTerminalSuspendWithoutShell(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	p.env = append(p.env, childEnv+"=stubborn")
	o := startOnTerminal(t, p.command("run", "--name", "x", "--", os.Args[0]), 80)
	o.await("start ")
	for i := range 5 {
		o.press(ctrlZ + ctrlC)
		eventually(t, func() error {
			if n := strings.Count(o.screen.String(), "signal 2 "); n != i+1 {
				return fmt.Errorf("Ctrl-C after Ctrl-Z without a shell: the command got %d, want %d", n, i+1)
			}
			return nil
		})
	}
	o.press(ctrlD)
	o.ends(0)
	p.isFree(t, "x")
}

// TestTerminalSuspendWhatIsLeft presses Ctrl-Z when the command has ended and a process in its group has not.
func TestTerminalSuspendWhatIsLeft(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	o := startOnTerminal(t, p.script("bash", "", `set -m
		"$F" run --name x -- sh -c 'sleep 1000 & echo "left $!"'
		echo "stopped $?"; read line; fg; echo "ended $?"`), 80)
	left := o.number("left ")
	o.await("the command has ended; waiting for")
	held := p.listed(t)
	if len(held) != 1 {
		t.Fatalf("ls: got %+v", held)
	}
	o.press(ctrlZ)
	o.await("stopped 14")
	isStopped(t, left)
	isStopped(t, held[0].PID)
	o.press("\n")
	eventually(t, func() error {
		if s := state(left); s != "S" {
			return fmt.Errorf("continued: got state %q of what is left, want S", s)
		}
		return nil
	})
	if err := syscall.Kill(held[0].PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	o.await("ended 0\n")
	o.ends(0)
	isGone(t, left)
	p.isFree(t, "x")
}

// TestTerminalOnDemand has a command ask for the terminal that it was not given.
func TestTerminalOnDemand(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	o := startOnTerminal(t, p.script("bash", "", `"$F" run --name x -- sh -c 'read x </dev/tty; echo "got $x"' | cat
		read y; echo "then $y"`), 80)
	o.press("hello\nworld\n")
	o.await("got hello\n", "then world\n")
	o.ends(0)
	p.isFree(t, "x")
}

// TestTerminalBackgroundJob has a command ask for the terminal when the whole job does not have it.
func TestTerminalBackgroundJob(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	o := startOnTerminal(t, p.script("bash", "", `set -m
		"$F" run --name x -- sh -c 'echo "command $$"; read x; echo "got $x"' & echo "job $!"
		read line
		until [ "$(jobs -s)" ]; do sleep 0.01; done # the shell learns it when the last thread has stopped
		fg; echo "ended $?"`), 80)
	isStopped(t, o.number("job "))
	isStopped(t, o.number("command "))
	o.press("\n")
	o.await("\"$F\" run") // what fg prints
	o.press("hello\n")
	o.await("got hello\n", "ended 0\n")
	o.ends(0)
	p.isFree(t, "x")
}
