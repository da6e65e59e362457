package etcd

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/driver"
)

// entry is what the driver knows of an owner that asked for something through it. It is in the books from before
// the first request is sent until its key is surely gone. Guarded by Driver.mu, but for the first two.
type entry struct {
	owner driver.Owner
	asked time.Duration // the TTL of its first request, in whole seconds

	key  string // it changes only while create is zero
	slot int    // of the key; -1 if another driver has made it

	create   int64        // the key's create revision; zero until known
	token    driver.Token // zero until it is known to hold; from then on it holds while the key is there
	lease    *lease       // nil if it is not attached to one of ours
	deadline int64        // it was promised to live until then; afterwards it is deleted
	busy     int          // steps under way that may prolong it
	tries    int          // how many requests were begun that may create the key
	doubted  bool         // a request that may yet create the key has no answer
	lost     bool         // the data in which it was made are no more
	ending   bool         // its time is over and its key is being deleted

	waiter *waiter // nil unless the watch is to tell when it holds
}

// over reports that the owner cannot come back, whatever the server still stores.
func (e *entry) over() bool { return e.lost || e.ending }

var errOver = errors.New("etcd: what this owner had before has expired and is being deleted")

// enter puts an owner into the books for a step that may create its key. known says that it was there.
func (d *Driver) enter(o driver.Owner, l *lease, ttl time.Duration, waits bool) (e *entry, known bool, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e = d.entries[o]
	if e != nil && e.over() {
		return nil, true, errOver
	}
	if e == nil {
		e = &entry{owner: o, asked: ttl, lease: l, doubted: true}
		e.slot, e.key = d.takeSlot(o.Name)
		d.entries[o] = e
		d.clean()
	} else {
		known = true
	}
	e.busy++
	e.tries++
	if waits {
		d.wait(e)
	}
	return e, known, nil
}

// refuse ends a step that surely created nothing.
func (d *Driver) refuse(e *entry, known bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e.busy--
	if !known {
		d.remove(e)
	}
}

// doubt ends a step that may have created the key on the lease, or may do so yet.
func (d *Driver) doubt(e *entry, l *lease, known bool, lives time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e.busy--
	if !known {
		d.unwait(e)
	}
	if e.lost {
		return
	}
	if !known {
		e.doubted = true
		e.deadline = max(e.deadline, d.clock.Now()+int64(lives))
	}
	if !l.doubted {
		l.doubted = true
		l.audit = d.clock.Now() + int64(l.ttl)
		d.leases.doubted = append(d.leases.doubted, l)
	}
}

// remove takes the entry out of the books. d.mu is held.
func (d *Driver) remove(e *entry) {
	d.unwait(e)
	if d.entries[e.owner] == e {
		delete(d.entries, e.owner)
		if e.slot >= 0 {
			d.freeSlot(e.owner.Name, e.slot)
			e.slot = -1
		}
	}
}

// elsewhere gives the entry another key: what an earlier owner left is in the way.
func (d *Driver) elsewhere(e *entry) {
	d.mu.Lock()
	defer d.mu.Unlock()
	was := e.slot
	e.slot, e.key = d.takeSlot(e.owner.Name)
	if s := d.slots[e.owner.Name]; was >= 0 {
		s.free = append([]int{was}, s.free...) // to be taken last
	}
}

// isAt books the key of an entry, which another driver may have made. d.mu is held.
func (d *Driver) isAt(e *entry, key string) {
	if e.key == key {
		return
	}
	if e.slot >= 0 {
		d.freeSlot(e.owner.Name, e.slot)
	}
	e.slot, e.key = -1, key
}

// leaving says that a release of the owner is sent, and answers what is known of its key.
func (d *Driver) leaving(o driver.Owner) (key string, create int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if e := d.entries[o]; e != nil {
		d.unwait(e)
		return e.key, e.create
	}
	return "", 0
}

// delete deletes the owner's key, and reports whether there was one. key and create are zero if not known.
func (d *Driver) delete(ctx context.Context, o driver.Owner, key string, create int64, mine ...clientv3.Cmp) (bool, error) {
	if create == 0 {
		kv, err := d.find(ctx, o, key)
		if err != nil || kv == nil {
			return false, err
		}
		key, create = string(kv.Key), kv.CreateRevision
	}
	same := append(mine, clientv3.Compare(clientv3.CreateRevision(key), "=", create))
	resp, err := d.txn(ctx, same, []clientv3.Op{clientv3.OpDelete(key)}, nil)
	return err == nil && resp.Succeeded, err
}

// left says that the release was answered. If nothing was found, but a request is under way that may yet create
// the key, the entry stays until its deadline.
func (d *Driver) left(o driver.Owner, found bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if e := d.entries[o]; e != nil && (found || !e.doubted) {
		d.remove(e)
	}
}

// acquire is the step of Lock and Acquire.
func (d *Driver) acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	began := d.clock.Now()
	ttl := wholeSeconds(max(r.TTL, r.Claim))
	for {
		b, err := d.baseFor(ctx, r.Name, r.Floor)
		if err != nil {
			return driver.Answer{}, nothingYet(err)
		}
		l, err := d.sharedLease(ctx, ttl)
		if err != nil {
			return driver.Answer{}, err
		}
		if r.Wait { // its place must outlive the claim
			if err := d.ensure(ctx, l, began, r.Claim); errors.Is(err, errLeaseGone) {
				continue
			} else if err != nil {
				return driver.Answer{}, err
			}
		}
		e, known, err := d.enter(r.Owner, l, ttl, r.Wait)
		if err != nil {
			return driver.Answer{}, err
		}
		fresh := d.freshen(ctx, l)
		asked := d.clock.Now()
		p, err := d.placeFor(ctx, r, e, l, b)
		switch {
		case err == errLeft:
			d.doubt(e, l, known, ttl)
			return driver.Answer{}, ctx.Err()
		case errors.Is(err, rpctypes.ErrLeaseNotFound):
			d.mu.Lock()
			l.dead = true
			d.mu.Unlock()
			d.refuse(e, known)
			continue
		case errors.Is(err, rpctypes.ErrNoSpace):
			err = d.undo(ctx, e, err)
		}
		switch {
		case errors.Is(err, driver.ErrUnavailable):
			d.refuse(e, known)
			return driver.Answer{}, err
		case err != nil:
			d.doubt(e, l, known, ttl)
			return driver.Answer{}, err
		case p.held:
			d.refuse(e, known)
			return driver.Answer{State: driver.Held}, nil
		case p.existed != nil:
			d.mu.Lock()
			d.isAt(e, string(p.existed.Key))
			e.busy--
			e.deadline = max(e.deadline, d.clock.Now()+int64(ttl))
			d.mu.Unlock()
			result := d.refresh(ctx, []ask{{owner: r.Owner, ttl: r.TTL, waits: true, claim: max(r.Claim, time.Second)}})[0]
			if result.Err == nil && result.State == driver.Gone {
				continue // it ended meanwhile
			}
			return result.Answer, result.Err
		}
		if fresh != nil {
			// It takes less than the transaction did, unless its member hangs.
			select {
			case <-fresh:
			case <-time.After(time.Duration(d.clock.Now()-asked) + 10*time.Millisecond):
			}
		}
		return d.placed(e, l, p.view, r.Claim, began), nil
	}
}

// errLeft says that the caller has gone before the answer came.
var errLeft = errors.New("etcd: the caller has gone")

// lateTimeout bounds how long the answer to a request is awaited that nobody waits for.
const lateTimeout = 10 * time.Second

// placeFor is place for a caller who may go. A transaction that is broken off could be carried out after the
// release that the caller then sends, so it is awaited all the same, and what it made is deleted.
func (d *Driver) placeFor(ctx context.Context, r driver.Request, e *entry, l *lease, b base) (placement, error) {
	type result struct {
		placement
		err error
	}
	results := make(chan result, 1)
	var gone atomic.Bool // set by whichever side comes first
	going, cancel := context.WithTimeout(context.WithoutCancel(ctx), lateTimeout)
	d.mu.Lock()
	try := e.tries
	d.mu.Unlock()
	go func() {
		defer cancel()
		stop := context.AfterFunc(d.open, cancel)
		defer stop()
		p, err := d.place(ctx, going, r, e, l, b)
		if !gone.Swap(true) {
			results <- result{p, err}
			return
		}
		d.late(e, try, p, err)
	}()
	select {
	case res := <-results:
		return res.placement, res.err
	case <-ctx.Done():
	}
	if gone.Swap(true) {
		res := <-results
		return res.placement, res.err
	}
	return placement{}, errLeft
}

// late takes the result of a request whose caller has gone.
func (d *Driver) late(e *entry, try int, p placement, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case try > 1 || e.tries > 1 || p.existed != nil || d.closed || err != nil && !errors.Is(err, driver.ErrUnavailable):
		// The books and the janitor see to it.
	case err != nil && !errors.Is(err, rpctypes.ErrNoSpace) || p.held:
		d.remove(e)
	case !e.ending: // it was made, or may have been
		e.ending, e.doubted = true, false
		e.deadline = d.clock.Now() + int64(deleteTimeout+deleteRetry)
		d.running.Go(func() { d.expire(e) })
	}
}

// placed books an entry that was just made, and answers how it stands.
func (d *Driver) placed(e *entry, l *lease, v view, claim time.Duration, began int64) driver.Answer {
	var events []driver.Event
	defer func() { d.tellAll(events) }()
	d.mu.Lock()
	defer d.mu.Unlock()
	e.busy--
	e.lease, e.doubted = l, false
	e.create = v.create
	now := d.clock.Now()
	if !v.holds {
		e.deadline = max(e.deadline, now+int64(claim))
		events = d.waits(e, v)
		return driver.Answer{State: driver.Waiting}
	}
	d.unwait(e)
	e.token = v.token
	e.deadline = max(e.deadline, now+int64(l.ttl))
	return driver.Answer{State: driver.Granted, Token: v.token, TTL: min(l.left(began), l.ttl)}
}

// undo deletes the key after the server said that its database is full: it may say so when it has carried out what
// it was asked. The error answered matches ErrUnavailable if nothing is left.
func (d *Driver) undo(ctx context.Context, e *entry, full error) error {
	if _, err := d.delete(ctx, e.owner, e.key, 0); err != nil {
		return fmt.Errorf("etcd: %w; and what it may have written could not be deleted: %v", rpctypes.ErrNoSpace, err)
	}
	return full
}

// ask is a sign of life of an owner.
type ask struct {
	owner driver.Owner
	ttl   time.Duration
	waits bool          // it may stand in the queue; without, that means gone
	claim time.Duration // how long its place in the queue is kept
}

// refresh finds out how owners stand and makes them live on. Keepalives and reads go out at once: an owner whose
// key is there and whose lease was kept alive lives from the beginning of the step.
func (d *Driver) refresh(ctx context.Context, asks []ask) []driver.Result {
	began := d.clock.Now()
	results := make([]driver.Result, len(asks))
	var stands []*stand
	kept := make(map[*lease]error)
	d.mu.Lock()
	for i, a := range asks {
		s := &stand{ask: a, result: &results[i]}
		e := d.entries[a.owner]
		switch {
		case e == nil:
			e = &entry{owner: a.owner, slot: -1, asked: wholeSeconds(a.ttl)}
		case e.over():
			s.result.State = driver.Gone
			continue
		default:
			s.known = true
		}
		e.busy++
		s.entry, s.key, s.create, s.token = e, e.key, e.create, e.token
		if a.waits && e.token == 0 {
			d.wait(e)
		}
		if e.lease != nil && e.lease.asked == wholeSeconds(a.ttl) {
			kept[e.lease] = nil
		}
		stands = append(stands, s)
	}
	d.mu.Unlock()

	under := make(map[*lease]<-chan error)
	for l := range kept {
		under[l] = d.keeping(ctx, l)
	}
	d.look(ctx, stands)
	for l, done := range under {
		kept[l] = <-done
	}
	for _, s := range stands {
		if s.err != nil {
			s.result.Err = s.err
		} else {
			s.result.Answer, s.result.Err = d.settle(ctx, s, kept, began)
		}
		d.mu.Lock()
		s.entry.busy--
		d.mu.Unlock()
	}
	return results
}

// settle answers how an owner stands that was looked at, and sees to it that it lives on.
func (d *Driver) settle(ctx context.Context, s *stand, kept map[*lease]error, began int64) (driver.Answer, error) {
	e, v := s.entry, s.view
	if v.own == nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		if !e.doubted {
			d.remove(e)
		}
		return driver.Answer{State: driver.Gone}, nil
	}
	if !v.holds && !s.waits {
		return driver.Answer{State: driver.Gone}, nil
	}
	want := wholeSeconds(s.ttl)
	need := want
	if !v.holds {
		need = s.claim
	}
	d.mu.Lock()
	l := e.lease
	if l != nil && l.id != v.own.Lease {
		l = nil // another driver has taken it over
	}
	enough := l != nil && l.left(began) >= need
	d.mu.Unlock()
	if !enough {
		if l != nil && kept[l] != nil {
			return driver.Answer{}, kept[l]
		}
		var err error
		if l, err = d.move(ctx, s, need, want, began); err != nil {
			return driver.Answer{}, err
		}
		if l == nil {
			return driver.Answer{State: driver.Gone}, nil
		}
	}

	var events []driver.Event
	defer func() { d.tellAll(events) }()
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case e.over():
		return driver.Answer{State: driver.Gone}, nil
	case !s.known && d.entries[e.owner] == nil:
		d.entries[e.owner] = e
		d.clean()
	}
	d.isAt(e, string(v.own.Key))
	e.lease, e.create, e.doubted = l, v.create, false
	now := d.clock.Now()
	if !v.holds {
		e.deadline = max(e.deadline, now+int64(s.claim))
		events = d.waits(e, v)
		return driver.Answer{State: driver.Waiting}, nil
	}
	d.unwait(e)
	e.token = v.token
	// A lease of another TTL than was asked for may be longer; what it was promised for still counts.
	lives := want
	if l.asked == want {
		lives = l.ttl
	}
	least := max(time.Duration(e.deadline-began), lives)
	e.deadline = max(e.deadline, now+int64(lives))
	return driver.Answer{State: driver.Granted, Token: v.token, TTL: min(l.left(began), least)}, nil
}

// move attaches the key to a lease that has enough left: the shared one if the owner goes back to the TTL it
// began with, else one of its own, which nothing but its own extensions keeps alive. It answers nil if the
// key is gone.
func (d *Driver) move(ctx context.Context, s *stand, need, want time.Duration, began int64) (*lease, error) {
	e := s.entry
	var l *lease
	var err error
	if want == e.asked {
		if l, err = d.sharedLease(ctx, want); err != nil {
			return nil, err
		}
		err = d.ensure(ctx, l, began, need)
	} else {
		l, err = d.grant(ctx, want)
	}
	if err != nil {
		return nil, err
	}
	key := string(s.view.own.Key)
	same := clientv3.Compare(clientv3.CreateRevision(key), "=", s.view.create)
	resp, err := d.txn(ctx, []clientv3.Cmp{same},
		[]clientv3.Op{clientv3.OpPut(key, "", clientv3.WithIgnoreValue(), clientv3.WithLease(clientv3.LeaseID(l.id)))}, nil)
	if err != nil {
		return nil, err
	}
	if !resp.Succeeded {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.remove(e)
		return nil, nil
	}
	return l, nil
}

// The janitor's pace.
const (
	lookInterval  = 500 * time.Millisecond // it looks at the books at least so often while there is something in them
	deleteTimeout = 2 * time.Second
	deleteRetry   = 250 * time.Millisecond
	deletesAtOnce = 8
)

// clean starts the janitor unless it runs. d.mu is held.
func (d *Driver) clean() {
	if !d.cleaning && !d.closed {
		d.cleaning = true
		d.running.Go(d.janitor)
	}
}

// janitor deletes the keys of owners that nobody extends any more: the lease they share with others may go
// on. It also looks for keys that a request has made whose outcome is unknown. It ends when nothing is in
// the books.
func (d *Driver) janitor() {
	slots := make(chan struct{}, deletesAtOnce)
	for {
		d.mu.Lock()
		now := d.clock.Now()
		next := now + int64(lookInterval)
		var due []*entry
		for _, e := range d.entries {
			switch {
			case e.busy > 0:
			case e.deadline <= now:
				e.ending = true
				d.unwait(e)
				e.deadline = now + int64(deleteTimeout+deleteRetry) // not again while this try is under way
				due = append(due, e)
			default:
				next = min(next, e.deadline)
			}
		}
		audits := d.leases.due(now)
		if len(d.entries) == 0 && len(d.leases.doubted) == 0 || d.closed {
			d.cleaning = false
			d.mu.Unlock()
			return
		}
		d.mu.Unlock()

		for _, e := range due {
			slots <- struct{}{}
			d.running.Go(func() {
				d.expire(e)
				<-slots
			})
		}
		for _, l := range audits {
			d.audit(l)
		}
		select {
		case <-d.open.Done():
		case <-time.After(max(time.Duration(next-d.clock.Now()), time.Millisecond)):
		}
	}
}

// expire deletes the key of an owner whose time is over, unless another driver has taken it over.
func (d *Driver) expire(e *entry) {
	ctx, cancel := context.WithTimeout(d.open, deleteTimeout)
	defer cancel()
	d.mu.Lock()
	l, key, create := e.lease, e.key, e.create
	d.mu.Unlock()
	var mine []clientv3.Cmp
	if l != nil {
		mine = append(mine, clientv3.Compare(clientv3.LeaseValue(key), "=", clientv3.LeaseID(l.id)))
	}
	_, err := d.delete(ctx, e.owner, key, create, mine...)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		d.remove(e)
	} else {
		e.deadline = d.clock.Now() + int64(deleteRetry)
	}
}

// due answers the doubted leases whose keys are to be listed now, and forgets those that have ended. Driver.mu is
// held.
func (s *leases) due(now int64) (due []*lease) {
	var live []*lease
	for _, l := range s.doubted {
		if l.dead || l.until+int64(l.ttl) < now {
			continue
		}
		live = append(live, l)
		if l.audit <= now {
			l.audit = now + int64(l.ttl)
			due = append(due, l)
		}
	}
	s.doubted = live
	return due
}

// audit deletes the keys on the lease that are in no books.
func (d *Driver) audit(l *lease) {
	ctx, cancel := context.WithTimeout(d.open, deleteTimeout)
	defer cancel()
	resp, err := d.leasing.LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: l.id, Keys: true})
	if err != nil {
		return // the next audit asks again
	}
	booked := make(map[string]bool)
	d.mu.Lock()
	for _, e := range d.entries {
		booked[e.key] = true
	}
	d.mu.Unlock()
	for _, key := range resp.Keys {
		if booked[string(key)] { // if it is another's all the same, the next audit after the entry's end finds it
			continue
		}
		n, ok := d.name(string(key))
		kvs, err := d.read(ctx, string(key))
		if !ok || err != nil || len(kvs.Kvs) == 0 {
			continue
		}
		r, err := readRecord(kvs.Kvs[0])
		if err != nil {
			continue
		}
		o := driver.Owner{Name: n, ID: r.ID}
		d.mu.Lock()
		known := d.entries[o] != nil
		d.mu.Unlock()
		if !known {
			mine := clientv3.Compare(clientv3.LeaseValue(string(key)), "=", clientv3.LeaseID(l.id))
			_, _ = d.delete(ctx, o, string(key), kvs.Kvs[0].CreateRevision, mine)
		}
	}
}
