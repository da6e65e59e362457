package worker_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/history"
	"github.com/fencelock/fencelock/conformance/worker"
)

// TestClock steps a worker's wall clock in the midst of its work: that and nothing else of its time changes, for it alone.
func TestClock(t *testing.T) {
	w, err := worker.Start(t.Context(), worker.Options{URL: backend(t), Process: "a", Clock: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	file := filepath.Join(t.TempDir(), "clocks")
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- w.Work(ctx, worker.Work{
			Ask:   worker.Ask{Name: "x", TTL: 300 * time.Millisecond},
			Think: time.Millisecond, Writes: []worker.Write{{Writer: "clocks", Resource: file}},
		})
	}()
	var began time.Time
	for _, step := range []time.Duration{0, 24 * time.Hour, -24 * time.Hour, 0} {
		if err := w.SetClock(step); err != nil {
			t.Fatal(err)
		}
		// A write that was called after the step, so that all of it is.
		now := history.Clock(time.Now())
		if err := w.AwaitEvent(t.Context(), func(e history.Event) bool { return e.Type == history.WriteAdmitted && e.Called > now }); err != nil {
			t.Fatal(err)
		}
		at, wall, monotonic := readClocks(t, file)
		if got := wall.Sub(at).Round(time.Minute); got != step {
			t.Errorf("wall clock after a step by %v: got %v ahead", step, got)
		}
		if began.IsZero() {
			began = at.Add(-monotonic)
		}
		if drift := at.Add(-monotonic).Sub(began).Abs(); drift > 100*time.Millisecond {
			t.Errorf("monotonic clock after a step by %v: got %v apart from what it was", step, drift)
		}
	}
	if err := w.SetClock(time.Second / 2); err == nil || !strings.Contains(err.Error(), "whole seconds") {
		t.Errorf("SetClock by half a second: got %v, want an error that says so", err)
	}
	stop()
	is(t, "Work", <-done, nil)
	if err := history.Check(w.History(), history.Rules{MinAcquired: 1}).Err(); err != nil {
		t.Error(err)
	}
	for _, e := range w.History() {
		if e.Type == history.LossTold {
			t.Error("a lease was lost when the wall clock was set")
		}
	}
}

func init() { worker.Handle("clocks", writeClocks) }

// processBegan is read when the process begins, on all its clocks.
var processBegan = time.Now()

// writeClocks writes what the worker's clocks show.
func writeClocks(_ context.Context, file string, _ fencelock.Token) error {
	now := time.Now()
	text := fmt.Sprintln(now.UnixNano(), int64(now.Sub(processBegan)))
	return errors.Join(os.WriteFile(file+".new", []byte(text), 0o600), os.Rename(file+".new", file))
}

// readClocks answers what a worker's clocks showed, and when that was written by the clock of the test.
func readClocks(t *testing.T, file string) (at, wall time.Time, monotonic time.Duration) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var ns int64
	if _, err := fmt.Sscan(strings.TrimSpace(string(text)), &ns, &monotonic); err != nil {
		t.Fatal(err)
	}
	return time.Now(), time.Unix(0, ns), monotonic
}

func TestClockIsAnOption(t *testing.T) {
	err := start(t, backend(t), "a").SetClock(0)
	if err == nil || !strings.Contains(err.Error(), "option Clock") {
		t.Errorf("SetClock without the option: got %v, want an error that says so", err)
	}
}
