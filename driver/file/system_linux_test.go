package file

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// TestRealSystem: this machine's clock is the one that nobody sets.
func TestRealSystem(t *testing.T) {
	sys, err := thisSystem()
	if err != nil {
		t.Fatal(err)
	}
	const path = "/proc/uptime"
	uptime := func() time.Duration {
		var s float64
		if _, err := fmt.Sscan(string(read(t, path)), &s); err != nil {
			t.Fatalf("%s: got %v", path, err)
		}
		return time.Duration(s * float64(time.Second))
	}
	before := uptime()
	now := sys.now()
	after := uptime() + 10*time.Millisecond // what it rounds off
	if got := time.Duration(now.Lease); got < before || got > after {
		t.Fatalf("clock of leases: got %v, want the uptime, %v to %v (S2)", got, before, after)
	}
	if got := time.Since(time.UnixMicro(now.Token)); got < 0 || got > time.Minute {
		t.Fatalf("clock of tokens: got %v ago, want now (T4)", got)
	}
	if strings.Count(sys.boot, "-") != 4 {
		t.Fatalf("boot id: got %q, want a UUID", sys.boot)
	}
}

// TestPermissionDenied works as root, too: permissions follow the thread's fsuid.
func TestPermissionDenied(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "locks")
	d := openReal(t, dir)
	held := owner("held")
	mustLock(t, d, held, time.Minute)
	for _, path := range []string{dir, d.dir} {
		if err := os.Chmod(path, 0o555); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { // or a user who is not root could not remove it
		for _, path := range []string{dir, d.dir} {
			if err := os.Chmod(path, 0o700); err != nil {
				t.Error(err)
			}
		}
	})
	errs := make(chan []error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if os.Geteuid() == 0 {
			if err := syscall.Setfsuid(65534); err != nil {
				errs <- []error{err}
				return
			}
		}
		_, opened := New(dir, nil)
		_, locked := d.Lock(t.Context(), try(owner("new"), time.Second))
		_, fresh := New(filepath.Join(dir, "new"), nil)
		errs <- []error{locked, fresh, opened}
	}()
	got := <-errs
	if len(got) != 3 {
		t.Fatalf("setfsuid: got %v, want nil", got)
	}
	for i, what := range []string{"Lock of a new name", "New below a read-only directory"} {
		mustUnavailable(t, what, got[i], dir)
		if !errors.Is(got[i], os.ErrPermission) {
			t.Fatalf("%s: got %v, want it to match fs.ErrPermission", what, got[i])
		}
	}
	if os.Geteuid() == 0 { // else the files are one's own
		mustUnavailable(t, "New", got[2], dir)
	}
}

func TestClose(t *testing.T) {
	dir := t.TempDir()
	openReal(t, dir).Close() // whatever the runtime opens once
	before, goroutines := openFiles(t), runtime.NumGoroutine()
	d := openReal(t, dir)
	c := newClient(d)
	o, w := owner("n"), owner("n")
	mustLock(t, d, o, time.Minute)
	mustState(t, d, wait(w, time.Minute, time.Minute), driver.Waiting, "W4")
	<-c.recheck
	if got := sockets(t, d); len(got) != 1 {
		t.Fatalf("sockets while waiting: got %v, want one", got)
	}
	for range 2 {
		if err := d.Close(); err != nil {
			t.Fatalf("Close: got %v, want nil", err)
		}
	}
	if got := sockets(t, d); len(got) != 0 {
		t.Fatalf("sockets after Close: got %v, want none (L7)", got)
	}
	if got := openFiles(t); got > before {
		t.Fatalf("open files after Close: got %d, want at most %d (L7)", got, before)
	}
	eventually(t, "the driver's goroutines end (L7)", 5*time.Second, func() bool { return runtime.NumGoroutine() <= goroutines })
	_, err := d.Lock(t.Context(), try(owner("n"), time.Second))
	mustUnavailable(t, "Lock after Close", err, "closed")
	_, err = d.Release(t.Context(), o)
	mustUnavailable(t, "Release after Close", err, "closed")
	mustUnavailable(t, "List after Close", d.List(t.Context(), driver.Name{}, func(driver.Holding) bool { return true }), "closed")
	for _, r := range d.Poll(t.Context(), []driver.Poll{{Owner: w, TTL: time.Second, Claim: time.Second}}) {
		mustUnavailable(t, "Poll after Close", r.Err, "closed")
	}

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	d = openReal(t, dir)
	_, err = d.Lock(ended, try(owner("n"), time.Second))
	mustUnavailable(t, "Lock with an ended context", err, "canceled")
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("Lock with an ended context: got %v, want it to match context.Canceled", err)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}
