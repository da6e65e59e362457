package redlock_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/driver/redlock"
	"github.com/fencelock/fencelock/internal/redisbackend"
	"github.com/fencelock/fencelock/internal/redlockbackend"
)

// bench is five masters, a driver, and the least that any lock on them costs: SET NX PX and a script that compares and
// deletes, on all five at the same time, all of which are waited for.
type bench struct {
	*testing.B
	masters redlockbackend.Masters
	clients []*redis.Client
	driver  *redlock.Driver
	sha     string
}

func newBench(b *testing.B) *bench {
	b.Helper()
	x := &bench{B: b, masters: masters(b, 5)}
	var nodes []redlock.Node
	for _, s := range x.masters {
		c := redis.NewClient(&redis.Options{Addr: s.Addr(), PoolSize: 64, ContextTimeoutEnabled: true, MaxRetries: -1})
		b.Cleanup(func() { c.Close() })
		n, err := goredis.NewNode(c)
		if err != nil {
			b.Fatal(err)
		}
		x.clients, nodes = append(x.clients, c), append(nodes, n)
		x.sha = c.ScriptLoad(b.Context(), redisbackend.CompareAndDelete).Val()
	}
	d, err := redlock.New(nodes, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { d.Close() })
	x.driver = d
	return x
}

func (x *bench) each(f func(c *redis.Client) error) {
	var all sync.WaitGroup
	for _, c := range x.clients {
		all.Go(func() {
			if err := f(c); err != nil {
				x.Errorf("raw command: got %v, want nil", err)
			}
		})
	}
	all.Wait()
}

func (x *bench) raw(name string) {
	ctx, id := context.Background(), rand.Text()
	x.each(func(c *redis.Client) error { return c.SetNX(ctx, "raw/"+name, id, 30*time.Second).Err() })
	x.each(func(c *redis.Client) error { return c.EvalSha(ctx, x.sha, []string{"raw/" + name}, id).Err() })
}

func (x *bench) ours(name string) {
	r := request(name, 30*time.Second)
	if a, err := x.driver.Lock(x.Context(), r); err != nil || a.State != driver.Granted {
		x.Errorf("Lock: got %v, %v, want granted", a.State, err)
	}
	if found, err := x.driver.Release(x.Context(), r.Owner); err != nil || !found {
		x.Errorf("Release: got %v, %v, want true", found, err)
	}
}

func median(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}

// BenchmarkPair compares Lock and Release with the raw commands, in turn, and reports how long each takes by the median,
// the ratio, and how many requests each node got for one acquisition.
func BenchmarkPair(b *testing.B) {
	x := newBench(b)
	const pairs = 1000
	var raw, ours, ratios []float64
	before := redisbackend.Commands(b, x.masters[0])["evalsha"]
	for b.Loop() {
		var took [2][]float64
		for range pairs {
			for i, pair := range []func(string){x.raw, x.ours} {
				began := time.Now()
				pair("pair")
				took[i] = append(took[i], float64(time.Since(began).Microseconds()))
			}
		}
		r, o := median(took[0]), median(took[1])
		raw, ours, ratios = append(raw, r), append(ours, o), append(ratios, o/r)
	}
	requests := float64(redisbackend.Commands(b, x.masters[0])["evalsha"]-before) / float64(pairs*len(raw))
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(raw), "raw-µs")
	b.ReportMetric(median(ours), "ours-µs")
	b.ReportMetric(median(ratios), "ratio")
	b.ReportMetric(requests-2, "trips/lock") // the raw script and the release are one each
}

// BenchmarkCrowd compares pairs per second of 64 goroutines with a name each.
func BenchmarkCrowd(b *testing.B) {
	x := newBench(b)
	rate := func(pair func(string)) float64 {
		const goroutines, each = 64, 40
		began := time.Now()
		var all sync.WaitGroup
		for k := range goroutines {
			all.Go(func() {
				for range each {
					pair(fmt.Sprint("crowd/", k))
				}
			})
		}
		all.Wait()
		return goroutines * each / time.Since(began).Seconds()
	}
	var raw, ours, ratios []float64
	for b.Loop() {
		r, o := rate(x.raw), rate(x.ours)
		raw, ours, ratios = append(raw, r), append(ours, o), append(ratios, o/r)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(raw), "raw/s")
	b.ReportMetric(median(ours), "ours/s")
	b.ReportMetric(median(ratios), "ratio")
}

// BenchmarkOneStopped tells how long the slowest of many Lock and Release take, with a TTL of 10 s, while one of the five
// masters is stopped.
func BenchmarkOneStopped(b *testing.B) {
	x := newBench(b)
	x.ours("before")
	if err := x.masters[0].Pause(); err != nil {
		b.Fatal(err)
	}
	defer func() { _ = x.masters[0].Resume() }()
	var slowest atomic.Int64
	for b.Loop() {
		r := request("stopped", 10*time.Second)
		began := time.Now()
		a, err := x.driver.Lock(b.Context(), r)
		locked := time.Since(began)
		if err != nil || a.State != driver.Granted {
			b.Fatalf("Lock: got %v, %v, want granted", a.State, err)
		}
		began = time.Now()
		if found, err := x.driver.Release(b.Context(), r.Owner); err != nil || !found {
			b.Fatalf("Release: got %v, %v, want true", found, err)
		}
		slowest.Store(max(slowest.Load(), locked.Microseconds(), time.Since(began).Microseconds()))
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(slowest.Load())/1000, "slowest-ms")
}
