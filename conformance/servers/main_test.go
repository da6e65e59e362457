//go:build linux

// The tests look at processes through /proc.

package servers

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"
)

// The main thread belongs to TestMain, so that the goroutines of the tests run on threads that can
// end.
func init() { runtime.LockOSThread() }

// TestMain runs the tests, or plays the program whose death a test wants to see. After the tests
// nothing may be left: no goroutine, no child process.
func TestMain(m *testing.M) {
	if os.Getenv(orphanEnv) != "" {
		makeOrphan()
	}
	if os.Getenv(spinEnv) != "" {
		spin()
	}
	if n := os.Getenv(deafEnv); n != "" {
		beDeaf(n)
		return
	}
	before := runtime.NumGoroutine()
	code := m.Run()
	if err := poll(5*time.Second, func() error { return nothingLeft(before) }); err != nil {
		fmt.Fprintln(os.Stderr, "after all tests:", err)
		code = 1
	}
	os.Exit(code)
}

// nothingLeft returns an error if more than so many goroutines run, or any child process.
func nothingLeft(goroutines int) error {
	if n := runtime.NumGoroutine(); n > goroutines {
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		return fmt.Errorf("%d goroutines, want %d:\n%s", n, goroutines, stacks)
	}
	children, err := childrenOf(os.Getpid())
	if err != nil {
		return err
	}
	if len(children) > 0 {
		return fmt.Errorf("child processes left: %v", children)
	}
	return nil
}

// poll repeats check until it answers nil or the time is over, and returns its last answer.
func poll(limit time.Duration, check func() error) error {
	for deadline := time.Now().Add(limit); ; time.Sleep(2 * time.Millisecond) {
		err := check()
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// eventually fails the test if check does not answer nil soon.
func eventually(t *testing.T, check func() error) {
	t.Helper()
	if err := poll(10*time.Second, check); err != nil {
		t.Fatal(err)
	}
}

// leavesNothing checks, after the test and its other clean-ups, that it left no goroutine and no
// process.
func leavesNothing(t *testing.T) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		if err := poll(5*time.Second, func() error { return nothingLeft(before) }); err != nil {
			t.Error(err)
		}
	})
}

// newRedis starts a server for one test.
func newRedis(t *testing.T, opts *RedisOptions) *Redis {
	t.Helper()
	leavesNothing(t)
	r, err := StartRedis(t.Context(), opts)
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

// mustDo sends a command straight to the server and checks the reply.
func mustDo(t *testing.T, r *Redis, want any, args ...string) {
	t.Helper()
	got, err := r.Do(t.Context(), args...)
	if err != nil {
		t.Fatalf("%q: got error %v, want %#v", args, err, want)
	}
	if got != want {
		t.Fatalf("%q: got %#v, want %#v", args, got, want)
	}
}

// within returns a context for something that is expected to hang.
func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
