package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// values are what one round of a measure has shown of a subject, by the name of the column.
type values map[string]float64

// A measure is one kind of work. It fails if it sees two holders at the same time, a lost lock, or a token of a fenced
// subject that is missing or not greater than the one before.
type measure struct {
	kind string // what floors are for
	name string
	// only tells which subjects take part beside the floors.
	only func(subject) bool
	run  func(ctx context.Context, s *server, of subject, ttl time.Duration) (values, error)
	ttl  time.Duration
}

// sizes are how much of each measure a run does.
type sizes struct {
	Rounds   int           `json:"rounds"`
	Pairs    int           `json:"pairs"`
	Handover time.Duration `json:"handover_ns"`
	Waiters  []crowd       `json:"waiters"`
	Held     []int         `json:"held"`
	HeldFor  time.Duration `json:"held_for_ns"`
	Stall    time.Duration `json:"stall_ns"`
}

type crowd struct {
	Waiters int `json:"waiters"`
	Clients int `json:"clients"`
}

var (
	full = sizes{5, 1000, 3 * time.Second, []crowd{{8, 4}, {64, 4}, {256, 4}, {64, 1}, {64, 64}},
		[]int{1000, 10000, 50000}, 20 * time.Second, time.Second}
	quick = sizes{3, 200, 500 * time.Millisecond, []crowd{{8, 4}, {64, 4}}, []int{1000}, 7 * time.Second, time.Second}
)

func measures(z sizes) []measure {
	every := func(subject) bool { return true }
	fenced := func(s subject) bool { return s.fenced }
	all := []measure{
		{"pair", "pair", every, pairs(z.Pairs), 30 * time.Second},
		{"crowd", "64 goroutines", every, distinct(64, max(z.Pairs/10, 1)), 30 * time.Second},
	}
	for _, c := range z.Waiters {
		all = append(all, measure{"handover", fmt.Sprintf("handover %d on %d", c.Waiters, c.Clients), every,
			handover(c, z.Handover, 0), 30 * time.Second})
	}
	for _, n := range z.Held {
		all = append(all, measure{"held", fmt.Sprintf("%d leases", n), fenced, hold(n, z.HeldFor), 6 * time.Second})
	}
	return append(all, measure{"stall", "server stopped", fenced, handover(crowd{8, 4}, 2*z.Stall, z.Stall), 30 * time.Second})
}

// open makes n clients, and a function that closes them.
func open(ctx context.Context, s *server, of subject, ttl time.Duration, n int) (all []locker, closeAll func() error, err error) {
	closeAll = func() (err error) {
		for _, l := range all {
			err = errors.Join(err, l.close())
		}
		return err
	}
	for range n {
		l, err := of.open(ctx, s, ttl)
		if err != nil {
			return nil, nil, errors.Join(err, closeAll())
		}
		all = append(all, l)
	}
	return all, closeAll, nil
}

// pair locks and unlocks once.
func pair(ctx context.Context, l locker, of subject, name string, last *uint64) error {
	h, err := l.lock(ctx, name)
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	if of.fenced && h.token <= *last {
		return fmt.Errorf("token: got %d after %d, want a greater one", h.token, *last)
	}
	*last = h.token
	if h.err != nil && h.err() != nil {
		return fmt.Errorf("lost while held: %w", h.err())
	}
	if err := h.unlock(ctx); err != nil {
		return fmt.Errorf("unlock: %w", err)
	}
	return nil
}

// pairs locks and unlocks in one goroutine, with client and server on a processor each.
func pairs(n int) func(context.Context, *server, subject, time.Duration) (values, error) {
	return func(ctx context.Context, s *server, of subject, ttl time.Duration) (v values, err error) {
		clients, closeAll, err := open(ctx, s, of, ttl, 1)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, closeAll()) }()
		free, err := pin(s)
		if err != nil {
			return nil, err
		}
		defer free()
		var last uint64
		for range n/10 + 1 { // connections, scripts, the size of the heap
			if err := pair(ctx, clients[0], of, "pair", &last); err != nil {
				return nil, err
			}
		}
		before, err := s.requests(ctx, of.sends)
		if err != nil {
			return nil, err
		}
		took := make([]time.Duration, n)
		var m0, m1 runtime.MemStats
		runtime.ReadMemStats(&m0)
		for i := range took {
			began := time.Now()
			if err := pair(ctx, clients[0], of, "pair", &last); err != nil {
				return nil, err
			}
			took[i] = time.Since(began)
		}
		runtime.ReadMemStats(&m1)
		after, err := s.requests(ctx, of.sends)
		if err != nil {
			return nil, err
		}
		return values{"p50 µs": micro(quantile(took, 0.5)), "p99 µs": micro(quantile(took, 0.99)),
			"requests": (after - before) / float64(n), "allocations": float64(m1.Mallocs-m0.Mallocs) / float64(n)}, nil
	}
}

// distinct lets many goroutines lock and unlock a name of their own each.
func distinct(goroutines, n int) func(context.Context, *server, subject, time.Duration) (values, error) {
	return func(ctx context.Context, s *server, of subject, ttl time.Duration) (v values, err error) {
		clients, closeAll, err := open(ctx, s, of, ttl, 1)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, closeAll()) }()
		lasts := make([]uint64, goroutines)
		run := func(n int) error {
			errs := make([]error, goroutines)
			var all sync.WaitGroup
			for g := range goroutines {
				all.Go(func() {
					for range n {
						if errs[g] = pair(ctx, clients[0], of, "crowd/"+strconv.Itoa(g), &lasts[g]); errs[g] != nil {
							return
						}
					}
				})
			}
			all.Wait()
			return errors.Join(errs...)
		}
		if err := run(n/10 + 1); err != nil {
			return nil, err
		}
		began := time.Now()
		if err := run(n); err != nil {
			return nil, err
		}
		return values{"pairs/s": float64(goroutines*n) / time.Since(began).Seconds()}, nil
	}
}

// handover lets waiters take one lock in a loop, each holding it for 1 ms, for some time. With a stall the server is
// stopped for that long, half a stall after the beginning.
func handover(c crowd, lasts, stall time.Duration) func(context.Context, *server, subject, time.Duration) (values, error) {
	return func(ctx context.Context, s *server, of subject, ttl time.Duration) (v values, err error) {
		clients, closeAll, err := open(ctx, s, of, ttl, c.Clients)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, closeAll()) }()
		if lasts == 0 {
			return nil, errors.New("a handover needs time")
		}
		before, err := s.requests(ctx, of.sends)
		if err != nil {
			return nil, err
		}
		// The first four are of whoever holds the lock.
		var (
			owner             = -1
			token             uint64
			given             time.Time
			gaps              []time.Duration
			changes, acquired int
			resumed           time.Time
			recovered         time.Duration
			seen              sync.Mutex
			inside            atomic.Int32
			overlaps, failed  atomic.Int64
		)
		waits := make([][]time.Duration, c.Waiters)
		errs := make([]error, c.Waiters)
		ending := make(chan struct{})
		waiting, cancel := context.WithCancel(ctx)
		defer cancel()
		var all sync.WaitGroup
		for w := range c.Waiters {
			all.Go(func() {
				l := clients[w%c.Clients]
				for {
					select {
					case <-ending:
						return
					default:
					}
					began := time.Now()
					h, err := l.lock(waiting, "handover")
					if waiting.Err() != nil {
						if err == nil {
							errs[w] = errors.Join(errs[w], h.unlock(ctx))
						}
						return
					}
					if err != nil {
						if stall == 0 {
							errs[w] = fmt.Errorf("lock: %w", err)
							return
						}
						failed.Add(1)
						continue
					}
					got := time.Now()
					if inside.Add(1) != 1 {
						overlaps.Add(1)
					}
					waits[w] = append(waits[w], got.Sub(began))
					seen.Lock()
					acquired++
					if w != owner {
						if owner >= 0 {
							changes++
							gaps = append(gaps, got.Sub(given))
						}
						owner = w
						if !resumed.IsZero() && recovered == 0 {
							recovered = got.Sub(resumed)
						}
					}
					if of.fenced && h.token <= token {
						errs[w] = fmt.Errorf("token: got %d after %d, want a greater one", h.token, token)
					}
					token = h.token
					seen.Unlock()
					time.Sleep(time.Millisecond)
					if h.err != nil && h.err() != nil {
						errs[w] = fmt.Errorf("lost while held: %w", h.err())
					}
					seen.Lock()
					given = time.Now()
					seen.Unlock()
					inside.Add(-1)
					if err := h.unlock(ctx); err != nil {
						if stall == 0 {
							errs[w] = fmt.Errorf("unlock: %w", err)
							return
						}
						failed.Add(1)
					}
				}
			})
		}
		began := time.Now()
		if stall > 0 {
			time.Sleep(stall / 2)
			if err := s.Pause(); err != nil {
				return nil, err
			}
			time.Sleep(stall)
			err := s.Resume()
			seen.Lock()
			resumed = time.Now()
			seen.Unlock()
			if err != nil {
				return nil, err
			}
		}
		time.Sleep(max(0, lasts-time.Since(began)))
		seen.Lock()
		elapsed, changed, total := time.Since(began), float64(changes), float64(acquired)
		seen.Unlock()
		after, countErr := s.requests(ctx, of.sends)
		close(ending)
		time.AfterFunc(2*time.Second, cancel) // whoever polls may not see that it is its turn
		all.Wait()
		if err := errors.Join(append(errs, countErr)...); err != nil {
			return nil, err
		}
		if n := overlaps.Load(); n > 0 {
			return nil, fmt.Errorf("overlaps: got %d, want 0", n)
		}
		if len(gaps) == 0 {
			return nil, errors.New("owner changes: got 0, want some")
		}
		var waited []time.Duration
		sum, squares := 0.0, 0.0
		for _, w := range waits {
			waited = append(waited, w...)
			sum += float64(len(w))
			squares += float64(len(w)) * float64(len(w))
		}
		longest := slices.Max(waited)
		v = values{"errors": float64(failed.Load())}
		if stall > 0 {
			v["recovery ms"] = milli(recovered)
			v["longest wait over stall ms"] = milli(longest - stall)
			return v, nil
		}
		v["changes/s"] = changed / elapsed.Seconds()
		v["p50 µs"], v["p99 µs"] = micro(quantile(gaps, 0.5)), micro(quantile(gaps, 0.99))
		v["requests"] = (after - before) / total
		v["Jain"] = sum * sum / (float64(c.Waiters) * squares)
		v["longest/median wait"] = float64(longest) / float64(max(quantile(waited, 0.5), 1))
		return v, nil
	}
}

// hold keeps n locks for some time and counts what that costs the client.
func hold(n int, lasts time.Duration) func(context.Context, *server, subject, time.Duration) (values, error) {
	return func(ctx context.Context, s *server, of subject, ttl time.Duration) (v values, err error) {
		clients, closeAll, err := open(ctx, s, of, ttl, 1)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, closeAll()) }()
		var last uint64
		if err := pair(ctx, clients[0], of, "held/warm", &last); err != nil {
			return nil, err
		}
		locks, errs := make([]held, n), make([]error, n)
		names := make([]string, n)
		for i := range names {
			names[i] = "held/" + strconv.Itoa(i)
		}
		heap, goroutines := live()
		var all sync.WaitGroup
		for g := range 32 {
			all.Go(func() {
				for i := g; i < n; i += 32 {
					locks[i], errs[i] = clients[0].lock(ctx, names[i])
				}
			})
		}
		all.Wait()
		if err := errors.Join(errs...); err != nil {
			return nil, err
		}
		before, err := s.requests(ctx, of.sends)
		if err != nil {
			return nil, err
		}
		began, cpu := time.Now(), cpuTime()
		time.Sleep(lasts)
		cpu, elapsed := cpuTime()-cpu, time.Since(began)
		after, err := s.requests(ctx, of.sends)
		if err != nil {
			return nil, err
		}
		lost := 0
		for i, l := range locks {
			if l.err() != nil {
				lost++
			}
			if l.token == 0 {
				return nil, fmt.Errorf("token of %q: got 0, want one", names[i])
			}
		}
		if lost > 0 {
			return nil, fmt.Errorf("lost leases: got %d, want 0", lost)
		}
		heapNow, goroutinesNow := live()
		runtime.KeepAlive(locks)
		return values{"goroutines/lease": float64(max(0, goroutinesNow-goroutines)) / float64(n),
			"heap B/lease": (float64(heapNow) - float64(heap)) / float64(n), "client CPU s": cpu.Seconds(),
			"requests/s": (after - before) / elapsed.Seconds()}, nil
	}
}

// live answers the heap in use after a collection, and the goroutines.
func live() (uint64, int) {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc, runtime.NumGoroutine()
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func quantile(of []time.Duration, q float64) time.Duration {
	slices.Sort(of)
	return of[min(len(of)-1, int(q*float64(len(of))))]
}

func micro(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
func milli(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
