package fencelock

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/driver/memory"
)

// TestShortLocksDoNotWakeTheScheduler: what it was woken for is over when it runs, and still the next lock need not
// wake it again. At rest it sleeps until it is woken.
func TestShortLocksDoNotWakeTheScheduler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := New(memory.New(memory.NewStore()))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		until := func() int64 {
			synctest.Wait()
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.sleeping
		}
		synctest.Wait()
		for range 2 {
			l, err := c.TryLock(t.Context(), "short")
			if err != nil {
				t.Fatal(err)
			}
			if err := l.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := until(); got == never {
				t.Fatal("after a short lock: the scheduler sleeps until it is woken, want until a time soon")
			}
		}
		time.Sleep(2 * maxSleep)
		if got := until(); got != never {
			t.Fatalf("at rest: the scheduler sleeps until %d, want until it is woken (W2)", got)
		}
	})
}
