package redlock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// maxTrips is how many proposals one request makes. A second one is due when the name's last token is ahead of the
// client's clock, more only if others are at the same name: of all who are, one gets on with each.
const maxTrips = 64

// maxBlocked is how many proposals in a row one request makes while the same others stand in its way and other nodes fail.
// Who wants the lock too gives way to the leader within that; who holds it, perhaps on the nodes that fail, does not.
const maxBlocked = 4

// Lock implements driver.Locker.
func (d *Driver) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	if err := d.begin(ctx); err != nil {
		return driver.Answer{}, err
	}
	o, b := d.adopt(r), newBallot(r.ID, len(d.nodes), r.Limit, r.Floor)
	b.propose(max(d.lastSeen(r.Name)+1, r.Floor+1, now()), strconv.Itoa(rand.N(r.Limit)))
	has := make([]bool, len(d.nodes)) // it may have granted something, by any of the proposals
	vague := make([]bool, len(d.nodes))
	blocked, by := 0, ""
	for trip := 1; ; trip++ {
		sent := d.clock.Start()
		round, v := d.put(ctx, r, o, b, trip, has, vague)
		if before := by; v == again {
			if by = b.blockers(); by != before {
				blocked = 0
			}
			if blocked++; by != "" && blocked == maxBlocked {
				v = held
			}
		}
		d.see(r.Name, b.seen())
		if v == won {
			d.granted(o, sent, r.TTL, b.token, b.place)
			return driver.Answer{State: driver.Granted, Token: b.token, TTL: r.TTL}, nil
		}
		if (v == again || v == yield) && trip < maxTrips && ctx.Err() == nil {
			d.contend(ctx, o, b, v, trip, time.Duration(d.clock.Now()-sent))
			continue
		}
		a, err := d.notWon(ctx, o, v, trip, round.outcomes, has, vague)
		if r.Wait && a.State == driver.Held {
			d.waits(r, b, time.Duration(d.clock.Now()-sent))
		}
		return a, err
	}
}

// contend makes the next proposal. Those who give way to others need about as long as the last one took.
func (d *Driver) contend(ctx context.Context, o *owner, b *ballot, v verdict, trip int, took time.Duration) {
	slot, others := b.slot, false
	leader, _ := b.leader(slot)
	for _, v := range b.votes {
		others = others || v.said == other
	}
	if v == yield {
		d.giveWay(o, b.proposal)
		took *= time.Duration(min(trip, 8))
		slot = strconv.Itoa(rand.N(b.limit))
	} else if leader != "" && leader != shortID(o.ID) {
		slot, _ = b.free(rand.N(b.limit))
	}
	if others || v == yield {
		pause(ctx, took)
	}
	b.propose(b.next(now()), slot)
}

// giveWay gives back what a proposal has got, and nothing that a later one will get.
func (d *Driver) giveWay(o *owner, t driver.Token) {
	keys := d.keys(o.Name)
	d.broadcast(d.ctx, func(n *node) *ask {
		if !o.asked[n.index].Load() {
			return nil
		}
		return &ask{step: releaseStep, kind: o.Name.Kind, keys: keys, args: []string{o.ID, t.String()}, owner: o}
	}).stop()
}

// pause waits about as long.
func pause(ctx context.Context, about time.Duration) {
	timer := time.NewTimer(about/2 + rand.N(about+1))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// now is the client's clock as a token.
func now() driver.Token { return driver.Token(time.Now().UnixMicro()) }

// put puts a proposal to the nodes and collects votes until they mean something.
func (d *Driver) put(ctx context.Context, r driver.Request, o *owner, b *ballot, trip int, has, vague []bool) (*round, verdict) {
	keys, args := d.keys(r.Name), []string{stored(b.proposal, r.ID, r.Holder), milliseconds(r.TTL), b.proposal.String()}
	// What is not needed is left out, for a node spends as much time on words as on what it does.
	if r.Wait {
		args = append(args, milliseconds(r.Claim), d.channel)
	} else {
		keys = keys[:len(keys)-1] // without that of the waiters
	}
	if mode := b.mode(trip); mode != "first" || b.slot != "0" {
		if !r.Wait {
			args = append(args, "0", "")
		}
		args = append(args, mode, b.slot)
	}
	round := d.broadcast(ctx, func(*node) *ask {
		return &ask{step: acquireStep, kind: r.Name.Kind, keys: keys, args: args, owner: o}
	})
	defer round.stop()
	v := b.verdict()
	for v == open && round.next() {
		i := round.got.node.index
		b.votes[i] = d.vote(round.got, b.proposal, &round.outcomes[i])
		switch b.votes[i].said {
		case mine, uncounted:
			has[i] = true
		case unknown:
			has[i], vague[i] = true, true
			o.unsure[i].Store(true)
		case other:
			has[i] = false
		}
		v = b.verdict()
	}
	for i := range round.outcomes {
		if a := round.asks[i]; !round.outcomes[i].came && a != nil {
			// It is not waited for. If it was sent already it may be granted yet.
			if v != won && a.state.CompareAndSwap(queued, finished) {
				continue
			}
			has[i] = true
			round.outcomes[i] = outcome{text: "not waited for"}
		}
	}
	return round, v
}

// vote reads a node's reply to a proposal of the token.
func (d *Driver) vote(r reply, t driver.Token, out *outcome) vote {
	if r.err != nil {
		if r.sure {
			return vote{said: failed}
		}
		return vote{said: unknown}
	}
	v := vote{}
	if n, ok := r.value.(int64); ok && n == int64(mine) {
		v = vote{said: mine, token: t, slot: "0"} // all is as it was proposed
	} else if fields, _ := r.value.([]any); len(fields) == 4 {
		what, _ := fields[0].(int64)
		text, _ := fields[1].(string)
		v.slot, _ = fields[2].(string)
		busy, _ := fields[3].(string)
		for pair := range strings.FieldsSeq(busy) {
			if v.busy == nil {
				v.busy = make(map[string]string)
			}
			slot, who, _ := strings.Cut(pair, ":")
			v.busy[slot] = who
		}
		token, err := strconv.ParseUint(text, 10, 64)
		if v.token = driver.Token(token); err == nil && what >= 1 && what <= int64(far) {
			v.said = said(what)
		}
	}
	switch v.said {
	case mine:
		if left := r.node.quarantine.Load() - d.clock.Now(); left > 0 {
			v.said = uncounted
			out.text = fmt.Sprintf("granted, but it has restarted and does not count for another %v",
				time.Duration(left).Round(time.Millisecond))
			return v
		}
		out.text = "granted with token " + v.token.String()
	case other:
		out.text = "held by others"
	case low:
		out.text = "has given token " + v.token.String()
	case far:
		out.text = "the token is too far ahead of its clock"
	default:
		v.said = unknown
		out.err = fmt.Errorf("answered %.80q", fmt.Sprint(r.value))
	}
	return v
}

// notWon gives back what an attempt that failed has left, and says how it failed.
func (d *Driver) notWon(ctx context.Context, o *owner, v verdict, trips int, outcomes []outcome, has, vague []bool) (driver.Answer, error) {
	unclear := false
	for i, said := range has {
		unclear = unclear || said && (vague[i] || outcomes[i].text == "not waited for")
	}
	if unclear && v != held {
		// Whoever asks again may find that it was granted, so nothing is given back by itself.
		return driver.Answer{}, errors.Join(d.failure("", outcomes), ctx.Err())
	}
	left, sure := 0, true
	type undone struct {
		node int
		err  error
	}
	replies := make(chan undone, len(d.nodes))
	nodes := d.release(o, false, func(r reply) { replies <- undone{r.node.index, r.err} })
	waits := make([]bool, len(d.nodes))
	for i, said := range has {
		if said && !vague[i] && outcomes[i].text != "not waited for" {
			waits[i] = true
			left++
		}
	}
	// What was granted is given back by nodes that answer, so that it is in nobody's way when this returns.
	timer := time.NewTimer(d.patience(ctx))
	defer timer.Stop()
	for ; nodes > 0 && left > 0; nodes-- {
		select {
		case u := <-replies:
			if waits[u.node] {
				left--
				sure = sure && u.err == nil
			}
			continue
		case <-timer.C:
		case <-ctx.Done():
		}
		sure = false
		break
	}
	switch {
	case v == held:
		return driver.Answer{State: driver.Held}, nil
	case v == again || v == yield:
		// Others have been faster each time.
		err := d.failure(fmt.Sprintf("%d proposals have not been accepted", trips), outcomes)
		if !sure {
			return driver.Answer{}, errors.Join(err, ctx.Err())
		}
		return driver.Answer{}, driver.Unavailable(err)
	case sure:
		return driver.Answer{}, driver.Unavailable(d.failure("", outcomes))
	}
	return driver.Answer{}, errors.Join(d.failure("", outcomes), ctx.Err())
}

// Acquire implements driver.Semaphore.
func (d *Driver) Acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return d.Lock(ctx, r)
}

// maxSeen is of how many names tokens are remembered that lie ahead of the clock.
const maxSeen = 4096

func (d *Driver) lastSeen(n driver.Name) driver.Token {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.seen[n]
	if t < now() {
		delete(d.seen, n)
	}
	return t
}

// see remembers a token that nodes have told of and that lies ahead of the clock, so that the next proposal is above it.
func (d *Driver) see(n driver.Name, t driver.Token) {
	if t < now() {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.seen) >= maxSeen {
		for some := range d.seen {
			delete(d.seen, some)
			break
		}
	}
	d.seen[n] = max(t, d.seen[n])
}

// NextToken implements driver.FencingSource.
func (d *Driver) NextToken(ctx context.Context, n driver.Name, floor driver.Token) (driver.Token, error) {
	if err := d.begin(ctx); err != nil {
		return 0, err
	}
	b := newBallot("", len(d.nodes), 1, floor)
	b.propose(max(d.lastSeen(n)+1, floor+1, now()), "")
	sure := true
	for trip := 1; ; trip++ {
		round, v := d.fenceRound(ctx, n, b, b.proposal, b.mode(trip))
		d.see(n, b.seen())
		for _, v := range b.votes {
			sure = sure && (v.said == failed || v.said == low || v.said == far)
		}
		switch {
		case v == won:
			return b.token, nil
		case v == again && trip < maxTrips && ctx.Err() == nil:
			b.propose(b.next(now()), "")
			continue
		case sure:
			return 0, driver.Unavailable(d.failure("", round.outcomes))
		}
		return 0, errors.Join(d.failure("", round.outcomes), ctx.Err())
	}
}

// Advance implements driver.FencingSource.
func (d *Driver) Advance(ctx context.Context, n driver.Name, floor driver.Token) error {
	if err := d.begin(ctx); err != nil {
		return err
	}
	b := newBallot("", len(d.nodes), 1, 0)
	round, v := d.fenceRound(ctx, n, b, floor, "raise")
	if v == won {
		d.see(n, floor)
		return nil
	}
	for _, v := range b.votes {
		if v.said != failed {
			return errors.Join(d.failure("", round.outcomes), ctx.Err())
		}
	}
	return driver.Unavailable(d.failure("", round.outcomes))
}

// fenceRound puts a token to the fences of the nodes.
func (d *Driver) fenceRound(ctx context.Context, n driver.Name, b *ballot, t driver.Token, what string) (*round, verdict) {
	b.proposal = t
	keys, args := []string{d.fence(n)}, []string{t.String(), what}
	round := d.broadcast(ctx, func(*node) *ask { return &ask{step: tokenStep, kind: n.Kind, keys: keys, args: args} })
	defer round.stop()
	v := b.verdict()
	for v == open && round.next() {
		i := round.got.node.index
		if fields, ok := round.got.value.([]any); ok {
			round.got.value = append(fields, "", "")
		}
		b.votes[i] = d.vote(round.got, b.proposal, &round.outcomes[i])
		v = b.verdict()
	}
	return round, v
}
