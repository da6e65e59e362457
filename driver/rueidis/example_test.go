package rueidis_test

import (
	"context"
	"fmt"
	"log"
	"time"

	client "github.com/redis/rueidis"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/rueidis"
)

// A client that the program has anyway serves for locks as well.
func ExampleNew() {
	rdb, err := client.NewClient(client.ClientOption{
		InitAddress: []string{"localhost:6379"}, ConnWriteTimeout: 3 * time.Second, AlwaysPipelining: true, DisableRetry: true,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer rdb.Close()
	d, err := rueidis.New(rdb, &rueidis.Options{Namespace: "shop"})
	if err != nil {
		log.Fatal(err)
	}
	locks, err := fencelock.New(d)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()

	err = fencelock.Do(context.Background(), locks, "reports/daily", func(ctx context.Context, l *fencelock.Lease) error {
		fmt.Println("fenced by", l.Token())
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
}
