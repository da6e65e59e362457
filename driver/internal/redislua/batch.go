package redislua

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/internal/hashtag"
)

// batchSize is how many names one call takes at most: it keeps the server busy for one or two
// milliseconds.
const batchSize = 128

// Extend implements driver.Locker.
func (d *Driver) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	b := newBatch(d, len(leases))
	for i, e := range leases {
		c := b.add(i, scripts[e.Name.Kind].extend, e.Name)
		d.space.holders(&c.Keys, e.Name)
		c.Args.add(e.ID)
		c.Args.duration(e.TTL)
		d.confirm(c, e.TTL)
	}
	return b.answers(ctx, func(i int) time.Duration { return leases[i].TTL })
}

// Poll implements driver.Queue.
func (d *Driver) Poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	b := newBatch(d, len(waiters))
	for i, w := range waiters {
		c := b.add(i, scripts[w.Name.Kind].poll, w.Name)
		d.space.keys(&c.Keys, w.Name)
		c.Args.add(w.ID)
		c.Args.duration(w.TTL)
		c.Args.duration(w.Claim)
		d.confirm(c, w.Claim)
	}
	results := b.answers(ctx, func(i int) time.Duration { return waiters[i].TTL })
	for i, r := range results {
		if r.State == driver.Waiting {
			d.listen(waiters[i].Name, waiters[i].Claim)
		}
	}
	return results
}

// batch spreads items over as few calls as possible.
type batch struct {
	driver *Driver
	size   int
	calls  []*Call
	items  [][]int           // by call
	open   map[callClass]int // the call that takes more
}

// callClass is what the items of one call have in common.
type callClass struct {
	kind driver.Kind
	slot string // hash tag, where a call may take keys of one slot only
}

func newBatch(d *Driver, size int) *batch {
	return &batch{driver: d, size: size, open: make(map[callClass]int)}
}

// add answers the call that takes one more item; the caller adds its keys and arguments.
func (b *batch) add(item int, s *Script, n driver.Name) *Call {
	class := callClass{kind: n.Kind}
	if b.driver.client.SameSlot() {
		open, middle, end := tagged(n.Name)
		class.slot, _ = hashtag.Of(open + middle + end)
	}
	at, ok := b.open[class]
	if !ok || len(b.items[at]) == batchSize {
		at = len(b.calls)
		b.open[class] = at
		b.calls = append(b.calls, newCall(s))
		b.items = append(b.items, nil)
	}
	b.items[at] = append(b.items[at], item)
	return b.calls[at]
}

// run sends the calls and hands each item's reply over.
func (b *batch) run(ctx context.Context, each func(c *Call, item int, reply any, err error)) {
	if len(b.calls) == 0 {
		return
	}
	b.driver.evalAll(ctx, b.calls)
	b.split(ctx)
	for at, c := range b.calls {
		err := c.result()
		replies, ok := c.Reply.([]any)
		if err == nil && (!ok || len(replies) != len(b.items[at])) {
			err = unexpected(c.Reply)
		}
		for i, item := range b.items[at] {
			if err != nil {
				each(c, item, nil, err)
			} else if failed, ok := replies[i].(error); ok {
				// The server did the rest of the batch, and refused this item.
				one := Call{Err: failed, Refusal: failed.Error(), Sent: c.Sent}
				each(c, item, nil, one.result())
			} else {
				each(c, item, replies[i], nil)
			}
		}
	}
}

// split sends the items of calls singly that were refused because a slot is on its way to another server: there the
// keys of one item are, and those of another are still here.
func (b *batch) split(ctx context.Context) {
	var calls []*Call
	for at := range b.calls {
		c, of := b.calls[at], b.items[at]
		if len(of) == 1 || !strings.HasPrefix(c.Refusal, tryAgain) || !errors.Is(c.result(), driver.ErrUnavailable) {
			continue
		}
		for i, item := range of {
			one := newCall(c.Script)
			one.Replicas, one.Patience = c.Replicas, c.Patience
			c.Keys.part(&one.Keys, i, len(of))
			c.Args.part(&one.Args, i, len(of))
			if i == 0 {
				b.calls[at], b.items[at] = one, []int{item}
			} else {
				b.calls, b.items = append(b.calls, one), append(b.items, []int{item})
			}
			calls = append(calls, one)
		}
	}
	if calls != nil {
		b.driver.evalAll(ctx, calls)
	}
}

// answers runs a batch about owners: one result for each, in their order.
func (b *batch) answers(ctx context.Context, ttl func(item int) time.Duration) []driver.Result {
	results := make([]driver.Result, b.size)
	b.run(ctx, func(c *Call, item int, reply any, err error) {
		r := &results[item]
		if r.Err = err; err == nil {
			r.Answer, r.Err = answer(reply, ttl(item))
		}
		if r.State == driver.Granted && c.unconfirmed() != nil {
			// It is so on the primary: whoever asks again may get it confirmed.
			*r = driver.Result{Err: c.unconfirmed()}
		}
	})
	return results
}
