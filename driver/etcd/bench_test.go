package etcd

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

// syncing is a server that waits for the disk before it answers, as in earnest.
func syncing(b *testing.B) *servers.Etcd {
	b.Helper()
	s, err := servers.StartEtcd(b.Context(), &servers.EtcdOptions{Binary: os.Getenv(binaryVariable)})
	if err != nil {
		b.Fatalf("start etcd: %v", err)
	}
	b.Cleanup(func() { s.Close() })
	return s
}

// onDisks runs a benchmark on a server that waits for the disk, and on one that does not, which shows more of what we
// add.
func onDisks(b *testing.B, bench func(b *testing.B, s *servers.Etcd)) {
	b.Run("sync", func(b *testing.B) { bench(b, syncing(b)) })
	b.Run("nosync", func(b *testing.B) { bench(b, newServer(b)) })
}

// report answers the median, and reports it.
func report(b *testing.B, what string, took []time.Duration) float64 {
	slices.Sort(took)
	p50 := float64(took[len(took)/2])
	b.ReportMetric(p50/1e3, what+"-p50-us")
	return p50
}

// BenchmarkPair compares TryLock and Release of an uncontended lock with two raw transactions that create and delete a
// key on a lease: the least that a lock costs. Both go through one client, in turn. The raft proposals of a pair are
// counted.
func BenchmarkPair(b *testing.B) {
	onDisks(b, func(b *testing.B, s *servers.Etcd) {
		f := onServer(b, s)
		d := newDriver(b, f.raw, f.namespace)
		c := locks(b, d)
		granted, err := f.raw.Grant(b.Context(), 30)
		if err != nil {
			b.Fatal(err)
		}
		const key = "raw/a"
		pairs := map[string]func(){
			"raw": func() {
				absent := clientv3.Compare(clientv3.CreateRevision(key), "=", 0)
				put, err := f.raw.Txn(b.Context()).If(absent).Then(clientv3.OpPut(key, "host 4711", clientv3.WithLease(granted.ID))).Commit()
				if err != nil || !put.Succeeded {
					b.Fatal("raw put", err)
				}
				same := clientv3.Compare(clientv3.CreateRevision(key), "=", put.Header.Revision)
				del, err := f.raw.Txn(b.Context()).If(same).Then(clientv3.OpDelete(key)).Commit()
				if err != nil || !del.Succeeded {
					b.Fatal("raw delete", err)
				}
			},
			"step": func() {
				r := lockOf("a", 30*time.Second)
				asked(b, d, r, driver.Granted)
				given(b, d, r.Owner, true)
			},
			"lock": func() {
				l, err := c.TryLock(b.Context(), "a")
				if err != nil {
					b.Fatal(err)
				}
				if err := l.Release(b.Context()); err != nil {
					b.Fatal(err)
				}
			},
		}
		for range 100 {
			for _, pair := range pairs {
				pair()
			}
		}
		took := map[string][]time.Duration{}
		for b.Loop() {
			if _, err := f.raw.KeepAliveOnce(b.Context(), granted.ID); err != nil {
				b.Fatal(err)
			}
			for what, pair := range pairs { // in random order
				began := time.Now()
				pair()
				took[what] = append(took[what], time.Since(began))
			}
		}
		raw := report(b, "raw", took["raw"])
		b.ReportMetric(report(b, "step", took["step"])/raw, "step/raw")
		b.ReportMetric(report(b, "lock", took["lock"])/raw, "lock/raw")
		const counted = 200
		before := proposals(b, s)
		for range counted {
			pairs["lock"]()
		}
		b.ReportMetric(float64(proposals(b, s)-before)/counted, "proposals/lock")
	})
}

// BenchmarkHandoff is from the call of Release by one client until Lock has returned to another, in turn with etcd's own
// concurrency.Mutex.
func BenchmarkHandoff(b *testing.B) {
	onDisks(b, func(b *testing.B, s *servers.Etcd) {
		f := onServer(b, s)
		ours := [2]*fencelock.Client{locks(b, f.driver()), locks(b, f.driver())}
		var theirs [2]*concurrency.Mutex
		for i := range theirs {
			session, err := concurrency.NewSession(newClient(b, f.addrs...))
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { session.Close() })
			theirs[i] = concurrency.NewMutex(session, f.namespace+"-theirs")
		}
		queued := func(prefix string) {
			eventually(b, patience, func() error {
				resp, err := f.raw.Get(b.Context(), prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
				if err == nil && resp.Count != 2 {
					err = fmt.Errorf("queue: got %d, want 2", resp.Count)
				}
				return err
			})
			time.Sleep(2 * time.Millisecond) // the waiter's own watch must stand
		}
		held, err := ours[0].Lock(b.Context(), "a")
		if err != nil {
			b.Fatal(err)
		}
		if err := theirs[0].Lock(b.Context()); err != nil {
			b.Fatal(err)
		}
		var us, them []time.Duration
		at := 0
		for b.Loop() {
			next := 1 - at
			leases := make(chan *fencelock.Lease)
			go func() {
				l, err := ours[next].Lock(b.Context(), "a")
				if err != nil {
					b.Error(err)
				}
				leases <- l
			}()
			queued(f.namespace + "/lock/a/")
			began := time.Now()
			if err := held.Release(b.Context()); err != nil {
				b.Fatal(err)
			}
			held = <-leases
			us = append(us, time.Since(began))

			locked := make(chan struct{})
			go func() {
				if err := theirs[next].Lock(b.Context()); err != nil {
					b.Error(err)
				}
				close(locked)
			}()
			queued(f.namespace + "-theirs/")
			began = time.Now()
			if err := theirs[at].Unlock(b.Context()); err != nil {
				b.Fatal(err)
			}
			<-locked
			them = append(them, time.Since(began))
			at = next
		}
		mutex := report(b, "mutex", them)
		b.ReportMetric(report(b, "lock", us)/mutex, "lock/mutex")
	})
}

// countedDriver counts the grants that are pushed.
type countedDriver struct {
	*Driver
	pushed *atomic.Int64
}

func (d countedDriver) Notify(sink func(driver.Event)) {
	d.Driver.Notify(func(e driver.Event) {
		if e.Kind == driver.EventGranted {
			d.pushed.Add(1)
		}
		sink(e)
	})
}

// BenchmarkWaiters serves 64 waiters of 8 clients, one after the other, and counts the raft proposals and the waiters that
// are woken for each release.
func BenchmarkWaiters(b *testing.B) {
	s := syncing(b)
	f := onServer(b, s)
	const waiters = 64
	var pushed atomic.Int64
	var clients []*fencelock.Client
	for range 8 {
		d := f.driver()
		r := lockOf("warm", 30*time.Second) // brings the base and a lease
		asked(b, d, r, driver.Granted)
		given(b, d, r.Owner, true)
		clients = append(clients, locks(b, countedDriver{d, &pushed}))
	}
	var gaps []time.Duration
	var woken, written float64
	for b.Loop() {
		held, err := clients[0].Lock(b.Context(), "a")
		if err != nil {
			b.Fatal(err)
		}
		var all sync.WaitGroup
		var mu sync.Mutex
		last := time.Time{}
		for i := range waiters {
			all.Go(func() {
				l, err := clients[i%len(clients)].Lock(b.Context(), "a")
				if err != nil {
					b.Error(err)
					return
				}
				mu.Lock()
				gaps = append(gaps, time.Since(last))
				last = time.Now()
				mu.Unlock()
				if err := l.Release(b.Context()); err != nil {
					b.Error(err)
				}
			})
		}
		eventually(b, patience, func() error {
			if n := len(f.keys("lock/a/")); n != waiters+1 {
				return fmt.Errorf("queue: got %d entries, want %d", n, waiters+1)
			}
			return nil
		})
		before, wakes := proposals(b, s), pushed.Load()
		mu.Lock()
		last = time.Now()
		mu.Unlock()
		if err := held.Release(b.Context()); err != nil {
			b.Fatal(err)
		}
		all.Wait()
		written += float64(proposals(b, s)-before) / (waiters + 1)
		woken += float64(pushed.Load()-wakes) / waiters
	}
	report(b, "handoff", gaps)
	b.ReportMetric(written/float64(b.N), "proposals/release")
	b.ReportMetric(woken/float64(b.N), "woken/release")
}

// BenchmarkLossSignal cuts a client off that holds a lock, and reports by how much its signal of the loss comes before
// the server lets go: the least and the most of all runs.
func BenchmarkLossSignal(b *testing.B) {
	s := syncing(b)
	f := onServer(b, s)
	var leads []time.Duration
	for b.Loop() {
		p, err := servers.NewProxy(s.Addr())
		if err != nil {
			b.Fatal(err)
		}
		c := locks(b, newDriver(b, newClient(b, p.Addr()), f.namespace))
		l, err := c.Lock(b.Context(), "a", fencelock.TTL(3*time.Second))
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(b.Context(), patience)
		changes := f.raw.Watch(ctx, f.namespace+"/lock/a/", clientv3.WithPrefix(), clientv3.WithCreatedNotify(), clientv3.WithFilterPut())
		<-changes
		first := l.Deadline()
		eventually(b, patience, func() error {
			if !l.Deadline().After(first) {
				return fmt.Errorf("Deadline: got %v, want it extended", first)
			}
			return nil
		})
		p.Drop(servers.Both)
		<-l.Done()
		told := time.Now()
		if resp := <-changes; len(resp.Events) != 1 {
			b.Fatalf("watch: got %v, want the key's end", resp)
		}
		leads = append(leads, time.Since(told))
		cancel()
		p.Close()
		c.Close()
	}
	b.ReportMetric(float64(slices.Min(leads).Microseconds())/1e3, "least-lead-ms")
	b.ReportMetric(float64(slices.Max(leads).Microseconds())/1e3, "most-lead-ms")
}
