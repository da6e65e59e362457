package redlock

import (
	"cmp"
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
	parts   []part // of the nodes that still have it
	gone    int
	absent  []*node
	refused map[int]error // by node: it took the request, and could not do this one
	decided bool
	slot    string // that a majority has, if granted
	result  driver.Result
}

// part is what one node has of a lease.
type part struct {
	node  *node
	token driver.Token
	left  time.Duration
	slot  string
}

// most answers the parts on the slot that most nodes have. An acquisition that was repeated may have got a permit on
// different slots of different nodes: those are no majority together, for others could have one of either slot.
func (e *extension) most() (most []part) {
	of := make(map[string][]part, 1)
	for _, p := range e.parts {
		same := append(of[p.slot], p)
		if of[p.slot] = same; len(same) > len(most) {
			most = same
		}
	}
	return most
}

// extending is a request about leases of one kind on its way to all nodes. Replies that come when it is decided are of
// use all the same: a node that lacks a lease is given it again.
type extending struct {
	d     *Driver
	sent  int64
	items []*extension

	mu        sync.Mutex
	kept      [][]*extension // by node: those that were sent to it, nil for all
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
		all[i] = &extension{Extension: e, owner: d.extending(e), keys: d.keys(e.Name)}
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
	x := &extending{d: d, sent: d.clock.Start(), items: items, kept: make([][]*extension, len(d.nodes)), outcomes: make([]outcome, len(d.nodes)), left: len(d.nodes),
		undecided: len(items), done: make(chan struct{})}
	var keys, args []string
	for _, e := range items {
		keys, args = e.add(keys, args)
	}
	by := d.clock.Now() + int64(d.timeout)
	d.order.Lock()
	defer d.order.Unlock()
	for _, n := range d.nodes {
		n.push(&ask{step: extendStep, kind: kind, keys: keys, args: args, by: by, done: x.answer,
			trim: func(a *ask) bool { return x.trim(a, n) }})
	}
	return x
}

func (e *extension) add(keys, args []string) (k, a []string) {
	return append(keys, e.keys...), append(args, e.ID, milliseconds(e.TTL))
}

// trim takes out of a request that is about to be sent the leases whose release has begun (L3).
func (x *extending) trim(a *ask, n *node) bool {
	over := func(e *extension) bool { return e.owner != nil && e.owner.over.Load() }
	if !slices.ContainsFunc(x.items, over) {
		return true
	}
	kept := slices.DeleteFunc(slices.Clone(x.items), over)
	a.keys, a.args = nil, nil
	for _, e := range kept {
		a.keys, a.args = e.add(a.keys, a.args)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.kept[n.index] = kept
	return len(kept) > 0
}

// answer takes the reply of one node.
func (x *extending) answer(r reply) {
	x.mu.Lock()
	fields, _ := r.value.([]any)
	items := x.items
	if kept := x.kept[r.node.index]; kept != nil {
		items = kept
	}
	if r.err == nil && len(fields) != len(items) {
		r.err, r.sure = errors.New("an unexpected answer"), false
	}
	x.outcomes[r.node.index] = outcome{came: true, err: r.err, sure: r.sure, text: "extended or gone"}
	type lack struct {
		owner *owner
		nodes []*node
	}
	var fill []lack
	for i, e := range items {
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
		if len(v) != 3 {
			return false
		}
		text, _ := v[0].(string)
		left, _ := v[1].(int64)
		slot, _ := v[2].(string)
		t, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return false
		}
		e.parts = append(e.parts, part{n, driver.Token(t), time.Duration(left) * time.Millisecond, slot})
		if e.decided && slot != e.slot {
			e.absent = append(e.absent, n)
		}
	case int64:
		e.gone++
		e.absent = append(e.absent, n)
	case error:
		if e.refused == nil {
			e.refused = make(map[int]error)
		}
		e.refused[n.index] = v
		return false
	default:
		return false
	}
	if !e.decided {
		switch most := e.most(); {
		case len(most) >= d.quorum:
			x.grant(e, most)
		case len(most)+len(d.nodes)-len(e.parts)-e.gone < d.quorum:
			e.decided = true
			e.result.State = driver.Gone
			x.decide()
		}
	}
	return e.result.State == driver.Granted && e.owner != nil && len(e.absent) > 0
}

// grant decides that a majority has the lease, on one slot. x.mu is held.
func (x *extending) grant(e *extension, same []part) {
	d := x.d
	slices.SortFunc(same, func(a, b part) int { return cmp.Compare(b.left, a.left) })
	e.decided, e.slot = true, same[0].slot
	e.result.State, e.result.TTL = driver.Granted, e.TTL
	if left := same[d.quorum-1].left; left >= e.TTL+time.Millisecond { // more than rounding has made of it
		e.result.TTL = left
	}
	count := make(map[driver.Token]int, 1)
	for _, p := range same {
		if count[p.token]++; count[p.token] > count[e.result.Token] {
			e.result.Token = p.token
		}
	}
	for _, p := range e.parts {
		if p.slot != e.slot {
			e.absent = append(e.absent, p.node)
		}
	}
	if e.owner != nil {
		d.extended(e.owner, x.sent, e.result.TTL)
	}
	x.decide()
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
		sure := len(e.parts) == 0
		for i := range x.outcomes {
			o := &x.outcomes[i]
			if !o.came {
				o.err = errNoAnswer
			}
			sure = sure && (o.err == nil || o.sure)
		}
		outcomes := slices.Clone(x.outcomes)
		for i, err := range e.refused {
			outcomes[i].err = err
		}
		e.decided = true
		if e.result.Err = error(x.d.failure("", outcomes)); sure {
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
