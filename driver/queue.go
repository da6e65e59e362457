package driver

import (
	"context"
	"time"
)

// Poll is the sign of life of one waiter.
type Poll struct {
	Owner

	// TTL is what the lease gets if the owner turns out to hold already.
	TTL time.Duration

	// Claim is how long the entry lives from now on; see Request.Claim.
	Claim time.Duration
}

// Queue is implemented by drivers that keep waiters on the server, first come first served, and hand
// the lock over inside the step that frees it: Request.Wait appends to the queue, Release and every
// step that finds a name free or expired give it to the live head, as a claim of the head's own Claim,
// with a token minted in that step. A driver should also implement [Notifier] and push the grant;
// without a push the waiter finds it by polling.
type Queue interface {
	// Poll renews queue entries and tells how they stand, each on its own: Waiting; Granted if a step
	// of somebody, or this one, gave it the lock, and then the claim becomes a lease of TTL from this
	// step on; or Gone if the entry expired or was never there, and nothing is stored then (L3).
	// Before answering it serves the name's queue as Lock does.
	//
	// The results are as many as the waiters and in their order; see Extend for batches.
	Poll(ctx context.Context, waiters []Poll) []Result
}
