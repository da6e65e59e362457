// Package state is the reference of what one name does: who holds, who waits, which token is next. It
// is a plain value and pure functions of the clock, so that driver/memory keeps it in a map, driver/file
// in a file, and the tests compare real servers against it. It is for drivers only.
package state

import (
	"slices"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// Remember is how long the last token of an unused name is kept at least (T5).
const Remember = 48 * time.Hour

// Now is one reading of the clocks, taken by the server when it begins the step.
type Now struct {
	// Lease is the clock that leases live by, in nanoseconds from any origin. It never goes back.
	Lease int64
	// Token is the clock that tokens follow, in microseconds since 1970. It may go back.
	Token int64
}

func (n Now) plus(d time.Duration) int64 { return n.Lease + int64(d) }

// Holder is one lease.
type Holder struct {
	ID      string
	Token   driver.Token
	Expires int64
	Info    string `json:",omitempty"`
}

// Waiter is one entry of the queue. It carries all that the step which grants to it needs.
type Waiter struct {
	ID      string
	Limit   int
	Floor   driver.Token `json:",omitempty"`
	Claim   time.Duration
	Expires int64
	Info    string `json:",omitempty"`
	// Client is where the grant is to be announced.
	Client string `json:",omitempty"`
}

// Name is the state of one name. The zero value is a name never used.
type Name struct {
	Last    driver.Token
	Holders []Holder `json:",omitempty"`
	Queue   []Waiter `json:",omitempty"`
}

// Grant is a lease that a step gave to a waiter, to be announced to its client.
type Grant struct {
	ID     string
	Token  driver.Token
	Client string
}

// Lock is the step of driver.Locker.Lock and driver.Semaphore.Acquire. client is stored with a waiter.
func (n *Name) Lock(now Now, r driver.Request, client string) (driver.Answer, []Grant) {
	grants := n.serve(now)
	if a, ok := n.renew(now, r.ID, r.TTL); ok {
		return a, without(grants, r.ID)
	}
	if w := n.waiter(r.ID); w != nil {
		w.Expires = now.plus(r.Claim)
		return driver.Answer{State: driver.Waiting}, grants
	}
	if len(n.Queue) == 0 && len(n.Holders) < r.Limit {
		t := n.mint(now, r.Floor)
		n.Holders = append(n.Holders, Holder{ID: r.ID, Token: t, Expires: now.plus(r.TTL), Info: r.Holder})
		return driver.Answer{State: driver.Granted, Token: t, TTL: r.TTL}, grants
	}
	if !r.Wait {
		return driver.Answer{State: driver.Held}, grants
	}
	n.Queue = append(n.Queue, Waiter{ID: r.ID, Limit: r.Limit, Floor: r.Floor, Claim: r.Claim,
		Expires: now.plus(r.Claim), Info: r.Holder, Client: client})
	return driver.Answer{State: driver.Waiting}, grants
}

// Extend is the step of driver.Locker.Extend for one lease.
func (n *Name) Extend(now Now, id string, ttl time.Duration) driver.Answer {
	n.expire(now)
	a, _ := n.renew(now, id, ttl)
	return a
}

// Release is the step of driver.Locker.Release.
func (n *Name) Release(now Now, id string) (bool, []Grant) {
	n.expire(now)
	before := len(n.Holders) + len(n.Queue)
	n.Holders = slices.DeleteFunc(n.Holders, func(h Holder) bool { return h.ID == id })
	n.Queue = slices.DeleteFunc(n.Queue, func(w Waiter) bool { return w.ID == id })
	found := len(n.Holders)+len(n.Queue) < before
	return found, n.serve(now)
}

// Poll is the step of driver.Queue.Poll for one waiter.
func (n *Name) Poll(now Now, p driver.Poll) (driver.Answer, []Grant) {
	if w := n.waiter(p.ID); w != nil && w.Expires > now.Lease {
		w.Expires = now.plus(p.Claim)
	}
	grants := n.serve(now)
	if a, ok := n.renew(now, p.ID, p.TTL); ok {
		return a, without(grants, p.ID)
	}
	if n.waiter(p.ID) != nil {
		return driver.Answer{State: driver.Waiting}, grants
	}
	return driver.Answer{State: driver.Gone}, grants
}

// NextToken is the step of driver.FencingSource.NextToken.
func (n *Name) NextToken(now Now, floor driver.Token) driver.Token { return n.mint(now, floor) }

// Advance is the step of driver.FencingSource.Advance.
func (n *Name) Advance(floor driver.Token) { n.Last = max(n.Last, floor) }

// ForceUnlock is the step of driver.ForceUnlocker.
func (n *Name) ForceUnlock(now Now) (int, []Grant) {
	n.expire(now)
	ended := len(n.Holders)
	n.Holders = nil
	return ended, n.serve(now)
}

// Live answers the leases that are alive now.
func (n *Name) Live(now Now) []Holder {
	n.expire(now)
	return n.Holders
}

// Idle reports that nobody holds or waits.
func (n *Name) Idle(now Now) bool {
	n.expire(now)
	return len(n.Holders) == 0 && len(n.Queue) == 0
}

// expire drops what has ended. A waiter in the middle of the queue counts as well: it could be served
// before it reaches the head only by mistake.
func (n *Name) expire(now Now) {
	n.Holders = slices.DeleteFunc(n.Holders, func(h Holder) bool { return h.Expires <= now.Lease })
	n.Queue = slices.DeleteFunc(n.Queue, func(w Waiter) bool { return w.Expires <= now.Lease })
}

// serve grants to the head of the queue while the head's own limit allows it (S1, W4).
func (n *Name) serve(now Now) (grants []Grant) {
	n.expire(now)
	for len(n.Queue) > 0 && len(n.Holders) < n.Queue[0].Limit {
		w := n.Queue[0]
		n.Queue = slices.Delete(n.Queue, 0, 1)
		t := n.mint(now, w.Floor)
		n.Holders = append(n.Holders, Holder{ID: w.ID, Token: t, Expires: now.plus(w.Claim), Info: w.Info})
		grants = append(grants, Grant{ID: w.ID, Token: t, Client: w.Client})
	}
	return grants
}

func (n *Name) renew(now Now, id string, ttl time.Duration) (driver.Answer, bool) {
	for i := range n.Holders {
		if h := &n.Holders[i]; h.ID == id {
			h.Expires = max(h.Expires, now.plus(ttl))
			left := time.Duration(h.Expires - now.Lease)
			return driver.Answer{State: driver.Granted, Token: h.Token, TTL: left}, true
		}
	}
	return driver.Answer{State: driver.Gone}, false
}

func (n *Name) waiter(id string) *Waiter {
	for i := range n.Queue {
		if n.Queue[i].ID == id {
			return &n.Queue[i]
		}
	}
	return nil
}

func (n *Name) mint(now Now, floor driver.Token) driver.Token {
	n.Last = max(n.Last+1, floor+1, driver.Token(max(now.Token, 0)))
	return n.Last
}

// without leaves out the grant to the owner whose own step this is: the answer tells it.
func without(grants []Grant, id string) []Grant {
	return slices.DeleteFunc(grants, func(g Grant) bool { return g.ID == id })
}
