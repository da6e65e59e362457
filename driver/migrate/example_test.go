package migrate_test

import (
	"context"
	"fmt"
	"log"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/memory"
	"github.com/fencelock/fencelock/driver/migrate"
)

// An application that runs in phase both beside instances that are still in phase from.
func ExampleNew() {
	ctx := context.Background()
	old, young := memory.NewStore(), memory.NewStore() // two servers
	connect := func(p migrate.Phase) *fencelock.Client {
		d, err := migrate.New(ctx, memory.New(old), memory.New(young), &migrate.Options{Phase: p})
		if err != nil {
			log.Fatal(err)
		}
		c, err := fencelock.New(d)
		if err != nil {
			log.Fatal(err)
		}
		return c
	}
	before, now := connect(migrate.From), connect(migrate.Both)
	defer before.Close()
	defer now.Close()

	l, err := now.Lock(ctx, "orders/7")
	if err != nil {
		log.Fatal(err)
	}
	_, err = before.TryLock(ctx, "orders/7")
	fmt.Println(err)
	if err := l.Release(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: fencelock: try lock "orders/7": held by another
}

// The operator's side: when may the clients of the next phase be started?
func ExampleAdvance() {
	ctx := context.Background()
	old, young := memory.New(memory.NewStore()), memory.New(memory.NewStore())
	for range 2 {
		p, err := migrate.Advance(ctx, old, young)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("start clients with phase", p)
	}
	// Output:
	// start clients with phase both
	// start clients with phase to
}
