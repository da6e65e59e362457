package conformance

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock"
)

var doTests = []test{
	{name: "RunsWhileHolding", run: doRunsWhileHolding, permit: true},
	{name: "FailureRunsNothing", run: doFailureRunsNothing, permit: true},
	{name: "ErrorsAreJoined", run: doErrorsAreJoined, permit: true},
	{name: "LossIsAnError", run: doLossIsAnError, permit: true},
	{name: "PanicReleases", run: doPanicReleases, permit: true},
	{name: "GoexitReleases", run: doGoexitReleases, permit: true},
	{name: "IsNotOnce", run: doIsNotOnce, permit: true},
}

var errWork = errors.New("the work failed")

func doRunsWhileHolding(t *T) {
	c, rival := t.locker(t.client()), t.locker(t.client())
	err := fencelock.Do(t.Context(), c, t.key(), func(ctx context.Context, l *fencelock.Lease) error {
		if err := ctx.Err(); err != nil {
			t.Errorf("context of the work: got %v, want none", err)
		}
		t.held(l, "in the work")
		t.refused(rival, t.key(), "while the work runs", "L1")
		return nil
	}, fencelock.TTL(t.long()))
	if err != nil {
		t.Fatalf("Do: got %v, want nil", err)
	}
	t.release(t.lock(rival, t.key()))
}

func doFailureRunsNothing(t *T) {
	c, f := t.faulty()
	never := func(context.Context, *fencelock.Lease) error {
		t.Errorf("work of a Do that could not lock: got run, want not (L8)")
		return nil
	}
	f.on(stepLock, once(refusal()))
	t.is("Do while the backend refuses", fencelock.Do(t.Context(), t.locker(c), t.key(), never), fencelock.ErrUnavailable, "L8")
	f.on(stepLock, once(lostReply()))
	t.is("Do whose reply is lost", fencelock.Do(t.Context(), t.locker(c), t.key(), never), fencelock.ErrUncertain, "L8")
	t.is("Do on a cancelled context", fencelock.Do(cancelled(), t.locker(c), t.key(), never), context.Canceled, "L8")
	t.is("Do with a bad TTL", fencelock.Do(t.Context(), t.locker(c), t.key(), never, fencelock.TTL(0)), fencelock.ErrInvalid, "L8")
	t.awaitReply(f, stepRelease, 1)
	give := t.holdFor(t.key())
	t.is("Do of a held lock", fencelock.Do(t.Context(), t.locker(c), t.key(), never, fencelock.WaitFor(50*time.Millisecond)), context.DeadlineExceeded, "L8")
	give()
}

// doErrorsAreJoined: the work's own error is not hidden by that of the release, nor the reverse.
func doErrorsAreJoined(t *T) {
	c, f := t.faulty()
	ctx, cancel := context.WithCancel(t.Context())
	f.on(stepRelease, once(refusal()))
	err := fencelock.Do(ctx, t.locker(c), t.key(), func(ctx context.Context, l *fencelock.Lease) error {
		cancel()
		<-ctx.Done()
		return errors.Join(errWork, ctx.Err())
	}, fencelock.TTL(t.short()), fencelock.NoRenew())
	for _, want := range []error{errWork, context.Canceled, fencelock.ErrUnavailable} {
		t.is("Do whose work and release fail", err, want, "L8")
	}
	err = fencelock.Do(t.Context(), t.locker(c), t.key()+"/2", func(context.Context, *fencelock.Lease) error { return errWork })
	t.is("Do whose work fails", err, errWork, "L8")
	if errors.Is(err, fencelock.ErrLost) || errors.Is(err, fencelock.ErrNotHeld) {
		t.Fatalf("Do whose work fails: got %v, want the work's error only", err)
	}
}

// doLossIsAnError: work that did not notice the loss does not make Do succeed, and Do does not linger.
func doLossIsAnError(t *T) {
	c, f := t.faulty()
	f.on(stepExtend, f.hang())
	var cause error
	err := fencelock.Do(t.Context(), t.locker(c), t.key(), func(ctx context.Context, l *fencelock.Lease) error {
		<-ctx.Done()
		cause = context.Cause(ctx)
		f.on(stepRelease, f.hang())
		return nil
	}, fencelock.TTL(t.short()))
	t.is("Do whose lease was lost", err, fencelock.ErrLost, "L2")
	t.is("cause of the work's context after a loss", cause, fencelock.ErrLost, "L2")
}

func doPanicReleases(t *T) {
	c, rival := t.locker(t.client()), t.locker(t.client())
	func() {
		defer func() {
			if r := recover(); r != errWork {
				t.Errorf("panic in the work: got %v, want it to go on", r)
			}
		}()
		_ = fencelock.Do(t.Context(), c, t.key(), func(context.Context, *fencelock.Lease) error { panic(errWork) }, fencelock.TTL(t.long()))
	}()
	t.release(t.lock(rival, t.key()))
}

// doGoexitReleases: t.FailNow in a test's work ends the goroutine like this.
func doGoexitReleases(t *T) {
	c, rival := t.locker(t.client()), t.locker(t.client())
	var work sync.WaitGroup
	work.Go(func() {
		_ = fencelock.Do(t.Context(), c, t.key(), func(context.Context, *fencelock.Lease) error {
			runtime.Goexit()
			return nil
		}, fencelock.TTL(t.long()))
	})
	work.Wait()
	t.release(t.lock(rival, t.key()))
}

// doIsNotOnce: three schedulers run a short job one after the other, each its own time.
func doIsNotOnce(t *T) {
	var runs, inside atomic.Int32
	var all sync.WaitGroup
	for range 3 {
		c := t.locker(t.client())
		all.Go(func() {
			err := fencelock.Do(t.Context(), c, t.key(), func(context.Context, *fencelock.Lease) error {
				if inside.Add(1) > 1 {
					t.Errorf("work of three schedulers: got two at a time, want one (L1)")
				}
				runs.Add(1)
				inside.Add(-1)
				return nil
			}, fencelock.TTL(t.long()))
			if err != nil {
				t.Errorf("Do: got %v, want nil", err)
			}
		})
	}
	all.Wait()
	if n := runs.Load(); n != 3 {
		t.Fatalf("runs of a job by three schedulers: got %d, want 3: a lock is not once", n)
	}
}
