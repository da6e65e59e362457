package lab

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/history"
	"github.com/fencelock/fencelock/conformance/worker"
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/guard/httpguard"
	"github.com/fencelock/fencelock/internal/lateness"
)

// Options say how a run is made. The zero value of each field is its default, and nil means all defaults.
type Options struct {
	// Lanes is how many pairs of holder and rival run side by side; default 5.
	Lanes int
	// Code names what writes, beside the doubles; see [Code].
	Code string
	// Seed decides at which moments the faults come; 0 stands for a random one. The result has it.
	Seed uint64
}

// stage is a run under way.
type stage struct {
	*system
	scenario *Scenario
	ttl      time.Duration
	lanes    []*lane
	rec      *history.Recorder // the faults
	longer   bool              // a server may grant more than was asked for
}

// lane is a holder and a rival that want one lock.
type lane struct {
	name          string
	holder, rival *worker.Worker // one and the same where clients cannot be processes of their own
	lines         [2]*line       // of holder and rival
	writes        []worker.Write
	rng           *rand.Rand
	works         sync.WaitGroup
	stopHolder    context.CancelFunc
	cutAt         int64 // when it was cut off, by the clock of histories
	err           error // why it is void
	crash         error // that a worker ended by itself
}

// The roles in a lane.
const holder, rival = "holder", "rival"

// process is the name in histories of who has a role.
func (l *lane) process(role string) string { return l.name + " " + role }

// Run makes one run of a scenario on a backend of its own, and judges it. It takes some five TTLs and the time that the
// servers need to start. The error says that the run could not be made; what went wrong in a lane is in the result.
func Run(ctx context.Context, b *Backend, sc *Scenario, opts *Options) (_ *Result, err error) {
	o := Options{}
	if opts != nil {
		o = *opts
	}
	if o.Lanes == 0 {
		o.Lanes = 5
	}
	if o.Lanes < 0 {
		return nil, fmt.Errorf("lab: Lanes %d: want 1 or more", o.Lanes)
	}
	for o.Seed == 0 {
		o.Seed = rand.Uint64()
	}
	if why := sc.Not(b); why != "" {
		return nil, fmt.Errorf("lab: %s on %s: %w: %s", sc.Name, b.Name, errors.ErrUnsupported, why)
	}
	if o.Code != "" && !worker.Handles(o.Code) {
		return nil, fmt.Errorf("lab: Code %q: call lab.Code with that name before lab.Main", o.Code)
	}
	r := &Result{Backend: b.Name, Scenario: sc.Name, Seed: o.Seed}
	sys, err := b.start(ctx)
	if err != nil {
		return nil, fmt.Errorf("lab: %s: %w", b.Name, err)
	}
	defer func() { err = errors.Join(err, sys.close()) }()
	doubles, err := openDoubles()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, doubles.close()) }()

	s := &stage{system: sys, scenario: sc, ttl: max(b.TTL, sc.ttl), rec: history.NewRecorder("lab", nil)}
	s.longer = among(sc.longer, b.Name)
	if sc.keeps { // what is lost on a busy machine would look as if it was lost by the fault
		s.ttl = max(s.ttl, 3*time.Second)
	}
	for i := range o.Lanes {
		s.lanes = append(s.lanes, &lane{name: fmt.Sprintf("lane-%d", i+1), rng: rand.New(rand.NewPCG(o.Seed, uint64(i)))})
	}
	defer func() {
		for _, l := range s.lanes {
			err = errors.Join(err, l.close())
		}
	}()
	for _, l := range s.lanes {
		l.writes = []worker.Write{{Writer: double, Resource: doubles.fenced(l.name)}, {Writer: double, Resource: doubles.open(l.name)}}
		if o.Code != "" {
			l.writes = append(l.writes, worker.Write{Writer: o.Code, Resource: fmt.Sprintf("%s-%x", l.name, o.Seed)})
		}
	}
	if err := s.each(func(l *lane) error { return l.open(ctx, s) }); err != nil && !slices.ContainsFunc(s.lanes, func(l *lane) bool { return l.err == nil }) {
		return nil, fmt.Errorf("lab: %s on %s: no client: %w", sc.Name, b.Name, err)
	}
	machine := lateness.Measure()
	defer machine()
	if sc.before != nil {
		s.void(sc.before(ctx, s))
	}
	_ = s.each(func(l *lane) error { return l.hold(ctx, s) })
	s.rec.FaultBegin(sc.Name)
	s.void(sc.fault(ctx, s))
	s.rec.FaultEnd(sc.Name)
	_ = s.each(func(l *lane) error { return l.finish(s.ttl) })

	r.Late = machine()
	if r.Late > b.TTL/4 {
		s.void(fmt.Errorf("lab: the machine is too busy: a timer was %v late", r.Late))
	}
	faults := s.rec.History()
	for _, l := range s.lanes {
		l.crash = l.closeWorkers() // so that all they did is in the history
		h := history.Merge(append(l.histories(), faults)...)
		r.Lanes = append(r.Lanes, judge(l, h, doubles, sc, lossTolerance+r.Late))
	}
	r.compare(sc)
	return r, ctx.Err()
}

// each does something with all lanes at once that are not void; a lane in which it fails is void from then on. It answers
// the first error.
func (s *stage) each(do func(*lane) error) error {
	var all sync.WaitGroup
	for _, l := range s.lanes {
		if l.err == nil {
			all.Go(func() { l.err = do(l) })
		}
	}
	all.Wait()
	for _, l := range s.lanes {
		if l.err != nil {
			return l.err
		}
	}
	return nil
}

// void makes all lanes void that are not yet, if something that concerns all went wrong.
func (s *stage) void(err error) {
	if err == nil {
		return
	}
	for _, l := range s.lanes {
		if l.err == nil {
			l.err = err
		}
	}
}

// hit records that a fault of the servers has hit all lanes.
func (s *stage) hit() {
	for _, l := range s.lanes {
		s.rec.FaultHit(l.name)
	}
}

// open starts the processes of a lane.
func (l *lane) open(ctx context.Context, s *stage) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errors.New("lab: the processes did not start in time"))
	defer cancel()
	for i, to := range []**worker.Worker{&l.holder, &l.rival} {
		var err error
		if l.lines[i], err = newLine(s.system); err != nil {
			return err
		}
		if i > 0 && s.oneProcess {
			l.rival = l.holder
			return nil
		}
		if *to, err = l.start(ctx, s, i); err != nil {
			return err
		}
	}
	return nil
}

// start starts the process of the holder, 0, or the rival, 1.
func (l *lane) start(ctx context.Context, s *stage, who int) (*worker.Worker, error) {
	return worker.Start(ctx, worker.Options{
		URL: s.url(l.lines[who].addrs()), Process: l.process([]string{holder, rival}[who]), Longer: s.longer, Clock: s.scenario.clock,
	})
}

// newcomer puts a new process in the place of the rival, which has not begun its work.
func (l *lane) newcomer(ctx context.Context, s *stage) error {
	if err := l.rival.Close(); err != nil {
		return err
	}
	var err error
	l.rival, err = l.start(ctx, s, 1)
	return err
}

// hold lets a lane begin its work: the holder has written and, unless it comes late, the rival waits when it returns.
func (l *lane) hold(ctx context.Context, s *stage) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errors.New("lab: the lane did not begin in time"))
	defer cancel()
	holding, stop := context.WithCancel(context.WithoutCancel(ctx))
	l.stopHolder = stop
	// So that the fault comes at any moment between renewals.
	if err := sleep(ctx, time.Duration(l.rng.Int64N(int64(s.ttl/3)))); err != nil {
		return err
	}
	work, begun := l.work(s, holder), history.WriteAdmitted
	work.NoRenew = s.scenario.plain
	if s.scenario.hangs {
		work.Think, begun = 2*s.ttl, history.Acquired
	}
	l.works.Go(func() { _ = l.holder.Work(holding, work) }) // what comes of it is in the history
	if err := l.await(ctx, holder, isType(begun)); err != nil || s.scenario.late {
		return err
	}
	l.begin(s, rival, s.ttl*3/2)
	if err := l.await(ctx, rival, isType(history.Started)); err != nil {
		return err
	}
	// One that reaches a part of the servers only may get no answer.
	answered, cancel := context.WithTimeout(ctx, s.ttl/2)
	defer cancel()
	if err := l.rival.AwaitRequests(answered, l.name, 0, 1); err != nil && answered.Err() == nil {
		return err
	}
	return nil
}

// work is what both do.
func (l *lane) work(s *stage, role string) worker.Work {
	return worker.Work{Ask: worker.Ask{Name: l.name, TTL: s.ttl}, As: l.process(role), Think: s.ttl / 20, Writes: l.writes}
}

func (l *lane) worker(role string) *worker.Worker {
	if role == holder {
		return l.holder
	}
	return l.rival
}

// begin lets one wait for the lock, and work for that long once it has it.
func (l *lane) begin(s *stage, role string, hold time.Duration) {
	work := l.work(s, role)
	work.For = hold
	l.works.Go(func() { l.insist(l.worker(role), work) })
}

// insist lets a worker work, and ask again when it is told that the backend does not answer.
func (l *lane) insist(w *worker.Worker, work worker.Work) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for ctx.Err() == nil {
		err := w.Work(ctx, work)
		if !errors.Is(err, fencelock.ErrUnavailable) && !errors.Is(err, fencelock.ErrUncertain) {
			return
		}
		_ = sleep(ctx, work.TTL/20)
	}
}

// await waits for an event of who has a role.
func (l *lane) await(ctx context.Context, role string, match func(history.Event) bool) error {
	return l.worker(role).AwaitEvent(ctx, func(e history.Event) bool { return e.Process == l.process(role) && match(e) })
}

// wrote waits until one has the lock and has written everywhere, after that moment.
func (l *lane) wrote(ctx context.Context, role string, after int64) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("lab: the %s did not write in time", role))
	defer cancel()
	last := l.writes[len(l.writes)-1].Resource
	return l.await(ctx, role, func(e history.Event) bool {
		return e.Resource == last && e.T > after && (e.Type == history.WriteAdmitted || e.Type == history.WriteRefused)
	})
}

// finish lets a holder that has lost nothing release after another half TTL, and waits until both have done their work.
func (l *lane) finish(ttl time.Duration) error {
	time.AfterFunc(ttl/2, l.stopHolder)
	done := make(chan struct{})
	go func() {
		l.works.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-time.After(patience):
		return errors.New("lab: holder and rival did not end their work in time")
	}
}

func (l *lane) closeWorkers() error {
	var err error
	for _, w := range []*worker.Worker{l.holder, l.rival} {
		if w != nil {
			err = errors.Join(err, w.Close())
		}
	}
	return err
}

func (l *lane) close() error {
	if l.stopHolder != nil {
		l.stopHolder()
	}
	err := l.closeWorkers()
	l.works.Wait()
	for _, line := range l.lines {
		if line != nil {
			err = errors.Join(err, line.close())
		}
	}
	return err
}

// histories are what the workers have recorded.
func (l *lane) histories() (all []history.History) {
	if l.holder != nil {
		all = append(all, l.holder.History())
	}
	if l.rival != nil && l.rival != l.holder {
		all = append(all, l.rival.History())
	}
	return all
}

const fencedPath = "/fenced/"

// doubles are the resources that are written to: one compares tokens, the other does not.
type doubles struct {
	base   string
	server *http.Server
	ended  chan error
}

func openDoubles() (*doubles, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	done := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux := http.NewServeMux()
	mux.Handle(fencedPath, &httpguard.Handler{Next: done, Guard: &guard.Guard{}})
	mux.Handle("/open/", done)
	d := &doubles{base: "http://" + l.Addr().String(), server: &http.Server{Handler: mux, ReadHeaderTimeout: patience}, ended: make(chan error, 1)}
	go func() { d.ended <- d.server.Serve(l) }()
	return d, nil
}

func (d *doubles) fenced(lane string) string { return d.base + fencedPath + lane }
func (d *doubles) open(lane string) string   { return d.base + "/open/" + lane }

func (d *doubles) close() error {
	err := d.server.Close()
	if e := <-d.ended; !errors.Is(e, http.ErrServerClosed) {
		err = errors.Join(err, e)
	}
	return err
}
