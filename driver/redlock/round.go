package redlock

import (
	"context"
	"errors"
	"time"
)

// round is a request on its way to all nodes.
type round struct {
	nodes   []*node
	ctx     context.Context
	asks    []*ask // by node, nil if it is not asked
	replies chan reply
	left    int // replies to come
	timer   *time.Timer

	got      reply // the latest
	outcomes []outcome
}

// outcome is what became of a request on one node.
type outcome struct {
	came bool
	text string
	err  error
	sure bool // with err: nothing happened there
}

// patience is how long replies are waited for: the node timeout, or until the deadline of ctx if that is sooner and it
// does not tell itself.
func (d *Driver) patience(ctx context.Context) time.Duration {
	if at, ok := ctx.Deadline(); ok && ctx.Done() == nil {
		return min(d.timeout, time.Until(at))
	}
	return d.timeout
}

// broadcast gives a request to all nodes for which it is made.
func (d *Driver) broadcast(ctx context.Context, request func(*node) *ask) *round {
	r := &round{nodes: d.nodes, ctx: ctx, asks: make([]*ask, len(d.nodes)), replies: make(chan reply, len(d.nodes)),
		outcomes: make([]outcome, len(d.nodes)), timer: time.NewTimer(d.patience(ctx))}
	by := d.clock.Now() + int64(d.timeout)
	for i, n := range d.nodes {
		a := request(n)
		if a == nil {
			continue
		}
		a.by = by
		a.done = func(got reply) { r.replies <- got }
		r.asks[i] = a
		r.left++
	}
	d.order.Lock()
	defer d.order.Unlock()
	for i, a := range r.asks {
		if a != nil {
			d.nodes[i].push(a)
		}
	}
	return r
}

var errNoAnswer = errors.New("no answer in time")

// next waits for one more reply. When the time is over it ends what was not sent, and makes up the replies of those that
// have not answered. It answers false if there are no more.
func (r *round) next() bool {
	if r.left == 0 {
		return false
	}
	select {
	case r.got = <-r.replies:
	default:
		select {
		case r.got = <-r.replies:
		case <-r.timer.C:
			return r.expire()
		case <-r.ctx.Done():
			return r.expire()
		}
	}
	return r.note()
}

func (r *round) note() bool {
	r.left--
	r.outcomes[r.got.node.index] = outcome{came: true, err: r.got.err, sure: r.got.sure}
	return true
}

// expire ends the wait.
func (r *round) expire() bool {
	for i, a := range r.asks {
		if a == nil || r.outcomes[i].came {
			continue
		}
		if a.state.CompareAndSwap(queued, finished) {
			a.done(reply{r.nodes[i], nil, errNotSent, true})
		} else {
			a.finish(reply{r.nodes[i], nil, errNoAnswer, false}) // unless it is being answered just now
		}
	}
	r.timer.Reset(time.Hour)
	r.ctx = context.Background()
	r.got = <-r.replies
	return r.note()
}

// stop ends the round's timer. Replies that are still to come are nobody's business any more.
func (r *round) stop() { r.timer.Stop() }
