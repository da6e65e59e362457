package rueidis_test

import (
	"fmt"
	"testing"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/rueidis"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// BenchmarkCrowd compares TryLock and Release of 64 goroutines, each with a lock of its own, with SET NX PX and
// compare-and-delete through the same client.
func BenchmarkCrowd(b *testing.B) {
	s := redisbackend.Rueidis.Start(b)
	c := newClient(b, redisbackend.Options{Addr: s.Addr()})
	d, err := rueidis.New(c, nil)
	if err != nil {
		b.Fatal(err)
	}
	locks, err := fencelock.New(d)
	if err != nil {
		b.Fatal(err)
	}
	defer locks.Close()
	ctx, id := b.Context(), redisbackend.NewID()
	sha, err := c.Do(ctx, c.B().ScriptLoad().Script(redisbackend.CompareAndDelete).Build()).ToString()
	if err != nil {
		b.Fatal(err)
	}
	raw := redisbackend.Crowd{Name: "raw", Pair: func(name string) error {
		key := "raw/" + name
		if err := c.Do(ctx, c.B().Set().Key(key).Value(id).Nx().PxMilliseconds(30000).Build()).Error(); err != nil {
			return err
		}
		n, err := c.Do(ctx, c.B().Evalsha().Sha1(sha).Numkeys(1).Key(key).Arg(id).Build()).AsInt64()
		if err == nil && n != 1 {
			err = fmt.Errorf("deleted %d, want 1", n)
		}
		return err
	}}
	redisbackend.CompareCrowds(b, raw, redisbackend.TryAndRelease(b, "ours", locks))
}
