package fencelock

import (
	"context"
	"encoding/json"
	"os"
	"strconv"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// shareKey names the lease that all calls with one Holder share.
type shareKey struct {
	name   driver.Name
	holder string
}

// share is such a lease, or the call that is getting it.
type share struct {
	ready chan struct{} // closed when that call is done
	h     *hold         // nil until then; guarded by c.mu
}

// takeShared is take for a re-entrant lock.
func (c *Client) takeShared(ctx context.Context, a *attempt) (*Lease, error) {
	key := shareKey{a.name, a.cfg.holder}
	for {
		c.mu.Lock()
		s := c.shares[key]
		if s == nil {
			s = &share{ready: make(chan struct{})}
			c.shares[key] = s
			c.mu.Unlock()
			return c.takeFirst(ctx, a, key, s)
		}
		if s.h != nil {
			after := c.endIfExpired(s.h, c.clock.Now())
			if s.h.ended {
				delete(c.shares, key)
				c.mu.Unlock()
				after.run()
				continue
			}
			l := &Lease{h: s.h}
			s.h.more = append(s.h.more, l)
			c.mu.Unlock()
			return l, nil
		}
		c.mu.Unlock()
		if !a.wait {
			return nil, c.opError(a.op, a.name, ErrHeld) // another call of this holder is waiting for it
		}
		select {
		case <-s.ready:
		case <-ctx.Done():
			return nil, c.opError(a.op, a.name, ctx.Err())
		case <-c.closing:
			return nil, c.opError(a.op, a.name, ErrClosed)
		}
	}
}

func (c *Client) takeFirst(ctx context.Context, a *attempt, key shareKey, s *share) (*Lease, error) {
	l, err := c.take(ctx, a)
	c.mu.Lock()
	defer c.mu.Unlock()
	defer close(s.ready)
	if err != nil || l.h.ended {
		delete(c.shares, key)
		return l, err
	}
	s.h, l.h.share = l.h, key
	return l, nil
}

// HolderInfo is who took a lease, by its own word.
type HolderInfo struct {
	Host  string    `json:"host,omitempty"`
	PID   int       `json:"pid,omitempty"`
	Since time.Time `json:"since,omitzero"` // when it was granted, by the holder's wall clock or the server's
	Label string    `json:"label,omitempty"`
}

// hostData is the beginning of what holderData makes, the same for all leases of a process.
func hostData() string {
	host, err := os.Hostname()
	if err != nil {
		host = ""
	}
	if len(host) > 255 {
		host = host[:255]
	}
	quoted, _ := json.Marshal(host) // a string cannot fail; what is no UTF-8 is replaced
	return `{"host":` + string(quoted) + `,"pid":` + strconv.Itoa(os.Getpid()) + `,"since":"`
}

// holderData is what is stored with a lease: a HolderInfo in JSON.
func (c *Client) holderData(label string) string {
	var room [192]byte
	b := append(room[:0], c.host...)
	b = time.Now().UTC().AppendFormat(b, "2006-01-02T15:04:05.000Z")
	b = append(b, '"')
	if label != "" {
		quoted, _ := json.Marshal(label)
		b = append(b, `,"label":`...)
		b = append(b, quoted...)
	}
	return string(append(b, '}'))
}
