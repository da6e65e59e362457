package fencelock

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// maxSleep bounds the scheduler's sleep while something is due later: its timer stands still while the machine
// is suspended, the lease clock does not.
const maxSleep = time.Second

// schedule does what is due by time, for all leases and waiters of the client: it ends leases, and sends
// extensions and polls in batches. It never waits for an answer itself, so that a backend that hangs
// delays no loss (L2).
func (c *Client) schedule() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		woken := false
		select {
		case <-c.closing:
			return
		case <-c.wake:
			woken = true
		case <-timer.C:
		}
		c.mu.Lock()
		now := c.clock.Now()
		b := c.due(now)
		c.sleeping = never
		// What it was woken for may be over by now. If it then slept until woken again, a loop of short locks would wake
		// it for each of them.
		if woken || len(c.timeline) > 0 {
			c.sleeping = now + int64(maxSleep)
			if len(c.timeline) > 0 {
				c.sleeping = min(c.sleeping, c.timeline[0].due())
			}
			timer.Reset(time.Duration(c.sleeping - now))
		}
		c.mu.Unlock()
		b.after.run()
		if len(b.holds) > 0 {
			go c.extendAll(b.holds, b.extensions)
		}
		if len(b.waiters) > 0 {
			go c.pollAll(b.waiters, b.polls)
		}
	}
}

// maxPolls bounds the polls under way for one waiter when answers are slow. The entry lives for as many periods.
const maxPolls = 3

// batch is what one round of the scheduler sends.
type batch struct {
	after      ending
	holds      []*hold
	extensions []driver.Extension
	waiters    []*waiter
	polls      []driver.Poll
}

// due collects what is due now. When there is an extension or poll to send, those of the same client that are
// due within half their period go with it: so all soon fall due together, in one batch (W2). c.mu is held.
func (c *Client) due(now int64) (b batch) {
	for len(c.timeline) > 0 && c.timeline[0].due() <= now {
		switch it := c.timeline[0].(type) {
		case *hold:
			if it.until.Load() <= now {
				b.after.add(c.endIfExpired(it, now))
			} else {
				c.addExtension(&b, it, now)
			}
		case *waiter:
			c.addPoll(&b, it, now)
		}
	}
	var slack time.Duration
	for _, h := range b.holds {
		slack = max(slack, h.period()/2)
	}
	for _, w := range b.waiters {
		slack = max(slack, w.period()/2)
	}
	if slack == 0 {
		return b
	}
	// An item of the first round is due again half a period from now, which is not before that: no item is
	// taken twice.
	for _, it := range c.timeline.within(now + int64(slack)) {
		switch it := it.(type) {
		case *hold:
			if len(b.holds) > 0 && it.renewAt-int64(it.period()/2) < now && it.until.Load() > now {
				c.addExtension(&b, it, now)
			}
		case *waiter:
			if len(b.waiters) > 0 && it.pollAt-int64(it.period()/2) < now {
				c.addPoll(&b, it, now)
			}
		}
	}
	return b
}

// within lists the items due by then, in no order.
func (t timeline) within(then int64) (items []timed) {
	var visit func(i int)
	visit = func(i int) {
		if i < len(t) && t[i].due() <= then {
			items = append(items, t[i])
			visit(2*i + 1)
			visit(2*i + 2)
		}
	}
	visit(0)
	return items
}

func (c *Client) addExtension(b *batch, h *hold, now int64) {
	b.holds = append(b.holds, h)
	b.extensions = append(b.extensions, driver.Extension{Owner: h.owner, TTL: h.ttl})
	// If no answer comes, send it again before the lease ends; an answer plans anew.
	h.renewAt = now + int64(max(h.period()/2, time.Millisecond))
	c.reschedule(h)
}

func (c *Client) addPoll(b *batch, w *waiter, now int64) {
	if w.polls < maxPolls {
		w.polls++
		b.waiters = append(b.waiters, w)
		b.polls = append(b.polls, driver.Poll{Owner: w.owner, TTL: w.ttl, Claim: w.claim})
	}
	w.pollAt = now + int64(w.period())
	c.reschedule(w)
}

// extendAll sends a batch of extensions and takes the answers. Several may be under way for one lease when
// answers are slow; each counts from its own time of sending, and none shortens.
func (c *Client) extendAll(holds []*hold, extensions []driver.Extension) {
	var timeout time.Duration
	for _, h := range holds {
		timeout = max(timeout, c.requestTimeout(h.ttl))
	}
	type answered struct {
		holds   []*hold
		results []driver.Result
	}
	sent := c.clock.Start()
	reply, err := call(c.ctx, c, timeout, func(ctx context.Context) (a answered, err error) {
		a.holds, extensions = c.stillHeld(holds, extensions)
		if len(extensions) > 0 {
			a.results = c.d.Extend(ctx, extensions)
		}
		if len(a.results) != len(extensions) {
			return a, fmt.Errorf("driver answered %d results for %d extensions", len(a.results), len(extensions))
		}
		return a, nil
	}, nil)
	if err == nil {
		holds = reply.holds
	}
	for i, h := range holds {
		failed := err
		if failed == nil {
			failed = reply.results[i].Err
		}
		if failed == nil {
			c.extended(h, sent, reply.results[i].Answer)
			continue
		}
		c.mu.Lock()
		if !h.ended && (!h.noRenew || h.claim > 0) {
			h.renewAt = min(h.renewAt, c.clock.Now()+int64(c.retryAfter(h.period())))
			c.reschedule(h)
			c.obs.tell(Event{Kind: EventRenewFailed, Of: h.owner.Name.Kind, Name: h.owner.Name.Name, Token: h.token, Err: failed})
		}
		c.mu.Unlock()
	}
}

// stillHeld leaves out what was released or lost since the batch was collected (L3).
func (c *Client) stillHeld(holds []*hold, extensions []driver.Extension) ([]*hold, []driver.Extension) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var live []*hold
	var left []driver.Extension
	for i, h := range holds {
		if !h.ended {
			live, left = append(live, h), append(left, extensions[i])
		}
	}
	return live, left
}

// retryAfter is the pause after a failed extension or poll: about a quarter of the period, at most 5 s, spread
// so that many clients do not come back at one moment.
func (c *Client) retryAfter(period time.Duration) time.Duration {
	pause := min(period/4, 5*time.Second)
	return max(pause/2+rand.N(pause/2+1), time.Millisecond)
}

// pollAll sends a batch of polls and takes the answers.
func (c *Client) pollAll(waiters []*waiter, polls []driver.Poll) {
	var timeout time.Duration
	for _, w := range waiters {
		timeout = max(timeout, c.requestTimeout(w.ttl))
	}
	sent := c.clock.Start()
	results, err := call(c.ctx, c, timeout, func(ctx context.Context) ([]driver.Result, error) {
		return c.queue.Poll(ctx, polls), nil
	}, nil)
	if err == nil && len(results) != len(waiters) {
		err = fmt.Errorf("driver answered %d results for %d polls", len(results), len(waiters))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.clock.Now()
	for i, w := range waiters {
		w.polls--
		if c.waiters[w.owner.ID] != w {
			continue // it has been served or has left
		}
		failed := err
		if failed == nil {
			failed = results[i].Err
		}
		if failed != nil {
			w.failed(c, now, failed)
			continue
		}
		w.answered(sent, now, results[i].Answer)
	}
}

// event takes a message of the driver. It is the sink of driver.Notifier.
func (c *Client) event(e driver.Event) {
	switch e.Kind {
	case driver.EventWarning:
		c.obs.tell(Event{Kind: EventWarning, Err: e.Err})
	case driver.EventGranted:
		c.mu.Lock()
		defer c.mu.Unlock()
		// An owner that is not waiting any more has left the queue by a release, which gives back what
		// crossed it.
		if w := c.waiters[e.Owner.ID]; w != nil && w.owner == e.Owner {
			w.pushed(e.Token)
		}
	case driver.EventFreed:
		c.mu.Lock()
		defer c.mu.Unlock()
		if l := c.lines[e.Owner.Name]; l != nil {
			l.hint()
		}
	case driver.EventRecheck:
		c.mu.Lock()
		defer c.mu.Unlock()
		about := func(n driver.Name) bool { return e.Owner.Name.Name == "" || e.Owner.Name == n }
		for _, w := range c.waiters {
			if !about(w.owner.Name) {
				continue
			}
			w.recheck = true
			if w.index() >= 0 {
				w.pollAt = 0
				c.reschedule(w)
			}
		}
		for n, l := range c.lines {
			if about(n) {
				l.hint()
			}
		}
	}
}
