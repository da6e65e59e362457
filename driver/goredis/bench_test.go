package goredis_test

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// BenchmarkPair compares Lock and Release of an uncontended lock, tokens, queue and all, with the least
// that any lock on Redis costs: SET NX PX and a script that compares and deletes. Both go through the
// same client, in turn. It reports the medians, their ratio, the allocations, and what the server executed per pair.
func BenchmarkPair(b *testing.B) {
	s := startRedis(b)
	client := s.client(b)
	d := s.driver(b)
	name := driver.Name{Kind: driver.KindLock, Name: "bench/pair"}
	sha := client.ScriptLoad(b.Context(), redisbackend.CompareAndDelete).Val()
	id := newID()

	raw := func() {
		ok, err := client.SetNX(b.Context(), "raw/pair", id, 30*time.Second).Result()
		if !ok || err != nil {
			b.Fatalf("SET NX: got %v, %v, want true", ok, err)
		}
		n, err := client.EvalSha(b.Context(), sha, []string{"raw/pair"}, id).Int()
		if n != 1 || err != nil {
			b.Fatalf("compare and delete: got %v, %v, want 1", n, err)
		}
	}
	ours := func() {
		owner := driver.Owner{Name: name, ID: id}
		a, err := d.Lock(b.Context(), driver.Request{Owner: owner, TTL: 30 * time.Second, Limit: 1, Holder: "host 4711"})
		if a.State != driver.Granted || err != nil {
			b.Fatalf("Lock: got %v, %v, want granted", a.State, err)
		}
		if found, err := d.Release(b.Context(), owner); !found || err != nil {
			b.Fatalf("Release: got %v, %v, want true", found, err)
		}
	}
	compare(b, s, raw, ours)

	const pairs = 1000
	for what, pair := range map[string]func(){"raw": raw, "ours": ours} {
		before := s.commands(b)
		allocations := testing.AllocsPerRun(pairs, pair)
		after := s.commands(b)
		var all []string
		for command, n := range after {
			if n -= before[command]; n >= pairs/2 {
				all = append(all, fmt.Sprintf("%s %.0f", command, float64(n)/pairs))
			}
		}
		slices.Sort(all)
		b.Logf("per pair, %s: %.0f allocations; commands on the server: %s", what, allocations, strings.Join(all, ", "))
	}
}

// compare runs raw and ours in turn, in rounds, with this process and the server on a processor of their own each
// if there are two and taskset(1) can do that: where the scheduler puts them makes more of a difference than what
// is measured. It reports the medians over all rounds of each round's median time, and of each round's ratio.
func compare(b *testing.B, s server, raw, ours func()) {
	if _, err := exec.LookPath("taskset"); err == nil && runtime.NumCPU() > 1 {
		for cpu, pid := range []int{os.Getpid(), s.PID()} {
			if out, err := exec.Command("taskset", "-apc", strconv.Itoa(cpu), strconv.Itoa(pid)).CombinedOutput(); err != nil {
				b.Fatalf("taskset: %v: %s", err, out)
			}
		}
		all := fmt.Sprintf("0-%d", runtime.NumCPU()-1)
		defer func() { _ = exec.Command("taskset", "-apc", all, strconv.Itoa(os.Getpid())).Run() }()
		// As Go would have it on one processor; else threads that look for work take it from the one that has some.
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	}
	const perRound = 1000
	median := func(of []float64) float64 {
		slices.Sort(of)
		return of[len(of)/2]
	}
	var medians [2][]float64
	var ratios []float64
	round := func() {
		var took [2][]float64
		for range perRound {
			for i, pair := range []func(){raw, ours} {
				began := time.Now()
				pair()
				took[i] = append(took[i], float64(time.Since(began)))
			}
		}
		for i := range took {
			medians[i] = append(medians[i], median(took[i]))
		}
		ratios = append(ratios, median(took[1])/median(took[0]))
	}
	round() // connections, scripts, the size of the heap
	medians, ratios = [2][]float64{}, nil
	for b.Loop() {
		round()
	}
	b.ReportMetric(median(medians[0]), "raw-p50-ns")
	b.ReportMetric(median(medians[1]), "p50-ns")
	b.ReportMetric(median(ratios), "p50-ratio")
	b.ReportMetric(slices.Min(ratios), "least-ratio")
	b.ReportMetric(slices.Max(ratios), "most-ratio")
	b.ReportMetric(0, "ns/op")
}

func BenchmarkExtend(b *testing.B) {
	for _, kind := range []driver.Kind{driver.KindLock, driver.KindPermit} {
		for _, size := range []int{1, 256, 10000} {
			b.Run(fmt.Sprintf("%v/%d", kind, size), func(b *testing.B) {
				d := newDriver(b, newClient(b, &redis.Options{Addr: startRedis(b).Addr(), MaxRetries: -1, ReadTimeout: time.Minute}))
				leases := make([]driver.Extension, size)
				for i := range leases {
					o := driver.Owner{Name: driver.Name{Kind: kind, Name: fmt.Sprintf("bench/%d", i)}, ID: newID()}
					leases[i] = driver.Extension{Owner: o, TTL: time.Minute}
					if a, err := d.Lock(b.Context(), driver.Request{Owner: o, TTL: time.Minute, Limit: 1}); a.State != driver.Granted {
						b.Fatalf("Lock: got %v, %v, want granted", a.State, err)
					}
				}
				for b.Loop() {
					for i, r := range d.Extend(b.Context(), leases) {
						if r.State != driver.Granted {
							b.Fatalf("Extend %d: got %v, %v, want granted", i, r.State, r.Err)
						}
					}
				}
			})
		}
	}
}
