package redislua

import (
	"context"
	"crypto/rand"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// subscription is one channel on which grants to this client's waiters are announced: the one for all names or, on a
// Cluster, the one for a name. It is guarded by Driver.mu.
type subscription struct {
	until time.Time // nobody waits any more then
	idle  *time.Timer
}

// Pauses between attempts to subscribe.
const (
	firstPause = 50 * time.Millisecond
	maxPause   = 2 * time.Second
)

// Notify implements driver.Notifier.
func (d *Driver) Notify(sink func(driver.Event)) {
	d.sink = sink
	d.channel = d.space.channel(rand.Text(), d.client.SameSlot())
}

// listen lets the subscription that a waiter for the name needs live for as long, and begins it if there is none. It
// does not wait.
func (d *Driver) listen(n driver.Name, keep time.Duration) {
	if d.sink == nil {
		return
	}
	channel := d.space.channelOf(n, d.channel)
	if !d.client.SameSlot() {
		n = driver.Name{} // the channel is for all
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	until := time.Now().Add(keep)
	if s := d.subscriptions[channel]; s != nil {
		if until.After(s.until) {
			s.until = until
		}
		return
	}
	if d.closed.Load() {
		return
	}
	ctx, cancel := context.WithCancel(d.ctx)
	s := &subscription{until: until}
	d.subscriptions[channel] = s
	s.idle = time.AfterFunc(keep, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if left := time.Until(s.until); left > 0 {
			s.idle.Reset(left)
			return
		}
		delete(d.subscriptions, channel)
		cancel()
	})
	d.tasks.Go(func() {
		defer cancel()
		d.receive(ctx, channel, n)
	})
}

// receive passes on what the channel, which is for all names or one, brings until ctx ends.
func (d *Driver) receive(ctx context.Context, channel string, n driver.Name) {
	pause, before := firstPause, false
	up := func() {
		pause = firstPause
		if before {
			d.checked.Store(false)
		}
		before = true
		d.sink(driver.Event{Kind: driver.EventRecheck, Owner: driver.Owner{Name: n}})
	}
	message := func(payload string) {
		e, ok := d.space.grant(payload)
		if ok && d.replicas > 0 {
			// Nobody has confirmed it yet: let the waiter ask.
			e = driver.Event{Kind: driver.EventRecheck, Owner: driver.Owner{Name: e.Owner.Name}}
		}
		if ok {
			d.sink(e)
		}
	}
	for {
		// Whatever the error is: the waiters poll as well.
		_ = d.client.Listen(ctx, channel, up, message)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, maxPause)
	}
}

// grant reads a message: token, id and the key of the holder.
func (s keyspace) grant(payload string) (driver.Event, bool) {
	token, rest, _ := strings.Cut(payload, " ")
	id, key, _ := strings.Cut(rest, " ")
	t, err := strconv.ParseUint(token, 10, 64)
	name, ok := s.name(key)
	return driver.Event{Kind: driver.EventGranted, Owner: driver.Owner{Name: name, ID: id}, Token: driver.Token(t)},
		ok && err == nil && id != ""
}
