package fencelock

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// LockAll locks all names or none. They are taken in byte order, duplicates once, so that callers with
// overlapping names cannot block each other for ever. While it waits for the next one, those already taken
// renew themselves, with NoRenew too; the loss of one ends the wait. Each name has its own token.
//
// On an error all that was taken has been given back, or that is under way. No names are an error matching
// [ErrInvalid]. WaitFor bounds the whole.
func (c *Client) LockAll(ctx context.Context, names []string, opts ...Option) (*LeaseSet, error) {
	return c.lockAll(ctx, names, opts, true, c.Lock)
}

// TryLockAll is LockAll without waiting: if one name is held, it gives back the others and fails with ErrHeld.
func (c *Client) TryLockAll(ctx context.Context, names []string, opts ...Option) (*LeaseSet, error) {
	return c.lockAll(ctx, names, opts, false, c.TryLock)
}

var errWriteOfAll = driver.Invalid("Write with several", "names", "is for TryLock only: the write of one name could not be taken back")

func (c *Client) lockAll(ctx context.Context, names []string, opts []Option, wait bool,
	lock func(context.Context, string, ...Option) (*Lease, error)) (*LeaseSet, error) {
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	if len(names) == 0 {
		return nil, c.opError("lock all", nameOfAll, errNoNames)
	}
	var cfg config
	for _, o := range opts {
		if o != nil {
			o.apply(&cfg)
		}
	}
	if ctx == nil {
		return nil, c.opError("lock all", nameOfAll, errNilContext)
	}
	if cfg.write != nil {
		return nil, c.opError("lock all", nameOfAll, errWriteOfAll)
	}
	if cfg.waitFor > 0 && wait {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, cfg.waitFor)
		defer cancel()
	}
	waitCtx, lost := context.WithCancelCause(ctx)
	defer lost(nil)

	s := &LeaseSet{}
	renewing := append(slices.Clone(opts), optionFunc(func(c *config) { c.noRenew = false }))
	for _, name := range names {
		l, err := lock(waitCtx, name, renewing...)
		if err == nil {
			s.leases = append(s.leases, l)
			l.onEnd(func() { lost(l.Err()) })
			err = s.Err()
		} else if cause := context.Cause(waitCtx); errors.Is(cause, ErrLost) {
			err = cause
		}
		if err != nil {
			return nil, errors.Join(err, s.giveBack(ctx))
		}
	}
	if cfg.noRenew {
		for _, l := range s.leases {
			l.stopRenewal()
		}
	}
	return s, nil
}

// stopRenewal makes the lease as if taken with NoRenew, unless it shares that of a Holder's other call.
func (l *Lease) stopRenewal() {
	h, c := l.h, l.h.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if h.ended || l != &h.first || len(h.more) > 0 {
		return
	}
	if h.noRenew = true; h.claim == 0 {
		h.renewAt = never
		c.reschedule(h)
	}
}

// LeaseSet is what LockAll took.
type LeaseSet struct {
	leases []*Lease
	once   sync.Once
	done   chan struct{}
}

// Leases are the leases in the byte order of their names.
func (s *LeaseSet) Leases() []*Lease { return slices.Clone(s.leases) }

// Lease is the one of that name, or nil.
func (s *LeaseSet) Lease(name string) *Lease {
	for _, l := range s.leases {
		if l.Name() == name {
			return l
		}
	}
	return nil
}

// Err is nil while all may be believed, else the error of the first that may not.
func (s *LeaseSet) Err() error {
	for _, l := range s.leases {
		if err := l.Err(); err != nil {
			return err
		}
	}
	return nil
}

// Deadline is the earliest of all.
func (s *LeaseSet) Deadline() time.Time {
	first := s.leases[0].Deadline()
	for _, l := range s.leases[1:] {
		if d := l.Deadline(); d.Before(first) {
			first = d
		}
	}
	return first
}

// Done is closed when the first lease is released or lost.
func (s *LeaseSet) Done() <-chan struct{} {
	s.once.Do(func() {
		done := make(chan struct{})
		var once sync.Once
		s.done = done
		for _, l := range s.leases {
			l.onEnd(func() { once.Do(func() { close(done) }) })
		}
	})
	return s.done
}

// Context is as [Lease.Context], for the first lease that ends.
func (s *LeaseSet) Context(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(parent)
	stops := make([]func(), len(s.leases))
	for i, l := range s.leases {
		stops[i] = l.onEnd(func() { cancel(l.Err()) })
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
		cancel(context.Canceled)
	}
}

// Release releases all, the last taken first, and joins their errors. It may be called again.
func (s *LeaseSet) Release(ctx context.Context) error {
	var err error
	for _, l := range slices.Backward(s.leases) {
		err = errors.Join(err, l.Release(ctx))
	}
	return err
}

// giveBack is Release after a failure: that a lease was lost is known already.
func (s *LeaseSet) giveBack(ctx context.Context) error {
	var err error
	for _, l := range slices.Backward(s.leases) {
		if e := l.Release(ctx); !errors.Is(e, ErrNotHeld) {
			err = errors.Join(err, e)
		}
	}
	return err
}
