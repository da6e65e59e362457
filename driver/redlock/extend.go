package redlock

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// maxItems is how many leases one request extends.
const maxItems = 128

// extension is one lease in a batch.
type extension struct {
	driver.Extension
	owner *owner // nil if the driver does not know it
	keys  []string

	// Guarded by extending.mu.
	here    []time.Duration // what is left on the nodes that still have it
	token   map[driver.Token]int
	gone    int
	absent  []*node
	decided bool
	result  driver.Result
}

// extending is a request about leases of one kind on its way to all nodes. Replies that come when it is decided are of
// use all the same: a node that lacks a lease is given it again.
type extending struct {
	d     *Driver
	sent  int64
	items []*extension

	mu        sync.Mutex
	outcomes  []outcome
	left      int // nodes
	undecided int
	done      chan struct{}
}

// Extend implements driver.Locker.
func (d *Driver) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	results := make([]driver.Result, len(leases))
	if err := d.begin(ctx); err != nil {
		for i := range results {
			results[i].Err = err
		}
		return results
	}
	all := make([]*extension, len(leases))
	byKind := make(map[driver.Kind][]*extension)
	for i, e := range leases {
		all[i] = &extension{Extension: e, owner: d.extending(e), keys: d.keys(e.Name), token: make(map[driver.Token]int)}
		byKind[e.Name.Kind] = append(byKind[e.Name.Kind], all[i])
	}
	var requests []*extending
	for kind, items := range byKind {
		for part := range slices.Chunk(items, maxItems) {
			requests = append(requests, d.extend(kind, part))
		}
	}
	timer := time.NewTimer(d.patience(ctx))
	defer timer.Stop()
	for _, x := range requests {
		select {
		case <-x.done:
		case <-timer.C:
			timer.Reset(0) // for the others
		case <-ctx.Done():
		}
		x.close(ctx)
	}
	for i, e := range all {
		results[i] = e.result
	}
	return results
}

func (d *Driver) extend(kind driver.Kind, items []*extension) *extending {
	x := &extending{d: d, sent: d.clock.Start(), items: items, outcomes: make([]outcome, len(d.nodes)), left: len(d.nodes),
		undecided: len(items), done: make(chan struct{})}
	var keys, args []string
	for _, e := range items {
		keys = append(keys, e.keys...)
		args = append(args, e.ID, milliseconds(e.TTL))
	}
	by := d.clock.Now() + int64(d.timeout)
	d.order.Lock()
	defer d.order.Unlock()
	for _, n := range d.nodes {
		n.push(&ask{step: extendStep, kind: kind, keys: keys, args: args, by: by, done: x.answer})
	}
	return x
}

// answer takes the reply of one node.
func (x *extending) answer(r reply) {
	x.mu.Lock()
	fields, _ := r.value.([]any)
	if r.err == nil && len(fields) != len(x.items) {
		r.err, r.sure = errors.New("an unexpected answer"), false
	}
	x.outcomes[r.node.index] = outcome{came: true, err: r.err, sure: r.sure, text: "extended or gone"}
	type lack struct {
		owner *owner
		nodes []*node
	}
	var fill []lack
	for i, e := range x.items {
		if r.err == nil && x.count(e, r.node, fields[i]) {
			fill = append(fill, lack{e.owner, e.absent})
			e.absent = nil
		}
	}
	if x.left--; x.left == 0 && x.undecided > 0 {
		close(x.done)
		x.undecided = 0
	}
	x.mu.Unlock()
	for _, l := range fill {
		for _, n := range l.nodes {
			x.d.fill(l.owner, n)
		}
	}
}

// count takes what a node says of one lease, and answers whether there are nodes to be given it. x.mu is held.
func (x *extending) count(e *extension, n *node, said any) (fill bool) {
	d := x.d
	switch v := said.(type) {
	case []any:
		if len(v) != 2 {
			return false
		}
		text, _ := v[0].(string)
		left, _ := v[1].(int64)
		t, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return false
		}
		e.here = append(e.here, time.Duration(left)*time.Millisecond)
		e.token[driver.Token(t)]++
	case int64:
		e.gone++
		e.absent = append(e.absent, n)
	default:
		return false
	}
	switch {
	case e.decided:
	case len(e.here) >= d.quorum:
		e.decided = true
		slices.SortFunc(e.here, func(a, b time.Duration) int { return int(b - a) })
		e.result.State = driver.Granted
		e.result.TTL = e.TTL
		if left := e.here[d.quorum-1]; left >= e.TTL+time.Millisecond { // more than rounding has made of it
			e.result.TTL = left
		}
		for t, n := range e.token {
			if n > e.token[e.result.Token] {
				e.result.Token = t
			}
		}
		if e.owner != nil {
			d.extended(e.owner, x.sent, e.result.TTL)
		}
		x.decide()
	case e.gone > len(d.nodes)-d.quorum:
		e.decided = true
		e.result.State = driver.Gone
		x.decide()
	}
	return e.result.State == driver.Granted && e.owner != nil && len(e.absent) > 0
}

// decide counts one more decided lease. x.mu is held.
func (x *extending) decide() {
	if x.undecided--; x.undecided == 0 {
		close(x.done)
	}
}

// close ends the wait, and makes the results of leases that are not decided.
func (x *extending) close(ctx context.Context) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, e := range x.items {
		if e.decided {
			continue
		}
		sure := len(e.here) == 0
		for i := range x.outcomes {
			o := &x.outcomes[i]
			if !o.came {
				o.err = errNoAnswer
			}
			sure = sure && (o.err == nil || o.sure)
		}
		e.decided = true
		if e.result.Err = error(x.d.failure("", x.outcomes)); sure {
			e.result.Err = driver.Unavailable(e.result.Err)
		} else if ctx.Err() != nil {
			e.result.Err = errors.Join(e.result.Err, ctx.Err())
		}
	}
	if x.undecided > 0 {
		x.undecided = 0
		close(x.done)
	}
}
