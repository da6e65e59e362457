package postgres

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

// flushing is a server whose commits wait for the disk, as in earnest.
func flushing(b *testing.B) *servers.Postgres {
	return newServer(b, "-c", "fsync=on", "-c", "full_page_writes=on")
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// BenchmarkUncontended compares Lock and Release with the least that a lock in a table could cost, in turns through
// the same pool.
func BenchmarkUncontended(b *testing.B) {
	s := flushing(b)
	psql(b, s, "CREATE TABLE raw (name bytea PRIMARY KEY, owner text, expires timestamptz)")
	d := on(b, s.URL()+"&pool_max_conns=1", namespace())
	var raw, lock []time.Duration
	for b.Loop() {
		r := request("a", time.Minute)
		began := time.Now()
		for _, statement := range []string{
			"INSERT INTO raw VALUES ($1, $2, clock_timestamp() + interval '1 min') ON CONFLICT (name) DO UPDATE SET owner = excluded.owner WHERE raw.expires < clock_timestamp()",
			"DELETE FROM raw WHERE name = $1 AND owner = $2",
		} {
			if tag, err := d.pool.Exec(b.Context(), statement, pgx.QueryExecModeExec, []byte("a"), r.ID); err != nil || tag.RowsAffected() != 1 {
				b.Fatal(tag, err)
			}
		}
		raw = append(raw, time.Since(began))
		began = time.Now()
		locked(b, d, r, driver.Granted, "L1")
		released(b, d, r.Owner, true)
		lock = append(lock, time.Since(began))
	}
	b.ReportMetric(float64(median(raw).Microseconds()), "raw-p50-us")
	b.ReportMetric(float64(median(lock).Microseconds()), "lock-p50-us")
	b.ReportMetric(float64(median(lock))/float64(median(raw)), "lock/raw")
}

// BenchmarkHandover is from the release of one client until the push has reached the next of 64 that wait.
func BenchmarkHandover(b *testing.B) {
	s := flushing(b)
	ns := namespace()
	const waiters = 64
	d := []*Driver{on(b, s.URL(), ns), on(b, s.URL(), ns)}
	pushed := make(chan driver.Owner, waiters)
	for _, d := range d {
		d.Notify(func(e driver.Event) {
			if e.Kind == driver.EventGranted {
				pushed <- e.Owner
			}
		})
	}
	holder := request("a", time.Hour)
	locked(b, d[0], holder, driver.Granted, "L1")
	for i := range waiters {
		locked(b, d[i%2], waiting(request("a", time.Hour), time.Hour), driver.Waiting, "W4")
	}
	eventually(b, func() error {
		if got := psql(b, s, `SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN %%' AND pid <> pg_backend_pid()`); got != "2" {
			return fmt.Errorf("listening: got %s, want 2", got)
		}
		return nil
	})
	var trips, all []time.Duration
	owner, turn := holder.Owner, 0
	for b.Loop() {
		began := time.Now()
		if _, err := d[0].pool.Exec(b.Context(), "UPDATE fencelock.names SET used = used WHERE ns = $1", pgx.QueryExecModeExec, ns); err != nil {
			b.Fatal(err)
		}
		trips = append(trips, time.Since(began))
		began = time.Now()
		released(b, d[turn%2], owner, true)
		owner = <-pushed
		all = append(all, time.Since(began))
		turn++
		locked(b, d[turn%2], waiting(request("a", time.Hour), time.Hour), driver.Waiting, "W4")
	}
	b.ReportMetric(float64(median(trips).Microseconds()), "trip-p50-us")
	b.ReportMetric(float64(median(all).Microseconds()), "handover-p50-us")
	b.ReportMetric(float64(median(all))/float64(median(trips)), "handover/trip")
}

// BenchmarkExtensions renews 10,000 leases as one batch of the engine.
func BenchmarkExtensions(b *testing.B) {
	s := flushing(b)
	ns := namespace()
	d := on(b, s.URL(), ns)
	const leases = 10000
	psql(b, s, `INSERT INTO fencelock.leases SELECT '%s', 1, ('n' || i)::bytea, 'o' || i, i, now() + interval '1 hour', '' FROM generate_series(0, %d) i`, ns, leases-1)
	batch := make([]driver.Extension, leases)
	for i := range batch {
		batch[i] = driver.Extension{Owner: driver.Owner{Name: driver.Name{Kind: driver.KindLock, Name: fmt.Sprint("n", i)}, ID: fmt.Sprint("o", i)}, TTL: time.Hour}
	}
	psql(b, s, "SELECT pg_stat_statements_reset()")
	for b.Loop() {
		for i, r := range d.Extend(b.Context(), batch) {
			if r.Err != nil || r.State != driver.Granted {
				b.Fatalf("Extend of lease %d: got %v, %v, want granted", i, r.State, r.Err)
			}
		}
	}
	calls, err := strconv.Atoi(psql(b, s, `SELECT sum(calls) FROM pg_stat_statements WHERE query LIKE '%%.extend%%'`))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(leases*b.N)/float64(calls), "leases/statement")
}
