package migrate_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/history"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/conformance/worker"
	"github.com/fencelock/fencelock/driver"
	_ "github.com/fencelock/fencelock/driver/etcd"
	_ "github.com/fencelock/fencelock/driver/file"
	_ "github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/driver/migrate"
	_ "github.com/fencelock/fencelock/driver/postgres"
	_ "github.com/fencelock/fencelock/driver/redlock"
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/guard/httpguard"
	"github.com/fencelock/fencelock/internal/lateness"
)

var (
	proofSeed   = flag.Uint64("migrate.seed", 0, "of TestRollingMigration; 0 takes a new one")
	proofRounds = flag.Int("migrate.rounds", 1, "how often TestRollingMigration goes forth and back")
)

// site is a backend with what can be done to it.
type site struct {
	url     string
	restart func() error // SIGKILL and start; nil if there is no server
}

// sites start a backend of each kind. What one acknowledged it must know after a restart; the machine's own end is
// no part of this.
var sites = map[string]func(t *testing.T) site{
	"file": func(t *testing.T) site { return site{url: "file://" + t.TempDir()} },
	"goredis": func(t *testing.T) site {
		s, err := servers.StartRedis(t.Context(), &servers.RedisOptions{AppendFsync: "always"})
		return site{url: "redis://" + proofServer(t, s, err).Addr(), restart: restarting(t, s)}
	},
	"redlock": func(t *testing.T) site {
		var nodes []*servers.Redis
		var addrs []string
		for range 5 {
			s, err := servers.StartRedis(t.Context(), &servers.RedisOptions{AppendFsync: "always"})
			nodes, addrs = append(nodes, proofServer(t, s, err)), append(addrs, s.Addr())
		}
		return site{url: "redlock://" + strings.Join(addrs, ","), restart: restarting(t, nodes[0])}
	},
	"etcd": func(t *testing.T) site {
		s, err := servers.StartEtcd(t.Context(), &servers.EtcdOptions{Binary: os.Getenv("FENCELOCK_ETCD"), Args: []string{"--unsafe-no-fsync"}})
		return site{url: "etcd://" + proofServer(t, s, err).Addr(), restart: restarting(t, s)}
	},
	"postgres": func(t *testing.T) site {
		s, err := servers.StartPostgres(t.Context(), &servers.PostgresOptions{Args: []string{"-c", "max_connections=400", "-c", "fsync=off"}})
		proofServer(t, s, err)
		return site{url: s.URL(), restart: restarting(t, s)}
	},
}

func proofServer[S servers.Server](t *testing.T, s S, err error) S {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func restarting(t *testing.T, s servers.Server) func() error {
	return func() error {
		if err := s.Kill(); err != nil {
			return err
		}
		return s.Start(t.Context())
	}
}

// TestRollingMigration restarts twelve processes one after another in the next phase, to the new backend and back,
// while they all work on the same names, while some are killed and stopped, and each server is restarted. It judges the
// history of the whole run, over both backends.
func TestRollingMigration(t *testing.T) {
	for _, pair := range [][2]string{{"goredis", "etcd"}, {"goredis", "postgres"}, {"redlock", "etcd"}, {"file", "goredis"}} {
		t.Run(pair[0]+"To"+pair[1], func(t *testing.T) { testRollingMigration(t, sites[pair[0]](t), sites[pair[1]](t)) })
	}
}

const (
	proofWorkers = 12
	proofTTL     = 5 * time.Second
	// phaseTTL is how long a process that was killed holds up a step.
	proofPhaseTTL = 6 * time.Second

	faultKill, faultStop           = "process killed", "process stopped past its TTL"
	faultOldServer, faultNewServer = "old server restarted", "new server restarted"
)

func testRollingMigration(t *testing.T, from, to site) {
	seed := *proofSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d", seed)
	p := &proof{t: t, from: from, to: to, random: rand.New(rand.NewPCG(seed, 0)), rec: history.NewRecorder("test", nil)}
	p.ctx, p.cancel = context.WithCancel(t.Context())
	p.machine = lateness.Measure()
	t.Cleanup(func() { p.machine() })
	guarded := httptest.NewServer(&httpguard.Handler{Guard: &p.guard, Next: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		token, _ := httpguard.FromContext(r.Context())
		p.rec.Write(r.URL.Path, uint64(token), time.Time{}, true)
		p.writes.Add(1)
	})})
	t.Cleanup(guarded.Close)
	t.Cleanup(p.end)
	p.load = worker.Load{
		Seed: seed, Goroutines: 2, Attempts: 1 << 30, For: time.Hour, TTL: proofTTL, Hold: 60 * time.Millisecond,
		Unit: time.Second, WaitFor: 4 * proofTTL, Guard: guarded.URL,
	}
	for i := range 20 {
		p.load.Locks = append(p.load.Locks, fmt.Sprintf("lock-%d", i))
	}
	for i := range 5 {
		p.load.Permits = append(p.load.Permits, worker.Permits{Name: fmt.Sprintf("semaphore-%d", i), Limits: []int{1 + i}})
	}
	for range proofWorkers {
		p.workers = append(p.workers, p.start(migrate.From))
	}
	p.work(50)
	for range *proofRounds {
		p.step(migrate.Advance, migrate.Both, p.kill, p.restart(faultOldServer, from))
		p.step(migrate.Advance, migrate.To, p.stop, p.restart(faultNewServer, to))
		p.step(migrate.Rollback, migrate.Both, p.stop, p.kill)
		p.step(migrate.Rollback, migrate.From, p.kill)
	}
	p.work(50)
	p.end()
	p.judge()
}

type proof struct {
	t        *testing.T
	ctx      context.Context // of the loads
	cancel   context.CancelFunc
	from, to site
	random   *rand.Rand
	rec      *history.Recorder // of faults and of writes
	guard    guard.Guard
	writes   atomic.Int64 // that it admitted
	load     worker.Load

	workers, gone []*worker.Worker
	loads         sync.WaitGroup
	outage        time.Duration        // the longest of a server
	machine       func() time.Duration // see lateness.Measure
}

// start starts a process in the phase.
func (p *proof) start(phase migrate.Phase) *worker.Worker {
	p.t.Helper()
	q := url.Values{"from": {p.from.url}, "to": {p.to.url}, "phase": {string(phase)}, "phase_ttl": {proofPhaseTTL.String()}}
	n := len(p.workers) + len(p.gone)
	o := worker.Options{
		URL: "migrate://?" + q.Encode(), Process: fmt.Sprintf("process %d in %s", n, phase),
		RequestTimeout: proofTTL / 2, Longer: true,
	}
	// As whatever supervises processes does with one that does not reach its backend while the machine is busy.
	w, err := worker.Start(p.ctx, o)
	for deadline := time.Now().Add(time.Minute); err != nil && time.Now().Before(deadline); w, err = worker.Start(p.ctx, o) {
		p.t.Logf("start again: %v", err)
	}
	if err != nil {
		p.t.Fatalf("process in phase %s: got %v, want it to start", phase, err)
	}
	l := p.load
	l.Seed += uint64(n) << 32
	p.loads.Go(func() { _ = w.Run(p.ctx, l) }) // judge looks at what it did
	return w
}

// step takes a step of the migration, with faults on the way.
func (p *proof) step(move func(context.Context, driver.Driver, driver.Driver) (migrate.Phase, error), want migrate.Phase, faults ...func(migrate.Phase)) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, 2*time.Minute)
	defer cancel()
	from, err := driver.Open(ctx, p.from.url)
	if err != nil {
		p.t.Fatal(err)
	}
	defer from.Close()
	to, err := driver.Open(ctx, p.to.url)
	if err != nil {
		p.t.Fatal(err)
	}
	defer to.Close()
	if got, err := move(ctx, from, to); got != want || err != nil {
		p.t.Fatalf("step to phase %s: got %s, %v", want, got, err)
	}
	order := p.random.Perm(proofWorkers)
	for i, k := range order {
		old := p.workers[k]
		if err := old.Close(); err != nil {
			p.t.Errorf("restart: got %v, want an orderly end", err)
		}
		p.gone = append(p.gone, old)
		p.workers = slices.Delete(p.workers, k, k+1)
		p.workers = slices.Insert(p.workers, k, p.start(want))
		if n := len(faults); i%(proofWorkers/(n+1)) == proofWorkers/(n+1)-1 && i/(proofWorkers/(n+1)) < n {
			faults[i/(proofWorkers/(n+1))](want)
		}
	}
}

// work waits until holders have written so often more.
func (p *proof) work(more int64) {
	p.t.Helper()
	goal := p.writes.Load() + more
	for deadline := time.Now().Add(time.Minute); p.writes.Load() < goal; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			p.t.Fatalf("work: got %d writes within a minute, want %d", p.writes.Load()+more-goal, more)
		}
	}
}

// holder answers the index of a process that holds, as far as is known.
func (p *proof) holder() int {
	for {
		for _, k := range p.random.Perm(proofWorkers) {
			if holding(p.workers[k]) {
				return k
			}
		}
		time.Sleep(time.Millisecond)
	}
}

func holding(w *worker.Worker) bool {
	open := map[uint64]bool{}
	for _, e := range w.History() {
		switch e.Type {
		case history.Acquired:
			open[e.Attempt] = true
		case history.ReleaseCalled, history.LossTold:
			delete(open, e.Attempt)
		}
	}
	return len(open) > 0
}

// kill kills a process, and another one takes its place, in the phase that it was in or the next.
func (p *proof) kill(phase migrate.Phase) {
	p.t.Helper()
	k := p.holder()
	w := p.workers[k]
	p.rec.FaultBegin(faultKill)
	if err := w.Kill(); err != nil {
		p.t.Fatal(err)
	}
	p.rec.FaultHit(faultKill)
	p.gone = append(p.gone, w)
	p.workers = slices.Delete(p.workers, k, k+1)
	p.workers = slices.Insert(p.workers, k, p.start(phase))
	p.work(20)
	p.rec.FaultEnd(faultKill)
}

// stop stops a process for longer than its leases live.
func (p *proof) stop(migrate.Phase) {
	p.t.Helper()
	w := p.workers[p.holder()]
	p.rec.FaultBegin(faultStop)
	if err := w.PauseBetween(); err != nil {
		p.t.Fatal(err)
	}
	p.rec.FaultHit(faultStop)
	time.Sleep(proofTTL + time.Second)
	p.work(20)
	if err := w.Resume(); err != nil {
		p.t.Fatal(err)
	}
	p.rec.FaultEnd(faultStop)
}

// restart kills and starts a server.
func (p *proof) restart(fault string, s site) func(migrate.Phase) {
	return func(migrate.Phase) {
		p.t.Helper()
		if s.restart == nil {
			return
		}
		p.rec.FaultBegin(fault)
		began := time.Now()
		if err := s.restart(); err != nil {
			p.t.Fatal(err)
		}
		p.outage = max(p.outage, time.Since(began))
		p.rec.FaultHit(fault)
		p.work(20)
		p.rec.FaultEnd(fault)
	}
}

// end ends all processes. It may be called again.
func (p *proof) end() {
	p.cancel()
	for _, w := range p.workers {
		if err := w.Close(); err != nil {
			p.t.Errorf("worker: got %v, want an orderly end", err)
		}
	}
	p.loads.Wait()
}

func (p *proof) judge() {
	t := p.t
	t.Helper()
	parts := []history.History{p.rec.History()}
	for _, w := range slices.Concat(p.workers, p.gone) {
		parts = append(parts, w.History())
	}
	h := history.Merge(parts...)
	met := func(name string, hits int) history.FaultRule {
		return history.FaultRule{Name: name, Hits: hits, AcquiredBefore: 50, AttemptsDuring: 10, AcquiredAfter: 20}
	}
	rules := history.Rules{
		// L2 is for the suite to measure, on a machine that does less.
		LossTolerance: 10 * time.Second,
		MinAcquired:   1000, MinContended: 50,
		Faults: []history.FaultRule{met(faultKill, 3), met(faultStop, 2)},
	}
	for fault, s := range map[string]site{faultOldServer: p.from, faultNewServer: p.to} {
		if s.restart != nil {
			rules.Faults = append(rules.Faults, met(fault, 1))
		}
	}
	report := history.Check(h, rules)
	if err := report.Err(); err != nil {
		t.Errorf("history of the migration: got\n%v\nwant no violation", err)
	}
	writes := p.writes.Load()
	if writes < 500 {
		t.Errorf("void: %d guarded writes, want hundreds", writes)
	}
	gap, refused := gaps(h)
	t.Logf("%d acquisitions checked, %d attempts refused, %d failed, %d writes admitted in order and %d refused; longest gap in service %v, longest time "+
		"a process got nothing but errors %v, servers down for %v", report.Acquired, report.Refused, report.Failed, writes, len(p.guard.Refused()),
		gap, refused, p.outage)
	// A request goes through several processes, each of which may have to wait for a processor.
	machine := p.machine()
	t.Logf("a timer was up to %v late", machine)
	if limit := proofTTL + p.outage + 20*machine; gap > limit || refused > limit {
		t.Errorf("service: got a gap of %v, and a process that got nothing but errors for %v, want at most one TTL and the time a server was down, %v (W3)",
			gap, refused, limit)
	}
}

// gaps answers the longest time between two acquisitions of whatever process, and the longest for which the backends
// refused all requests of a process that was not stopped.
func gaps(h history.History) (service, refused time.Duration) {
	last := int64(0)
	since := map[string]int64{} // the first failure of a process after which nothing went well
	for _, e := range h {
		switch {
		case e.Type == history.Acquired:
			if last > 0 {
				service = max(service, time.Duration(e.T-last))
			}
			last = e.T
			delete(since, e.Process)
		case e.Type == history.Refused, e.Type == history.ProcessStopped, e.Type == history.ProcessContinued, e.Type == history.ProcessEnded:
			delete(since, e.Process)
		case e.Type == history.Failed && (e.Result == history.Unavailable || e.Result == history.Uncertain || e.Result == history.Other):
			if since[e.Process] == 0 {
				since[e.Process] = e.T
			}
			refused = max(refused, time.Duration(e.T-since[e.Process]))
		}
	}
	return service, refused
}
