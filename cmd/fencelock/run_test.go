//go:build linux

package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestRunNeedsNothingInstalled(t *testing.T) {
	t.Parallel()
	home := t.TempDir()
	for _, p := range []struct {
		env []string
		dir string
	}{
		{[]string{"HOME=" + home}, ".cache/fencelock/locks"},
		{[]string{"HOME=" + home, "XDG_CACHE_HOME=relative"}, ".cache/fencelock/locks"},
		{[]string{"HOME=/nonexistent", "XDG_CACHE_HOME=" + home + "/odd %20?#dir"}, "odd %20?#dir/fencelock/locks"},
	} {
		here := place{p.env}
		stdout, stderr := here.want(t, 0, "run", "--name", "demo", "--", "echo", "hello")
		if stdout != "hello\n" || stderr != "" {
			t.Errorf("run with %q: got stdout %q stderr %q, want hello and nothing", p.env, stdout, stderr)
		}
		if _, err := os.Stat(filepath.Join(home, p.dir)); err != nil {
			t.Errorf("run with %q: the locks are not where they should be: %v", p.env, err)
		}
	}
	_, stderr := place{[]string{"HOME="}}.want(t, exitUsage, "ls")
	if !strings.Contains(stderr, "FENCELOCK_URL") {
		t.Errorf("ls without HOME: got %q, want to be told of FENCELOCK_URL", stderr)
	}
}

func TestRunEnvironment(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	p.env = append(p.env, "FENCELOCK_TOKEN=outer", "FENCELOCK_NAME=outer", "OTHER=kept")
	env := func() (name, token string) {
		stdout, _ := p.want(t, 0, "run", "--name", "a=b c", "--", "sh", "-c",
			`tr '\0' '\n' </proc/$$/environ | grep -c '^FENCELOCK_TOKEN\|^FENCELOCK_NAME'; echo "$OTHER"; echo "$FENCELOCK_NAME"; echo "$FENCELOCK_TOKEN"`)
		l := strings.Split(stdout, "\n")
		if l[0] != "2" || l[1] != "kept" {
			t.Fatalf("environment of the command: got %q, want each variable once and the others kept", stdout)
		}
		return l[2], l[3]
	}
	last := 0
	for range 5 {
		name, token := env()
		if name != "a=b c" {
			t.Errorf("FENCELOCK_NAME: got %q, want %q", name, "a=b c")
		}
		if n := atoi(t, token); n <= last {
			t.Errorf("FENCELOCK_TOKEN: got %d after %d, want it to rise (T1)", n, last)
		} else {
			last = n
		}
		stdout, _ := p.want(t, 0, "token", "a=b c")
		if n := atoi(t, strings.TrimSpace(stdout)); n <= last {
			t.Errorf("token: got %d after %d, want it to rise (T1)", n, last)
		} else {
			last = n
		}
	}
}

func TestRunExcludes(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	first, _ := p.hold(t, "plain", "--name", "job", "--label", "the first")
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	who := []string{`"the first"`, "host " + host, fmt.Sprintf("pid %d", first.cmd.Process.Pid), "since 2", "for "}

	for _, wait := range []string{"no", "0", "30ms"} {
		_, stderr := p.want(t, exitHeld, "run", "--name", "job", "--wait", wait, "--", "echo", "never")
		for _, w := range who {
			if !strings.Contains(stderr, w) {
				t.Errorf("run --wait %s while held: got %q, want it to contain %q", wait, stderr, w)
			}
		}
	}

	second := p.startChild(t, "plain", "--name", "job")
	second.stderr.await(t, append(who, "waiting for job, held by ")...)
	first.finishes(0)
	second.started()
	second.finishes(0)
	if s := second.stderr.String(); strings.Count(s, "\n") != 1 || strings.ContainsAny(s, "\r\x1b") {
		t.Errorf("waiting, stderr no terminal: got %q, want one plain line", s)
	}
	p.isFree(t, "job")
}

// TestRunConcurrent lets the programs themselves find out whether two of them run at once.
func TestRunConcurrent(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	dir := t.TempDir()
	script := `mkdir "$0/in" || exit 1; read n <"$0/n"; echo $((n+1)) >"$0/n"; echo $FENCELOCK_TOKEN >>"$0/tokens"; rmdir "$0/in"`
	if err := os.WriteFile(filepath.Join(dir, "n"), []byte("0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const runs = 12
	var all []*proc
	for range runs {
		all = append(all, p.start(t, "run", "--name", "counter", "--", "sh", "-c", script, dir))
	}
	for _, r := range all {
		r.ends(0)
	}
	n, err := os.ReadFile(filepath.Join(dir, "n"))
	if err != nil || strings.TrimSpace(string(n)) != fmt.Sprint(runs) {
		t.Errorf("counter after %d runs: got %s, %v (L1)", runs, n, err)
	}
	tokens, err := os.ReadFile(filepath.Join(dir, "tokens"))
	if err != nil {
		t.Fatal(err)
	}
	last := 0
	for _, s := range strings.Fields(string(tokens)) {
		if n := atoi(t, s); n <= last {
			t.Errorf("token: got %d after %d, want it to rise (T1)", n, last)
		} else {
			last = n
		}
	}
}

func TestRunPermits(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	a, _ := p.hold(t, "plain", "--name", "api", "--limit", "2", "--label", "a")
	b, _ := p.hold(t, "plain", "--name", "api", "--limit", "2", "--label", "b")
	_, stderr := p.want(t, exitHeld, "run", "--name", "api", "--limit", "2", "--wait", "no", "--", "true")
	if !strings.Contains(stderr, "one of 2 permits of api: held by a (") || !strings.Contains(stderr, "; b (") {
		t.Errorf("third of 2 permits: got %q, want both holders named (S1)", stderr)
	}
	p.want(t, 0, "run", "--name", "api", "--wait", "no", "--", "true") // the lock of that name is another thing
	c := p.startChild(t, "plain", "--name", "api", "--limit", "2")
	c.stderr.await(t, "waiting for one of 2 permits of api, held by a (")
	a.finishes(0)
	c.started()
	if held := p.listed(t); len(held) != 2 || held[0].Kind != "semaphore" || held[0].Label != "b" {
		t.Errorf("ls: got %+v, want permits of b and another", held)
	}
	c.finishes(0)
	b.finishes(0)
	p.isFree(t, "api")
}

func TestRunStatus(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, test := range []struct {
		code    int
		stderr  string
		command []string
	}{
		{0, "", []string{"true"}},
		{1, "", []string{"false"}},
		{255, "", []string{"sh", "-c", "exit 255"}},
		{exitHeld, "", []string{"sh", "-c", "exit 193"}},
		{128 + 15, "", []string{"sh", "-c", "kill -TERM $$"}},
		{128 + 9, "", []string{"sh", "-c", "kill -KILL $$"}},
		{128 + 2, "", []string{"sh", "-c", "kill -INT $$"}},
		{127, "command not found", []string{"no-such-command-here"}},
		{127, "command not found", []string{filepath.Join(dir, "nothing")}},
		{126, "permission denied", []string{file("plain", "#!/bin/sh\n", 0o600)}},
		{126, "is a directory", []string{dir}},
		{126, "exec format error", []string{file("binary", "\x00\x01\x02", 0o700)}},
		{127, "no such file", []string{file("interpreted", "#!/no/such/interpreter\n", 0o700)}},
	} {
		_, stderr := p.want(t, test.code, append([]string{"run", "--name", "x", "--"}, test.command...)...)
		if !strings.Contains(stderr, test.stderr) || (stderr != "") != (test.stderr != "") {
			t.Errorf("run %q: got stderr %q, want %q", test.command, stderr, test.stderr)
		}
		p.isFree(t, "x")
	}
	stdout, _ := p.want(t, 0, "run", "--name", "x", "echo", "-n", "--name", "y") // without a "--"
	if stdout != "--name y" {
		t.Errorf("flags of the command: got output %q, want %q", stdout, "--name y")
	}
}

func TestRunPassesSignals(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r := p.startChild(t, "stubborn,family", "--name", "x")
	child, pid := bothStarted(r)
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGWINCH, syscall.SIGTERM} {
		r.signal(sig)
		want := fmt.Sprint(int(sig))
		seen := map[string]string{}
		for range 2 { // in either order
			f := strings.Fields(r.next())
			seen[f[0]] = f[1]
		}
		if seen["signal"] != want || seen["grandsignal"] != want {
			t.Fatalf("signal %v: got %v, want it at the command and at its child, once", sig, seen)
		}
	}
	for _, sig := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGUSR2} {
		r.signal(sig)
		if got := r.line("signal")[0]; got != fmt.Sprint(int(sig)) {
			t.Fatalf("signal %v: the command got %s", sig, got)
		}
	}
	// A process sees the lesser of two pending signals first, and SIGUSR1 and SIGUSR2 would be.
	r.signal(syscall.SIGTERM)
	for range 2 {
		if line := r.next(); strings.Fields(line)[1] != "15" {
			t.Fatalf("after SIGUSR1, SIGUSR2 and SIGTERM: got %q, want SIGTERM only, at the command's child too", line)
		}
	}
	r.finishes(0)
	isGone(t, pid)
	isGone(t, child)
}

// bothStarted waits for a child of the mode family and the one that it has started, in either order.
func bothStarted(r *proc) (child, pid int) {
	r.t.Helper()
	for child == 0 || pid == 0 {
		line := r.next()
		if rest, ok := strings.CutPrefix(line, "grandstart "); ok {
			child = atoi(r.t, strings.Fields(rest)[0])
		} else if rest, ok := strings.CutPrefix(line, "start "); ok {
			pid = atoi(r.t, strings.Fields(rest)[0])
		} else {
			r.t.Fatalf("stdout: got %q, want both to start; stderr: %s", line, r.stderr)
		}
	}
	return child, pid
}

func TestRunEndsBySignal(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGUSR1} {
		p := newPlace(t)
		r, pid := p.hold(t, "plain", "--name", "x")
		rival := p.startChild(t, "plain", "--name", "x")
		rival.stderr.await(t, "waiting")
		rival.signal(sig) // which ends a wait, too
		rival.ends(128 + int(sig))
		if sig == syscall.SIGUSR1 { // which a Go program ignores
			r.finishes(0)
		} else {
			r.signal(sig)
			r.ends(128 + int(sig))
		}
		isGone(t, pid)
		p.isFree(t, "x")
	}
}

func TestRunKeepsIgnoredSignals(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	cmd := p.command()
	cmd.Args = []string{"nohup", binary, "run", "--name", "x", "--", "sh", "-c",
		`kill -HUP $PPID; kill -HUP $$; grep SigIgn /proc/self/status`}
	cmd.Path = "/usr/bin/nohup"
	code, stdout, stderr := finish(t, cmd)
	if code != 0 || !strings.HasSuffix(strings.TrimSpace(stdout), "1") {
		t.Errorf("run under nohup: got code %d, %q, %q, want SIGHUP to stay ignored", code, stdout, stderr)
	}
}

func TestRunWaitsForTheGroup(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r := p.startChild(t, "family,leave", "--name", "x")
	pid := atoi(t, r.line("grandstart")[0])
	r.stderr.await(t, "the command has ended; waiting for the processes")
	p.isHeld(t, "x")
	r.signal(syscall.SIGUSR1) // there is no command any more that could get it
	r.signal(syscall.SIGTERM) // which the remaining process ignores
	if s := state(pid); s == "" || s == "Z" {
		t.Errorf("background process: got state %q, want it to live", s)
	}
	r.finishes(3)
	isGone(t, pid)
	p.isFree(t, "x")
}

// TestRunUnderBadInit has a process of the group become an orphan, and end, where nobody else waits for it.
func TestRunUnderBadInit(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	cmd := p.command()
	cmd.Path = os.Args[0]
	cmd.Args = []string{os.Args[0], binary, "run", "--name", "x", "--", os.Args[0]}
	cmd.Env = append(cmd.Env, childEnv+"=bad-init", innerEnv+"=family,leave")
	r := startProc(t, cmd)
	r.line("grandstart")
	r.stderr.await(t, "the command has ended; waiting for the processes")
	r.finishes(3)
	p.isFree(t, "x")
}

// TestRunLoss takes the lock away from a command that does not obey.
func TestRunLoss(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r := p.startChild(t, "stubborn,family", "--name", "x", "--ttl", "2s", "--grace", "1s")
	child, pid := bothStarted(r)
	held := p.listed(t)
	if len(held) != 1 || held[0].PID != r.cmd.Process.Pid {
		t.Fatalf("ls: got %+v, want one lock, of process %d", held, r.cmd.Process.Pid)
	}
	_, stderr := p.want(t, 0, "unlock", "--force", "x")
	if !strings.Contains(stderr, "lock x taken away; it was held by ") {
		t.Errorf("unlock --force: got %q, want to hear from whom", stderr)
	}
	if got := r.line("signal")[0]; got != "15" {
		t.Errorf("lost: the command got signal %s, want 15", got)
	}
	r.ends(exitLost)
	r.stderr.await(t, "lost x: ", "did not end within 1s: killed it")
	isGone(t, pid)
	isGone(t, child)
	p.isFree(t, "x")
}

func TestRunLossOfWhatEndsWell(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r, _ := p.hold(t, "obedient", "--name", "x", "--ttl", "2s")
	p.want(t, 0, "unlock", "x", "--force")
	r.ends(exitLost) // although the command answered 0
	if s := r.stderr.String(); strings.Contains(s, "killed") {
		t.Errorf("command that ends on SIGTERM: got %q, want no SIGKILL", s)
	}

	// Told by the release that it was lost.
	r, _ = p.hold(t, "plain", "--name", "x", "--ttl", "1m")
	p.want(t, 0, "unlock", "x", "--force")
	r.finishes(exitLost)
	r.stderr.await(t, "it was lost before the command had ended")
}

// TestRunFrozen stops the program itself for longer than its lease.
func TestRunFrozen(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r, pid := p.hold(t, "stubborn", "--name", "x", "--ttl", "2s", "--grace", "1s")
	r.signal(syscall.SIGSTOP)
	isStopped(t, r.cmd.Process.Pid)
	rival, _ := p.hold(t, "plain", "--name", "x", "--ttl", "6s") // so that it polls every second
	busy := watchMachine()
	woken := time.Now().UnixNano()
	r.signal(syscall.SIGCONT)
	got := r.line("signal")
	if got[0] != "15" {
		t.Errorf("continued after the lease: the command got signal %s, want 15 (L2)", got[0])
	}
	late := busy() // of a process that does nothing but sleep
	if d := time.Duration(int64(atoi(t, got[1])) - woken); d > 50*time.Millisecond+10*late {
		t.Errorf("continued after the lease: the command was told after %v on a machine %v late, want at once (L2)", d, late)
	}
	r.ends(exitLost)
	isGone(t, pid)
	rival.finishes(0)
	p.isFree(t, "x")
}

// TestRunKilled kills the program without a chance to clean up.
func TestRunKilled(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	const ttl = 2 * time.Second
	r, pid := p.hold(t, "stubborn", "--name", "x", "--ttl", ttl.String())
	killed := time.Now()
	r.signal(syscall.SIGKILL)
	r.ends(128 + 9)
	isGone(t, pid)
	for {
		began := time.Now()
		code, _, stderr := p.run(t, "run", "--name", "x", "--wait", "no", "--", "true")
		if code == 0 {
			break
		}
		if code != exitHeld || began.After(killed.Add(ttl)) {
			t.Fatalf("lock of a holder killed %v ago: got exit code %d, %s, want it free after %v (L7)",
				began.Sub(killed), code, stderr, ttl)
		}
	}
	p.isFree(t, "x")
}

func TestUnavailable(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := "redis://127.0.0.1:" + fmt.Sprint(l.Addr().(*net.TCPAddr).Port)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for _, url := range []string{refused, "file:///dev/null/locks"} {
		for _, args := range [][]string{
			{"run", "--name", "x", "--", "echo", "never"},
			{"run", "--name", "x", "--wait", "no", "--", "echo", "never"},
			{"ls"}, {"token", "x"}, {"unlock", "--force", "x"},
		} {
			stdout, stderr := atURL(url).want(t, exitUnavailable, args...)
			if stdout != "" || strings.Count(stderr, "\n") != 1 {
				t.Errorf("%q at %s: got stdout %q, stderr %q, want one line on stderr", args, url, stdout, stderr)
			}
		}
	}
}

func TestUsage(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	for _, test := range []struct {
		stderr string
		args   []string
	}{
		{"fencelock help", nil},
		{"there is no lock", []string{"lock"}},
		{"not defined: -nam", []string{"run", "--nam", "x", "--", "true"}},
		{"needs --name", []string{"run", "--", "true"}},
		{"needs a command", []string{"run", "--name", "x"}},
		{"needs a command", []string{"run", "--name", "x", "--"}},
		{"-ttl", []string{"run", "--name", "x", "--ttl", "10", "--", "true"}},
		{"TTL", []string{"run", "--name", "x", "--ttl", "1ms", "--", "true"}},
		{"TTL", []string{"run", "--name", "x", "--ttl", "48h", "--", "true"}},
		{"-wait", []string{"run", "--name", "x", "--wait", "maybe", "--", "true"}},
		{"-wait", []string{"run", "--name", "x", "--wait", "-1s", "--", "true"}},
		{"-limit", []string{"run", "--name", "x", "--limit", "0", "--", "true"}},
		{"-limit", []string{"run", "--name", "x", "--limit", "many", "--", "true"}},
		{"grace", []string{"run", "--name", "x", "--grace", "-1s", "--", "true"}},
		{"Label", []string{"run", "--name", "x", "--label", strings.Repeat("l", 257), "--", "true"}},
		{"name", []string{"run", "--name", strings.Repeat("n", 513), "--", "true"}},
		{"url scheme", []string{"ls", "--url", "nosuch://host"}},
		{"url parameter", []string{"ls", "--url", "file:///tmp?colour=red"}},
		{"no arguments", []string{"ls", "x"}},
		{"one NAME", []string{"unlock", "--force"}},
		{"one NAME", []string{"unlock", "--force", "x", "y"}},
		{"is not held; nothing done", []string{"unlock", "x"}},
		{"no quoted Go string", []string{"unlock", "--force", "--quoted", "x"}},
		{"one NAME", []string{"token"}},
		{"no arguments", []string{"version", "x"}},
		{"there is no backend redish", []string{"compare", "--backend", "redis,redish"}},
		{"there is no scenario rain", []string{"compare", "--scenario", "rain"}},
		{"at least 1", []string{"compare", "--runs", "0"}},
		{"no arguments", []string{"compare", "x"}},
		{"one topic", []string{"help", "run", "ls"}},
		{"there is no lock", []string{"help", "lock"}},
	} {
		stdout, stderr := p.want(t, exitUsage, test.args...)
		if stdout != "" || !strings.HasPrefix(stderr, "fencelock: ") || strings.Count(stderr, "\n") != 1 ||
			!strings.Contains(stderr, test.stderr) {
			t.Errorf("%q: got stdout %q, stderr %q, want one line with %q", test.args, stdout, stderr, test.stderr)
		}
	}
}

func TestOutputFails(t *testing.T) {
	t.Parallel()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	cmd := newPlace(t).command("help")
	errs := newBuffer()
	cmd.Stdout, cmd.Stderr = full, errs
	cmd.Run()
	if code := exitCode(cmd); code != exitFailed || !strings.Contains(errs.String(), "no space left") {
		t.Errorf("help into a full disk: got exit code %d, %q, want %d and the reason", code, errs, exitFailed)
	}
}

// TestRunOutlivesItsReader closes the reading end of stderr, which the program writes to when the lock is lost.
func TestRunOutlivesItsReader(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r, _ := p.hold(t, "obedient", "--name", "x", "--ttl", "2s")
	if err := r.readStderr.Close(); err != nil {
		t.Fatal(err)
	}
	p.want(t, 0, "unlock", "x", "--force")
	r.ends(exitLost) // and not by SIGPIPE
}
