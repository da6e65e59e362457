package worker_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/history"
	"github.com/fencelock/fencelock/conformance/worker"
	_ "github.com/fencelock/fencelock/driver/file"
	_ "github.com/fencelock/fencelock/driver/memory"
)

// parent, if set, makes the test binary a program that starts a worker and then hangs.
const parent = "FENCELOCK_WORKER_TEST_PARENT"

func TestMain(m *testing.M) {
	worker.Main()
	if url := os.Getenv(parent); url != "" {
		hang(url)
	}
	os.Exit(m.Run())
}

func hang(url string) {
	w, err := worker.Start(context.Background(), worker.Options{URL: url, Process: "orphan"})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	if err := w.Pause(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(w.PID())
	time.Sleep(time.Minute)
}

func backend(t *testing.T) string { return "file://" + filepath.ToSlash(t.TempDir()) }

func start(t *testing.T, url, process string) *worker.Worker {
	t.Helper()
	w, err := worker.Start(t.Context(), worker.Options{URL: url, Process: process})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

func take(t *testing.T, w *worker.Worker, a worker.Ask) *worker.Remote {
	t.Helper()
	l, err := w.Take(t.Context(), a)
	if err != nil {
		t.Fatalf("Take: got %v, want a lease", err)
	}
	return l
}

func is(t *testing.T, op string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Fatalf("%s: got %v, want %v", op, got, want)
	}
}

const long = time.Minute

func TestOrders(t *testing.T) {
	url := backend(t)
	a, b := start(t, url, "a"), start(t, url, "b")
	ctx := t.Context()

	l := take(t, a, worker.Ask{Name: "x", TTL: long, Label: "me"})
	_, err := b.Take(ctx, worker.Ask{Name: "x", TTL: long, Try: true})
	is(t, "rival's try", err, fencelock.ErrHeld)
	_, err = b.Take(ctx, worker.Ask{Name: "x", TTL: long, WaitFor: time.Millisecond})
	is(t, "rival's bounded wait", err, context.DeadlineExceeded)
	is(t, "Err of a held lease", l.Err(ctx), nil)
	is(t, "Extend", l.Extend(ctx, 2*long), nil)
	is(t, "Extend by nothing", l.Extend(ctx, 0), fencelock.ErrInvalid)

	p := take(t, b, worker.Ask{Name: "x", Limit: 2, TTL: long})
	take(t, a, worker.Ask{Name: "x", Limit: 2, TTL: long, Try: true})
	_, err = b.Take(ctx, worker.Ask{Name: "x", Limit: 2, TTL: long, Try: true})
	is(t, "try of a third permit of two", err, fencelock.ErrHeld)
	is(t, "Release of a permit", p.Release(ctx), nil)

	token, err := b.NextToken(ctx, "x")
	if err != nil || token <= l.Token() {
		t.Fatalf("NextToken: got %v, %v, want more than %v", token, err, l.Token())
	}
	is(t, "Release", l.Release(ctx), nil)
	is(t, "Err after Release", l.Err(ctx), fencelock.ErrReleased)
	if m := take(t, b, worker.Ask{Name: "x", TTL: long, NoRenew: true}); m.Token() <= token {
		t.Fatalf("token of the next lease: got %v, want more than %v", m.Token(), token)
	}

	// b still holds, a has a permit: closing gives both back.
	is(t, "Close", errors.Join(a.Close(), b.Close()), nil)
	c := start(t, url, "c")
	take(t, c, worker.Ask{Name: "x", TTL: long, Try: true})
	take(t, c, worker.Ask{Name: "x", Limit: 1, TTL: long, Try: true})
	is(t, "Close", c.Close(), nil)

	h := history.Merge(a.History(), b.History(), c.History())
	if err := history.Check(h, history.Rules{MinAcquired: 6, MinContended: 3}).Err(); err != nil {
		t.Fatal(err)
	}
}

// The end of the controller's context ends the worker's wait.
func TestCancel(t *testing.T) {
	url := backend(t)
	a, b := start(t, url, "a"), start(t, url, "b")
	l := take(t, a, worker.Ask{Name: "x", TTL: long})
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan error)
	go func() {
		_, err := b.Take(ctx, worker.Ask{Name: "x", TTL: long})
		got <- err
	}()
	if err := b.AwaitRequests(t.Context(), "x", 0, 1); err != nil {
		t.Fatal(err)
	}
	cancel()
	is(t, "cancelled wait", <-got, context.Canceled)
	is(t, "Release", l.Release(t.Context()), nil)
	take(t, a, worker.Ask{Name: "x", TTL: long, Try: true})
}

// One process does the work of two, whose leases follow each other.
func TestWorkAs(t *testing.T) {
	w := start(t, "memory:", "both")
	done := make(chan error)
	for _, name := range []string{"a", "b", "a"} {
		go func() {
			done <- w.Work(t.Context(), worker.Work{Ask: worker.Ask{Name: "x", TTL: long}, As: name, For: time.Millisecond, Think: time.Millisecond})
		}()
	}
	is(t, "Work", errors.Join(<-done, <-done, <-done), nil)
	acquired := map[string]int{}
	for _, e := range w.History() {
		if e.Type == history.Acquired {
			acquired[e.Process]++
		}
	}
	if acquired["a"] != 2 || acquired["b"] != 1 {
		t.Errorf("leases by name: got %v, want 2 of a and 1 of b", acquired)
	}
	if err := history.Check(w.History(), history.Rules{MinAcquired: 3}).Err(); err != nil {
		t.Error(err)
	}
}

// A lease that is renewed keeps showing in the history as its deadline moves.
func TestPauseAndResume(t *testing.T) {
	url := backend(t)
	a, b := start(t, url, "a"), start(t, url, "b")
	ctx := t.Context()
	const ttl = 300 * time.Millisecond
	l := take(t, a, worker.Ask{Name: "x", TTL: ttl})
	err := a.AwaitEvent(ctx, func(e history.Event) bool { return e.Type == history.Extended })
	is(t, "renewal", err, nil)
	is(t, "Pause", a.Pause(), nil)
	is(t, "Pause again", a.Pause(), nil)
	bounded, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	is(t, "Err of a stopped worker", l.Err(bounded), context.DeadlineExceeded)
	m := take(t, b, worker.Ask{Name: "x", TTL: ttl})
	is(t, "Resume", a.Resume(), nil)
	is(t, "Resume again", a.Resume(), nil)
	is(t, "Err after Resume", l.Err(ctx), fencelock.ErrLost)
	is(t, "Release after Resume", l.Release(ctx), fencelock.ErrNotHeld)
	is(t, "Err of the successor", m.Err(ctx), nil)
	is(t, "Release of the successor", m.Release(ctx), nil)
	h := history.Merge(a.History(), b.History())
	if err := history.Check(h, history.Rules{MinAcquired: 2}).Err(); err != nil {
		t.Fatal(err)
	}
}

func TestKill(t *testing.T) {
	w := start(t, backend(t), "a")
	ctx := t.Context()
	take(t, w, worker.Ask{Name: "x", TTL: long})
	got := make(chan error)
	go func() {
		_, err := w.Take(ctx, worker.Ask{Name: "x", TTL: long})
		got <- err
	}()
	is(t, "request", w.AwaitRequests(ctx, "x", 0, 1), nil)
	is(t, "Pause", w.Pause(), nil)
	is(t, "Kill", w.Kill(), nil)
	is(t, "wait of a killed worker", <-got, worker.ErrEnded)
	_, err := w.Take(ctx, worker.Ask{Name: "y", TTL: long})
	is(t, "order to a killed worker", err, worker.ErrEnded)
	is(t, "Close", w.Close(), nil)
	if err := history.Check(w.History(), history.Rules{MinAcquired: 1}).Err(); err != nil {
		t.Fatal(err)
	}
}

// An end that was not asked for is no silent one.
func TestUnexpectedEnd(t *testing.T) {
	w, err := worker.Start(t.Context(), worker.Options{URL: backend(t), Process: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(w.PID(), syscall.SIGQUIT); err != nil {
		t.Fatal(err)
	}
	err = w.AwaitEvent(t.Context(), func(history.Event) bool { return false })
	is(t, "wait for an event of a worker that crashes", err, worker.ErrEnded)
	err = w.Close()
	is(t, "Close of a worker that crashed", err, worker.ErrEnded)
	if !strings.Contains(err.Error(), "SIGQUIT") {
		t.Fatalf("Close of a worker that crashed: got %v, want its standard error in it", err)
	}
}

func TestStartFails(t *testing.T) {
	_, err := worker.Start(t.Context(), worker.Options{URL: "file:relative", Process: "a"})
	is(t, "Start with a bad URL", err, fencelock.ErrInvalid)
}

func TestLoad(t *testing.T) {
	url := backend(t)
	load := worker.Load{
		Goroutines: 4, Attempts: 200, For: 2 * time.Second,
		Locks: []string{"a", "b"}, Permits: []worker.Permits{{Name: "s", Limits: []int{1, 2, 3}}}, Tokens: true,
		TTL: 2 * time.Second, Hold: 5 * time.Millisecond, Short: 200 * time.Millisecond, WaitFor: 5 * time.Second,
	}
	workers := []*worker.Worker{start(t, url, "a"), start(t, url, "b")}
	done := make(chan error)
	for i, w := range workers {
		l := load
		l.Seed = uint64(i)
		go func() { done <- w.Run(t.Context(), l) }()
	}
	rec := history.NewRecorder("here", nil)
	c, err := fencelock.Open(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	load.Seed = 2
	load.Run(t.Context(), worker.Record(c, "here", rec, false))
	is(t, "Run", errors.Join(<-done, <-done), nil)
	h := history.Merge(rec.History(), workers[0].History(), workers[1].History())
	rep := history.Check(h, history.Rules{MinAcquired: 100, MinContended: 50, LossTolerance: time.Second})
	t.Log(rep)
	if err := rep.Err(); err != nil {
		t.Fatal(err)
	}
	seen := map[history.Type]bool{}
	for _, e := range h {
		seen[e.Type] = true
	}
	for _, want := range []history.Type{history.Refused, history.Failed, history.Extended, history.LossTold} {
		if !seen[want] {
			t.Errorf("events of a load: got none of %s, want some", want)
		}
	}
}

// A worker, stopped or not, does not outlive the process that started it.
func TestDiesWithParent(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), parent+"="+backend(t))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var line bytes.Buffer
	for buf := make([]byte, 64); !bytes.Contains(line.Bytes(), []byte("\n")); {
		n, err := out.Read(buf)
		line.Write(buf[:n])
		if err != nil {
			t.Fatalf("parent: got %q, %v, want the worker's pid", line.String(), err)
		}
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line.String()))
	if err != nil {
		t.Fatalf("parent: got %q, want the worker's pid", line.String())
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || strings.Contains(string(stat), ") Z ") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("worker %d after the death of its parent: got %s, want it gone", pid, stat)
		}
	}
}
