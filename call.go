package fencelock

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// call runs one request and waits for its answer until ctx ends or the timeout has passed, however long
// the driver takes: some client libraries do not look at a context while they read (L2, L6). The outcome is
// then unknown. An answer that comes after that is passed to late, if late is not nil.
func call[T any](ctx context.Context, c *Client, timeout time.Duration, request func(context.Context) (T, error), late func(T, error)) (T, error) {
	if c.info.Deadlines && ctx.Done() == nil {
		// Nothing but the time can end the wait, and the driver heeds that: no goroutine is needed.
		ctx, cancel := c.bounded(ctx, timeout)
		defer cancel()
		return request(ctx)
	}
	type reply struct {
		value T
		err   error
	}
	caller := ctx
	ctx, cancel := context.WithTimeout(caller, timeout)
	defer cancel()
	replies := make(chan reply, 1)
	var left atomic.Bool // set by whichever side comes first
	go func() {
		value, err := request(ctx)
		if left.Swap(true) {
			if late != nil {
				late(value, err)
			}
			return
		}
		replies <- reply{value, err}
	}()
	select {
	case r := <-replies:
		return r.value, r.err
	case <-ctx.Done():
	}
	if left.Swap(true) {
		r := <-replies
		return r.value, r.err
	}
	var none T
	if err := caller.Err(); err != nil {
		return none, err
	}
	return none, fmt.Errorf("no answer within %v", timeout)
}

// bound is a context that ends by time only, and that requests share which are sent at about the same time: to set
// a timer and to stop it is felt in the time of a request.
type bound struct {
	context.Context
	timeout time.Duration
	began   int64
}

// bounded makes ctx, which cannot be cancelled, end after the timeout, or up to 1/64 of it earlier. There is one bound to
// share at a time, and none is made while that is fresh: requests with another timeout have a timer each, which the
// function stops.
func (c *Client) bounded(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	now := c.clock.Start()
	b := c.bound.Load()
	if b == nil || now-b.began > int64(b.timeout/64) {
		shared, cancel := context.WithTimeout(c.ctx, timeout)
		if fresh := (&bound{shared, timeout, now}); c.bound.CompareAndSwap(b, fresh) {
			b = fresh
			_ = cancel // it ends by itself, when others may still use it
		} else { // somebody was faster
			b = c.bound.Load()
			cancel()
		}
	}
	switch {
	case b.timeout != timeout:
		return context.WithTimeout(ctx, timeout)
	case ctx == context.Background():
		return b, func() {}
	}
	return &valued{b, ctx}, func() {}
}

// valued is a context with the values of another one.
type valued struct {
	*bound
	values context.Context
}

func (v *valued) Value(key any) any {
	if value := v.values.Value(key); value != nil {
		return value
	}
	return v.bound.Value(key)
}
