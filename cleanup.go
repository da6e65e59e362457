package fencelock

import (
	"context"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// cleanup holds the releases that no caller waits for: compensation of acquisitions that failed (L7), and
// what ends with a lost lease. A few goroutines work it off while there is something, and none when not.
type cleanup struct {
	jobs    []*cleaning
	workers int
	wake    chan struct{} // of capacity 1: there is a new job
	idle    chan struct{} // closed when nothing is owed; made when somebody waits for it
}

const maxCleaners = 8

type cleaning struct {
	owner   driver.Owner
	retry   int64 // until when it is tried again; one try is always made
	next    int64 // not before
	pause   time.Duration
	settled chan struct{} // closed when it was answered or given up
	ok      bool          // it was answered; read after settled
}

// clean sends a release of the owner in the background, and again until it is answered or the time has come.
// c.mu is held.
func (c *Client) clean(o driver.Owner, retry int64) *cleaning {
	j := &cleaning{owner: o, retry: retry, pause: 10 * time.Millisecond, settled: make(chan struct{})}
	c.cleanup.jobs = append(c.cleanup.jobs, j)
	select {
	case c.cleanup.wake <- struct{}{}:
	default:
	}
	if c.cleanup.workers < maxCleaners {
		c.cleanup.workers++
		go c.cleaner()
	}
	return j
}

func (c *Client) cleaner() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		j, wait := c.nextCleaning()
		if j == nil && wait == 0 {
			c.cleanup.workers--
			if c.cleanup.workers == 0 && c.cleanup.idle != nil {
				close(c.cleanup.idle)
				c.cleanup.idle = nil
			}
			return
		}
		c.mu.Unlock()
		if j == nil {
			select {
			case <-time.After(wait):
			case <-c.cleanup.wake:
			case <-c.ctx.Done():
			}
			c.mu.Lock()
			continue
		}
		_, err := call(c.ctx, c, c.requestTimeout(c.cfg.ttl), func(ctx context.Context) (bool, error) {
			return c.d.Release(ctx, j.owner)
		}, nil)
		c.mu.Lock()
		now := c.clock.Now()
		if err != nil && now < j.retry && c.ctx.Err() == nil {
			j.next = now + int64(j.pause)
			j.pause = min(2*j.pause, time.Second)
			c.cleanup.jobs = append(c.cleanup.jobs, j)
			continue
		}
		j.ok = err == nil
		close(j.settled)
		if err != nil {
			c.obs.tell(Event{Kind: EventCleanupFailed, Of: j.owner.Name.Kind, Name: j.owner.Name.Name, Err: err})
		}
	}
}

// nextCleaning takes the first job that may run now; without one it answers how long to wait, zero if nothing
// is left. c.mu is held.
func (c *Client) nextCleaning() (*cleaning, time.Duration) {
	now, first := c.clock.Now(), never
	for i, j := range c.cleanup.jobs {
		if j.next <= now || c.ctx.Err() != nil {
			c.cleanup.jobs = append(c.cleanup.jobs[:i], c.cleanup.jobs[i+1:]...)
			return j, 0
		}
		first = min(first, j.next)
	}
	if first == never {
		return nil, 0
	}
	return nil, time.Duration(first - now)
}

// drainCleanup waits until nothing is owed, but no longer than patience.
func (c *Client) drainCleanup(patience time.Duration) {
	c.mu.Lock()
	if c.cleanup.workers == 0 {
		c.mu.Unlock()
		return
	}
	if c.cleanup.idle == nil {
		c.cleanup.idle = make(chan struct{})
	}
	idle := c.cleanup.idle
	c.mu.Unlock()
	select {
	case <-idle:
	case <-time.After(patience):
	}
}
