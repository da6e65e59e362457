package rueidis

import (
	"context"
	"testing"
	"time"
)

// TestUntilDeadline shares contexts among requests: each must end at its own deadline or up to 1/64 of its time before, have
// its own values, and not heed that the caller went away.
func TestUntilDeadline(t *testing.T) {
	type key struct{}
	var a adapter
	ended, end := context.WithCancel(context.WithValue(t.Context(), key{}, -1))
	end()
	ctx := a.untilDeadline(ended)
	if _, ok := ctx.Deadline(); ok || ctx.Err() != nil || ctx.Value(key{}) != -1 {
		t.Errorf("of a cancelled context: got %v, want one without end and with its value", ctx)
	}
	made := map[*bound]bool{}
	for i, timeout := range []time.Duration{time.Hour, time.Hour, 10 * time.Millisecond, time.Minute, time.Minute, 2 * time.Minute, -time.Second} {
		parent, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, i), timeout)
		ctx := a.untilDeadline(parent)
		cancel()
		want, _ := parent.Deadline()
		got, ok := ctx.Deadline()
		if early := want.Sub(got); !ok || early < 0 || early > max(0, timeout/64) {
			t.Errorf("deadline in %v: got it %v before, want at most 1/64 of it", timeout, early)
		}
		if ctx.Value(key{}) != i {
			t.Errorf("value: got %v, want its own, %d", ctx.Value(key{}), i)
		}
		if timeout > time.Second && ctx.Err() != nil {
			t.Errorf("after the caller went away: got %v, want nil", ctx.Err())
		}
		if timeout < time.Second {
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Second):
				t.Errorf("deadline in %v: not heeded", timeout)
			}
		}
		made[ctx.(*valued).bound] = true
	}
	if len(made) != 5 {
		t.Errorf("contexts made for two equal timeouts, twice, and three others: got %d, want 5", len(made))
	}
}

// TestUntilDeadlineEnds: requests with deadlines far apart share nothing, and leave no timer but that of the latest.
func TestUntilDeadlineEnds(t *testing.T) {
	var a adapter
	until := func(timeout time.Duration) (ctx context.Context) {
		parent, cancel := context.WithTimeout(t.Context(), timeout)
		defer cancel()
		return a.untilDeadline(parent)
	}
	hour := until(time.Hour)
	shared, minute := until(time.Hour), until(time.Minute)
	a.answered(hour)
	if shared.Err() != nil {
		t.Errorf("context of a request that is not over: got %v, want nil", shared.Err())
	}
	a.answered(shared)
	if shared.Err() == nil {
		t.Error("context whose requests are over, and that others do not share any more: got one that goes on")
	}
	a.answered(minute)
	if minute.Err() != nil {
		t.Errorf("context that the next request may share: got %v, want nil", minute.Err())
	}
	until(time.Hour)
	if minute.Err() == nil {
		t.Error("context that was replaced when no request had it: got one that goes on")
	}
}
