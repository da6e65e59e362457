package etcd

import (
	"context"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/driver"
)

// view is how an owner stands in its queue, at one revision. An entry holds if every entry up to itself has a place
// below its own limit. New entries come behind, so one that holds goes on holding until its key is gone.
type view struct {
	own      *mvccpb.KeyValue // nil if it is not there
	revision int64
	create   int64
	holds    bool
	token    driver.Token // that it holds with, or will if nobody gives it another one meanwhile

	// Of one that waits.
	limit int
	ahead []rival // the entries before it, in order
	more  bool    // there are earlier ones, too many to list
}

// rival is an entry that stands before another one.
type rival struct {
	key   string
	limit int
}

// holds reports whether an entry with that limit holds behind these.
func holds(ahead []rival, more bool, limit int) bool {
	for i, r := range ahead {
		if i >= r.limit {
			return false
		}
	}
	return !more && len(ahead) < limit
}

// newestFirst and oldestFirst order a queue.
var (
	newestFirst = clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortDescend)
	oldestFirst = clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortAscend)
)

// aheadAtOnce is how many keys before its own a lock's waiter is told.
const aheadAtOnce = 100

// behind sees an entry that has these before it.
func (v view) behind(ahead []rival, more bool) view {
	v.ahead, v.more = ahead, more
	v.holds = holds(ahead, more, v.limit)
	return v
}

// locksAhead are the keys before a lock's entry, read newest first.
func locksAhead(kvs []*mvccpb.KeyValue) (ahead []rival) {
	for _, kv := range slices.Backward(kvs) {
		ahead = append(ahead, rival{string(kv.Key), 1})
	}
	return ahead
}

// viewOf is the view of an entry that was read.
func viewOf(own *mvccpb.KeyValue, revision int64) (view, error) {
	r, err := readRecord(own)
	return view{own: own, revision: revision, create: own.CreateRevision, token: r.token(own), limit: r.Limit}, err
}

// viewPermit is the view of a semaphore's owner, of the whole queue in order.
func viewPermit(o driver.Owner, queue []*mvccpb.KeyValue, revision int64) (view, error) {
	var ahead []rival
	for _, kv := range queue {
		r, err := readRecord(kv)
		if err != nil {
			return view{}, err
		}
		if r.ID == o.ID {
			v, err := viewOf(kv, revision)
			return v.behind(ahead, false), err
		}
		ahead = append(ahead, rival{string(kv.Key), r.Limit})
	}
	return view{revision: revision}, nil
}

// admits reports whether one more would hold, with that limit.
func admits(queue []*mvccpb.KeyValue, limit int) (bool, error) {
	for i, kv := range queue {
		r, err := readRecord(kv)
		if err != nil || i >= r.Limit {
			return false, err
		}
	}
	return len(queue) < limit, nil
}

// placement is what came of an attempt to enter a queue.
type placement struct {
	view    view             // of the new entry
	held    bool             // it was refused, and nothing is stored
	existed *mvccpb.KeyValue // the owner's entry, if it stands there already
}

// place makes the owner's entry, in one transaction unless somebody interferes. A request that waits is appended
// whatever the queue is; one that does not is made only if it holds at once: the transaction compares
// that nobody has come since the queue was known to admit one more. When the caller's context has ended it
// begins no further transaction.
func (d *Driver) place(caller, ctx context.Context, r driver.Request, e *entry, l *lease, b base) (placement, error) {
	queue := d.queueKey(r.Name)
	lock := r.Name.Kind == driver.KindLock
	since := int64(0) // a lock is thought to be free: no key at all
	stale := !lock && !r.Wait
	for {
		if err := caller.Err(); err != nil {
			return placement{}, driver.Unavailable(err)
		}
		if stale {
			resp, err := d.read(ctx, queue, clientv3.WithPrefix(), oldestFirst)
			if err != nil {
				return placement{}, err
			}
			for _, kv := range resp.Kvs {
				if there, err := readRecord(kv); err == nil && there.ID == r.ID {
					return placement{existed: kv}, nil
				}
			}
			if ok, err := admits(resp.Kvs, r.Limit); err != nil || !ok {
				return placement{held: true}, err
			}
			since, stale = resp.Header.Revision, false
		}
		value := record{ID: r.ID, Base: b.top(), Limit: r.Limit, Holder: r.Holder}
		cmps := d.unchanged(r.Name, b)
		if r.Wait || !lock { // else the whole queue is compared
			cmps = append(cmps, clientv3.Compare(clientv3.CreateRevision(e.key), "=", 0))
		}
		then := []clientv3.Op{clientv3.OpPut(e.key, value.text(), clientv3.WithLease(clientv3.LeaseID(l.id)))}
		switch {
		case !r.Wait:
			cmps = append(cmps, clientv3.Compare(clientv3.CreateRevision(queue), "<", since+1).WithPrefix())
		case lock:
			then = append(then, clientv3.OpGet(queue, clientv3.WithPrefix(), newestFirst,
				clientv3.WithLimit(1+aheadAtOnce), clientv3.WithKeysOnly()))
		default:
			then = append(then, clientv3.OpGet(queue, clientv3.WithPrefix(), oldestFirst))
		}
		// The entry that is in the way: at the key, or else the holder's, which may have been made by another driver.
		otherwise := append(d.baseOps(r.Name), clientv3.OpGet(e.key))
		if lock && !r.Wait {
			otherwise = append(otherwise, clientv3.OpGet(queue, clientv3.WithPrefix(), oldestFirst, clientv3.WithLimit(1)))
		}
		generation := d.knownStore().generation
		resp, err := d.txn(ctx, cmps, then, otherwise)
		if err != nil {
			return placement{}, err
		}
		if resp.Succeeded {
			v := view{revision: resp.Header.Revision, create: resp.Header.Revision, holds: true,
				token: driver.Token(b.top() + resp.Header.Revision), limit: r.Limit}
			switch {
			case !r.Wait:
			case lock:
				read := resp.Responses[1].GetResponseRange()
				v = v.behind(locksAhead(read.Kvs[1:]), read.More)
			default:
				v, err = viewPermit(r.Owner, resp.Responses[1].GetResponseRange().Kvs, resp.Header.Revision)
			}
			if err != nil {
				return placement{}, unknown(err)
			}
			return placement{view: v}, nil
		}
		taken := false
		for i, answer := range resp.Responses[2:] {
			for _, kv := range answer.GetResponseRange().Kvs {
				if there, err := readRecord(kv); err == nil && there.ID == r.ID {
					return placement{existed: kv}, nil
				}
				taken = taken || i == 0
			}
		}
		now, err := d.readBase(resp.Responses)
		if err != nil {
			return placement{}, err
		}
		if now.mod == b.mod && now.floorMod == b.floorMod {
			switch {
			case lock && !r.Wait:
				return placement{held: true}, nil
			case taken:
				d.elsewhere(e)
			default:
				stale = true // somebody came to the semaphore
			}
			continue
		}
		d.learn(r.Name, now, generation)
		if b, err = d.baseFor(ctx, r.Name, r.Floor); err != nil {
			return placement{}, err
		}
	}
}

// stand is one owner's part in a batch.
type stand struct {
	ask
	result *driver.Result
	entry  *entry
	known  bool         // it was in the books
	key    string       // as the books said
	create int64        // as the books said
	token  driver.Token // as the books said

	view view
	err  error
}

// opsAtOnce bounds a transaction; a server takes 128 operations unless told otherwise.
const opsAtOnce = 100

// look reads how owners stand, in as few transactions as possible.
func (d *Driver) look(ctx context.Context, stands []*stand) {
	var b glance
	for _, s := range stands {
		e := s.entry
		if s.token == 0 && s.create == 0 && e.owner.Name.Kind == driver.KindLock {
			kv, err := d.find(ctx, e.owner, s.key)
			if s.err = err; kv == nil {
				continue
			}
			s.key, s.create = string(kv.Key), kv.CreateRevision
		}
		if len(b.ops)+2 > opsAtOnce {
			d.glance(ctx, b)
			b = glance{}
		}
		at := len(b.ops)
		queue := d.queueKey(e.owner.Name)
		switch {
		case s.token > 0:
			b.add(s, func(a *glanced) (view, error) {
				own := a.own(at, s.create)
				if own == nil {
					return view{}, nil
				}
				return view{own: own, revision: a.revision, create: s.create, holds: true, token: s.token}, nil
			}, clientv3.OpGet(s.key, clientv3.WithKeysOnly()))
		case e.owner.Name.Kind == driver.KindLock:
			b.add(s, func(a *glanced) (view, error) {
				own := a.own(at, s.create)
				if own == nil {
					return view{}, nil
				}
				v, err := viewOf(own, a.revision)
				return v.behind(locksAhead(a.kvs(at+1)), a.answers[at+1].GetResponseRange().More), err
			}, clientv3.OpGet(s.key), clientv3.OpGet(queue, clientv3.WithPrefix(), clientv3.WithMaxCreateRev(s.create-1),
				newestFirst, clientv3.WithLimit(aheadAtOnce), clientv3.WithKeysOnly()))
		default:
			at, read := b.queues[queue]
			var op []clientv3.Op
			if !read {
				at = len(b.ops)
				if b.queues == nil {
					b.queues = make(map[string]int)
				}
				b.queues[queue] = at
				op = append(op, clientv3.OpGet(queue, clientv3.WithPrefix(), oldestFirst))
			}
			b.add(s, func(a *glanced) (view, error) { return viewPermit(e.owner, a.kvs(at), a.revision) }, op...)
		}
	}
	d.glance(ctx, b)
}

// glance is one transaction that looks at several owners.
type glance struct {
	ops    []clientv3.Op
	queues map[string]int // where semaphores are read, once for all owners
	stands []*stand
	views  []func(*glanced) (view, error)
}

// glanced is what it saw.
type glanced struct {
	answers  []*pb.ResponseOp
	revision int64
}

func (a *glanced) kvs(i int) []*mvccpb.KeyValue { return a.answers[i].GetResponseRange().Kvs }

// own is an entry's key, unless it is another owner's by now.
func (a *glanced) own(i int, create int64) *mvccpb.KeyValue {
	for _, kv := range a.kvs(i) {
		if kv.CreateRevision == create {
			return kv
		}
	}
	return nil
}

func (b *glance) add(s *stand, v func(*glanced) (view, error), ops ...clientv3.Op) {
	b.ops = append(b.ops, ops...)
	b.stands = append(b.stands, s)
	b.views = append(b.views, v)
}

func (d *Driver) glance(ctx context.Context, b glance) {
	if len(b.ops) == 0 {
		return
	}
	resp, err := again(ctx, d, func(ctx context.Context) (*clientv3.TxnResponse, error) { return d.txn(ctx, nil, b.ops, nil) })
	for i, s := range b.stands {
		if s.err = err; err == nil {
			s.view, s.err = b.views[i](&glanced{resp.Responses, resp.Header.Revision})
		}
	}
}

// find looks for an owner's entry whose create revision is not in the books: at the key where it was to be made or, if
// there is none, in the whole queue. It answers nil if it is not there.
func (d *Driver) find(ctx context.Context, o driver.Owner, key string) (*mvccpb.KeyValue, error) {
	var opts []clientv3.OpOption
	if key == "" {
		key, opts = d.queueKey(o.Name), append(opts, clientv3.WithPrefix())
	}
	resp, err := d.read(ctx, key, opts...)
	if err != nil {
		return nil, err
	}
	for _, kv := range resp.Kvs {
		r, err := readRecord(kv)
		if err != nil {
			return nil, err
		}
		if r.ID == o.ID {
			return kv, nil
		}
	}
	return nil, nil
}
