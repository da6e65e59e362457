package lab

import (
	"context"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/history"
	"github.com/fencelock/fencelock/driver"
	_ "github.com/fencelock/fencelock/driver/etcd"
	_ "github.com/fencelock/fencelock/driver/file"
	_ "github.com/fencelock/fencelock/driver/goredis"
	_ "github.com/fencelock/fencelock/driver/memory"
	_ "github.com/fencelock/fencelock/driver/postgres"
	_ "github.com/fencelock/fencelock/driver/redlock"
	"github.com/fencelock/fencelock/guard"
)

func TestMain(m *testing.M) {
	for _, b := range brokenDrivers {
		driver.Register(b.scheme, func(ctx context.Context, u *url.URL) (driver.Driver, error) {
			inner, err := driver.Open(ctx, u.Query().Get("of"))
			if err != nil {
				return nil, err
			}
			b.Driver, b.began = inner, time.Now()
			return &b, nil
		})
	}
	Code("no guard", func(context.Context, string, fencelock.Token) error { return nil })
	Code("guard", func(_ context.Context, resource string, t fencelock.Token) error { return guardInFile(resource, t) })
	Main()
	dir, err := os.MkdirTemp("", "fencelock-lab")
	if err != nil {
		panic(err)
	}
	os.Setenv(marksEnv, dir) // workers inherit it
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// marksEnv is where guardInFile keeps its marks.
const marksEnv = "FENCELOCK_LAB_MARKS"

// run makes a run; one in which most lanes are void is made again, a few times.
func run(t *testing.T, b *Backend, sc *Scenario, o Options) *Result {
	t.Helper()
	for _, o.Lanes = range []int{3, 3, 3, 20} {
		r, err := Run(t.Context(), b, sc, &o)
		if err != nil {
			t.Fatalf("%s on %s: %v", sc.Name, b.Name, err)
		}
		if few := o.Lanes == 3 && len(r.Unexpected) == 1 && strings.HasPrefix(r.Unexpected[0], "no lane showed"); few {
			t.Logf("%s on %s: seed %d: %s", sc.Name, b.Name, r.Seed, r.Unexpected[0]) // what may happen need not in so few
			continue
		}
		if 2*r.Valid() >= len(r.Lanes) {
			t.Logf("%s on %s: seed %d, %d lanes count, findings %v", sc.Name, b.Name, r.Seed, r.Valid(), r.Lanes[0].Findings)
			return r
		}
		t.Logf("%s on %s: seed %d, void: %s", sc.Name, b.Name, r.Seed, r.void())
	}
	t.Fatalf("%s on %s: most lanes of four runs are void", sc.Name, b.Name)
	return nil
}

// TestScenarios makes some of the runs of fencelock compare: those that show what a lock alone cannot do, and those that
// show what a backend can. Each is as expected, or a scenario or a driver is wrong.
func TestScenarios(t *testing.T) {
	t.Parallel()
	cells := map[*Backend][]*Scenario{
		Memory:        {HolderHangs, HolderClockBack},
		File:          {HolderPaused, HolderHangs, HolderKilled, HolderClockAhead},
		Redis:         {HolderPaused, HolderClockBack, Flushed, GrantLost},
		RedisSentinel: {ReplicaPromoted},
		Redlock:       {HolderPaused, HolderClockAhead, ClockAhead, NodeEmptied, NodeEmptiedNewcomer, TwoPaused},
		Etcd:          {HolderPaused, HolderClockAhead, RequestsLost, MinorityCut},
		Postgres:      {HolderPaused, HolderClockBack, StandbyPromoted},
	}
	for b, scenarios := range cells {
		for _, sc := range scenarios {
			t.Run(sc.Name+"/"+b.Name, func(t *testing.T) {
				t.Parallel()
				r := run(t, b, sc, Options{})
				if err := r.Err(); err != nil {
					t.Errorf("not as expected: %v", err)
				}
			})
		}
	}
}

// TestRepeatable: the same seed gives the same moments.
func TestRepeatable(t *testing.T) {
	t.Parallel()
	r := run(t, File, HolderKilled, Options{Seed: 7})
	if r.Seed != 7 {
		t.Errorf("seed: got %d, want 7", r.Seed)
	}
}

// TestCode: code without a guard lets stale writes through, code with one does not.
func TestCode(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]bool{"no guard": true, "guard": false} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			r := run(t, File, HolderPaused, Options{Code: code})
			if got := r.StaleWrites() > 0; got != want {
				t.Errorf("stale writes by code with %s: got %d, want some %v", code, r.StaleWrites(), want)
			}
		})
	}
}

// guardInFile is a resource that processes share: the mark is the name of the greatest file in a directory.
func guardInFile(resource string, t fencelock.Token) error {
	dir := filepath.Join(os.Getenv(marksEnv), resource)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	seen, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if len(seen) > 0 && slices.MaxFunc(seen, func(a, b os.DirEntry) int { return strings.Compare(a.Name(), b.Name()) }).Name() > t.String() {
		return guard.Stale(resource)
	}
	return os.WriteFile(dir+"/"+t.String(), nil, 0o600)
}

// brokenDrivers do one thing wrong each, as a fault of a driver would.
var brokenDrivers = []broken{
	{scheme: "broken-ttl", ttl: 0.5, in: HolderPaused, shows: Overlap},
	{scheme: "broken-token", ttl: 1, token: 41, in: HolderPaused, shows: Disorder},
	{scheme: "broken-clock-ahead", ttl: 1, wall: time.Hour, in: HolderClockAhead, shows: EarlyLoss},
	{scheme: "broken-clock-back", ttl: 1, wall: -time.Hour, in: HolderClockBack, shows: EarlyLoss},
}

// broken tells another TTL or token than the server has granted, or that a lease is gone.
type broken struct {
	driver.Driver
	scheme string
	ttl    float64 // what part of the TTL the server is asked for
	token  driver.Token
	wall   time.Duration // a step of the client's wall clock that ends leases
	began  time.Time
	in     *Scenario
	shows  Finding
}

func (b *broken) part(ttl time.Duration) time.Duration { return time.Duration(float64(ttl) * b.ttl) }

// stepped says whether the wall clock has been stepped by as much as ends leases.
func (b *broken) stepped() bool {
	now := time.Now()
	step := now.Round(0).Sub(b.began.Round(0)) - now.Sub(b.began)
	return b.wall > 0 && step > b.wall || b.wall < 0 && step < b.wall
}

func (b *broken) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	asked := r.TTL
	r.TTL = b.part(r.TTL)
	r.Wait = false // no queue, so that each grant comes from here
	a, err := b.Driver.Lock(ctx, r)
	if a.State == driver.Granted {
		a.TTL = asked
		if b.token > 0 {
			a.Token = b.token
		}
	}
	return a, err
}

func (b *broken) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	asked := slices.Clone(leases)
	for i := range asked {
		asked[i].TTL = b.part(asked[i].TTL)
	}
	results := b.Driver.Extend(ctx, asked)
	for i := range results {
		if results[i].State == driver.Granted {
			results[i].TTL = leases[i].TTL
			if b.stepped() {
				results[i].State = driver.Gone
			}
		}
	}
	return results
}

// TestBroken: a driver that is broken on purpose lights up.
func TestBroken(t *testing.T) {
	t.Parallel()
	for _, b := range brokenDrivers {
		t.Run(b.scheme, func(t *testing.T) {
			t.Parallel()
			backend := &Backend{Name: b.scheme, TTL: Redis.TTL, start: func(ctx context.Context) (*system, error) {
				s, err := startRedis(ctx)
				if err != nil {
					return nil, err
				}
				inner := s.url
				s.url = func(addrs []string) string { return b.scheme + "://x?of=" + url.QueryEscape(inner(addrs)) }
				return s, nil
			}}
			r := run(t, backend, b.in, Options{})
			if r.With(b.shows) == 0 || len(r.Unexpected) == 0 {
				t.Errorf("%s: got findings %v and %d unexpected, want %s", b.scheme, r.Lanes[0].Findings, len(r.Unexpected), b.shows)
			}
		})
	}
}

// nobody is a backend without a driver.
var nobody = &Backend{Name: "nobody", TTL: File.TTL, start: func(context.Context) (*system, error) {
	return &system{url: func([]string) string { return "nobody://x" }, close: func() error { return nil }}, nil
}}

// TestPlanGoesOn: a run that cannot be made leaves the others, and is told.
func TestPlanGoesOn(t *testing.T) {
	t.Parallel()
	p := &Plan{Backends: []*Backend{nobody, File}, Scenarios: []*Scenario{HolderKilled}, Options: Options{Lanes: 1}}
	r, err := p.Do(t.Context())
	if err == nil || !strings.Contains(err.Error(), "nobody") {
		t.Errorf("plan with a backend that has no driver: got %v, want an error that names it", err)
	}
	if len(r.Results) != 1 || r.Results[0].Backend != File.Name {
		t.Errorf("plan with a backend that has no driver: got %d results, want that of file", len(r.Results))
	}
}

// TestNothingProven: a run that shows nothing says so.
func TestNothingProven(t *testing.T) {
	t.Parallel()
	if _, err := Run(t.Context(), File, HolderPaused, &Options{Code: "forgotten"}); err == nil || !strings.Contains(err.Error(), "forgotten") {
		t.Errorf("Run with code that nobody made known: got %v, want an error that names it", err)
	}
	if _, err := Run(t.Context(), nobody, HolderKilled, nil); err == nil || !strings.Contains(err.Error(), "nobody") {
		t.Errorf("Run without the driver: got %v, want an error that names it", err)
	}
	void := &Result{Backend: "x", Lanes: []*Lane{{Void: "the fault did not hit"}}}
	if err := void.Err(); err == nil || !strings.Contains(err.Error(), "the fault did not hit") {
		t.Errorf("Err without a lane that counts: got %v, want why", err)
	}
}

// TestCrash: a process that ends by itself is found, and so are too many lanes that show nothing, as where nobody gets the lock.
func TestCrash(t *testing.T) {
	t.Parallel()
	at := func(t history.Type, who string, n int64) history.Event {
		return history.Event{T: n, Type: t, Process: who, Kind: history.Lock, Attempt: 1, TTL: time.Second, Token: 1, V: n + int64(time.Second)}
	}
	l := &lane{name: "lane-1"}
	h := history.History{at(history.Started, l.process(holder), 1), at(history.Acquired, l.process(holder), 2),
		{T: 3, Type: history.FaultBegin, Fault: HolderKilled.Name}, {T: 4, Type: history.FaultHit, Fault: l.name}}
	stuck := judge(l, h, &doubles{}, HolderKilled, lossTolerance)
	if !strings.Contains(stuck.Void, "did not get the lock") {
		t.Errorf("a rival that does not get the lock: got void %q, want that said", stuck.Void)
	}
	r := &Result{Backend: File.Name, Lanes: []*Lane{stuck, stuck, {}}}
	if r.compare(HolderKilled); r.Err() == nil || !strings.Contains(r.Err().Error(), "did not get the lock") {
		t.Errorf("Err if one of three lanes counts: got %v, want why", r.Err())
	}
	l.crash = errors.New("panic: x")
	if got := judge(l, h, &doubles{}, HolderKilled, lossTolerance); got.Void != "" || got.Findings[Crash] != 1 || got.Report != "panic: x" {
		t.Errorf("a process that ended by itself: got findings %v, void %q and %q, want %s and why", got.Findings, got.Void, got.Report, Crash)
	}
	r = &Result{Backend: File.Name, Lanes: []*Lane{judge(l, h, &doubles{}, HolderKilled, lossTolerance)}}
	if r.compare(HolderKilled); r.Err() == nil {
		t.Error("Err of it: got nil, want an error")
	}
}

func TestBadOptions(t *testing.T) {
	t.Parallel()
	if _, err := Run(t.Context(), File, HolderPaused, &Options{Lanes: -1}); err == nil || !strings.Contains(err.Error(), "Lanes -1") {
		t.Errorf("Run with Lanes -1: got %v, want an error that says so", err)
	}
	if _, err := Run(t.Context(), File, ServerPaused, nil); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), noServers) {
		t.Errorf("Run of server-paused on file: got %v, want ErrUnsupported and %s", err, noServers)
	}
}
