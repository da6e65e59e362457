package redisbackend

import (
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
)

// CompareAndDelete is the usual release of a lock that was taken with SET NX PX.
const CompareAndDelete = `if redis.call("GET", KEYS[1]) == ARGV[1] then return redis.call("DEL", KEYS[1]) end return 0`

// Crowd is one way to take and give back locks.
type Crowd struct {
	Name string
	// Pair takes a lock and gives it back.
	Pair func(name string) error
}

// TryAndRelease is a crowd at the locks of a client.
func TryAndRelease(b *testing.B, name string, locks *fencelock.Client) Crowd {
	return Crowd{name, func(name string) error {
		l, err := locks.TryLock(b.Context(), name)
		if err != nil {
			return err
		}
		return l.Release(b.Context())
	}}
}

// CompareCrowds lets 64 goroutines take and give back a lock of their own each, by each of the ways in turn, in rounds. It
// reports the medians of the pairs per second, and of the ratios to the first way in the same round.
func CompareCrowds(b *testing.B, ways ...Crowd) {
	const goroutines, pairs = 64, 300
	round := func() (rates []float64) {
		for _, way := range ways {
			began := time.Now()
			var all sync.WaitGroup
			for g := range goroutines {
				all.Go(func() {
					for range pairs {
						if err := way.Pair("crowd/" + strconv.Itoa(g)); err != nil {
							b.Errorf("%s: got %v, want nil", way.Name, err)
							return
						}
					}
				})
			}
			all.Wait()
			rates = append(rates, goroutines*pairs/time.Since(began).Seconds())
		}
		return rates
	}
	round() // connections, scripts, the size of the heap
	rates, ratios := make([][]float64, len(ways)), make([][]float64, len(ways))
	for b.Loop() {
		for i, rate := range round() {
			rates[i] = append(rates[i], rate)
			ratios[i] = append(ratios[i], rate/rates[0][len(rates[0])-1])
		}
	}
	median := func(of []float64) float64 {
		slices.Sort(of)
		return of[len(of)/2]
	}
	for i, way := range ways {
		b.ReportMetric(median(rates[i]), way.Name+"-pairs/s")
		if i > 0 {
			b.ReportMetric(median(ratios[i]), way.Name+"-ratio")
		}
	}
	b.ReportMetric(0, "ns/op")
}
