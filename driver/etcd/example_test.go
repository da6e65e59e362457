package etcd_test

import (
	"context"
	"fmt"
	"log"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/etcd"
)

// A client that the program has anyway serves for locks as well. It should not wait long before it tries a member again
// that was gone, or leases end before it is back.
func ExampleNew() {
	client, err := clientv3.New(clientv3.Config{
		Endpoints:         []string{"etcd-0:2379", "etcd-1:2379", "etcd-2:2379"},
		DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 3 * time.Second,
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		})},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	d, err := etcd.New(client, &etcd.Options{Namespace: "shop"})
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
