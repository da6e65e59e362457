package guard

import (
	"context"
	"errors"
	"fmt"

	"github.com/fencelock/fencelock"
)

// Fenced makes a Locker whose locks have raised the mark of what they protect before Lock or TryLock returns. From
// then on earlier holders are refused, also while the new one has not written yet. raise is called with the name of the lock and
// the token of the lease; it is the Raise of a guard, with the resource that the name stands for.
//
// The lease is held and renewed during raise. If raise fails, the lock is released and the error matches both that and,
// if raise found the token stale, [fencelock.ErrLost]: then somebody has taken the lock since.
func Fenced(l fencelock.Locker, raise func(ctx context.Context, name string, t Token) error) fencelock.Locker {
	return fenced{l, raise}
}

type fenced struct {
	locker fencelock.Locker
	raise  func(context.Context, string, Token) error
}

func (f fenced) Lock(ctx context.Context, name string, opts ...fencelock.Option) (*fencelock.Lease, error) {
	return f.fence(ctx, f.locker.Lock, name, opts)
}

func (f fenced) TryLock(ctx context.Context, name string, opts ...fencelock.Option) (*fencelock.Lease, error) {
	return f.fence(ctx, f.locker.TryLock, name, opts)
}

func (f fenced) fence(ctx context.Context, lock func(context.Context, string, ...fencelock.Option) (*fencelock.Lease, error),
	name string, opts []fencelock.Option) (*fencelock.Lease, error) {
	lease, err := lock(ctx, name, opts...)
	if err != nil {
		return nil, err
	}
	raised := false
	defer func() {
		if !raised { // it failed or panics
			_ = lease.Release(ctx)
		}
	}()
	held, cancel := lease.Context(ctx)
	defer cancel()
	err = f.raise(held, name, lease.Token())
	switch lost := lease.Err(); {
	case err == nil && lost == nil:
		raised = true
		return lease, nil
	case err == nil:
		err = lost
	case errors.Is(err, ErrStale):
		err = fmt.Errorf("%w: %w", fencelock.ErrLost, err)
	case lost != nil:
		err = errors.Join(err, lost)
	}
	return nil, fmt.Errorf("guard: lock %.80q: raise the mark: %w", name, err)
}
