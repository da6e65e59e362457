// Package fencelock locks across machines: locks, semaphores and fencing tokens behind one API, over
// interchangeable backends.
//
// A [Client] is opened by URL or made from a driver:
//
//	client, err := fencelock.Open(ctx, "redis://localhost:6379/0") // import _ ".../driver/goredis"
//	lease, err := client.Lock(ctx, "orders/7")
//	if err != nil {
//		return err
//	}
//	defer lease.Release(ctx)
//
// A [Lease] renews itself until it is released or lost. It tells a loss before the server lets somebody
// else in: by its own clock, without needing an answer. What it cannot do is stop a holder that is paused
// from writing when it wakes up: for that every lease has a [Token], which the protected resource compares.
//
// The promises, numbered, are in docs/contract.md; comments here cite them as (L1), (T1) and so on. Package
// driver is for those who write a backend, package conformance proves one.
package fencelock
