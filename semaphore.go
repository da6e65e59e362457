package fencelock

import "context"

// Semaphore takes permits: a name has as many as the limit says that comes with each request.
type Semaphore interface {
	// Acquire waits for one of limit permits and takes it. A permit is granted only if, counting it, no
	// more than limit are held, so callers should agree on the limit; a lowered one evicts nobody.
	// Where the driver queues nobody passes the head, whatever its limit. Errors as [Locker]; a limit
	// below 1 is ErrInvalid.
	//
	// A permit's [Lease] has a token as well. With a limit above 1 it names and orders permits; a guard
	// that demands "not lower than the highest seen" must not be used with it.
	Acquire(ctx context.Context, name string, limit int, opts ...Option) (*Lease, error)

	// TryAcquire makes one attempt; [ErrHeld] says that no permit is free for us.
	TryAcquire(ctx context.Context, name string, limit int, opts ...Option) (*Lease, error)
}

// Permits makes the semaphore a Locker whose Lock takes one of limit permits, for use with [Do].
func Permits(s Semaphore, limit int) Locker { return permits{s, limit} }

type permits struct {
	s     Semaphore
	limit int
}

func (p permits) Lock(ctx context.Context, name string, opts ...Option) (*Lease, error) {
	return p.s.Acquire(ctx, name, p.limit, opts...)
}

func (p permits) TryLock(ctx context.Context, name string, opts ...Option) (*Lease, error) {
	return p.s.TryAcquire(ctx, name, p.limit, opts...)
}
