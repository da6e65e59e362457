package migrate_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/memory"
	"github.com/fencelock/fencelock/driver/migrate"
)

// mistake breaks the algorithm on purpose.
type mistake int

const (
	none         mistake = iota
	noAdvance            // the old backend is never told the new token
	lateAdvance          // it is told after the grant was answered
	noPhaseLease         // nobody sees a phase lease
	oneBackend           // phase both locks something else than the old backend
)

// TestModel lets clients of all phases take random steps on two backends in memory, with steps of others between the
// requests of one step, crashes there, clients that are stopped, leases that expire and backends whose tokens are ahead,
// while the migration goes on and back. It checks L1, S1, T1 and T2 of what is believed.
func TestModel(t *testing.T) {
	acquired := 0
	for range 10 {
		seed := mathrand.Uint64()
		wrong, n := runModel(t, seed, none)
		if wrong != "" {
			t.Fatalf("seed %d: %s", seed, wrong)
		}
		acquired += n
	}
	t.Logf("%d acquisitions", acquired)
	if acquired < 1000 {
		t.Fatalf("acquisitions: got %d, want more than a thousand, or the run is void", acquired)
	}
}

// TestModelFindsMistakes: the model finds what it is there for.
func TestModelFindsMistakes(t *testing.T) {
	for m, want := range map[mistake]string{
		noAdvance: "(T", lateAdvance: "(T", noPhaseLease: "(", oneBackend: "(",
	} {
		found := ""
		for tries := 0; found == "" && tries < 300; tries++ {
			found, _ = runModel(t, mathrand.Uint64(), m)
		}
		if !strings.Contains(found, want) {
			t.Errorf("mistake %d: got %q in 300 runs, want a violation of %s", m, found, want)
		}
	}
}

type model struct {
	t       *testing.T
	rng     *mathrand.Rand
	mistake mistake
	stores  stores
	phase   migrate.Phase
	clients []*modelClient
	depth   int
	clock   int // counts beginnings and ends of acquisitions
	done    map[driver.Name][]*belief
	wrong   string
	late    []func() // Advances that are late
}

type modelClient struct {
	m          *model
	d          driver.Driver
	old, young *fallible
	phase      migrate.Phase
	thaw       []func() // not nil: stopped
	dead       bool
	busy       bool // in the middle of a step
	held       []*belief
}

type belief struct {
	r        driver.Request
	began    int
	ended    int
	token    driver.Token
	until    time.Time
	released bool
}

var errCrash = errors.New("the client has crashed")

var modelNames = []driver.Name{{Kind: driver.KindLock, Name: "a"}, {Kind: driver.KindLock, Name: "b"}, {Kind: driver.KindPermit, Name: "a"}}

func runModel(t *testing.T, seed uint64, what mistake) (wrong string, acquired int) {
	synctest.Test(t, func(t *testing.T) {
		m := &model{t: t, rng: mathrand.New(mathrand.NewPCG(seed, 0)), mistake: what, stores: newStores(), phase: migrate.From,
			done: make(map[driver.Name][]*belief)}
		m.migrate() // recorded from the beginning
		for range 1500 {
			if m.wrong != "" {
				break
			}
			m.step()
		}
		for _, c := range m.clients {
			m.end(c)
		}
		wrong = m.wrong
		for _, all := range m.done {
			acquired += len(all)
		}
	})
	return wrong, acquired
}

// step is one of anything.
func (m *model) step() {
	switch n := m.rng.IntN(100); {
	case n < 8 && len(m.clients) < 6:
		m.open()
	case n < 10:
		if c := m.pick(); c != nil {
			m.end(c)
		}
	case n < 13 && m.depth == 0:
		m.sleep()
	case n < 16 && m.depth == 0:
		m.migrate()
	case n < 20:
		m.ahead()
	case n < 24:
		m.stop()
	case n < 26:
		for _, f := range m.late {
			f()
		}
		m.late = nil
	case n < 32:
		m.extend()
	case n < 50:
		m.release()
	default:
		m.acquire()
	}
}

// pick chooses a client that can do something.
func (m *model) pick() *modelClient {
	var able []*modelClient
	for _, c := range m.clients {
		if c.thaw == nil && !c.busy && !c.dead {
			able = append(able, c)
		}
	}
	if len(able) == 0 {
		return nil
	}
	return able[m.rng.IntN(len(able))]
}

func (m *model) open() {
	c := &modelClient{m: m, phase: m.phase}
	if m.rng.IntN(3) == 0 { // a neighbour, or one that must be refused
		c.phase = []migrate.Phase{migrate.From, migrate.Both, migrate.To}[m.rng.IntN(3)]
	}
	if c.phase != m.phase && c.phase != migrate.Both && m.phase != migrate.Both {
		return // nobody starts clients that far from the recorded phase, and if, they are refused
	}
	if m.phase == migrate.Both && c.phase != migrate.Both && m.rng.IntN(2) == 0 {
		c.phase = migrate.Both
	}
	if c.phase != m.phase && m.phase == migrate.Both && !m.lived(c.phase) {
		return // the next step needs its Advance first
	}
	c.old, c.young = m.stores.drivers()
	c.old.hook, c.young.hook = c.between, c.between
	old, young := driver.Driver(&broken{c.old, m, true}), driver.Driver(&broken{c.young, m, false})
	if m.mistake == oneBackend && c.phase == migrate.Both {
		old = &broken{&fallible{Driver: memory.New(memory.NewStore())}, m, true}
	}
	c.busy = true
	d, err := migrate.New(m.t.Context(), old, young, &migrate.Options{Phase: c.phase})
	c.busy = false
	if err != nil {
		if !errors.Is(err, migrate.ErrPhase) && !errors.Is(err, errCrash) {
			m.wrong = fmt.Sprintf("New: got %v, want nil or ErrPhase", err)
		}
		return
	}
	c.d = d
	m.clients = append(m.clients, c)
}

// lived reports whether a client of the phase is open.
func (m *model) lived(p migrate.Phase) bool {
	for _, c := range m.clients {
		if c.phase == p && !c.dead {
			return true
		}
	}
	return false
}

// end closes a client, which ends its beliefs first.
func (m *model) end(c *modelClient) {
	for i, other := range m.clients {
		if other == c {
			m.clients = append(m.clients[:i:i], m.clients[i+1:]...)
		}
	}
	for _, thaw := range c.thaw {
		thaw()
	}
	for _, b := range c.held {
		b.released = true
	}
	c.dead, c.busy = true, true
	c.d.Close()
}

// stop stops a client for a while, with its requests, or lets one go on.
func (m *model) stop() {
	c := m.clients
	if len(c) == 0 {
		return
	}
	x := c[m.rng.IntN(len(c))]
	if x.busy {
		return
	}
	if x.thaw != nil {
		for _, thaw := range x.thaw {
			thaw()
		}
		x.thaw = nil
		synctest.Wait()
		return
	}
	x.thaw = []func(){x.old.freeze(), x.young.freeze()}
}

// sleep lets time pass: little, or so much that leases end.
func (m *model) sleep() {
	time.Sleep(time.Duration(m.rng.Int64N(int64([]time.Duration{time.Millisecond, 10 * time.Second, 3 * time.Minute}[m.rng.IntN(3)]))))
	synctest.Wait()
}

// ahead lets the tokens of a backend run ahead, as if its clock did.
func (m *model) ahead() {
	s := m.stores.old
	if m.rng.IntN(2) == 0 {
		s = m.stores.young
	}
	d := memory.New(s)
	defer d.Close()
	if err := d.Advance(context.Background(), modelNames[m.rng.IntN(len(modelNames))], driver.Token(time.Now().Add(time.Duration(m.rng.Int64N(int64(time.Second)))).UnixMicro())); err != nil {
		m.wrong = err.Error()
	}
}

// migrate takes a step, after it has ended the clients that stand in its way, except those that are stopped.
func (m *model) migrate() {
	move, target := migrate.Advance, migrate.To
	switch {
	case m.phase == migrate.From:
		target = migrate.Both
	case m.phase == migrate.To:
		move, target = migrate.Rollback, migrate.Both
	case m.rng.IntN(2) == 0:
		move, target = migrate.Rollback, migrate.From
	}
	for _, c := range m.clients {
		if c.thaw == nil && (target == migrate.To && c.phase == migrate.From || target == migrate.From && c.phase == migrate.To) {
			m.end(c)
		}
	}
	old, young := m.stores.drivers()
	defer old.Close()
	defer young.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Hour)
	defer cancel()
	p, err := move(ctx, &broken{old, m, true}, &broken{young, m, false})
	if err != nil || p != target {
		m.wrong = fmt.Sprintf("step to phase %s: got %s, %v", target, p, err)
		return
	}
	m.phase = target
}

// between runs between two requests of a step: others do something, time passes, or the client crashes.
func (c *modelClient) between(step string, n driver.Name) error {
	m := c.m
	if strings.HasPrefix(n.Name, "fencelock.migrate/") {
		return nil
	}
	if c.dead {
		return errCrash
	}
	if !c.busy || step == "Extend" || m.depth > 2 {
		return nil
	}
	m.depth++
	defer func() { m.depth-- }()
	for range m.rng.IntN(3) {
		m.step()
	}
	if m.rng.IntN(60) == 0 { // stopped on its way, but for the phase lease if it is quick
		if m.rng.IntN(2) == 0 {
			thaw := []func(){c.old.freeze(), c.young.freeze()}
			time.Sleep(time.Duration(m.rng.Int64N(int64(3 * time.Minute))))
			thaw[0]()
			thaw[1]()
		} else {
			time.Sleep(time.Duration(m.rng.Int64N(int64(time.Minute))))
		}
	}
	if m.rng.IntN(100) == 0 {
		return errCrash
	}
	return nil
}

func (m *model) acquire() {
	c := m.pick()
	if c == nil {
		return
	}
	n := modelNames[m.rng.IntN(len(modelNames))]
	b := &belief{r: driver.Request{Owner: driver.Owner{Name: n, ID: rand.Text()}, Limit: 1,
		TTL: []time.Duration{time.Second, 30 * time.Second, 2 * time.Minute}[m.rng.IntN(3)]}}
	if n.Kind == driver.KindPermit {
		b.r.Limit = 2
	}
	m.clock++
	b.began = m.clock
	c.busy = true
	defer func() { c.busy = false }()
	sent := time.Now()
	var a driver.Answer
	var err error
	if sem, _ := driver.As[driver.Semaphore](c.d); n.Kind == driver.KindPermit {
		a, err = sem.Acquire(context.Background(), b.r)
	} else {
		a, err = c.d.Lock(context.Background(), b.r)
	}
	if c.dead || err == nil && a.State != driver.Granted {
		return
	}
	b.until = sent.Add(a.TTL - max(a.TTL/100, 2*time.Millisecond))
	if err != nil || !time.Now().Before(b.until) {
		if m.rng.IntN(2) == 0 { // a client that has not crashed cleans up
			c.d.Release(context.Background(), b.r.Owner)
		}
		return
	}
	m.clock++
	b.ended, b.token = m.clock, a.Token
	m.believed(b)
	c.held = append(c.held, b)
}

// believed checks a new belief against all others.
func (m *model) believed(b *belief) {
	n, others := b.r.Name, 0
	for _, o := range m.done[n] {
		if !o.released && time.Now().Before(o.until) {
			others++
		}
		if o.ended < b.began && o.token >= b.token {
			m.wrong = fmt.Sprintf("%v %s: token %d, after one with %d had been granted (T1)", n.Kind, n.Name, b.token, o.token)
		}
		if o.token == b.token && n.Kind == driver.KindLock {
			m.wrong = fmt.Sprintf("%v %s: token %d twice (T2)", n.Kind, n.Name, b.token)
		}
	}
	if others >= b.r.Limit {
		m.wrong = fmt.Sprintf("%v %s: believed by %d others (L1)", n.Kind, n.Name, others)
	}
	m.done[n] = append(m.done[n], b)
}

// take picks one of a client's beliefs that has not ended.
func (c *modelClient) take() *belief {
	for len(c.held) > 0 {
		i := c.m.rng.IntN(len(c.held))
		b := c.held[i]
		if !b.released && time.Now().Before(b.until) {
			return b
		}
		b.released = true
		c.held = append(c.held[:i:i], c.held[i+1:]...)
	}
	return nil
}

func (m *model) extend() {
	c := m.pick()
	if c == nil {
		return
	}
	b := c.take()
	if b == nil {
		return
	}
	sent := time.Now()
	switch r := c.d.Extend(context.Background(), []driver.Extension{{Owner: b.r.Owner, TTL: b.r.TTL}})[0]; {
	case r.Err != nil:
	case r.State != driver.Granted:
		b.released = true
	default:
		if r.Token != b.token {
			m.wrong = fmt.Sprintf("token of an extension: got %d, want %d (T3)", r.Token, b.token)
		}
		if until := sent.Add(r.TTL - max(r.TTL/100, 2*time.Millisecond)); until.After(b.until) {
			b.until = until
		}
	}
}

func (m *model) release() {
	c := m.pick()
	if c == nil {
		return
	}
	if b := c.take(); b != nil {
		b.released = true
		c.busy = true
		c.d.Release(context.Background(), b.r.Owner)
		c.busy = false
	}
}

// broken makes the mistakes.
type broken struct {
	*fallible
	m   *model
	old bool
}

func (b *broken) Advance(ctx context.Context, n driver.Name, t driver.Token) error {
	if b.old && !strings.HasPrefix(n.Name, "fencelock.migrate/") {
		switch b.m.mistake {
		case noAdvance:
			return nil
		case lateAdvance:
			b.m.late = append(b.m.late, func() { b.Driver.Advance(ctx, n, t) })
			return nil
		}
	}
	return b.fallible.Advance(ctx, n, t)
}

func (b *broken) List(ctx context.Context, n driver.Name, yield func(driver.Holding) bool) error {
	if b.m.mistake == noPhaseLease && n.Name == "fencelock.migrate/phase" {
		return b.fallible.List(ctx, n, func(h driver.Holding) bool { return !strings.Contains(h.Holder, `"record":true`) || yield(h) })
	}
	return b.fallible.List(ctx, n, yield)
}
