package fencelock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/memory"
)

func ExampleOpen() {
	ctx := context.Background()
	// The scheme chooses the backend: "redis://localhost:6379/0" after importing driver/goredis,
	// "file:///var/lib/locks" after importing driver/file.
	client, err := fencelock.Open(ctx, "memory:", fencelock.Require(fencelock.Semaphores))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	lease, err := client.Lock(ctx, "orders/7", fencelock.TTL(10*time.Second))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("held:", lease.Err() == nil)
	fmt.Println("released:", lease.Release(ctx) == nil)
	// Output:
	// held: true
	// released: true
}

func ExampleNew() {
	// For tests: two clients on one store exclude each other like two machines.
	store := memory.NewStore()
	a, err := fencelock.New(memory.New(store))
	if err != nil {
		log.Fatal(err)
	}
	defer a.Close()
	b, err := fencelock.New(memory.New(store))
	if err != nil {
		log.Fatal(err)
	}
	defer b.Close()

	ctx := context.Background()
	lease, err := a.Lock(ctx, "report")
	if err != nil {
		log.Fatal(err)
	}
	_, err = b.TryLock(ctx, "report")
	fmt.Println(errors.Is(err, fencelock.ErrHeld))
	if err := lease.Release(ctx); err != nil {
		log.Fatal(err)
	}
	_, err = b.TryLock(ctx, "report")
	fmt.Println(err)
	// Output:
	// true
	// <nil>
}

// Guard a job: run it on one machine at a time.
func ExampleDo() {
	ctx := context.Background()
	client, err := fencelock.Open(ctx, "memory:")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	err = fencelock.Do(ctx, client, "nightly-report", func(ctx context.Context, lease *fencelock.Lease) error {
		// ctx ends when the lease is lost: pass it on to everything the job does.
		fmt.Println("running alone")
		return ctx.Err()
	}, fencelock.WaitFor(time.Minute), fencelock.Label("report v2"))
	fmt.Println(err)
	// Output:
	// running alone
	// <nil>
}

// account is a resource that remembers the highest token it has seen.
type account struct {
	balance int
	highest fencelock.Token
}

func (a *account) write(token fencelock.Token, balance int) error {
	if token < a.highest {
		return fmt.Errorf("stale token")
	}
	a.highest, a.balance = token, balance
	return nil
}

// Fence a write: a holder that was paused past its lease cannot overwrite its successor's work.
func ExampleLease_Token() {
	ctx := context.Background()
	client, err := fencelock.Open(ctx, "memory:")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	var acc account

	paused, err := client.Lock(ctx, "account/7", fencelock.TTL(20*time.Millisecond), fencelock.NoRenew())
	if err != nil {
		log.Fatal(err)
	}
	<-paused.Done() // as if the process had been stopped for longer than its lease

	successor, err := client.Lock(ctx, "account/7")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("successor:", acc.write(successor.Token(), 80))
	fmt.Println("paused:", acc.write(paused.Token(), 100))
	fmt.Println("balance:", acc.balance)
	// Output:
	// successor: <nil>
	// paused: stale token
	// balance: 80
}

// Limit workers: at most three of all machines call the API at once.
func ExampleClient_Acquire() {
	ctx := context.Background()
	client, err := fencelock.Open(ctx, "memory:")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	var busy, most atomic.Int64
	var workers sync.WaitGroup
	for range 20 {
		workers.Go(func() {
			permit, err := client.Acquire(ctx, "payment-api", 3)
			if err != nil {
				log.Fatal(err)
			}
			defer permit.Release(ctx)
			n := busy.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			time.Sleep(time.Millisecond)
			busy.Add(-1)
		})
	}
	workers.Wait()
	fmt.Println("never more than three:", most.Load() <= 3)
	// Output: never more than three: true
}

func ExamplePermits() {
	ctx := context.Background()
	client, err := fencelock.Open(ctx, "memory:")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	err = fencelock.Do(ctx, fencelock.Permits(client, 3), "payment-api", func(context.Context, *fencelock.Lease) error {
		fmt.Println("one of three")
		return nil
	})
	fmt.Println(err)
	// Output:
	// one of three
	// <nil>
}

func ExampleClient_NextToken() {
	ctx := context.Background()
	client, err := fencelock.Open(ctx, "memory:")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	first, err := client.NextToken(ctx, "config")
	if err != nil {
		log.Fatal(err)
	}
	lease, err := client.Lock(ctx, "config")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(lease.Token() > first)
	// Output: true
}

func ExampleClient_LockAll() {
	ctx := context.Background()
	client, err := fencelock.Open(ctx, "memory:")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	both, err := client.LockAll(ctx, []string{"account/9", "account/7"})
	if err != nil {
		log.Fatal(err)
	}
	for _, lease := range both.Leases() {
		fmt.Println(lease.Name())
	}
	fmt.Println(both.Release(ctx))
	// Output:
	// account/7
	// account/9
	// <nil>
}

func ExampleHolder() {
	ctx := context.Background()
	client, err := fencelock.Open(ctx, "memory:")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	outer, err := client.Lock(ctx, "tree", fencelock.Holder("request 1"))
	if err != nil {
		log.Fatal(err)
	}
	inner, err := client.Lock(ctx, "tree", fencelock.Holder("request 1"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("same token:", inner.Token() == outer.Token())
	fmt.Println(inner.Release(ctx), outer.Err()) // the outer one still holds
	fmt.Println(outer.Release(ctx))
	// Output:
	// same token: true
	// <nil> <nil>
	// <nil>
}

func ExampleStripe() {
	fmt.Println(fencelock.Stripe("users", "ada", 64))
	// Output: users/59
}

func ExampleWithObserver() {
	ctx := context.Background()
	client, err := fencelock.Open(ctx, "memory:", fencelock.WithObserver(func(e fencelock.Event) {
		fmt.Println(e.Backend, e.Of, e.Name, e.Kind)
	}))
	if err != nil {
		log.Fatal(err)
	}
	lease, err := client.Lock(ctx, "orders/7")
	if err != nil {
		log.Fatal(err)
	}
	if err := lease.Release(ctx); err != nil {
		log.Fatal(err)
	}
	client.Close() // delivers what the observer has not seen yet
	// Output:
	// memory lock orders/7 acquired
	// memory lock orders/7 released
}
