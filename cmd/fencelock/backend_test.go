//go:build linux

package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
)

// startRedis starts a server for one test.
func startRedis(t *testing.T, opts *servers.RedisOptions) *servers.Redis {
	t.Helper()
	r, err := servers.StartRedis(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func TestRedis(t *testing.T) {
	t.Parallel()
	r := startRedis(t, nil)
	p := atURL("redis://" + r.Addr())
	first, _ := p.hold(t, "plain", "--name", "x", "--label", "first")
	p.isHeld(t, "x")
	second := p.startChild(t, "plain", "--name", "x", "--label", "second")
	second.stderr.await(t, "waiting for x, held by first (")
	before := p.listed(t)
	first.finishes(0)
	second.started()
	after := p.listed(t)
	if len(before) != 1 || len(after) != 1 || after[0].Token <= before[0].Token || after[0].Label != "second" {
		t.Errorf("handover: ls got %+v and then %+v, want the second and a greater token (T1)", before, after)
	}
	second.finishes(0)
	p.isFree(t, "x")
	p.want(t, 7, "run", "--name", "y", "--limit", "2", "--", "sh", "-c", "exit 7")
	p.isFree(t, "y")
}

// TestNoPassword looks for a password in whatever is printed about backends that refuse it, or never see it.
func TestNoPassword(t *testing.T) {
	t.Parallel()
	const secret, wrong = "correct-horse", "battery-staple"
	r := startRedis(t, &servers.RedisOptions{Password: secret})
	at := func(password string) string { return "redis://:" + password + "@" + r.Addr() + "/0" }
	atURL(at(secret)).want(t, 0, "run", "--name", "x", "--", "true")

	for _, test := range []struct {
		code int
		url  string
	}{
		{exitUnavailable, at(wrong)},
		{exitUnavailable, "redis://user:" + wrong + "@127.0.0.1:1/0"},
		{exitUsage, "redis://:" + wrong + "@host:notaport/0"},
		{exitUsage, "redis://:" + wrong + "@" + r.Addr() + "/0?no-such-parameter=" + wrong},
		{exitUsage, "nosuch://:" + wrong + "@host"},
	} {
		for _, args := range [][]string{
			{"run", "--name", "x", "--", "true"}, {"ls"}, {"token", "x"}, {"unlock", "--force", "x"},
		} {
			for _, byFlag := range []bool{false, true} {
				p := atURL(test.url)
				all := args
				if byFlag {
					p = place{}
					all = append([]string{args[0], "--url", test.url}, args[1:]...)
				}
				stdout, stderr := p.want(t, test.code, all...)
				if strings.Contains(stdout+stderr, wrong) {
					t.Errorf("%q: got %q %q, with the password in it", all, stdout, stderr)
				}
			}
		}
		stdout, _ := atURL(test.url).want(t, 0, "version")
		if strings.Contains(stdout, wrong) {
			t.Errorf("version: got %q, with the password in it", stdout)
		}
	}
	_, stderr := place{}.want(t, exitUsage, "ls", at(wrong)) // --url forgotten
	if strings.Contains(stderr, wrong) {
		t.Errorf("ls: got %q, with the password in it", stderr)
	}
}

// TestRunLossOfBackend stops a Redis server under leases of 1 s, and measures how long after the end of
// belief each command is told. A round in which the machine was too busy to run even a process that does
// nothing but sleep is void.
func TestRunLossOfBackend(t *testing.T) {
	const ttl, commands, bound = time.Second, 4, 50 * time.Millisecond
	rounds := 5
	if testing.Short() {
		rounds = 1
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	r := startRedis(t, nil)
	p := atURL("redis://" + r.Addr())
	var all []time.Duration
	void := 0
	for done := 0; done < rounds; {
		busy := watchMachine()
		late := lossRound(t, p, r, ttl, commands, time.Duration(random.Int64N(int64(ttl))))
		if b := busy(); slices.Max(late) > bound && b > bound/10 {
			if void++; void > 2*rounds {
				t.Fatalf("void: commands told up to %v after V, while a timer was %v late", slices.Max(late), b)
			}
			continue
		}
		done++
		all = append(all, late...)
	}
	slices.Sort(all)
	if all[0] < 0 || all[len(all)-1] > bound {
		t.Errorf("commands told %v to %v after V, want 0 to %v (L2)", all[0], all[len(all)-1], bound)
	}
	t.Logf("%d commands told after V: least %v, median %v, most %v; %d rounds void", len(all), all[0], all[len(all)/2],
		all[len(all)-1], void)
}

var validUntil = regexp.MustCompile(`it was valid until (\S+)`)

// lossRound stops the server under so many commands, some time after they began, and answers how long after V
// each was told.
func lossRound(t *testing.T, p place, r *servers.Redis, ttl time.Duration, commands int, after time.Duration) (late []time.Duration) {
	t.Helper()
	var all []*proc
	for i := range commands {
		held, _ := p.hold(t, "obedient", "--name", fmt.Sprintf("x%d", i), "--ttl", ttl.String())
		all = append(all, held)
	}
	time.Sleep(after) // so that the stop hits any moment between two renewals
	stopped := time.Now()
	if err := r.Pause(); err != nil {
		t.Fatal(err)
	}
	for _, held := range all {
		got := held.line("signal")
		if got[0] != "15" {
			t.Errorf("lost: the command got signal %s, want 15", got[0])
		}
		held.ends(exitLost)
		held.stderr.await(t, "valid until ")
		m := validUntil.FindStringSubmatch(held.stderr.String())
		if m == nil {
			t.Fatalf("lost: got %q, want to hear until when it was valid", held.stderr)
		}
		until, err := time.Parse(time.RFC3339Nano, m[1]) // in milliseconds, cut off
		if err != nil {
			t.Fatal(err)
		}
		if until.After(stopped.Add(ttl)) {
			t.Errorf("V: got %v after the server was stopped, want at most %v (L2)", until.Sub(stopped), ttl)
		}
		late = append(late, time.Unix(0, int64(atoi(t, got[1]))).Sub(until))
	}
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error { // what was left ends with its TTL
		if code, out, _ := p.run(t, "ls", "--json"); code != 0 || out != "[]\n" {
			return fmt.Errorf("ls after the server goes on: got exit code %d, %s", code, out)
		}
		return nil
	})
	return late
}

// watchMachine begins to look how late timers are, and answers a function that ends that and tells the most.
func watchMachine() (most func() time.Duration) {
	stop, result := make(chan struct{}), make(chan time.Duration)
	go func() {
		var most time.Duration
		for {
			began := time.Now()
			select {
			case <-stop:
				result <- most
				return
			case <-time.After(time.Millisecond):
				most = max(most, time.Since(began)-time.Millisecond)
			}
		}
	}()
	return func() time.Duration {
		close(stop)
		return <-result
	}
}

// oddNames are names that are no fun on a terminal.
var oddNames = []string{"a\x00b", "line\nline", "\x1b[31mred", "\xff\xfe", "two words", `say "hi"`, "größe", "-", "--force", "{x}/y"}

func TestOddNames(t *testing.T) {
	t.Parallel()
	url := "file://" + t.TempDir()
	p := atURL(url)
	client, err := fencelock.Open(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for _, name := range oddNames {
		if _, err := client.TryLock(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		if _, err := client.TryAcquire(t.Context(), name, 2); err != nil {
			t.Fatal(err)
		}
	}
	stdout, _ := p.want(t, 0, "ls")
	if n := strings.Count(stdout, "\n"); n != 1+2*len(oddNames) || strings.ContainsAny(stdout, "\x00\x1b") || !utf8.ValidString(stdout) {
		t.Errorf("ls: got %d lines, want %d, without control characters, in\n%q", n, 1+2*len(oddNames), stdout)
	}
	held := p.listed(t)
	var names []string
	for _, e := range held {
		name, err := strconv.Unquote(e.Quoted)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	want := slices.Sorted(slices.Values(append(oddNames, oddNames...)))
	if !slices.Equal(names, want) {
		t.Errorf("ls --json: got names %q, want %q", names, want)
	}
	for _, e := range held {
		args := []string{"unlock", "--force", "--quoted", e.Quoted}
		if e.Kind == "semaphore" {
			args = append(args, "--semaphore")
		}
		p.want(t, 0, args...)
	}
	if held := p.listed(t); len(held) != 0 {
		t.Errorf("ls after unlocking all: got %+v", held)
	}
	_, stderr := p.want(t, 0, "unlock", "--force", "--", "--force")
	if !strings.Contains(stderr, "lock --force was not held") {
		t.Errorf("unlock of what is free: got %q, want to be told", stderr)
	}
	stdout, stderr = p.want(t, 0, "ls")
	if stdout != "" || !strings.Contains(stderr, "nothing is held") {
		t.Errorf("ls of nothing: got %q, %q", stdout, stderr)
	}
}

// TestNULInName can be done in this process only: no argument of a program holds a NUL.
func TestNULInName(t *testing.T) {
	code, stderr := inProcess(t, []string{"run", "--name", "a\x00b", "--", "true"})
	if code != exitUsage || !strings.Contains(stderr, "NUL") {
		t.Errorf("run --name with NUL: got exit code %d, %q, want %d", code, stderr, exitUsage)
	}
	code, _ = inProcess(t, []string{"unlock", "--force", "a\x00b"})
	if code != 0 {
		t.Errorf("unlock of a name with NUL: got exit code %d, want 0", code)
	}
}

// inProcess calls run, which the other tests reach through the program.
func inProcess(t *testing.T, args []string) (code int, stderr string) {
	t.Helper()
	file := func(name string) *os.File {
		f, err := os.Create(filepath.Join(t.TempDir(), name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	errs := file("stderr")
	code = run(t.Context(), args, []string{"FENCELOCK_URL=file://" + t.TempDir()}, file("stdin"), file("stdout"), errs)
	if _, err := errs.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(errs)
	if err != nil {
		t.Fatal(err)
	}
	return code, string(text)
}

// TestHungBackend asks a server that accepts connections and answers nothing.
func TestHungBackend(t *testing.T) {
	t.Parallel()
	r := startRedis(t, nil)
	p := atURL("redis://" + r.Addr())
	p.want(t, 0, "ls")
	if err := r.Pause(); err != nil {
		t.Fatal(err)
	}
	var all []*proc
	for _, args := range [][]string{
		{"run", "--name", "x", "--", "echo", "never"},
		{"run", "--name", "x", "--wait", "no", "--", "echo", "never"},
		{"ls"}, {"token", "x"}, {"unlock", "--force", "x"},
	} {
		all = append(all, p.start(t, args...))
	}
	for _, hung := range all {
		hung.ends(exitUnavailable)
		if line, more := <-hung.lines; more {
			t.Errorf("%q at a hung server: got %q, want nothing on stdout", hung.cmd.Args, line)
		}
	}
}

// TestBackendFailsWhileWaiting kills the server under a holder and a waiter.
func TestBackendFailsWhileWaiting(t *testing.T) {
	t.Parallel()
	r := startRedis(t, nil)
	p := atURL("redis://" + r.Addr())
	holder, _ := p.hold(t, "obedient", "--name", "x", "--ttl", "1s")
	waiter := p.startChild(t, "plain", "--name", "x", "--ttl", "1s")
	waiter.stderr.await(t, "waiting for x")
	if err := r.Kill(); err != nil {
		t.Fatal(err)
	}
	holder.ends(exitLost)
	holder.stderr.await(t, "cannot renew x, trying again: ", "lost x: ")
	waiter.ends(exitUnavailable)
	p.want(t, exitUnavailable, "ls")
}
