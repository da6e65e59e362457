package redlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/redislua"
)

// node is one of the masters, and what is to be sent to it. Requests go out in the order in which they were made, many
// at a time, and the next ones when those have been answered or given up on: so a release does not overtake the
// request that it undoes, and a node that hangs costs one batch at a time.
type node struct {
	d      *Driver
	index  int
	name   string
	client redislua.Client

	// quarantine is until when what the node grants does not count, in nanoseconds of Driver.clock.
	quarantine atomic.Int64

	mu      sync.Mutex
	queue   []*ask
	working bool     // somebody sends the queue
	stuck   int      // batches given up on whose client library has not returned
	run     string   // the latest run id, empty if none was seen
	scripts *scripts // of that run
	known   bool     // nothing has happened since the node was asked who it is
	warned  string   // the latest warning
}

// Bounds of what one node may hold up.
const (
	maxBatch = 128  // requests sent together
	maxQueue = 1024 // requests that wait
	maxStuck = 4    // batches that a client library does not give back
)

// ask is a request to one node.
type ask struct {
	step  step
	kind  driver.Kind
	keys  []string
	args  []string
	owner *owner // whose end makes the request void; nil if it has none
	void  func() bool
	trim  func(*ask) bool // drops what need not be sent, and answers whether something is left; nil if nothing can be
	by    int64           // not sent later than this, of Driver.clock
	state atomic.Int32
	done  func(reply) // called once, and does not block
}

// States of an ask.
const (
	queued int32 = iota
	sent
	finished
)

// reply is what became of an ask.
type reply struct {
	node  *node
	value any
	err   error
	sure  bool // with err: nothing happened, and nothing will
}

func (a *ask) finish(r reply) {
	if a.state.Swap(finished) == finished {
		return
	}
	if a.owner != nil && r.err != nil && !r.sure {
		a.owner.unsure[r.node.index].Store(true) // also if nobody waits for the reply
	}
	a.done(r)
}

func (a *ask) isVoid() bool {
	return a.owner != nil && a.owner.over.Load() || a.void != nil && a.void()
}

var (
	errNotSent = errors.New("no answer to earlier requests, and not sent")
	errHangs   = errors.New("does not answer, and the client library does not give up")
	errFull    = errors.New("too many requests wait for it")
	errVoid    = errors.New("not sent")
	errClosed  = errors.New("redlock: the driver is closed")
)

// push takes a request. It does not block.
func (n *node) push(a *ask) {
	n.mu.Lock()
	var dead []*ask
	if len(n.queue) >= maxQueue {
		dead = n.sweep()
	}
	var why error
	switch {
	case n.stuck >= maxStuck:
		why = errHangs
	case len(n.queue) >= maxQueue:
		why = errFull
	}
	start := why == nil && !n.working
	if why == nil {
		n.queue = append(n.queue, a)
		n.working = true
	}
	n.mu.Unlock()
	for _, d := range dead {
		d.finish(reply{n, nil, errVoid, true})
	}
	if why != nil {
		a.finish(reply{n, nil, why, true})
	}
	if start {
		n.d.background(n.work, func() {
			n.mu.Lock()
			n.working = false
			n.mu.Unlock()
			n.fail(errClosed)
		})
	}
}

// sweep takes what is void out of the queue. n.mu is held.
func (n *node) sweep() (dead []*ask) {
	live := n.queue[:0]
	for _, a := range n.queue {
		if a.state.Load() == queued && !a.isVoid() {
			live = append(live, a)
		} else {
			dead = append(dead, a)
		}
	}
	clear(n.queue[len(live):])
	n.queue = live
	return dead
}

// fail ends all requests that wait.
func (n *node) fail(err error) {
	n.mu.Lock()
	queue := n.queue
	n.queue = nil
	n.mu.Unlock()
	for _, a := range queue {
		a.finish(reply{n, nil, err, true})
	}
}

// work sends what waits until there is nothing.
func (n *node) work() {
	for {
		batch := n.take()
		if batch == nil || !n.exchange(batch) {
			return
		}
	}
}

// take answers the next batch, nil if there is none: then nobody works.
func (n *node) take() []*ask {
	for {
		n.mu.Lock()
		count := min(len(n.queue), maxBatch)
		if count == 0 {
			n.working = false
			n.mu.Unlock()
			return nil
		}
		batch := n.queue[:count:count]
		n.queue = n.queue[count:]
		n.mu.Unlock()

		now, live := n.d.clock.Now(), batch[:0]
		for _, a := range batch {
			if a.owner != nil {
				a.owner.asked[n.index].Store(true) // before the look whether it is over: see Driver.Release
			}
			switch {
			case a.isVoid(), a.trim != nil && !a.trim(a):
				a.finish(reply{n, nil, errVoid, true})
			case now > a.by:
				a.finish(reply{n, nil, errNotSent, true})
			case a.state.CompareAndSwap(queued, sent):
				live = append(live, a)
			}
		}
		if len(live) > 0 {
			return live
		}
	}
}

// States of a batch on its way.
const (
	nothingSent int32 = iota
	onTheWay
	answered
	givenUp
)

// until is a context that tells a deadline and leaves it to others to watch it.
type until struct {
	context.Context
	at time.Time
}

func (u until) Deadline() (time.Time, bool) { return u.at, true }

// exchange sends a batch and waits for the answers. It answers false if that took too long: then it has been given up
// on, and somebody else works.
func (n *node) exchange(batch []*ask) bool {
	var state atomic.Int32
	ctx := until{n.d.ctx, time.Now().Add(n.d.timeout)}
	timer := time.AfterFunc(n.d.timeout, func() {
		sure := state.CompareAndSwap(nothingSent, givenUp)
		if !sure && !state.CompareAndSwap(onTheWay, givenUp) {
			return
		}
		n.giveUp(batch, sure)
	})
	defer timer.Stop()

	full := false
	for rest := batch; len(rest) > 0; full = true {
		anew := full || slices.ContainsFunc(rest, func(a *ask) bool { return a.step == hello })
		scripts, err := n.identify(ctx, &state, anew)
		next := onTheWay
		if err != nil {
			next = answered
		}
		if !state.CompareAndSwap(nothingSent, next) {
			return n.returned()
		}
		if err != nil {
			for _, a := range rest {
				a.finish(reply{n, nil, err, true})
			}
			return true
		}
		rest = n.send(ctx, rest, scripts, full)
		next = nothingSent
		if len(rest) == 0 {
			next = answered
		}
		if !state.CompareAndSwap(onTheWay, next) {
			return n.returned()
		}
	}
	return true
}

// send sends requests as scripts of the run, their texts if full, and passes the replies on. It answers those that
// are to be sent again with their texts, because the server did not know the scripts.
func (n *node) send(ctx context.Context, asks []*ask, s *scripts, full bool) (again []*ask) {
	calls := make([]*redislua.Call, 0, len(asks))
	scripted := asks[:0:0]
	for _, a := range asks {
		if a.step == hello {
			a.finish(reply{n, nil, nil, true})
			continue
		}
		args := a.args
		if full {
			args = append(slices.Clip(args), "run")
		}
		c := redislua.NewCall(s[a.kind][a.step], a.keys, args)
		c.Full = full
		calls = append(calls, c)
		scripted = append(scripted, a)
	}
	switch len(calls) {
	case 0:
		return nil
	case 1:
		n.client.Eval(ctx, calls[0])
	default:
		n.client.EvalAll(ctx, calls)
	}
	for i, c := range calls {
		switch {
		case c.Err == nil:
			scripted[i].finish(reply{n, c.Reply, nil, true})
			continue
		case c.Forgotten() && c.Sure() && !full:
			again = append(again, scripted[i])
			continue
		case c.Refusal == "" || strings.Contains(c.Refusal, restarted) || c.Forgotten():
			n.doubt()
		}
		scripted[i].finish(reply{n, nil, c.Err, c.Sure()})
	}
	return again
}

// doubt makes the node be asked who it is before the next request.
func (n *node) doubt() {
	n.mu.Lock()
	n.known = false
	n.mu.Unlock()
}

// giveUp ends a batch whose answers do not come.
func (n *node) giveUp(batch []*ask, sure bool) {
	n.mu.Lock()
	n.known = false
	n.stuck++
	goOn := n.stuck < maxStuck
	n.working = goOn
	n.mu.Unlock()
	for _, a := range batch {
		a.finish(reply{n, nil, fmt.Errorf("no answer within %v", n.d.timeout), sure})
	}
	if goOn {
		n.d.background(n.work, func() { n.fail(errClosed) })
	} else {
		n.fail(errHangs)
	}
}

// returned notes that a client library has come back from a batch that had been given up on.
func (n *node) returned() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.stuck--
	return false
}

// identify finds out who the node is, unless that is known; with anew in any case. It keeps what it found only if the
// exchange has not been given up on.
func (n *node) identify(ctx context.Context, state *atomic.Int32, anew bool) (*scripts, error) {
	n.mu.Lock()
	known, s := n.known, n.scripts
	n.mu.Unlock()
	if known && !anew {
		return s, nil
	}
	var info string
	if err := n.client.Info(ctx, "default", func(text string) { info = text }); err != nil {
		return nil, fmt.Errorf("asked who it is: %w", err)
	}
	id, err := readIdentity(info)
	if err != nil {
		return nil, err
	}
	if id.persistent {
		fsync, err := n.client.Config(ctx, "appendfsync")
		id.durable = err == nil && fsync == "always" // it may be forbidden to ask
	}
	if state.Load() != nothingSent {
		return nil, errNotSent
	}
	return n.accept(id)
}

// identity is what a server says about itself.
type identity struct {
	run        string
	uptime     time.Duration
	primary    bool
	cluster    bool
	policy     string // maxmemory-policy
	persistent bool   // it keeps an append-only file
	durable    bool   // and syncs it before it answers
}

func readIdentity(info string) (id identity, err error) {
	fields := make(map[string]string)
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}
	seconds, err := strconv.Atoi(fields["uptime_in_seconds"])
	id = identity{run: fields["run_id"], uptime: time.Duration(seconds) * time.Second, primary: fields["role"] == "master",
		cluster: fields["cluster_enabled"] == "1", policy: fields["maxmemory_policy"], persistent: fields["aof_enabled"] == "1"}
	if err != nil || id.run == "" || strings.Trim(id.run, "0123456789abcdef") != "" || fields["role"] == "" {
		return id, errors.New("it does not say who it is, as Redis and Valkey do by INFO")
	}
	return id, nil
}

// accept notes who the node is, or says why it cannot be one.
func (n *node) accept(id identity) (*scripts, error) {
	before, err := n.d.claim(n, id)
	warning := ""
	switch {
	case err != nil:
		warning = err.Error()
	case id.policy != "noeviction" && id.policy != "":
		warning = fmt.Sprintf("maxmemory-policy is %s: under memory pressure locks and tokens may be evicted; set noeviction", id.policy)
	case !id.durable:
		warning = "it does not run with appendfsync always: after a restart it may have forgotten locks and tokens"
	}
	changed := before != "" && before != id.run && err == nil
	if changed {
		n.d.warn(n, "it has restarted and may have forgotten locks and tokens")
	}
	n.mu.Lock()
	repeated := warning == n.warned
	n.warned = warning
	n.known = err == nil
	if err == nil && n.run != id.run {
		n.run, n.scripts = id.run, newScripts(id.run)
	}
	s := n.scripts
	n.mu.Unlock()
	if warning != "" && !repeated {
		n.d.warn(n, warning)
	}
	if err != nil {
		return nil, err
	}
	if changed {
		n.d.refill()
	}
	return s, nil
}

// refused says that a server cannot be one of the masters.
type refused struct{ why string }

func (r *refused) Error() string { return r.why }

// claim checks that the server can be this node, and sets from when on its grants count. It answers the node's run id
// until now.
func (d *Driver) claim(n *node, id identity) (before string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n.mu.Lock()
	before = n.run
	n.mu.Unlock()
	switch of := d.runs[id.run]; {
	case id.cluster:
		return before, &refused{"it is a member of a Cluster; the masters must be independent"}
	case !id.primary:
		return before, &refused{"it is a replica; the masters must be independent"}
	case of != nil && of != n:
		return before, &refused{"it is the same server as " + of.name}
	}
	if before != id.run {
		delete(d.runs, before)
		d.runs[id.run] = n
		// What it has granted before it restarted has ended when the longest lease has.
		wait := d.safety - max(id.uptime, 0) // it is below 0 when the node's clock was set back
		if before != "" {
			wait = max(wait, d.longest)
		}
		if !id.durable && wait > 0 {
			n.quarantine.Store(d.clock.Now() + int64(wait))
		}
	}
	return before, nil
}
