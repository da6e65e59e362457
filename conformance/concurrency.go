package conformance

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/history"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/conformance/worker"
	"github.com/fencelock/fencelock/driver"
)

// The tests of this group let a crowd loose on a few names, disturb it, and judge what it has recorded.
var concurrencyTests = []test{
	{name: "Quiet", run: quietRun, limit: crowdLimit},
	{name: "HoldersStopped", run: holdersStopped, needs: []Need{URL}, limit: crowdLimit},
	{name: "StoppedAnywhere", run: stoppedAnywhere, needs: []Need{URL}, limit: crowdLimit},
	{name: "HoldersKilled", run: holdersKilled, needs: []Need{URL}, limit: crowdLimit},
	{name: "ServerPaused", run: serverPaused, needs: []Need{Server}, limit: crowdLimit},
	{name: "WireHeld", run: wireHeld, needs: []Need{Wired}, limit: crowdLimit},
	{name: "WireDropped", run: wireDropped, needs: []Need{Wired}, limit: crowdLimit},
	{name: "WireReset", run: wireReset, needs: []Need{Wired}, limit: crowdLimit},
}

// crowdLimit allows for repetitions on a slow machine.
const crowdLimit = 4 * time.Minute

// A run in which the fault hit nothing, or the traffic was too thin, is void: it is tried again with
// another seed, and the test fails if none of these runs was better.
const runs = 3

// seedVariable names the environment variable that gives the seed of the first run. It repeats what each
// goroutine does, not when.
const seedVariable = "FENCELOCK_SEED"

// crowd is many goroutines on several clients, some of them in processes of their own.
type crowd struct {
	t    *T
	name string // begins the names that are locked
	seed uint64
	load worker.Load
	// timeout is the request timeout of all clients: short, so that faults are felt, except in a quiet run.
	timeout time.Duration
	longer  bool // see grantsLonger
	rec     *history.Recorder

	ctx     context.Context
	stop    context.CancelFunc
	loads   sync.WaitGroup
	clients []*worker.Recorded
	parties int // clients and workers that ever took part
	wires   []Wire

	workers []*worker.Worker // that live
	gone    []*worker.Worker
}

// plan is a run.
type plan struct {
	rules history.Rules
	// workers is how many processes take part, if the backend has a URL.
	workers int
	// wired is how many of the clients are wired.
	wired int
	// disturb does what is to happen while the crowd is at work. It may fail the test.
	disturb func(c *crowd)
	// hits answers the moments at which the fault met something, from the whole history.
	hits func(c *crowd, h history.History) []int64
	// fault is the name of the fault; empty for a quiet run.
	fault string
	// outage says that nobody need get anything while the fault lasts.
	outage bool
}

// checkedRun carries out a plan.
func (t *T) checkedRun(p plan) {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv(seedVariable); s != "" {
		given, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatalf("%s: got %q, want a number", seedVariable, s)
		}
		seed = given
	}
	var void []string
	for n := range runs {
		reason := t.oneRun(p, n, seed+uint64(n))
		if reason == "" {
			return
		}
		t.Logf("run with seed %d: %s", seed+uint64(n), reason)
		void = append(void, reason)
	}
	t.Fatalf("%d runs: all were void, want one that shows something\n%s", runs, strings.Join(void, "\n"))
}

// oneRun answers why the run was void, if it was.
func (t *T) oneRun(p plan, n int, seed uint64) string {
	t.Helper()
	t.Logf("seed %d", seed)
	c := t.newCrowd(fmt.Sprintf("%s/%d", t.key(), n), seed)
	if p.fault == "" {
		c.timeout = requestTimeout
	}
	machine := t.pulse()
	for i := range 3 {
		if i < p.wired {
			d, wire := t.Wired(t.TB)
			c.wire(d, wire)
		} else {
			c.start(t.client(fencelock.WithRequestTimeout(c.timeout)), fmt.Sprintf("client %d", i))
		}
	}
	if t.URL != "" {
		for range p.workers {
			c.startWorker()
		}
	}
	p.disturb(c)
	h := c.end()
	for _, at := range c.hits(p, h) {
		h = append(h, history.Event{T: at, Type: history.FaultHit, Fault: p.fault})
	}
	late := machine.end()
	rules := p.rules
	rules.LossTolerance = 50*time.Millisecond + 2*late
	rep := history.Check(h, rules)
	t.Logf("%v; timers of this machine were up to %v late", rep, late)
	if rep.Verdict() == history.Fail {
		t.Fatalf("run with seed %d: got\n%v\nwant no violation", seed, rep)
	}
	c.usable()
	if s := stalled(h, p, c.longest()+slack+2*late); s != "" {
		t.Fatalf("run with seed %d: %s", seed, s)
	}
	if rep.Verdict() == history.Void {
		return strings.Join(rep.Void, "; ")
	}
	if p.fault == "" {
		return c.quiet(h)
	}
	return ""
}

func (t *T) newCrowd(name string, seed uint64) *crowd {
	c := &crowd{t: t, name: name, seed: seed, longer: t.grantsLonger(), rec: history.NewRecorder("here", nil)}
	c.ctx, c.stop = context.WithCancel(t.Context())
	d := t.driver()
	c.load = worker.Load{
		Goroutines: 3, Attempts: 1 << 20, For: time.Hour,
		Locks:   []string{name + "/a", name + "/b"},
		Tokens:  has[driver.FencingSource](d),
		TTL:     t.ttl(time.Second),
		Hold:    10 * time.Millisecond,
		Unit:    t.Unit,
		Short:   t.ttl(200 * time.Millisecond),
		WaitFor: patience / 2,
	}
	c.timeout = c.load.TTL / 3
	if has[driver.Semaphore](d) {
		c.load.Permits = []worker.Permits{
			{Name: name + "/mixed", Limits: []int{1, 2, 3}},
			{Name: name + "/four", Limits: []int{4}},
		}
	}
	return c
}

// start lets a client take part.
func (c *crowd) start(client *fencelock.Client, name string) {
	r := worker.Record(client, name, c.rec, c.longer)
	c.clients = append(c.clients, r)
	l := c.nextLoad()
	c.loads.Go(func() { l.Run(c.ctx, r) })
}

func (c *crowd) nextLoad() worker.Load {
	l := c.load
	l.Seed = c.seed + uint64(c.parties)<<32
	c.parties++
	return l
}

// startWorker lets another process take part.
func (c *crowd) startWorker() {
	t := c.t
	t.Helper()
	name := fmt.Sprintf("process %d", len(c.workers)+len(c.gone))
	w := t.worker(name, c.timeout)
	c.workers = append(c.workers, w)
	l := c.nextLoad()
	c.loads.Go(func() { _ = w.Run(c.ctx, l) }) // of how it ends c.end judges
}

// worker starts a process on this backend, closed at the end of the test.
func (t *T) worker(process string, timeout time.Duration) *worker.Worker {
	t.Helper()
	return t.workerOf(worker.Options{Process: process, RequestTimeout: timeout})
}

// workerOf is worker with more options.
func (t *T) workerOf(o worker.Options) *worker.Worker {
	t.Helper()
	o.URL, o.Longer = t.URL, t.grantsLonger()
	w, err := worker.Start(t.Context(), o)
	if err != nil {
		t.Fatalf("worker: got %v, want it to start", err)
	}
	tb := t.TB
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			tb.Errorf("worker: got %v, want an orderly end", err)
		}
	})
	return w
}

// granted is the TTL that the backend grants when it is asked for one: that, or more.
func (t *T) granted(ttl time.Duration) time.Duration {
	t.Helper()
	d := t.driver()
	r := t.request(t.key()+"/probe", ttl)
	r.Name.Name += r.ID
	a := t.ask(d, r)
	t.give(d, r.Owner, true, "of the holder", "L7")
	return a.TTL
}

// grantsLonger says that the backend grants more than it is asked for, so that nothing can be said of V by what
// was asked for.
func (t *T) grantsLonger() bool { return t.granted(t.long()) > t.long() }

// longest is how long a lease of the load can live without its holder.
func (c *crowd) longest() time.Duration { return c.t.ttl(c.load.TTL * 3 / 2) }

// work lets the crowd work for that long, and until it has acquired that much more.
func (c *crowd) work(d time.Duration, acquisitions int) {
	t := c.t
	t.Helper()
	want := c.acquired() + acquisitions
	pause(d)
	for deadline := time.Now().Add(patience); c.acquired() < want && time.Now().Before(deadline); {
		pause(20 * time.Millisecond)
	}
}

func (c *crowd) acquired() (n int) {
	for _, r := range c.clients {
		n += r.Taken()
	}
	return n
}

// pause is the time that a fault lasts, or that traffic is let run.
func pause(d time.Duration) { time.Sleep(d) }

// end ends the work and answers all that was recorded.
func (c *crowd) end() history.History {
	t := c.t
	t.Helper()
	c.stop()
	if !within(patience, c.loads.Wait) {
		t.Fatalf("end of the work: got none within %v, want one: a call hangs (L6)\n%s", patience, stacks())
	}
	parts := []history.History{c.rec.History()}
	for _, w := range c.workers {
		if err := w.Close(); err != nil {
			t.Errorf("worker: got %v, want an orderly end", err)
		}
	}
	for _, w := range slices.Concat(c.workers, c.gone) {
		parts = append(parts, w.History())
	}
	return history.Merge(parts...)
}

func (c *crowd) hits(p plan, h history.History) []int64 {
	if p.hits == nil {
		return nil
	}
	return p.hits(c, h)
}

// usable checks that all names can be had after the run, and that nothing is left of it.
func (c *crowd) usable() {
	t := c.t
	t.Helper()
	client := t.client()
	take := func(l fencelock.Locker, n driver.Name) {
		t.Helper()
		t.eventually(c.longest()+patience/4, func() error {
			lease, err := l.TryLock(t.Context(), n.Name)
			if err != nil {
				return fmt.Errorf("TryLock of %s %q after the run: got %v, want a lease (L7)", n.Kind, n.Name, err)
			}
			return lease.Release(t.Context())
		})
		t.nothingLeft(n, "after the run")
	}
	for _, name := range c.load.Locks {
		take(client, driver.Name{Kind: driver.KindLock, Name: name})
	}
	for _, p := range c.load.Permits {
		take(fencelock.Permits(client, 1), driver.Name{Kind: driver.KindPermit, Name: p.Name})
	}
}

// quiet judges what only an undisturbed run must keep.
func (c *crowd) quiet(h history.History) string {
	t := c.t
	t.Helper()
	for _, e := range h {
		if e.Type == history.Failed && e.Result != history.Context && e.Result != history.Uncertain {
			t.Fatalf("run with seed %d, without any fault: got %v, want no error of the backend (L8)", c.seed, e)
		}
	}
	m := history.CheckModel(h, history.ModelRules{Timeout: patience})
	switch m.Verdict {
	case history.Fail:
		t.Fatalf("run with seed %d: got\n%s\nwant an order that an ideal lock allows (L1, S1, W4)", c.seed, m.Reason)
	case history.Void:
		return "model: " + m.Reason
	}
	return ""
}

// span is a time, on the clock of histories.
type span struct{ from, to int64 }

// stalled looks for somebody who waited longer than bound while nobody held and nobody was served: a dead or
// stopped process may not hold the others up for longer than the TTL of its leases (W3).
func stalled(h history.History, p plan, bound time.Duration) string {
	type subject struct {
		kind history.Kind
		name string
	}
	type key struct {
		process string
		attempt uint64
	}
	type attempt struct {
		start    history.Event
		end      int64 // of the wait
		released int64
	}
	const never = int64(1<<63 - 1)
	attempts := map[key]*attempt{}
	absent := map[string][]int64{} // when a process was stopped or killed
	var outages []span
	var last int64
	for _, e := range slices.SortedFunc(slices.Values(h), func(a, b history.Event) int { return cmp.Compare(a.T, b.T) }) {
		last = e.T
		a := attempts[key{e.Process, e.Attempt}]
		switch e.Type {
		case history.Started:
			attempts[key{e.Process, e.Attempt}] = &attempt{start: e, end: never, released: never}
		case history.Acquired:
			a.end = e.T
		case history.Refused, history.Failed:
			a.end, a.released = e.T, e.T
		case history.ReleaseReturned, history.LossTold:
			a.released = min(a.released, e.T)
		case history.ProcessStopped, history.ProcessEnded:
			absent[e.Process] = append(absent[e.Process], e.T)
		case history.FaultBegin:
			outages = append(outages, span{e.T, never})
		case history.FaultEnd:
			outages[len(outages)-1].to = e.T
		}
	}
	// A process that is stopped or killed excuses nothing from then on.
	present := func(process string, from, to int64) int64 {
		for _, t := range absent[process] {
			if from <= t && t < to {
				return t
			}
		}
		return to
	}
	held := map[subject][]span{} // or served: when nobody has reason to complain
	for _, a := range attempts {
		s := subject{a.start.Kind, a.start.Name}
		if a.end < never {
			held[s] = append(held[s], span{a.end, present(a.start.Process, a.end, a.released)})
		}
	}
	for s := range maps.Keys(held) {
		if p.outage {
			held[s] = append(held[s], outages...)
		}
		slices.SortFunc(held[s], func(a, b span) int { return cmp.Compare(a.from, b.from) })
	}
	for _, a := range attempts {
		if !a.start.Wait {
			continue
		}
		from, until := a.start.T, present(a.start.Process, a.start.T, min(a.end, last))
		for _, x := range append(held[subject{a.start.Kind, a.start.Name}], span{until, until}) {
			if x.to <= from {
				continue
			}
			if free := time.Duration(min(x.from, until) - from); free > bound {
				return fmt.Sprintf("wait for %s %q: got nothing for %v while nobody held it, want it within %v (W3)\n    %v",
					a.start.Kind, a.start.Name, free, bound, a.start)
			}
			if from = max(from, x.to); from >= until {
				break
			}
		}
	}
	return ""
}

// thin is the traffic below which a run shows nothing.
var thin = history.Rules{MinAcquired: 60, MinContended: 30}

// met adds a fault that must have met something.
func met(fault string, during int) history.Rules {
	r := thin
	r.Faults = []history.FaultRule{{Name: fault, Hits: 1, AcquiredBefore: 20, AttemptsDuring: during, AcquiredAfter: 20}}
	return r
}

func quietRun(t *T) {
	t.checkedRun(plan{rules: thin, workers: 2, disturb: func(c *crowd) { c.work(5*c.load.Short, 100) }})
}

// openAt answers the leases that a process, or one of its clients, had at a moment.
func openAt(h history.History, process, client string, t int64) (n int) {
	open := map[uint64]bool{}
	for _, e := range h {
		if e.T > t {
			break
		}
		if e.Process != process || client != "" && e.Client != client {
			continue
		}
		switch e.Type {
		case history.Acquired:
			open[e.Attempt] = e.Kind != history.Token
		case history.ReleaseCalled, history.LossTold:
			open[e.Attempt] = false
		}
	}
	for _, is := range open {
		if is {
			n++
		}
	}
	return n
}

// holds says whether a worker has a lease, as far as is known.
func holds(w *worker.Worker) bool {
	h := w.History()
	return len(h) > 0 && openAt(h, h[len(h)-1].Process, "", h[len(h)-1].T) > 0
}

// awaitHolder waits until a worker has a lease. It may have released it when this returns.
func (c *crowd) awaitHolder(w *worker.Worker) {
	for deadline := time.Now().Add(patience); !holds(w) && time.Now().Before(deadline); {
		pause(time.Millisecond)
	}
}

// holdsHere says whether a client of this process has a lease.
func (c *crowd) holdsHere() bool {
	h := c.rec.History()
	return len(h) > 0 && openAt(h, "here", "", h[len(h)-1].T) > 0
}

// hitHolders are the moments at which a process was stopped or killed that had a lease when it came to a halt, which is
// a while after the signal was sent.
func hitHolders(_ *crowd, h history.History) (at []int64) {
	stopped := map[string]int64{}
	for _, e := range h {
		switch e.Type {
		case history.ProcessStopped:
			stopped[e.Process] = e.T
		case history.ProcessContinued: // nothing that it did lies between the halt and this
			if openAt(h, e.Process, "", e.T) > 0 {
				at = append(at, stopped[e.Process])
			}
		case history.ProcessEnded:
			if openAt(h, e.Process, "", e.T) > 0 {
				at = append(at, e.T)
			}
		}
	}
	return at
}

// holdersStopped stops processes until their leases have long gone to others, and lets them go on.
func holdersStopped(t *T) { stopProcesses(t, (*worker.Worker).PauseBetween, false) }

// stoppedAnywhere does it in the middle of requests too, and then what the backend has locked for those may
// hold the others up.
func stoppedAnywhere(t *T) { stopProcesses(t, (*worker.Worker).Pause, true) }

func stopProcesses(t *T, stop func(*worker.Worker) error, outage bool) {
	const fault = "process stopped past its TTL"
	t.checkedRun(plan{rules: met(fault, 20), workers: 2, fault: fault, outage: outage, hits: hitHolders, disturb: func(c *crowd) {
		c.work(0, 50)
		for _, w := range c.workers {
			c.rec.FaultBegin(fault)
			for range 20 {
				c.awaitHolder(w)
				t.done("stop of a process", stop(w))
				pause(20 * time.Millisecond) // until what it wrote before is read: it may have released
				if holds(w) {
					break
				}
				t.done("Resume", w.Resume())
			}
			t.done("stop of a process", stop(w)) // if it is not
			pause(c.longest() + 100*time.Millisecond)
			t.done("Resume", w.Resume())
			c.rec.FaultEnd(fault)
			c.work(200*time.Millisecond, 30)
		}
	}})
}

// holdersKilled kills processes; others take their places.
func holdersKilled(t *T) {
	const fault = "process killed"
	t.checkedRun(plan{rules: met(fault, 20), workers: 2, fault: fault, hits: hitHolders, disturb: func(c *crowd) {
		c.work(0, 50)
		for range 3 {
			w := c.workers[0]
			c.workers, c.gone = c.workers[1:], append(c.gone, w)
			c.rec.FaultBegin(fault)
			c.awaitHolder(w)
			t.done("Kill", w.Kill())
			c.startWorker()
			c.work(c.load.TTL/2, 30)
			c.rec.FaultEnd(fault)
		}
		c.work(c.longest(), 30)
	}})
}

// serverPaused stops the server for less than the TTL, and for more.
func serverPaused(t *T) {
	const fault = "server stopped"
	hits := func(_ *crowd, h history.History) (at []int64) {
		for _, e := range h {
			if e.Type == history.FaultBegin && openAt(h, "here", "", e.T) > 0 {
				at = append(at, e.T)
			}
		}
		return at
	}
	t.checkedRun(plan{rules: met(fault, 10), workers: 2, fault: fault, outage: true, hits: hits, disturb: func(c *crowd) {
		c.work(0, 50)
		for _, d := range []time.Duration{c.load.TTL / 2, c.longest()} {
			for deadline := time.Now().Add(patience); !c.holdsHere() && time.Now().Before(deadline); {
				pause(time.Millisecond)
			}
			c.rec.FaultBegin(fault)
			t.done("Pause", t.Server.Pause())
			pause(d)
			t.done("Resume", t.Server.Resume())
			c.rec.FaultEnd(fault)
			c.work(200*time.Millisecond, 30)
		}
	}})
}

const wired = "wired client"

// wire lets a client take part whose network is about to be disturbed.
func (c *crowd) wire(d driver.Driver, w Wire) {
	c.t.Helper()
	c.wires = append(c.wires, w)
	c.start(c.t.clientOn(d, fencelock.WithRequestTimeout(c.timeout)), wired)
}

// hitWired are the moments at which the wired client saw the fault.
func hitWired(_ *crowd, h history.History) (at []int64) {
	for _, e := range h {
		failed := e.Type == history.Failed || e.Type == history.ReleaseReturned
		if e.Client == wired && (e.Type == history.LossTold ||
			failed && (e.Result == history.Uncertain || e.Result == history.Unavailable)) {
			at = append(at, e.T)
		}
	}
	return at
}

// cut disturbs the wire of one client for less than the TTL, and for more, in each direction.
func cut(t *T, fault string, set func(Wire, servers.Direction)) {
	t.checkedRun(plan{rules: met(fault, 10), workers: 1, wired: 1, fault: fault, hits: hitWired, disturb: func(c *crowd) {
		c.work(0, 50)
		w := c.wires[0]
		for _, f := range []struct {
			direction servers.Direction
			lasts     time.Duration
		}{{servers.ToClient, c.load.TTL / 2}, {servers.ToServer, c.load.TTL / 2}, {servers.Both, c.longest()}} {
			c.rec.FaultBegin(fault)
			set(w, f.direction)
			pause(f.lasts)
			w.Pass(servers.Both)
			c.rec.FaultEnd(fault)
			c.work(200*time.Millisecond, 30)
		}
	}})
}

// wireHeld delivers everything late: requests of long ago too.
func wireHeld(t *T) {
	cut(t, "wire holds", func(w Wire, d servers.Direction) { w.Hold(d) })
}

func wireDropped(t *T) {
	cut(t, "wire drops", func(w Wire, d servers.Direction) { w.Drop(d) })
}

// wireReset breaks connections again and again, each time after a request whose reply nobody will see.
func wireReset(t *T) {
	const fault = "wire resets"
	t.checkedRun(plan{rules: met(fault, 10), workers: 1, wired: 1, fault: fault, disturb: func(c *crowd) {
		c.work(0, 50)
		w := c.wires[0]
		c.rec.FaultBegin(fault)
		for range 20 {
			dropped := w.DropNextReply(nil)
			select {
			case <-dropped:
				c.rec.FaultHit(fault)
			case <-time.After(c.load.TTL):
			}
			c.work(0, 2)
			w.Reset()
			c.work(0, 2)
		}
		w.Pass(servers.Both) // takes back what has not acted
		c.rec.FaultEnd(fault)
		c.work(c.longest(), 30)
	}})
}
