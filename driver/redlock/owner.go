package redlock

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// owner is what the driver knows of an acquisition: to undo it everywhere, and to give it again to nodes that lack it.
type owner struct {
	driver.Owner
	holder string
	asked  []atomic.Bool // by node: it was sent something that may have given it the lock
	unsure []atomic.Bool // by node: what became of that is unknown
	fills  []atomic.Bool // by node: it is being given the lock again
	over   atomic.Bool   // nothing but releases is sent

	// Guarded by Driver.mu.
	ttl   time.Duration // the longest asked for
	until int64         // until when something of it may be there if nothing else is sent
	valid int64         // until when a majority has it; 0 if it is not granted
	token driver.Token
	slot  string
	round atomic.Int32 // of its release, counts up; changed only with Driver.mu held, and looked at without it too
}

// adopt makes what is known of an acquisition that a request is sent for. A repeated request takes over from the
// earlier one and switches its releases off, which would undo it.
func (d *Driver) adopt(r driver.Request) *owner {
	n := len(d.nodes)
	o := &owner{Owner: r.Owner, holder: r.Holder, ttl: r.TTL, until: d.clock.Start() + int64(r.TTL),
		asked: make([]atomic.Bool, n), unsure: make([]atomic.Bool, n), fills: make([]atomic.Bool, n)}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.longest = max(d.longest, r.TTL)
	if before := d.owners[r.ID]; before != nil {
		before.round.Add(1)
		before.over.Store(true)
		o.ttl, o.until = max(o.ttl, before.ttl), max(o.until, before.until)
		o.asked, o.unsure = before.asked, before.unsure // what was sent before may end yet
	}
	// Whoever neither extends nor releases is forgotten in the course of time: ranging over a map begins anywhere.
	looks := 2
	for id, other := range d.owners {
		if looks--; looks < 0 {
			break
		}
		if other.until < d.clock.Now() {
			delete(d.owners, id)
		}
	}
	d.owners[r.ID] = o
	return o
}

// granted notes that a majority has it.
func (d *Driver) granted(o *owner, sent int64, ttl time.Duration, t driver.Token, slot string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	o.valid, o.token, o.slot = max(o.valid, sent+int64(ttl)), t, slot
	o.until = max(o.until, d.clock.Now()+int64(o.ttl))
}

// extending notes that an extension is about to be sent, and answers what is known of the lease, if anything.
func (d *Driver) extending(e driver.Extension) *owner {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.longest = max(d.longest, e.TTL)
	o := d.owners[e.ID]
	if o == nil || o.Owner != e.Owner || o.over.Load() {
		return nil
	}
	o.ttl = max(o.ttl, e.TTL)
	o.until = max(o.until, d.clock.Now()+int64(d.timeout)+int64(o.ttl))
	return o
}

// extended notes that an extension sent at that time has reached a majority.
func (d *Driver) extended(o *owner, sent int64, ttl time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if o.valid > 0 {
		o.valid = max(o.valid, sent+int64(ttl))
	}
}

// fill gives a lease that a majority has to a node that lacks it. That node counts from the next extension on.
func (d *Driver) fill(o *owner, n *node) {
	d.mu.Lock()
	now := d.clock.Now()
	left := time.Duration(o.valid - now).Truncate(time.Millisecond)
	token, slot := o.token, o.slot
	if left > 0 {
		o.until = max(o.until, now+int64(d.timeout+left))
	}
	d.mu.Unlock()
	if left <= 0 || o.over.Load() || o.fills[n.index].Swap(true) {
		return
	}
	n.push(&ask{step: fillStep, kind: o.Name.Kind, keys: d.keys(o.Name), owner: o, by: now + int64(min(d.timeout, left)),
		args: []string{stored(token, o.ID, o.holder), milliseconds(left), slot},
		done: func(reply) { o.fills[n.index].Store(false) }})
}

// refill gives leases to nodes that may lack them, such as one that has restarted. It asks all nodes first, since only a
// lease that a majority still has may be given again.
func (d *Driver) refill() {
	d.mu.Lock()
	now := d.clock.Now()
	byKind := make(map[driver.Kind][]*extension)
	for _, o := range d.owners {
		if o.valid > now && !o.over.Load() {
			byKind[o.Name.Kind] = append(byKind[o.Name.Kind], &extension{owner: o, keys: d.keys(o.Name),
				Extension: driver.Extension{Owner: o.Owner, TTL: time.Millisecond}})
		}
	}
	d.mu.Unlock()
	for kind, items := range byKind {
		for part := range slices.Chunk(items, maxItems) {
			d.extend(kind, part)
		}
	}
}

// How often and when a release is sent again to a node.
const (
	firstPause = 50 * time.Millisecond
	maxPause   = 5 * time.Second
	maxOwed    = 4096 // releases that are tried again, of all owners and nodes
	echoes     = 6    // of a release that may have passed the request that it undoes
)

// release undoes an acquisition on all nodes that were asked, and goes on with that in the background. Each answer, or
// the failure of the first try, is told. wake says that a waiter is to be told.
func (d *Driver) release(o *owner, wake bool, told func(reply)) (nodes int) {
	o.over.Store(true)
	d.mu.Lock()
	round := o.round.Add(1)
	d.owners[o.ID] = o // also one that was not known, for a second call
	d.mu.Unlock()
	args, keys := []string{o.ID}, d.keys(o.Name)
	if !wake {
		args = append(args, "")
	}
	if o.Name.Kind == driver.KindLock {
		keys = []string{keys[0], keys[2]} // the fence stays
	}
	var undo []*undoing
	for _, n := range d.nodes {
		if o.asked[n.index].Load() {
			undo = append(undo, &undoing{d: d, o: o, n: n, round: round, keys: keys, args: args, pause: firstPause, told: told})
		}
	}
	left := new(atomic.Int32)
	left.Store(int32(len(undo)))
	if len(undo) == 0 {
		d.forget(o, round)
	}
	d.order.Lock()
	defer d.order.Unlock()
	for _, u := range undo {
		u.left = left
		u.send()
	}
	return len(undo)
}

// forget drops an owner whose release has come to an end.
func (d *Driver) forget(o *owner, round int32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.owners[o.ID] == o && o.round.Load() == round {
		delete(d.owners, o.ID)
	}
}

// undoing is the release of an owner on one node.
type undoing struct {
	d     *Driver
	o     *owner
	n     *node
	round int32
	keys  []string
	args  []string
	tries int
	pause time.Duration
	left  *atomic.Int32 // nodes that have not come to an end
	told  func(reply)   // nil after the first try
}

// stale says that a later request for the same owner has taken over. It takes no lock: a node asks it with its own held.
func (u *undoing) stale() bool { return u.o.round.Load() != u.round }

func (u *undoing) send() {
	u.tries++
	u.n.push(&ask{step: releaseStep, kind: u.o.Name.Kind, keys: u.keys, args: u.args, void: u.stale,
		by: u.d.clock.Now() + int64(u.d.timeout), done: u.done})
}

func (u *undoing) done(r reply) {
	if u.told != nil {
		u.told(r)
		u.told = nil
	}
	again := r.err != nil
	if found, _ := r.value.(int64); r.err == nil && found == 0 && u.o.unsure[u.n.index].Load() {
		// What it undoes may arrive yet: a node that hung takes what several connections bring in any order.
		again = u.tries <= echoes
	}
	d := u.d
	d.mu.Lock()
	again = again && u.o.round.Load() == u.round && d.clock.Now() < u.o.until && d.owed < maxOwed && !d.closed.Load()
	if again {
		d.owed++
	}
	d.mu.Unlock()
	if !again {
		if u.left.Add(-1) == 0 {
			d.forget(u.o, u.round)
		}
		return
	}
	pause := u.pause
	u.pause = min(2*u.pause, maxPause)
	time.AfterFunc(pause, func() {
		d.mu.Lock()
		d.owed--
		d.mu.Unlock()
		u.send()
	})
}

// Release implements driver.Locker.
func (d *Driver) Release(ctx context.Context, w driver.Owner) (bool, error) {
	if err := d.begin(ctx); err != nil {
		return false, err
	}
	d.mu.Lock()
	o := d.owners[w.ID]
	if o == nil || o.Owner != w {
		o = &owner{Owner: w, until: d.clock.Now() + int64(max(d.longest, time.Minute)), asked: make([]atomic.Bool, len(d.nodes)),
			unsure: make([]atomic.Bool, len(d.nodes)), fills: make([]atomic.Bool, len(d.nodes))}
		for i := range o.asked {
			o.asked[i].Store(true)
		}
	}
	d.mu.Unlock()

	nodes, none := len(d.nodes), 0
	for i := range o.asked {
		if !o.asked[i].Load() {
			none++
		}
	}
	replies := newReplies(nodes, d.quorum-none)
	outcomes := make([]outcome, nodes)
	left := d.release(o, true, replies.add)
	found := 0
	none = nodes - left // those that were not asked have nothing
	timer := time.NewTimer(d.patience(ctx))
	defer timer.Stop()
	for {
		switch {
		case found >= d.quorum:
			return true, nil
		case none > nodes-d.quorum:
			return false, nil
		case left == 0 && found+none >= d.quorum:
			return found > 0, nil // those that do not answer may make a majority
		}
		var err error
		if left == 0 {
			err = d.failure("", outcomes)
		} else {
			if r, ok := replies.next(ctx, timer); ok {
				left--
				outcomes[r.node.index] = outcome{came: true, err: r.err}
				switch n, _ := r.value.(int64); {
				case r.err != nil:
				case n > 0:
					found++
				default:
					none++
				}
				continue
			}
			if found+none >= d.quorum {
				return found > 0, nil
			}
			for i := range outcomes {
				if !outcomes[i].came && o.asked[i].Load() {
					outcomes[i].err = errNoAnswer
				}
			}
			err = errors.Join(d.failure("", outcomes), ctx.Err())
		}
		return false, err // it goes on in the background, so it is not one that matches ErrUnavailable
	}
}

// milliseconds are rounded up.
func milliseconds(d time.Duration) string {
	return strconv.FormatInt(int64((d+time.Millisecond-1)/time.Millisecond), 10)
}
