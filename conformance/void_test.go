package conformance

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// failures keeps what a test says, instead of failing.
type failures struct {
	testing.TB
	said []string
}

func (f *failures) Errorf(format string, args ...any) {
	f.said = append(f.said, fmt.Sprintf(format, args...))
}
func (f *failures) Fatalf(format string, args ...any) { f.Errorf(format, args...); runtime.Goexit() }

// TestVoid: a failure does not count if the wall clock was set meanwhile, a bounded number of times; any other does.
func TestVoid(t *testing.T) {
	for _, c := range []struct {
		name        string
		fails, sets int // how many runs of the test fail, and in how many the clock is set
		by          time.Duration
		late        time.Duration // of a plain signal in the first run
		runs, voids int
		failed      string
	}{
		{name: "passes", runs: 1},
		{name: "passes while the clock is set", sets: 1, by: time.Second, runs: 1},
		{name: "fails", fails: 1, runs: 1, failed: "run 1"},
		{name: "fails while the clock is set forward", fails: 1, sets: 1, by: time.Second, runs: 2, voids: 1},
		{name: "fails while the clock is set back", fails: 1, sets: 1, by: -time.Second, runs: 2, voids: 1},
		{name: "fails while the clock moves a little", fails: 1, sets: 1, by: setBy / 10, runs: 1, failed: "run 1"},
		{name: "fails on a machine that stands still", fails: 1, late: time.Second, runs: 2, voids: 1},
		{name: "fails on a busy machine", fails: 1, late: stoodFor / 2, runs: 1, failed: "run 1"},
		{name: "fails again", fails: 2, sets: 1, by: time.Second, runs: 2, voids: 1, failed: "run 2"},
		{name: "fails always", fails: 9, sets: 9, by: time.Second, runs: 1 + voids, voids: voids, failed: "run 3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := &failures{TB: t}
			var audits, runs int
			var keys []string
			h := Harness{New: func(testing.TB) *Backend { return &Backend{Audit: func(testing.TB) { audits++ }} }}
			var void []string
			t.Run("suite", func(t *testing.T) {
				f.TB = t
				void = runOne(f, h, test{run: func(t *T) {
					runs++
					keys = append(keys, t.key())
					if runs <= c.sets {
						t.ahead -= c.by
					}
					if runs == 1 && c.late > 0 {
						pulses.Lock()
						pulses.late = append(pulses.late, beat{time.Now(), c.late})
						pulses.Unlock()
					}
					if runs <= c.fails {
						t.Error("another goroutine, run", runs)
						t.Fatalf("run %d", runs)
					}
				}}, driver.KindLock)
			})
			if runs != c.runs || len(void) != c.voids {
				t.Errorf("got %d runs, %d void (%q), want %d and %d", runs, len(void), void, c.runs, c.voids)
			}
			if got := strings.Join(f.said, "; "); !strings.HasSuffix(got, c.failed) || (got == "") != (c.failed == "") {
				t.Errorf("failures: got %q, want %q", got, c.failed)
			}
			if audits != 1 {
				t.Errorf("audits: got %d, want one, of the run that counts", audits)
			}
			for i, k := range keys[1:] {
				if k == keys[i] {
					t.Errorf("name that run %d locks: got %q again", i+2, k)
				}
			}
		})
	}
}
