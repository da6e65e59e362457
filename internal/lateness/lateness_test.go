//go:build unix

package lateness

import (
	"os"
	"os/exec"
	"strconv"
	"testing"
	"testing/synctest"
	"time"
)

// TestInTime: with a clock that jumps only when all wait, no timer is late.
func TestInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		end := Measure()
		time.Sleep(time.Second)
		if got := end(); got != 0 {
			t.Errorf("most on a machine that is in time: got %v, want 0", got)
		}
		if got := end(); got != 0 {
			t.Errorf("end again: got %v, want the same", got)
		}
	})
}

// TestStopped: the timers of a process that was stopped are late.
func TestStopped(t *testing.T) {
	end := Measure()
	const stopped = 300 * time.Millisecond
	pid := strconv.Itoa(os.Getpid())
	if out, err := exec.Command("sh", "-c", "kill -STOP "+pid+"; sleep 0.3; kill -CONT "+pid).CombinedOutput(); err != nil {
		t.Fatalf("stop: %v: %s", err, out)
	}
	if got := end(); got < stopped-2*beat {
		t.Errorf("most of a process that was stopped for %v: got %v, want about that", stopped, got)
	}
}
