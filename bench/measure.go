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
	// only tells which subjects take part that do not name their kinds.
	only func(subject) bool
	// run is one round of all these subjects.
	run func(ctx context.Context, s *server, of []subject, ttl time.Duration) ([]values, error)
	ttl time.Duration
}

// sizes are how much of each measure a run does.
type sizes struct {
	Rounds   int           `json:"rounds"`
	Pairs    int           `json:"pairs"`
	Crowd    time.Duration `json:"crowd_ns"`
	Handover time.Duration `json:"handover_ns"`
	Waiters  []crowd       `json:"waiters"`
	Drains   []drain       `json:"drains"`
	Held     []int         `json:"held"`
	HeldFor  time.Duration `json:"held_for_ns"`
	Stall    time.Duration `json:"stall_ns"`
}

type crowd struct {
	Waiters int `json:"waiters"`
	Clients int `json:"clients"`
}

type drain struct {
	Waiters int `json:"waiters"`
	Times   int `json:"times"`
}

var (
	full = sizes{Rounds: 5, Pairs: 1000, Crowd: time.Second, Handover: 3 * time.Second,
		Waiters: []crowd{{8, 4}, {64, 4}, {256, 4}, {64, 1}, {64, 64}}, Drains: []drain{{64, 5}, {256, 3}},
		Held: []int{1000, 10000, 50000}, HeldFor: 20 * time.Second, Stall: time.Second}
	quick = sizes{Rounds: 3, Pairs: 200, Crowd: 200 * time.Millisecond, Handover: 300 * time.Millisecond,
		Waiters: []crowd{{8, 4}, {64, 4}}, Drains: []drain{{64, 1}},
		Held: []int{1000}, HeldFor: 2500 * time.Millisecond, Stall: time.Second}
)

func measures(z sizes, backend string) []measure {
	every := func(subject) bool { return true }
	fenced := func(s subject) bool { return s.fenced }
	const ttl = 30 * time.Second
	all := []measure{
		{"pair", "pair", every, pairs(z.Pairs), ttl},
		{"crowd", "64 goroutines", every, inTurn(distinct(64, z.Crowd)), ttl},
	}
	for _, c := range z.Waiters {
		all = append(all, measure{"handover", fmt.Sprintf("handover %d on %d", c.Waiters, c.Clients), every,
			inTurn(handover(c, z.Handover, 0)), ttl})
	}
	for _, d := range z.Drains {
		if backend == "redis" {
			all = append(all, measure{"drain", fmt.Sprintf("draining %d", d.Waiters), every, inTurn(draining(d)), ttl})
		}
	}
	for _, n := range z.Held {
		all = append(all, measure{"held", fmt.Sprintf("%d leases", n), fenced, inTurn(hold(n, z.HeldFor)), 6 * time.Second})
	}
	if backend == "redlock" {
		return append(all, measure{"minority", "one of five stopped", every, inTurn(minority(8, z.Stall)), ttl})
	}
	return append(all, measure{"stall", "server stopped", fenced, inTurn(handover(crowd{8, 4}, 2*z.Stall, z.Stall)), ttl})
}

// inTurn lets the subjects do the work one after the other.
func inTurn(work func(context.Context, *server, subject, time.Duration) (values, error),
) func(context.Context, *server, []subject, time.Duration) ([]values, error) {
	return func(ctx context.Context, s *server, of []subject, ttl time.Duration) ([]values, error) {
		var all []values
		for _, x := range of {
			v, err := work(ctx, s, x, ttl)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", x.name, err)
			}
			all = append(all, v)
		}
		return all, nil
	}
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

// A witness sees that a name has one holder at a time, that it is not lost meanwhile, and that tokens rise.
type witness struct {
	inside atomic.Int32
	mu     sync.Mutex
	token  uint64
}

func (w *witness) enter(of subject, h held) error {
	if n := w.inside.Add(1); n != 1 {
		return fmt.Errorf("overlap: got %d holders, want 1", n)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if of.fenced && h.token <= w.token {
		return fmt.Errorf("token: got %d after %d, want a greater one", h.token, w.token)
	}
	w.token = h.token
	return nil
}

// leave is to be called just before the lock is given back.
func (w *witness) leave(h held) error {
	defer w.inside.Add(-1)
	if h.err != nil && h.err() != nil {
		return fmt.Errorf("lost while held: %w", h.err())
	}
	return nil
}

// pair locks and unlocks once.
func pair(ctx context.Context, l locker, of subject, name string, w *witness) error {
	h, err := l.lock(ctx, name)
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	if err := errors.Join(w.enter(of, h), w.leave(h)); err != nil {
		return err
	}
	if err := h.unlock(ctx); err != nil {
		return fmt.Errorf("unlock: %w", err)
	}
	return nil
}

// pairs locks and unlocks in one goroutine, with client and server on a processor each. The subjects take turns pair by
// pair, so that what the machine does meanwhile hits them all alike; then requests and allocations are counted of each.
func pairs(n int) func(context.Context, *server, []subject, time.Duration) ([]values, error) {
	return func(ctx context.Context, s *server, of []subject, ttl time.Duration) (all []values, err error) {
		var clients []locker
		defer func() {
			for _, c := range clients {
				err = errors.Join(err, c.close())
			}
		}()
		for _, x := range of {
			c, err := x.open(ctx, s, ttl)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", x.name, err)
			}
			clients = append(clients, c)
		}
		free, err := pin(s)
		if err != nil {
			return nil, err
		}
		defer free()
		witnesses := make([]witness, len(of))
		one := func(i int) (time.Duration, error) {
			began := time.Now()
			if err := pair(ctx, clients[i], of[i], "pair", &witnesses[i]); err != nil {
				return 0, fmt.Errorf("%s: %w", of[i].name, err)
			}
			return time.Since(began), nil
		}
		warm := n/10 + 1 // connections, scripts, the size of the heap
		took := make([][]time.Duration, len(of))
		for k := range warm + n {
			for i := range of {
				t, err := one(i)
				if err != nil {
					return nil, err
				}
				if k >= warm {
					took[i] = append(took[i], t)
				}
			}
		}
		for i := range of {
			before, err := s.requests(ctx)
			if err != nil {
				return nil, err
			}
			var m0, m1 runtime.MemStats
			runtime.ReadMemStats(&m0)
			for range n {
				if _, err := one(i); err != nil {
					return nil, err
				}
			}
			runtime.ReadMemStats(&m1)
			after, err := s.requests(ctx)
			if err != nil {
				return nil, err
			}
			all = append(all, values{"p50 µs": micro(quantile(took[i], 0.5)), "p99 µs": micro(quantile(took[i], 0.99)),
				"requests": (after - before) / float64(n), "allocations": float64(m1.Mallocs-m0.Mallocs) / float64(n)})
		}
		return all, nil
	}
}

// distinct lets many goroutines lock and unlock a name of their own each, for some time.
func distinct(goroutines int, lasts time.Duration) func(context.Context, *server, subject, time.Duration) (values, error) {
	return func(ctx context.Context, s *server, of subject, ttl time.Duration) (v values, err error) {
		clients, closeAll, err := open(ctx, s, of, ttl, 1)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, closeAll()) }()
		witnesses := make([]witness, goroutines)
		run := func(lasts time.Duration) (float64, error) {
			var pairs atomic.Int64
			errs := make([]error, goroutines)
			began := time.Now()
			var all sync.WaitGroup
			for g := range goroutines {
				all.Go(func() {
					name := "crowd/" + strconv.Itoa(g)
					for errs[g] == nil && time.Since(began) < lasts {
						errs[g] = pair(ctx, clients[0], of, name, &witnesses[g])
						pairs.Add(1)
					}
				})
			}
			all.Wait()
			return float64(pairs.Load()) / time.Since(began).Seconds(), errors.Join(errs...)
		}
		if _, err := run(lasts / 4); err != nil { // connections, scripts
			return nil, err
		}
		rate, err := run(lasts)
		return values{"pairs/s": rate}, err
	}
}

// patience is how long is waited for something to happen at all.
const patience = time.Minute

// A tally is what the waiters of a handover have seen. Its methods are safe for concurrent use.
type tally struct {
	mu        sync.Mutex
	owner     int       // the last that has had the lock, -1 before
	given     time.Time // when its owner began to give it back
	resumed   time.Time // when a stopped server went on
	recovered time.Duration
	since     []time.Time // of those that wait

	// These are of the time that counts.
	gaps     []time.Duration   // from one owner to another
	waits    [][]time.Duration // of each waiter
	acquired int
	failed   int
}

func newTally(waiters int) *tally {
	return &tally{owner: -1, since: make([]time.Time, waiters), waits: make([][]time.Duration, waiters)}
}

// begin forgets what was counted: the warm-up is over.
func (t *tally) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.gaps, t.waits, t.acquired, t.failed = nil, make([][]time.Duration, len(t.since)), 0, 0
}

// waiting says that w wants the lock. It still waits if an attempt has failed.
func (t *tally) waiting(w int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.since[w].IsZero() {
		t.since[w] = time.Now()
	}
}

func (t *tally) got(w int, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.waits[w] = append(t.waits[w], at.Sub(t.since[w]))
	t.since[w] = time.Time{}
	t.acquired++
	if w != t.owner {
		if t.owner >= 0 {
			t.gaps = append(t.gaps, at.Sub(t.given))
		}
		t.owner = w
	}
	if !t.resumed.IsZero() && t.recovered == 0 {
		t.recovered = at.Sub(t.resumed)
	}
}

func (t *tally) giving() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.given = time.Now()
}

func (t *tally) fails() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed++
}

func (t *tally) resume() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.resumed = time.Now()
}

func (t *tally) count() (acquired, changes int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.acquired, len(t.gaps)
}

// end answers what was counted since begin, requests among it. Who still waits has waited until now.
func (t *tally) end(elapsed time.Duration, requests float64) (values, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var waited []time.Duration
	longest := time.Duration(0)
	sum, squares := 0.0, 0.0
	for w, all := range t.waits {
		waited = append(waited, all...)
		sum += float64(len(all))
		squares += float64(len(all)) * float64(len(all))
		if !t.since[w].IsZero() {
			longest = max(longest, time.Since(t.since[w]))
		}
	}
	if len(t.gaps) == 0 {
		return nil, errors.New("owner changes: got 0, want some")
	}
	longest = max(longest, slices.Max(waited))
	return values{
		"changes/s": float64(len(t.gaps)) / elapsed.Seconds(),
		"p50 µs":    micro(quantile(t.gaps, 0.5)), "p99 µs": micro(quantile(t.gaps, 0.99)),
		"requests": requests / sum, "Jain": sum * sum / (float64(len(t.waits)) * squares),
		"longest/median wait": float64(longest) / float64(max(quantile(waited, 0.5), 1)),
		"longest wait ms":     milli(longest), "errors": float64(t.failed), "recovery ms": milli(t.recovered),
	}, nil
}

// handover lets waiters take one lock in a loop, each holding it for 1 ms. After a warm-up it counts for some time, and
// until every waiter could have been served ten times, but not for more than three times as long unless the owner has
// never changed. With a stall the server is stopped for that long, half a stall after the counting has begun.
func handover(c crowd, lasts, stall time.Duration) func(context.Context, *server, subject, time.Duration) (values, error) {
	return func(ctx context.Context, s *server, of subject, ttl time.Duration) (v values, err error) {
		clients, closeAll, err := open(ctx, s, of, ttl, c.Clients)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, closeAll()) }()
		var (
			t    = newTally(c.Waiters)
			seen witness
			all  sync.WaitGroup
			errs = make([]error, c.Waiters)
		)
		waiting, cancel := context.WithCancel(ctx)
		defer all.Wait()
		defer cancel()
		for w := range c.Waiters {
			all.Go(func() {
				for {
					t.waiting(w)
					h, err := clients[w%c.Clients].lock(waiting, "handover")
					at := time.Now()
					if waiting.Err() != nil {
						if err == nil {
							errs[w] = errors.Join(errs[w], h.unlock(ctx))
						}
						return
					}
					if err != nil && stall > 0 {
						t.fails()
						continue
					}
					if err != nil {
						errs[w] = fmt.Errorf("lock: %w", err)
						return
					}
					errs[w] = errors.Join(errs[w], seen.enter(of, h))
					t.got(w, at)
					time.Sleep(time.Millisecond)
					t.giving()
					if err := seen.leave(h); waiting.Err() == nil { // else it may have ended with its context
						errs[w] = errors.Join(errs[w], err)
					}
					err = h.unlock(ctx)
					if err != nil && stall > 0 {
						t.fails()
					} else if err != nil {
						errs[w] = errors.Join(errs[w], fmt.Errorf("unlock: %w", err))
						return
					}
				}
			})
		}
		opened := time.Now()
		for warm := false; !warm; time.Sleep(time.Millisecond) {
			acquired, _ := t.count()
			past := time.Since(opened)
			warm = past >= lasts/4 && (acquired >= c.Waiters || past >= lasts)
		}
		before, err := s.requests(ctx)
		if err != nil {
			return nil, err
		}
		t.begin()
		began := time.Now()
		if stall > 0 {
			time.Sleep(stall / 2)
			if err := s.Pause(); err != nil {
				return nil, err
			}
			time.Sleep(stall)
			err := s.Resume()
			t.resume()
			if err != nil {
				return nil, err
			}
		}
		for enough := false; !enough; time.Sleep(time.Millisecond) {
			acquired, changes := t.count()
			past := time.Since(began)
			enough = past >= lasts && (acquired >= 10*c.Waiters || past >= 3*lasts) && (changes > 0 || past >= patience)
		}
		elapsed := time.Since(began)
		after, err := s.requests(ctx)
		if err != nil {
			return nil, err
		}
		v, err = t.end(elapsed, after-before)
		cancel()
		all.Wait()
		if err := errors.Join(append(errs, err)...); err != nil {
			return nil, err
		}
		if stall > 0 {
			return values{"errors": v["errors"], "recovery ms": v["recovery ms"],
				"longest wait over stall ms": v["longest wait ms"] - milli(stall)}, nil
		}
		delete(v, "errors")
		delete(v, "recovery ms")
		return v, nil
	}
}

// draining lets waiters queue up for a lock that is held, and then take it once each and give it back at once.
func draining(d drain) func(context.Context, *server, subject, time.Duration) (values, error) {
	return func(ctx context.Context, s *server, of subject, ttl time.Duration) (v values, err error) {
		clients, closeAll, err := open(ctx, s, of, ttl, 4)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, closeAll()) }()
		once := func() (time.Duration, error) {
			h, err := clients[0].lock(ctx, "drain")
			if err != nil {
				return 0, fmt.Errorf("lock: %w", err)
			}
			errs := make([]error, d.Waiters)
			var seen witness
			var all sync.WaitGroup
			for w := range d.Waiters {
				all.Go(func() {
					errs[w] = pair(ctx, clients[w%len(clients)], of, "drain", &seen)
				})
			}
			time.Sleep(200 * time.Millisecond) // all have asked by then; who asks later waits for less
			began := time.Now()
			err = h.unlock(ctx)
			all.Wait()
			return time.Since(began), errors.Join(append(errs, err)...)
		}
		if _, err := once(); err != nil { // connections and scripts
			return nil, err
		}
		took := time.Duration(0)
		for range d.Times {
			t, err := once()
			if err != nil {
				return nil, err
			}
			took += t
		}
		return values{"handovers/s": float64(d.Times*d.Waiters) / took.Seconds()}, nil
	}
}

// minority lets goroutines lock and unlock a name of their own each, first with all servers and then for as long with
// the first one stopped.
func minority(goroutines int, lasts time.Duration) func(context.Context, *server, subject, time.Duration) (values, error) {
	return func(ctx context.Context, s *server, of subject, ttl time.Duration) (v values, err error) {
		clients, closeAll, err := open(ctx, s, of, ttl, 1)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, closeAll()) }()
		const warm, before, stopped, over = 0, 1, 2, 3
		var (
			phase  atomic.Int32
			mu     sync.Mutex
			pairs  [over + 1]int // by the phase in which they ended
			failed int
			slow   time.Duration // the slowest lock or unlock that a stopped server can have met
			all    sync.WaitGroup
			broken = make([]error, goroutines)
		)
		for g := range goroutines {
			all.Go(func() {
				var seen witness
				for phase.Load() != over {
					began := time.Now()
					h, err := clients[0].lock(ctx, "minority/"+strconv.Itoa(g))
					longest := time.Since(began)
					if err == nil {
						broken[g] = errors.Join(broken[g], seen.enter(of, h), seen.leave(h))
						began = time.Now()
						err = h.unlock(ctx)
						longest = max(longest, time.Since(began))
					}
					ended := phase.Load()
					mu.Lock()
					if err == nil {
						pairs[ended]++
					} else {
						failed++
					}
					if ended >= stopped {
						slow = max(slow, longest)
					}
					mu.Unlock()
				}
			})
		}
		time.Sleep(lasts / 4)
		phase.Store(before)
		began := time.Now()
		for enough := false; !enough; time.Sleep(time.Millisecond) {
			mu.Lock()
			some := pairs[before] > 0
			mu.Unlock()
			enough = time.Since(began) >= lasts && (some || time.Since(began) >= patience)
		}
		took := time.Since(began)
		err = s.Pause()
		phase.Store(stopped)
		if err == nil {
			time.Sleep(lasts)
			phase.Store(over)
			err = s.Resume()
		}
		phase.Store(over)
		all.Wait()
		if err := errors.Join(append(broken, err)...); err != nil {
			return nil, err
		}
		if pairs[before] == 0 {
			return nil, errors.New("pairs before the stop: got 0, want some")
		}
		return values{"throughput kept": float64(pairs[stopped]) / lasts.Seconds() / (float64(pairs[before]) / took.Seconds()), "errors": float64(failed),
			"longest step ms": milli(slow)}, nil
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
		if err := pair(ctx, clients[0], of, "held/warm", new(witness)); err != nil {
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
		before, err := s.requests(ctx)
		if err != nil {
			return nil, err
		}
		began, cpu := time.Now(), cpuTime()
		time.Sleep(lasts)
		cpu, elapsed := cpuTime()-cpu, time.Since(began)
		after, err := s.requests(ctx)
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
			"requests/s": (after - before) / elapsed.Seconds(), "requests/interval": (after - before) * (ttl / 3).Seconds() / elapsed.Seconds()}, nil
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
