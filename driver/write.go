package driver

import "context"

// Write is a write of the user's own that a [Writer] does in the step that grants a lock.
type Write struct {
	// Script is what to do, in the backend's own language; the driver's package says which, and how the script sees
	// the keys, the arguments and the token.
	Script string

	// Keys are all that the script reads and writes. They must be where the lock is, where the backend knows such
	// places.
	Keys []string

	// Args are the script's arguments. The token is added behind them.
	Args []string

	// Failed, if not nil, makes the error of a script that failed, from the server's message.
	Failed func(message string) error
}

// Writer is implemented by drivers that can take a lock and write the user's state in one step.
type Writer interface {
	// LockAndWrite is [Locker].Lock for a request that does not wait, and does the write in the same atomic step if, and
	// only if, that step grants. A request that finds its own id holding is answered the token and does not write again
	// (L5): the write was done in the step that granted. It costs no request more than Lock.
	//
	// A write that fails leaves no lock, and the error matches [ErrUnavailable]; what the script did before it failed is
	// left behind, and so is the token, which is spent. Keys that are not where the lock is are an error matching
	// [ErrInvalid], and nothing was sent. Every other error is as Lock's, and where the lease is unknown the write is: the
	// caller undoes the lease, but nothing undoes the write.
	LockAndWrite(ctx context.Context, r Request, w Write) (Answer, error)
}
