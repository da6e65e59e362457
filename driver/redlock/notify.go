package redlock

import (
	"context"
	"crypto/rand"
	mathrand "math/rand/v2"
	"strings"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// subscription is to the client's channel on all nodes, over which releases wake it. It is guarded by Driver.mu.
type subscription struct {
	until int64 // nobody waits any more then
	idle  *time.Timer
	end   context.CancelFunc
	up    int // nodes on which it has stood
}

// Pauses between attempts to subscribe.
const (
	firstListen = 50 * time.Millisecond
	maxListen   = 2 * time.Second
)

// Notify implements driver.Notifier. Grants are not told, since there are none but to who asks.
func (d *Driver) Notify(sink func(driver.Event)) {
	d.sink = sink
	d.channel = d.space + "rc:" + rand.Text()
}

// waits sees to it that a request that waits is told when to try again.
func (d *Driver) waits(r driver.Request, b *ballot, took time.Duration) {
	if d.sink == nil {
		return
	}
	d.listen(r.Claim)
	if _, votes := b.leader(b.slot); votes < b.quorum && !b.full() {
		// Nobody has it: several were at it at once. Each tries again at another moment.
		time.AfterFunc(took+mathrand.N(4*took+1), func() { d.free(r.Name) })
	}
}

// free tells that a name may be free.
func (d *Driver) free(n driver.Name) {
	if !d.closed.Load() {
		d.sink(driver.Event{Kind: driver.EventFreed, Owner: driver.Owner{Name: n}})
	}
}

// listen lets the subscription live for as long, and begins it if there is none. It does not wait.
func (d *Driver) listen(keep time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	until := d.clock.Now() + int64(keep)
	if d.sub != nil {
		d.sub.until = max(d.sub.until, until)
		return
	}
	ctx, cancel := context.WithCancel(d.ctx)
	s := &subscription{until: until, end: cancel}
	d.sub = s
	s.idle = time.AfterFunc(keep, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if left := s.until - d.clock.Now(); left > 0 && ctx.Err() == nil {
			s.idle.Reset(time.Duration(left))
			return
		}
		d.sub = nil
		cancel()
	})
	for _, n := range d.nodes {
		go d.background(func() { d.receive(ctx, s, n) }, func() {})
	}
}

// receive passes on what a node tells until ctx ends.
func (d *Driver) receive(ctx context.Context, s *subscription, n *node) {
	pause, before := firstListen, false
	up := func() {
		pause = firstListen
		d.mu.Lock()
		s.up++
		recheck := before || s.up == d.quorum
		d.mu.Unlock()
		if before {
			n.doubt()
		}
		before = true
		if recheck {
			d.sink(driver.Event{Kind: driver.EventRecheck})
		}
	}
	message := func(key string) {
		if name, ok := d.nameOf(key); ok {
			d.freed(name)
		}
	}
	for {
		// Whatever the error is: the waiters try again by themselves as well.
		_ = n.client.Listen(ctx, d.channel, up, message)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, maxListen)
	}
}

// nameOf answers whose first key this is.
func (d *Driver) nameOf(key string) (driver.Name, bool) {
	letter, name, ok := strings.Cut(strings.TrimPrefix(key, d.space), ":")
	for kind, k := range kinds {
		if ok && k.letter != "" && k.letter == letter {
			return driver.Name{Kind: driver.Kind(kind), Name: name}, true
		}
	}
	return driver.Name{}, false
}

// hint collects what several nodes tell of one release.
type hint struct {
	nodes int // that have told; below zero those that may still do so after it was passed on
	timer *time.Timer
}

// hintPatience is how long the other nodes are waited for: too early is in vain, for the lock is not free yet.
const hintPatience = 5 * time.Millisecond

// freed takes a node's word that a name is free there, and passes it on when a majority has given it.
func (d *Driver) freed(n driver.Name) {
	d.mu.Lock()
	h := d.hints[n]
	if h == nil {
		h = new(hint)
		d.hints[n] = h
		h.timer = time.AfterFunc(hintPatience, func() {
			d.mu.Lock()
			delete(d.hints, n)
			some := h.nodes > 0
			d.mu.Unlock()
			if some {
				d.free(n)
			}
		})
	}
	h.nodes++
	most := h.nodes == d.quorum
	if most {
		h.nodes -= len(d.nodes)
	}
	d.mu.Unlock()
	if most {
		d.free(n)
	}
}
