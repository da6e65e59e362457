package etcdguard_test

import (
	"context"
	"log"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/etcd"
	"github.com/fencelock/fencelock/guard/etcdguard"
)

// The leader's settings are written only while no later leader has been at work.
func ExampleGuard_Do() {
	ctx := context.Background()
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"localhost:2379"}})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	d, err := etcd.New(client, nil)
	if err != nil {
		log.Fatal(err)
	}
	locks, err := fencelock.New(d)
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()
	g := etcdguard.New(client, nil)

	err = fencelock.Do(ctx, locks, "leader", func(ctx context.Context, l *fencelock.Lease) error {
		_, err := g.Do(ctx, l.Name(), l.Token(), clientv3.OpPut("settings/rate", "100"))
		return err
	})
	if err != nil {
		log.Fatal(err) // matches guard.ErrStale if somebody else has written since
	}
}
