package guard_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/memory"
	"github.com/fencelock/fencelock/guard"
)

// The first holder is refused from the moment on when the second one has the lock.
func ExampleFenced() {
	ctx := context.Background()
	client, err := fencelock.New(memory.New(memory.NewStore()))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	var marks guard.Guard
	locks := guard.Fenced(client, func(ctx context.Context, name string, t fencelock.Token) error {
		return marks.Raise(name, t)
	})
	first, err := locks.Lock(ctx, "account/7")
	if err != nil {
		log.Fatal(err)
	}
	if err := first.Release(ctx); err != nil { // or it was lost in a long pause
		log.Fatal(err)
	}
	second, err := locks.Lock(ctx, "account/7")
	if err != nil {
		log.Fatal(err)
	}

	balance := 0
	late := marks.Do("account/7", first.Token(), func() error { balance = 100; return nil })
	fmt.Println("late write is stale:", errors.Is(late, guard.ErrStale))
	fmt.Println("write:", marks.Do("account/7", second.Token(), func() error { balance = 80; return nil }))
	fmt.Println("balance:", balance)
	// Output:
	// late write is stale: true
	// write: <nil>
	// balance: 80
}
