package fencelock_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/memory"
)

// BenchmarkPair is TryLock and Release with nothing behind it: what the engine itself costs.
func BenchmarkPair(b *testing.B) {
	c, err := fencelock.New(memory.New(memory.NewStore()))
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	b.ReportAllocs()
	for b.Loop() {
		l, err := c.TryLock(b.Context(), "x")
		if err != nil {
			b.Fatal(err)
		}
		if err := l.Release(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkHeldLease prints what a lease costs the client while it is held.
func BenchmarkHeldLease(b *testing.B) {
	const n = 10000
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("name/%d", i)
	}
	for b.Loop() {
		store := memory.NewStore()
		c, err := fencelock.New(memory.New(store))
		if err != nil {
			b.Fatal(err)
		}
		before, goroutines := heap(), runtime.NumGoroutine()
		leases := make([]*fencelock.Lease, n)
		for i, name := range names {
			if leases[i], err = c.TryLock(b.Context(), name, fencelock.TTL(time.Hour)); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(heap()-before)/n, "heap-B/lease")
		b.ReportMetric(float64(runtime.NumGoroutine()-goroutines), "goroutines")
		runtime.KeepAlive(leases)
		c.Close()
	}
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
