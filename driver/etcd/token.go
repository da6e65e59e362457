package etcd

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/driver"
)

// base is what revisions are added to, to make the tokens of one name: the namespace's base, one key that is only ever
// raised, or the name's own floor, if that is higher. Both are integers in decimal.
//
// A floor is made for a name when tokens far ahead of the clock are demanded, so that no other name goes there with
// it. It is kept until 48 h after the clock has passed the name's tokens (T5): since the namespace's base is raised
// whenever tokens are more than an hour behind the clock, nothing is lost with it then.
type base struct {
	value, mod   int64 // of the namespace; mod is the key's mod revision, zero if there is no key
	floor        int64 // of the name
	floorMod     int64
	floorLease   int64
	floorRenewed int64 // when its lease was begun or it was learnt, by the lease clock
}

// top is what a revision is added to.
func (b base) top() int64 { return max(b.value, b.floor) }

// The pace at which bases follow the clock.
const (
	// floorStep is in what steps a floor that is about now raises the base, in tokens: migration has such floors all
	// the time, and each would raise it anew.
	floorStep = int64(time.Second / time.Microsecond)
	// lag is how far tokens may fall behind the clock, and how often the lease of a name's floor is renewed.
	lag = time.Hour
	// remember is how long a name's floor outlives its use.
	remember = 48 * time.Hour

	floorsKnown = 1000 // names whose floors a driver keeps in mind; it may forget all
)

func (d *Driver) floorKey(n driver.Name) string {
	return d.prefix + "floor/" + n.Kind.String() + "/" + escape(n.Name)
}

// unchanged compares that the base is still this one.
func (d *Driver) unchanged(n driver.Name, b base) []clientv3.Cmp {
	return []clientv3.Cmp{
		clientv3.Compare(clientv3.ModRevision(d.baseKey()), "=", b.mod),
		clientv3.Compare(clientv3.ModRevision(d.floorKey(n)), "=", b.floorMod),
	}
}

// baseOps read the base, for readBase.
func (d *Driver) baseOps(n driver.Name) []clientv3.Op {
	return []clientv3.Op{clientv3.OpGet(d.baseKey()), clientv3.OpGet(d.floorKey(n))}
}

// readBase takes the answers to baseOps.
func (d *Driver) readBase(answers []*pb.ResponseOp) (b base, err error) {
	b.floorRenewed = d.clock.Now()
	for i, to := range []struct{ value, mod *int64 }{{&b.value, &b.mod}, {&b.floor, &b.floorMod}} {
		kvs := answers[i].GetResponseRange().Kvs
		if len(kvs) == 0 {
			continue
		}
		*to.value, err = strconv.ParseInt(string(kvs[0].Value), 10, 64)
		if err != nil || *to.value < 0 {
			return base{}, driver.Unavailable(fmt.Errorf("etcd: the value of %.200q was written by somebody else", kvs[0].Key))
		}
		*to.mod = kvs[0].ModRevision
		if i == 1 {
			b.floorLease = kvs[0].Lease
		}
	}
	return b, nil
}

// learn books a base that was read or written.
func (d *Driver) learn(n driver.Name, b base, generation int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if generation != d.store.generation {
		return
	}
	if b.mod > d.base.mod {
		d.base = base{value: b.value, mod: b.mod}
	}
	if b.floorMod == 0 {
		delete(d.floors, n)
		return
	}
	if len(d.floors) >= floorsKnown {
		clear(d.floors)
	}
	b.value, b.mod = 0, 0
	d.floors[n] = b
}

// baseFor answers a base by which the name's next token is greater than floor. The first one of a driver also makes it
// no less than the clock. Usually it is known and sends nothing; a transaction that uses it compares that it is
// unchanged.
func (d *Driver) baseFor(ctx context.Context, n driver.Name, floor driver.Token) (base, error) {
	mine := false // it is our turn to read and raise
	for {
		d.mu.Lock()
		b, known, based := d.floors[n], d.store, d.based
		b.value, b.mod = d.base.value, d.base.mod
		d.mu.Unlock()
		clock := time.Now().UnixMicro()
		renew := b.floorMod > 0 && d.clock.Now()-b.floorRenewed > int64(lag)
		next := b.top() + known.revision + 1
		if based && !renew && next > int64(floor) && next > clock-lag.Microseconds() {
			return b, nil
		}
		if !mine {
			// One at a time: each raise makes those under way begin again.
			select {
			case d.raising <- struct{}{}:
				defer func() { <-d.raising }()
				mine = true
				continue
			case <-ctx.Done():
				return base{}, ctx.Err()
			}
		}
		resp, err := d.txn(ctx, nil, d.baseOps(n), nil)
		if err != nil {
			return base{}, err
		}
		if b, err = d.readBase(resp.Responses); err != nil {
			return base{}, err
		}
		if b, err = d.raise(ctx, n, b, resp.Header.Revision, floor, clock, !based, renew); err != nil {
			return base{}, err
		}
		if b.mod == 0 {
			continue // somebody else was faster
		}
		d.learn(n, b, known.generation)
		d.mu.Lock()
		if known.generation == d.store.generation {
			d.based = true
		}
		d.mu.Unlock()
	}
}

// raise raises the base that was read at the revision as far as is needed. It answers one with mod zero if the base has
// changed meanwhile.
func (d *Driver) raise(ctx context.Context, n driver.Name, b base, revision int64, floor driver.Token, clock int64, first, renew bool) (base, error) {
	was := b
	var puts []clientv3.Op
	if b.floorMod > 0 && b.floor+revision < clock { // the clock has passed it
		b.floor, b.floorMod, b.floorLease = 0, 0, 0
		first = true
	}
	wanted := int64(0)
	if first || b.value+revision+1 < clock-lag.Microseconds() {
		wanted = clock
	}
	if b.top()+revision+1 <= int64(floor) && int64(floor) < clock {
		wanted = max(wanted, (int64(floor)/floorStep+1)*floorStep)
	}
	if raised := wanted - revision; b.mod == 0 || raised > b.value {
		b.value = max(raised, b.value)
		puts = append(puts, clientv3.OpPut(d.baseKey(), strconv.FormatInt(b.value, 10)))
		b.mod = -1 // set below
	}
	if least := max(int64(floor)+1-revision, b.floor); b.top() < least || renew && b.floorMod > 0 {
		b.floor = least
		ahead := time.Duration(max(0, b.floor+revision-clock)) * time.Microsecond
		l, err := d.grant(ctx, wholeSeconds(ahead+remember))
		if err != nil {
			return base{}, err
		}
		b.floorLease, b.floorMod, b.floorRenewed = l.id, -1, l.until-int64(l.ttl)
		puts = append(puts, clientv3.OpPut(d.floorKey(n), strconv.FormatInt(b.floor, 10), clientv3.WithLease(clientv3.LeaseID(l.id))))
	}
	if was.floorMod > 0 && b.floorMod == 0 {
		puts = append(puts, clientv3.OpDelete(d.floorKey(n)))
	}
	if len(puts) == 0 {
		return b, nil
	}
	resp, err := d.txn(ctx, d.unchanged(n, was), puts, nil)
	unused := int64(0) // a lease without a key
	switch {
	case err == nil && resp.Succeeded:
		unused = was.floorLease
	case err == nil:
		unused = b.floorLease
		// Of an unknown outcome: the floor may be on the new lease, and would go with it.
	}
	if unused != 0 && was.floorLease != b.floorLease {
		_, _ = d.leasing.LeaseRevoke(ctx, &pb.LeaseRevokeRequest{ID: unused})
	}
	if err != nil || !resp.Succeeded {
		return base{}, err
	}
	if b.mod < 0 {
		b.mod = resp.Header.Revision
	}
	if b.floorMod < 0 {
		b.floorMod = resp.Header.Revision
	}
	return b, nil
}

// unknown takes away from an error that it is certain: something was written before.
func unknown(err error) error { return fmt.Errorf("etcd: after a write: %v", err) }

// NextToken implements driver.FencingSource.
func (d *Driver) NextToken(ctx context.Context, n driver.Name, floor driver.Token) (driver.Token, error) {
	ctx, end, err := d.begin(ctx)
	if err != nil {
		return 0, err
	}
	defer end()
	for {
		b, err := d.baseFor(ctx, n, floor)
		if err != nil {
			return 0, err
		}
		generation := d.knownStore().generation
		resp, err := d.txn(ctx, d.unchanged(n, b), []clientv3.Op{
			clientv3.OpPut(d.mintKey(), ""),
			clientv3.OpGet(d.queueKey(n), clientv3.WithPrefix(), clientv3.WithCountOnly()),
		}, d.baseOps(n))
		if err != nil {
			return 0, err
		}
		if !resp.Succeeded {
			if b, err = d.readBase(resp.Responses); err != nil {
				return 0, err
			}
			d.learn(n, b, generation)
			continue
		}
		t := driver.Token(b.top() + resp.Header.Revision)
		if resp.Responses[1].GetResponseRange().Count > 1 {
			if err := d.passWaiters(ctx, n, t); err != nil {
				return 0, err
			}
		}
		return t, nil
	}
}

// Advance implements driver.FencingSource.
func (d *Driver) Advance(ctx context.Context, n driver.Name, floor driver.Token) error {
	ctx, end, err := d.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	if _, err := d.baseFor(ctx, n, floor); err != nil {
		return err
	}
	return d.passWaiters(ctx, n, floor)
}

// passWaiters gives new tokens to those who wait, if the token of one of them, fixed when it came, is not greater than
// floor. Their order stays, holders keep theirs (T3), and those who come later get greater ones.
func (d *Driver) passWaiters(ctx context.Context, n driver.Name, floor driver.Token) error {
	for {
		queue, err := d.read(ctx, d.queueKey(n), clientv3.WithPrefix(), oldestFirst)
		if err != nil {
			return err
		}
		waiting, _, err := standing(queue.Kvs)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(waiting, func(w queued) bool { return w.token(w.kv) <= floor }) {
			return nil
		}
		reserved := len(waiting) + 8 // some may come meanwhile
		next, kvs, err := d.reserve(ctx, n, floor, reserved)
		if err != nil {
			return err
		}
		waiting, there, err := standing(kvs)
		if err != nil {
			return err
		}
		if len(waiting) > reserved {
			continue
		}
		room := opsAtOnce - len(there)
		if room < 1 {
			return driver.Unavailable(fmt.Errorf("etcd: %d holders are too many to give new tokens to those who wait for them", len(there)))
		}
		var puts []clientv3.Op
		var same []clientv3.Cmp // nobody has given them other tokens since the reservation: they would be greater
		for _, w := range waiting {
			w.Token = next
			next++
			same = append(same, clientv3.Compare(clientv3.ModRevision(string(w.kv.Key)), "=", w.kv.ModRevision))
			puts = append(puts, clientv3.OpPut(string(w.kv.Key), w.text(), clientv3.WithIgnoreLease()))
		}
		// From the back, so that the order is kept whatever is cut off.
		done := true
		for len(puts) > 0 && done {
			from := max(0, len(puts)-room)
			resp, err := d.txn(ctx, slices.Concat(there, same[from:]), puts[from:], nil)
			if err != nil {
				return err
			}
			done = resp.Succeeded
			puts, same = puts[:from], same[:from]
		}
		if done {
			return nil
		}
	}
}

// queued is an entry that waits.
type queued struct {
	record
	kv *mvccpb.KeyValue
}

// standing tells who waits in a queue, in order, and the comparisons that they all go on waiting: that the holders are
// there, and the first of those who wait.
func standing(queue []*mvccpb.KeyValue) (waiting []queued, there []clientv3.Cmp, err error) {
	holding := true
	for i, kv := range queue {
		r, err := readRecord(kv)
		if err != nil {
			return nil, nil, err
		}
		holding = holding && i < r.Limit
		if holding || len(waiting) == 0 {
			there = append(there, clientv3.Compare(clientv3.CreateRevision(string(kv.Key)), "=", kv.CreateRevision))
		}
		if !holding {
			waiting = append(waiting, queued{r, kv})
		}
	}
	return waiting, there, nil
}

// reserve takes so many tokens, greater than floor, out of the order: the base is raised by their number, so that
// all tokens before that revision are less, those after it greater, and nobody else gets these. It answers the first of
// them, and the queue as it is at that revision.
func (d *Driver) reserve(ctx context.Context, n driver.Name, floor driver.Token, tokens int) (driver.Token, []*mvccpb.KeyValue, error) {
	for {
		b, err := d.baseFor(ctx, n, floor)
		if err != nil {
			return 0, nil, err
		}
		generation := d.knownStore().generation
		raise := clientv3.OpPut(d.baseKey(), strconv.FormatInt(b.value+int64(tokens), 10))
		if b.floor > b.value {
			raise = clientv3.OpPut(d.floorKey(n), strconv.FormatInt(b.floor+int64(tokens), 10), clientv3.WithIgnoreLease())
		}
		queue := clientv3.OpGet(d.queueKey(n), clientv3.WithPrefix(), oldestFirst)
		resp, err := d.txn(ctx, d.unchanged(n, b), []clientv3.Op{raise, queue}, d.baseOps(n))
		if err != nil {
			return 0, nil, err
		}
		if resp.Succeeded {
			return driver.Token(b.top() + resp.Header.Revision + 1), resp.Responses[1].GetResponseRange().Kvs, nil
		}
		if b, err = d.readBase(resp.Responses); err != nil {
			return 0, nil, err
		}
		d.learn(n, b, generation)
	}
}
