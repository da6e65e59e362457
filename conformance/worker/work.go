package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/guard"
)

// A Writer writes to what a lock protects. It answers nil if the write was done, and an error that matches
// [guard.ErrStale] if the resource refused the token; any other error leaves open whether it was done.
type Writer func(ctx context.Context, resource string, token fencelock.Token) error

var writers = map[string]Writer{}

// Handle makes a writer known to workers under a name. Call it before [Main], in the worker as in the process that
// starts it.
func Handle(name string, write Writer) { writers[name] = write }

// Handles reports whether a writer is known under that name.
func Handles(name string) bool { return writers[name] != nil }

// Work is what a user of a lock does: it takes the lock and, while it believes in the lease, writes to what the lock
// protects, again and again.
type Work struct {
	Ask
	// As is the process name under which it is recorded, if not that of the worker: so that one process can do the work
	// of several, on a backend that processes cannot share.
	As string
	// For is how long each lease is held; 0 is until it is lost.
	For time.Duration
	// Think is the time from a look at the lease to the write that relies on it: a pause in between is what no lock
	// helps against.
	Think time.Duration
	// Writes names a writer for each resource: see [Handle].
	Writes []Write
}

// Write is one resource and who writes to it.
type Write struct{ Writer, Resource string }

// Run does it with one lease, and returns when that is released or lost. Errors are those of Take, since a failed
// write or a lost lease is part of the work; all of that is in the history.
func (k Work) Run(ctx context.Context, c *Recorded) error {
	for _, w := range k.Writes {
		if writers[w.Writer] == nil {
			return fmt.Errorf("worker: no writer %q", w.Writer)
		}
	}
	l, err := c.Take(ctx, k.Ask)
	if err != nil {
		return err
	}
	began := time.Now()
	for l.Err() == nil && ctx.Err() == nil && (k.For == 0 || time.Since(began) < k.For) {
		rest(ctx, k.Think)
		for _, w := range k.Writes {
			called := time.Now()
			err := writers[w.Writer](context.WithoutCancel(ctx), w.Resource, l.Token())
			if err == nil || errors.Is(err, guard.ErrStale) {
				c.rec.Write(w.Resource, uint64(l.Token()), called, err == nil)
			}
		}
	}
	if l.live() {
		_ = l.Release(context.WithoutCancel(ctx))
	}
	return nil
}
