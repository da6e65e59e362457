package migrate_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/migrate"
)

// BenchmarkBoth compares Lock and Release of an uncontended lock in phase both with the same on each of the two backends
// alone, in turn in one run. It reports the medians, and the ratio to the slower backend.
func BenchmarkBoth(b *testing.B) {
	for _, pair := range []struct{ from, to string }{{"redis", "etcd"}, {"redis", "postgres"}, {"file", "redis"}} {
		b.Run(pair.from+"-"+pair.to, func(b *testing.B) {
			from, to := backendURL(b, pair.from), backendURL(b, pair.to)
			drivers := []driver.Driver{openURL(b, migrateURL(from, to, migrate.Both)), openURL(b, backendURL(b, pair.from)), openURL(b, backendURL(b, pair.to))}
			took := make([][]time.Duration, len(drivers))
			for b.Loop() {
				for i, d := range drivers {
					began := time.Now()
					r := request("bench", 30*time.Second)
					if a, err := d.Lock(b.Context(), r); a.State != driver.Granted {
						b.Fatalf("Lock: got %v, %v, want granted", a.State, err)
					}
					if found, err := d.Release(b.Context(), r.Owner); !found || err != nil {
						b.Fatalf("Release: got %v, %v, want true", found, err)
					}
					took[i] = append(took[i], time.Since(began))
				}
			}
			median := func(i int) float64 {
				slices.Sort(took[i])
				return float64(took[i][len(took[i])/2]) / float64(time.Microsecond)
			}
			b.ReportMetric(median(0), "µs/both")
			b.ReportMetric(median(1), "µs/old")
			b.ReportMetric(median(2), "µs/new")
			b.ReportMetric(median(0)/max(median(1), median(2)), "both/slower")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func openURL(b *testing.B, url string) driver.Driver {
	b.Helper()
	d, err := driver.Open(context.WithoutCancel(b.Context()), url)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { d.Close() })
	return d
}
