package goredis_test

import (
	"context"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// BenchmarkClientPair is BenchmarkPair for what a user calls: TryLock and Release of a client, token included,
// against SET NX PX and compare-and-delete through the same go-redis client, in turn.
func BenchmarkClientPair(b *testing.B) {
	s := startRedis(b)
	rdb := s.client(b)
	c, err := fencelock.New(newDriver(b, rdb))
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	ctx := context.Background()
	sha := rdb.ScriptLoad(ctx, redisbackend.CompareAndDelete).Val()
	id := newID()
	compare(b, s,
		func() {
			if ok, err := rdb.SetNX(ctx, "raw/pair", id, 30*time.Second).Result(); !ok || err != nil {
				b.Fatalf("SET NX: got %v, %v, want true", ok, err)
			}
			if n, err := rdb.EvalSha(ctx, sha, []string{"raw/pair"}, id).Int(); n != 1 || err != nil {
				b.Fatalf("compare and delete: got %v, %v, want 1", n, err)
			}
		},
		func() {
			l, err := c.TryLock(ctx, "bench/pair")
			if err != nil || l.Token() == 0 {
				b.Fatalf("TryLock: got %v, want a lease with a token", err)
			}
			if err := l.Release(ctx); err != nil {
				b.Fatalf("Release: got %v, want nil", err)
			}
		})
}

// BenchmarkCrowd compares TryLock and Release of 64 goroutines, each with a lock of its own, with SET NX PX and
// compare-and-delete through the same client; and, if this version of go-redis has it, both through an auto-pipelining
// client.
func BenchmarkCrowd(b *testing.B) {
	s := startRedis(b)
	rdb := s.client(b)
	ctx, id := b.Context(), newID()
	sha := rdb.ScriptLoad(ctx, redisbackend.CompareAndDelete).Val()
	raw := func(name string, c redis.Cmdable) redisbackend.Crowd {
		return redisbackend.Crowd{Name: name, Pair: func(name string) error {
			if ok, err := c.SetNX(ctx, "raw/"+name, id, 30*time.Second).Result(); !ok || err != nil {
				return fmt.Errorf("SET NX: got %v, %w, want true", ok, err)
			}
			n, err := c.EvalSha(ctx, sha, []string{"raw/" + name}, id).Int()
			if err == nil && n != 1 {
				err = fmt.Errorf("deleted %d, want 1", n)
			}
			return err
		}}
	}
	ours := func(name string, process func(context.Context, redis.Cmder) error) redisbackend.Crowd {
		d, err := goredis.New(rdb, &goredis.Options{Process: process})
		if err != nil {
			b.Fatal(err)
		}
		c, err := fencelock.New(d)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { c.Close() })
		return redisbackend.TryAndRelease(b, name, c)
	}
	ways := []redisbackend.Crowd{raw("raw", rdb), ours("ours", nil)}
	if piped := pipelined(b, rdb); piped != nil {
		ways = append(ways, raw("raw-piped", piped), ours("piped", piped.Process))
	}
	redisbackend.CompareCrowds(b, ways...)
}

// pipelined makes an auto-pipelining client, where go-redis has such.
func pipelined(tb testing.TB, rdb *redis.Client) redis.UniversalClient {
	method := reflect.ValueOf(rdb).MethodByName("AutoPipeline")
	if !method.IsValid() {
		return nil
	}
	results := method.Call(nil)
	if err, _ := results[1].Interface().(error); err != nil {
		tb.Fatalf("AutoPipeline: got %v, want nil", err)
	}
	return results[0].Interface().(redis.UniversalClient)
}

// BenchmarkHeldLeases holds 10,000 leases of 6 s for 10 s, and reports what they cost the client.
func BenchmarkHeldLeases(b *testing.B) {
	const n = 10000
	s := startRedis(b)
	rdb := s.client(b)
	for b.Loop() {
		c, err := fencelock.New(newDriver(b, rdb))
		if err != nil {
			b.Fatal(err)
		}
		ctx := context.Background()
		names := make([]string, n)
		for i := range names {
			names[i] = fmt.Sprintf("bench/held/%d", i)
		}
		if err := rdb.Ping(ctx).Err(); err != nil {
			b.Fatal(err)
		}
		heap, goroutines := live()
		leases := make([]*fencelock.Lease, n)
		for i, name := range names {
			if leases[i], err = c.TryLock(ctx, name, fencelock.TTL(6*time.Second)); err != nil {
				b.Fatal(err)
			}
		}
		most := 0
		for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			most = max(most, runtime.NumGoroutine()-goroutines)
		}
		lost := 0
		for _, l := range leases {
			if l.Err() != nil {
				lost++
			}
		}
		after, _ := live()
		b.ReportMetric(float64(after-heap)/n, "heap-B/lease")
		b.ReportMetric(float64(most), "goroutines")
		b.ReportMetric(float64(lost), "lost")
		runtime.KeepAlive(leases)
		if err := c.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkLossSignal stops a server under a lease of 2 s, 20 times, and reports how long after the lease's deadline
// Done was closed.
func BenchmarkLossSignal(b *testing.B) {
	const runs = 20
	for b.Loop() {
		late := make([]float64, runs)
		var all sync.WaitGroup
		for i := range runs {
			s := startRedis(b)
			c, err := fencelock.New(newDriver(b, s.client(b)))
			if err != nil {
				b.Fatal(err)
			}
			l, err := c.TryLock(context.Background(), "bench/loss", fencelock.TTL(2*time.Second))
			if err != nil {
				b.Fatal(err)
			}
			all.Go(func() {
				if err := s.Pause(); err != nil {
					b.Error(err)
				}
				<-l.Done()
				late[i] = float64(time.Since(l.Deadline())) / float64(time.Millisecond)
				if err := s.Resume(); err != nil {
					b.Error(err)
				}
				c.Close()
			})
		}
		all.Wait()
		slices.Sort(late)
		b.ReportMetric(late[0], "least-ms-after-V")
		b.ReportMetric(late[runs/2], "median-ms-after-V")
		b.ReportMetric(late[runs-1], "most-ms-after-V")
		b.ReportMetric(0, "ns/op")
	}
}

// live answers the heap in use after a collection, and the goroutines.
func live() (heap uint64, goroutines int) {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc, runtime.NumGoroutine()
}
