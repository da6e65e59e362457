//go:build linux

// The tests run the real program, look at processes through /proc and pause servers, so they need Linux.

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// childEnv makes the test program play a command that run runs; see child.
const childEnv = "FENCELOCK_TEST_CHILD"

// prefixEnv is what such a command writes before each line.
const prefixEnv = "FENCELOCK_TEST_PREFIX"

// binary is the program under test, built once.
var binary string

func TestMain(m *testing.M) {
	switch mode := os.Getenv(childEnv); mode {
	case "":
	case "bad-init":
		badInit()
	default:
		child(mode)
	}
	if signal.Ignored(syscall.SIGHUP) { // as under nohup: what the tests start must not inherit that
		signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	}
	// Most of the parallel tests wait; by default there would be as many at a time as processors.
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		_ = flag.Set("test.parallel", "8")
	}
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "fencelock-cli-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		binary = filepath.Join(dir, "fencelock")
		args := []string{"build", "-o", binary}
		if raceEnabled {
			args = append(args, "-race")
		}
		if out, err := exec.Command("go", append(args, ".")...).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build the program: %v\n%s", err, out)
			return 1
		}
		return m.Run()
	}())
}

// innerEnv is the mode of the command that a child of the mode bad-init starts.
const innerEnv = "FENCELOCK_TEST_INNER"

// badInit starts the program in its arguments and waits for no other process, as the first process of a
// container may do, although all orphans become its children.
func badInit() {
	adoptOrphans()
	cmd := exec.Command(os.Args[1], os.Args[2:]...)
	cmd.Env = append(os.Environ(), childEnv+"="+os.Getenv(innerEnv))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Run(); cmd.ProcessState == nil {
		panic(err)
	}
	os.Exit(exitCode(cmd))
}

// child is a command. It prints "start PID NAME TOKEN", for each signal "signal NUMBER NANOSECONDS", and ends
// with its stdin. Modes, which may be combined with commas:
//
//	plain      leaves signals to their default actions
//	obedient   ends with status 0 on SIGTERM
//	family     first starts another child, of the mode stubborn, in its group; its lines begin with "grand"
//	leave      after that ends with status 3
//	stubborn   none of these: signals are printed and do not end it
func child(mode string) {
	is := func(s string) bool { return strings.Contains(mode, s) }
	say := func(format string, args ...any) {
		fmt.Fprintf(os.Stdout, os.Getenv(prefixEnv)+format+"\n", args...)
	}
	signals := make(chan os.Signal, 256)
	if !is("plain") {
		signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1,
			syscall.SIGUSR2, syscall.SIGWINCH)
	}
	if is("family") {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"=stubborn", prefixEnv+"=grand")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		if err := cmd.Start(); err != nil {
			panic(err)
		}
		if is("leave") {
			os.Exit(3)
		}
	}
	say("start %d %s %s", os.Getpid(), os.Getenv("FENCELOCK_NAME"), os.Getenv("FENCELOCK_TOKEN"))
	eof := make(chan struct{})
	go func() {
		io.Copy(io.Discard, os.Stdin)
		close(eof)
	}()
	for {
		select {
		case <-eof:
			os.Exit(0)
		case sig := <-signals:
			say("signal %d %d", sig, time.Now().UnixNano())
			if is("obedient") && sig == syscall.SIGTERM {
				os.Exit(0)
			}
		}
	}
}

// patience bounds every wait for something that is to happen.
const patience = 40 * time.Second

// proc is the running program.
type proc struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	lines  chan string // of stdout
	stderr *buffer

	readStderr *os.File

	done chan struct{} // closed when it has ended
	code int           // exit code, or 128 + signal if it died of one
}

// buffer collects output and can be waited for.
type buffer struct {
	mu      sync.Mutex
	b       bytes.Buffer
	changed chan struct{}
}

func newBuffer() *buffer { return &buffer{changed: make(chan struct{})} }

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.changed)
	b.changed = make(chan struct{})
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// await waits until all texts are there, in any order.
func (b *buffer) await(t *testing.T, texts ...string) {
	t.Helper()
	deadline := time.After(patience)
	for {
		b.mu.Lock()
		s, changed := b.b.String(), b.changed
		b.mu.Unlock()
		missing := ""
		for _, text := range texts {
			if !strings.Contains(s, text) {
				missing = text
			}
		}
		if missing == "" {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("output: got %q, want it to contain %q", s, missing)
		}
	}
}

// place is a backend and what else the program's environment says.
type place struct {
	env []string
}

// atURL is a backend of a URL.
func atURL(url string) place { return place{[]string{"FENCELOCK_URL=" + url}} }

// newPlace is an empty directory.
func newPlace(t *testing.T) place { return atURL("file://" + t.TempDir()) }

func (p place) command(args ...string) *exec.Cmd {
	cmd := exec.Command(binary, args...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent",
		// By default the race detector makes every exit take a second.
		strings.TrimSpace("GORACE=" + os.Getenv("GORACE") + " atexit_sleep_ms=20")}, p.env...)
	return cmd
}

// run runs the program to its end.
func (p place) run(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	return finish(t, p.command(args...))
}

// finish runs a command to its end and answers its exit code, or 128 + signal.
func finish(t *testing.T, cmd *exec.Cmd) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(patience, func() { cmd.Process.Kill() })
	cmd.Wait()
	if !timer.Stop() {
		t.Fatalf("%q did not end within %v; stderr: %s", cmd.Args, patience, errs.String())
	}
	return exitCode(cmd), out.String(), errs.String()
}

func exitCode(cmd *exec.Cmd) int {
	if status := cmd.ProcessState.Sys().(syscall.WaitStatus); status.Signaled() {
		return 128 + int(status.Signal())
	}
	return cmd.ProcessState.ExitCode()
}

// want runs the program to its end and checks the exit code.
func (p place) want(t *testing.T, code int, args ...string) (stdout, stderr string) {
	t.Helper()
	got, stdout, stderr := p.run(t, args...)
	if got != code {
		t.Fatalf("fencelock %q: got exit code %d, want %d\nstdout: %s\nstderr: %s", args, got, code, stdout, stderr)
	}
	return stdout, stderr
}

// start starts the program; its stdin stays open.
func (p place) start(t *testing.T, args ...string) *proc {
	t.Helper()
	return startProc(t, p.command(args...))
}

// hold starts run with the flags and a child of the mode as command, and waits until that has started.
func (p place) hold(t *testing.T, mode string, flags ...string) (held *proc, pid int) {
	t.Helper()
	held = p.startChild(t, mode, flags...)
	return held, held.started()
}

func (p place) startChild(t *testing.T, mode string, flags ...string) *proc {
	t.Helper()
	p.env = append(p.env[:len(p.env):len(p.env)], childEnv+"="+mode)
	return p.start(t, append(append([]string{"run"}, flags...), "--", os.Args[0])...)
}

func startProc(t *testing.T, cmd *exec.Cmd) *proc {
	t.Helper()
	p := &proc{t: t, cmd: cmd, lines: make(chan string, 1024), stderr: newBuffer(), done: make(chan struct{})}
	// Pipes of our own: those of cmd end with the program, and not with what it leaves.
	ir, stdin, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.stdin = stdin
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	er, ew, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.readStderr = er
	cmd.Stdin, cmd.Stdout, cmd.Stderr = ir, w, ew
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ir.Close()
	w.Close()
	ew.Close()
	var readers sync.WaitGroup
	readers.Go(func() {
		defer close(p.lines)
		s := bufio.NewScanner(r)
		for s.Scan() {
			p.lines <- s.Text()
		}
	})
	readers.Go(func() { io.Copy(p.stderr, er) })
	go func() {
		cmd.Wait()
		p.code = exitCode(cmd)
		close(p.done)
	}()
	t.Cleanup(func() {
		stdin.Close() // ends every child
		select {
		case <-p.done:
		case <-time.After(patience):
			cmd.Process.Kill()
			t.Errorf("%q still runs after its stdin has ended", cmd.Args)
		}
		ended := make(chan struct{})
		go func() { readers.Wait(); close(ended) }()
		select {
		case <-ended:
		case <-time.After(patience):
			t.Errorf("a process that %q has started still has its output", cmd.Args)
		}
		r.Close()
		er.Close()
	})
	return p
}

// next waits for the next line of stdout.
func (p *proc) next() string {
	p.t.Helper()
	select {
	case line, ok := <-p.lines:
		if !ok {
			p.t.Fatalf("stdout ended; stderr: %s", p.stderr)
		}
		return line
	case <-time.After(patience):
		p.t.Fatalf("stdout: got no line within %v; stderr: %s", patience, p.stderr)
		return ""
	}
}

// line waits for the next line of stdout that begins with the prefix and answers its other fields.
func (p *proc) line(prefix string) []string {
	p.t.Helper()
	for {
		if rest, found := strings.CutPrefix(p.next(), prefix+" "); found {
			return strings.Fields(rest)
		}
	}
}

// started waits until the command runs and answers its process id.
func (p *proc) started() int {
	p.t.Helper()
	return atoi(p.t, p.line("start")[0])
}

// signal sends to the program.
func (p *proc) signal(sig syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		p.t.Fatal(err)
	}
}

// ends waits for the end of the program and checks its exit code.
func (p *proc) ends(code int) {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(patience):
		p.t.Fatalf("%q did not end; stderr: %s", p.cmd.Args, p.stderr)
	}
	if p.code != code {
		p.t.Fatalf("%q: got exit code %d, want %d; stderr: %s", p.cmd.Args, p.code, code, p.stderr)
	}
}

// finishes ends the command and checks the exit code.
func (p *proc) finishes(code int) {
	p.t.Helper()
	p.stdin.Close()
	p.ends(code)
}

func atoi(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// eventually fails the test if check does not answer nil soon.
func eventually(t *testing.T, check func() error) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// state answers the state of a process as in /proc/PID/stat, or "" if there is none.
func state(pid int) string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return after[:1]
}

// isGone waits until there is no such process, not even a zombie.
func isGone(t *testing.T, pid int) {
	t.Helper()
	eventually(t, func() error {
		if s := state(pid); s != "" {
			return fmt.Errorf("process %d: got state %s, want it gone", pid, s)
		}
		return nil
	})
}

// isStopped waits until the process is stopped.
func isStopped(t *testing.T, pid int) {
	t.Helper()
	eventually(t, func() error {
		if s := state(pid); s != "T" {
			return fmt.Errorf("process %d: got state %q, want T", pid, s)
		}
		return nil
	})
}

// listed answers what ls --json tells.
func (p place) listed(t *testing.T) []entry {
	t.Helper()
	stdout, _ := p.want(t, 0, "ls", "--json")
	var all []entry
	if err := json.Unmarshal([]byte(stdout), &all); err != nil {
		t.Fatalf("ls --json: %v in %s", err, stdout)
	}
	return all
}

// isFree checks that nothing is held and nobody stands in the queue of the name.
func (p place) isFree(t *testing.T, name string) {
	t.Helper()
	if held := p.listed(t); len(held) != 0 {
		t.Fatalf("ls: got %+v, want nothing held (L7)", held)
	}
	p.want(t, 0, "run", "--name", name, "--wait", "no", "--", "true")
}

// isHeld checks that a rival is refused.
func (p place) isHeld(t *testing.T, name string) {
	t.Helper()
	p.want(t, exitHeld, "run", "--name", name, "--wait", "no", "--", "true")
}
