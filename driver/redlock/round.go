package redlock

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// round is a request on its way to all nodes.
type round struct {
	nodes   []*node
	ctx     context.Context
	asks    []*ask // by node, nil if it is not asked
	replies *replies
	left    int // to come
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

// replies collects replies. Who waits for them is woken when there are so many that they may mean something, and then for
// each: to be woken for those before costs more than to look at them.
type replies struct {
	all  chan reply
	some chan struct{} // closed when there are so many
	few  atomic.Int32  // until then
	over bool          // they are waited for no more
}

func newReplies(nodes, few int) *replies {
	r := &replies{all: make(chan reply, nodes), some: make(chan struct{})}
	r.few.Store(int32(few))
	if few <= 0 {
		close(r.some)
	}
	return r
}

// add takes a reply. It does not block.
func (r *replies) add(got reply) {
	r.all <- got
	if r.few.Add(-1) == 0 {
		close(r.some)
	}
}

// next waits for one more reply. It answers false when the time is over and there is none.
func (r *replies) next(ctx context.Context, timer *time.Timer) (got reply, ok bool) {
	if !r.over {
		select {
		case <-r.some:
		case <-timer.C:
			r.over = true
		case <-ctx.Done():
			r.over = true
		}
	}
	select {
	case got = <-r.all:
		return got, true
	default:
	}
	if !r.over {
		select {
		case got = <-r.all:
			return got, true
		case <-timer.C:
		case <-ctx.Done():
		}
		r.over = true
	}
	return got, false
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
	r := &round{nodes: d.nodes, ctx: ctx, asks: make([]*ask, len(d.nodes)),
		outcomes: make([]outcome, len(d.nodes)), timer: time.NewTimer(d.patience(ctx))}
	by := d.clock.Now() + int64(d.timeout)
	for i, n := range d.nodes {
		a := request(n)
		if a == nil {
			continue
		}
		a.by = by
		r.asks[i] = a
		r.left++
	}
	r.replies = newReplies(r.left, min(r.left, d.quorum))
	d.order.Lock()
	defer d.order.Unlock()
	for i, a := range r.asks {
		if a != nil {
			a.done = r.replies.add
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
	got, ok := r.replies.next(r.ctx, r.timer)
	if !ok {
		return r.expire()
	}
	r.got = got
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
	r.got = <-r.replies.all
	return r.note()
}

// stop ends the round's timer. Replies that are still to come are nobody's business any more.
func (r *round) stop() { r.timer.Stop() }
