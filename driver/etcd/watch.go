package etcd

import (
	"context"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/driver"
)

// waiter is what is known of an entry that waits: how it stood when it was last looked at, and what the watch has told
// since. Guarded by Driver.mu.
//
// One watch of the namespace serves all waiters of a driver. It stands all the while, because etcd serves a watch that
// begins in the past every 100 ms only. It tells all that happens, in order; so when it has told that the last of
// those before a waiter has gone, and not that the waiter has, then the waiter holds.
type waiter struct {
	viewed int64 // the revision of the latest look; zero if there was none
	limit  int
	ahead  []rival
	more   bool
	gone   map[string]int64 // keys of the queue that went since the latest look was sent, and when

	token driver.Token
	mod   int64 // the revision at which the token was given
}

// listening is the driver's watch. Guarded by Driver.mu.
type listening struct {
	on       bool   // it stands or is being made
	again    func() // ends it, so that it is made again
	stands   int64  // the revision after which it tells everything; zero if it does not stand
	lastUsed int64
	waiters  map[string]map[*entry]bool // by queue
}

const (
	// listenIdle is how long the watch stays when nobody waits any more.
	listenIdle = MinTTL
	// The pauses before a watch is tried again.
	firstPause   = 50 * time.Millisecond
	longestPause = 2 * time.Second
)

// wait begins to listen for what concerns the entry, before the request is sent that makes or looks at it. d.mu
// is held.
func (d *Driver) wait(e *entry) {
	if d.sink == nil || d.closed || e.over() || d.entries[e.owner] != e {
		return
	}
	l := &d.listening
	l.lastUsed = d.clock.Now()
	if e.waiter == nil {
		e.waiter = &waiter{}
		queue := d.queueKey(e.owner.Name)
		if l.waiters[queue] == nil {
			l.waiters[queue] = make(map[*entry]bool)
		}
		l.waiters[queue][e] = true
	}
	// What the watch has told by now, the request will see itself.
	e.waiter.gone = make(map[string]int64)
	if !l.on {
		l.on = true
		d.running.Go(d.listen)
	}
}

// unwait ends it. d.mu is held.
func (d *Driver) unwait(e *entry) {
	if e.waiter == nil {
		return
	}
	e.waiter = nil
	queue := d.queueKey(e.owner.Name)
	delete(d.listening.waiters[queue], e)
	if len(d.listening.waiters[queue]) == 0 {
		delete(d.listening.waiters, queue)
	}
}

// waits books how a waiter was seen to stand, and answers the events that follow from it. d.mu is held.
func (d *Driver) waits(e *entry, v view) []driver.Event {
	w := e.waiter
	if w == nil || v.revision < w.viewed {
		return nil
	}
	if v.revision < d.listening.stands { // what happened in between was told to nobody
		d.lookAgain()
		return nil
	}
	if w.gone[e.key] > v.revision { // its own place
		d.unwait(e)
		return []driver.Event{{Kind: driver.EventRecheck}}
	}
	w.viewed, w.limit, w.more, w.ahead = v.revision, v.limit, v.more, nil
	for _, r := range v.ahead {
		if w.gone[r.key] <= v.revision {
			w.ahead = append(w.ahead, r)
		}
	}
	mod := v.create
	if v.own != nil {
		mod = v.own.ModRevision
	}
	if mod >= w.mod {
		w.token, w.mod = v.token, mod
	}
	return d.served(e)
}

// served answers the event that the waiter holds, if it does. d.mu is held.
func (d *Driver) served(e *entry) []driver.Event {
	w := e.waiter
	if w.viewed == 0 || w.more && len(w.ahead) > 0 {
		return nil
	}
	if w.more { // all that were listed have gone
		return []driver.Event{{Kind: driver.EventRecheck}}
	}
	if !holds(w.ahead, w.more, w.limit) {
		return nil
	}
	e.token = w.token
	d.unwait(e)
	return []driver.Event{{Kind: driver.EventGranted, Owner: e.owner, Token: e.token}}
}

func (d *Driver) tellAll(events []driver.Event) {
	for _, e := range events {
		d.tell(e)
	}
}

// listen keeps the watch up until nobody waits any more.
func (d *Driver) listen() {
	pause := firstPause
	for {
		ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(d.open))
		d.mu.Lock()
		d.listening.again = cancel
		d.mu.Unlock()
		done := make(chan struct{})
		go func() {
			defer close(done)
			d.hear(d.watcher.Watch(ctx, d.prefix, clientv3.WithPrefix(), clientv3.WithCreatedNotify()))
		}()
		for heard := false; !heard; {
			select {
			case <-done:
				heard = true
			case <-time.After(listenIdle / 4):
				if d.idle() {
					cancel()
				}
			}
		}
		cancel()
		d.mu.Lock()
		if d.listening.stands > 0 {
			pause = firstPause
		}
		d.listening.stands = 0
		if d.closed || len(d.listening.waiters) == 0 {
			d.listening.on = false
			d.mu.Unlock()
			return
		}
		d.mu.Unlock()
		select {
		case <-d.open.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, longestPause)
	}
}

// idle reports that nobody has waited for a while.
func (d *Driver) idle() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.listening.waiters) > 0 {
		d.listening.lastUsed = d.clock.Now()
	}
	return d.clock.Now()-d.listening.lastUsed >= int64(listenIdle)
}

// hear takes what the watch tells until it ends: because it is not wanted any more, or by a compaction, for lack of a
// leader, or of permission.
func (d *Driver) hear(responses clientv3.WatchChan) {
	for resp := range responses {
		if resp.Err() != nil {
			return
		}
		var events []driver.Event
		d.mu.Lock()
		if c := d.store.cluster; c != 0 && resp.Header.ClusterId != c {
			d.mu.Unlock()
			return // a step will find out
		}
		if resp.Created {
			d.listening.stands = resp.Header.Revision
			d.forgetViews(resp.Header.Revision)
			d.lookAgain()
			events = append(events, driver.Event{Kind: driver.EventRecheck})
		}
		for _, e := range resp.Events {
			events = append(events, d.heard(e)...)
		}
		d.mu.Unlock()
		d.tellAll(events)
	}
}

// forgetViews makes all waiters be looked at again that were looked at before the revision at which the watch began to
// stand: nobody was told what happened in between, such as that they lost their own places. d.mu is held.
func (d *Driver) forgetViews(stands int64) {
	for _, queue := range d.listening.waiters {
		for e := range queue {
			if e.waiter.viewed < stands {
				e.waiter.viewed, e.waiter.ahead = 0, nil
			}
		}
	}
}

// lookTimeout bounds a look that nobody asked for.
const lookTimeout = 3 * time.Second

// lookAgain looks at all waiters that must be looked at, in the background. If it fails, polling does. d.mu is held.
func (d *Driver) lookAgain() {
	var stands []*stand
	for _, queue := range d.listening.waiters {
		for e := range queue {
			if e.waiter.viewed == 0 && e.create > 0 {
				e.waiter.gone = make(map[string]int64)
				stands = append(stands, &stand{entry: e, key: e.key, create: e.create})
			}
		}
	}
	if len(stands) == 0 || d.closed {
		return
	}
	d.running.Go(func() {
		ctx, cancel := context.WithTimeout(d.open, lookTimeout)
		defer cancel()
		d.look(ctx, stands)
		for _, s := range stands {
			if s.err != nil || s.view.own == nil {
				continue
			}
			d.mu.Lock()
			events := d.waits(s.entry, s.view)
			d.mu.Unlock()
			d.tellAll(events)
		}
	})
}

// heard takes one change of a key. d.mu is held.
func (d *Driver) heard(c *clientv3.Event) (events []driver.Event) {
	key := string(c.Kv.Key)
	for e := range d.listening.waiters[key[:strings.LastIndexByte(key, '/')+1]] {
		w := e.waiter
		switch {
		case c.Type == mvccpb.PUT && key == e.key:
			if r, err := readRecord(c.Kv); err == nil && r.ID == e.owner.ID && c.Kv.ModRevision > w.mod {
				w.token, w.mod = r.token(c.Kv), c.Kv.ModRevision
			}
		case c.Type == mvccpb.PUT:
		case key == e.key:
			w.gone[key] = c.Kv.ModRevision
			if w.viewed > 0 && c.Kv.ModRevision > w.viewed {
				d.unwait(e)
				events = append(events, driver.Event{Kind: driver.EventRecheck}) // so that it queues anew
			}
		default:
			w.gone[key] = c.Kv.ModRevision
			for i, r := range w.ahead {
				if r.key == key && c.Kv.ModRevision > w.viewed { // not one of that key before
					w.ahead = append(w.ahead[:i:i], w.ahead[i+1:]...)
					events = append(events, d.served(e)...)
					break
				}
			}
		}
	}
	return events
}
