package migrate

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// backend is one of the two, with what it can. It is the steps of phases from and to.
type backend struct {
	driver.Driver
	which  string // "old" or "new", for errors
	sem    driver.Semaphore
	tokens driver.FencingSource
	lister driver.Lister

	// Nil if it has none.
	queue    driver.Queue
	notifier driver.Notifier
	force    driver.ForceUnlocker
}

// newBackends are both, or an error about the first that will not do.
func newBackends(from, to driver.Driver) (old, young *backend, err error) {
	if old, err = newBackend("old", from); err == nil {
		young, err = newBackend("new", to)
	}
	return old, young, err
}

func newBackend(which string, d driver.Driver) (*backend, error) {
	if d == nil {
		return nil, driver.Invalid(which+" driver", nil, "must not be nil")
	}
	b := &backend{Driver: d, which: which}
	for what, able := range map[string]bool{
		"semaphores": find(d, &b.sem), "tokens": find(d, &b.tokens), "listing": find(d, &b.lister),
	} {
		if !able {
			return nil, fmt.Errorf("migrate: the %s backend %q has no %s: %w", which, d.Info().Backend, what, errors.ErrUnsupported)
		}
	}
	find(d, &b.queue)
	find(d, &b.notifier)
	find(d, &b.force)
	return b, nil
}

func find[T any](d driver.Driver, t *T) (ok bool) {
	*t, ok = driver.As[T](d)
	return ok
}

// fail says which backend failed.
func (b *backend) fail(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s backend (%s): %w", b.which, b.Info().Backend, err)
}

func (b *backend) failed(results []driver.Result) []driver.Result {
	for i := range results {
		results[i].Err = b.fail(results[i].Err)
	}
	return results
}

func (b *backend) acquire(ctx context.Context, r driver.Request) (a driver.Answer, err error) {
	if r.Name.Kind == driver.KindPermit {
		a, err = b.sem.Acquire(ctx, r)
	} else {
		a, err = b.Lock(ctx, r)
	}
	return a, b.fail(err)
}

func (b *backend) extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	return b.failed(b.Extend(ctx, leases))
}

func (b *backend) release(ctx context.Context, o driver.Owner) (bool, error) {
	found, err := b.Release(ctx, o)
	return found, b.fail(err)
}

func (b *backend) poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	return b.failed(b.queue.Poll(ctx, waiters))
}

func (b *backend) nextToken(ctx context.Context, n driver.Name, floor driver.Token) (driver.Token, error) {
	t, err := b.tokens.NextToken(ctx, n, floor)
	return t, b.fail(err)
}

func (b *backend) advance(ctx context.Context, n driver.Name, floor driver.Token) error {
	return b.fail(b.tokens.Advance(ctx, n, floor))
}

func (b *backend) list(ctx context.Context, n driver.Name, yield func(driver.Holding) bool) error {
	return b.fail(b.lister.List(ctx, n, yield))
}

func (b *backend) forceUnlock(ctx context.Context, n driver.Name) (int, error) {
	ended, err := b.force.ForceUnlock(ctx, n)
	return ended, b.fail(err)
}

func (b *backend) notify(sink func(driver.Event)) { b.notifier.Notify(sink) }

// ahead is how far a token may run ahead of the client's clock without being noted.
const ahead = 100 * time.Millisecond

// greatest answers a token that is not less than any that clients of phase from or to have got from the backend.
func greatest(ctx context.Context, b *backend) (driver.Token, error) {
	t, err := b.nextToken(ctx, highName, 0)
	return t + driver.Token(ahead/time.Microsecond), err
}

// highMark notes tokens that run ahead of the clock: in phases from and to nobody tells them to the other backend, whose
// next clients ask for them.
type highMark struct {
	single bool
	mu     sync.Mutex
	noted  driver.Token
}

func (h *highMark) note(ctx context.Context, s steps, t driver.Token) error {
	if !h.single || t <= driver.Token(time.Now().Add(ahead).UnixMicro()) {
		return nil
	}
	h.mu.Lock()
	known := t <= h.noted
	h.mu.Unlock()
	if known {
		return nil
	}
	t += driver.Token(ahead / time.Microsecond)
	if err := s.advance(ctx, highName, t); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.noted = max(h.noted, t)
	return nil
}

// uncertain makes an error of unknown outcome of one that came after something was done: it matches what err does
// except driver.ErrUnavailable.
func uncertain(err error) error {
	if errors.Is(err, driver.ErrUnavailable) {
		return &halfwayError{err}
	}
	return err
}

type halfwayError struct{ err error }

func (e *halfwayError) Error() string { return "halfway: " + e.err.Error() }

func (e *halfwayError) Is(target error) bool {
	return target != driver.ErrUnavailable && errors.Is(e.err, target)
}

func (e *halfwayError) As(target any) bool { return errors.As(e.err, target) }
