package driver

import "context"

// Semaphore is implemented by drivers that grant permits.
type Semaphore interface {
	// Acquire makes one attempt to take a permit of the semaphore r.Name, whose kind is KindPermit. It
	// is [Locker.Lock] for r.Limit >= 1 holders: a grant is made only if, counting it, no more than
	// its own limit are held (S1). The head of the queue is judged by the head's own limit, and nobody
	// passes it, a request with a greater limit neither. A lowered limit evicts nobody. Each permit
	// has an owner, a token and an expiry of its own.
	Acquire(ctx context.Context, r Request) (Answer, error)
}
