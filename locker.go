package fencelock

import (
	"context"
	"errors"
	"hash/fnv"
	"strconv"
)

// Locker takes locks. It is an interface for accepting, so that code can be handed a [Client] or what
// wraps one; for fakes use a Client over driver/memory instead of implementing it.
type Locker interface {
	// Lock waits for the lock and takes it. ctx bounds the wait only: its end afterwards does not end
	// the lease. Where the driver queues, waiters are served in the order in which they came.
	//
	// Errors: that of ctx when the wait ended (or [WaitFor] passed), [ErrUnavailable], [ErrUncertain],
	// [ErrInvalid], [ErrClosed], [errors.ErrUnsupported] for an option that the backend cannot honour.
	// On any error the lock is not held by the caller, and what a request may have left on the server
	// is being removed.
	Lock(ctx context.Context, name string, opts ...Option) (*Lease, error)

	// TryLock makes one attempt. [ErrHeld] says that someone holds the lock or waits for it. Otherwise
	// it is as Lock.
	TryLock(ctx context.Context, name string, opts ...Option) (*Lease, error)
}

// Do runs fn while holding the lock. The context that fn gets ends when the lease is lost, with
// [ErrLost] as its cause, or when ctx ends.
//
// If the lock cannot be had, fn is not called and the error of Lock is returned. Otherwise the result
// joins fn's error, ErrLost if the lease was lost before fn returned, and the error of Release: so a fn
// that returned nil without noticing a loss does not make Do return nil. If fn panics, the lock is
// released and the panic goes on.
//
// A lock is not "once": after a short fn the next process that tries gets the lock and runs it again.
func Do(ctx context.Context, l Locker, name string, fn func(context.Context, *Lease) error, opts ...Option) error {
	lease, err := l.Lock(ctx, name, opts...)
	if err != nil {
		return err
	}
	fnCtx, cancel := lease.Context(ctx)
	returned := false
	defer func() {
		cancel()
		if !returned {
			_ = lease.Release(ctx) // fn panics, or ends its goroutine
		}
	}()
	err = fn(fnCtx, lease)
	returned = true
	if lost := lease.Err(); errors.Is(lost, ErrLost) {
		err = errors.Join(err, lost)
	}
	return errors.Join(err, lease.Release(ctx))
}

// Stripe maps key to one of n names made from name, so that many keys share few locks: keys of different
// stripes do not wait for each other, those of one stripe do. The same arguments give the same name in
// every process and version. It panics if n < 1.
func Stripe(name, key string, n int) string {
	if n < 1 {
		panic("fencelock: Stripe with n < 1")
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(key))
	return name + "/" + strconv.FormatUint(h.Sum64()%uint64(n), 10)
}
