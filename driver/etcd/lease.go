package etcd

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/driver"
)

// lease is an etcd lease. Nothing keeps it alive but the steps that need it, so it ends by itself when nobody
// uses it. The fields after ttl are guarded by Driver.mu.
type lease struct {
	id    int64
	asked time.Duration
	ttl   time.Duration // as granted: at least what was asked

	until   int64 // it lives at least until then: the time of sending of an acknowledged request, plus ttl
	asking  bool  // a keepalive is under way
	dead    bool  // the server does not know it
	doubted bool  // a key whose request had no answer may be attached to it
	audit   int64 // when its keys are to be listed next
}

// left is how long it lives at least, from then on.
func (l *lease) left(then int64) time.Duration { return time.Duration(l.until - then) }

// leases are the leases that are shared by all locks of one TTL. Guarded by Driver.mu.
type leases struct {
	shared   map[time.Duration]*lease
	granting map[time.Duration]chan struct{} // closed when the request under way has ended
	doubted  []*lease                        // see lease.doubted
}

func (s *leases) init() {
	s.shared = make(map[time.Duration]*lease)
	s.granting = make(map[time.Duration]chan struct{})
	s.doubted = nil
}

// wholeSeconds is the TTL that a lease is asked for.
func wholeSeconds(ttl time.Duration) time.Duration {
	return max((ttl+time.Second-1)/time.Second*time.Second, MinTTL)
}

// sharedLease answers the lease for the TTL. At least half of it is left, so that the answer to a step
// can still be used.
func (d *Driver) sharedLease(ctx context.Context, ttl time.Duration) (*lease, error) {
	for {
		d.mu.Lock()
		l, now := d.leases.shared[ttl], d.clock.Now()
		if l != nil && (l.dead || l.until <= now) {
			delete(d.leases.shared, ttl)
			l = nil
		}
		if l != nil && l.left(now) >= ttl/2 {
			d.mu.Unlock()
			return l, nil
		}
		granting := d.leases.granting
		if under := granting[ttl]; under != nil {
			d.mu.Unlock()
			select {
			case <-under:
				continue
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		under, generation := make(chan struct{}), d.store.generation
		granting[ttl] = under
		d.mu.Unlock()

		fresh := l
		var err error
		if l == nil {
			fresh, err = d.grant(ctx, ttl)
		} else {
			err = d.keep(ctx, l)
		}
		d.mu.Lock()
		delete(granting, ttl)
		close(under)
		if err == nil && generation == d.store.generation {
			d.leases.shared[ttl] = fresh
		} else if err == nil {
			err = errRestored
		}
		d.mu.Unlock()
		if !errors.Is(err, errLeaseGone) {
			return fresh, err
		}
	}
}

// grant makes a new lease.
func (d *Driver) grant(ctx context.Context, ttl time.Duration) (*lease, error) {
	sent := d.clock.Now()
	resp, err := d.leasing.LeaseGrant(ctx, &pb.LeaseGrantRequest{TTL: int64(ttl / time.Second)})
	if err != nil {
		return nil, failure(err)
	}
	granted := time.Duration(resp.TTL) * time.Second
	if resp.Error != "" || granted < ttl {
		return nil, driver.Unavailable(fmt.Errorf("etcd: asked for a lease of %v, got one of %v: %s", ttl, granted, resp.Error))
	}
	return &lease{id: resp.ID, asked: ttl, ttl: granted, until: sent + int64(granted)}, nil
}

var errLeaseGone = errors.New("etcd: the server does not know the lease any more")

// keep keeps the lease alive once. The error matches errLeaseGone if the server does not know it.
//
// A leader that was stopped answers when it goes on, for a moment, before it hears of its successor; that one knows nothing
// of the keepalive, and ends the lease by its own count. So an answer counts only if a linearizable read after it is of the
// same term: then whoever answered was the leader of that term still.
func (d *Driver) keep(ctx context.Context, l *lease) error {
	for {
		c, err := again(ctx, d, func(ctx context.Context) (*keepalive, error) { return d.keeper.ask(ctx, l.id) })
		if err != nil {
			return err
		}
		if c.ttl <= 0 {
			d.mu.Lock()
			l.dead = true
			d.mu.Unlock()
			return errLeaseGone
		}
		now, err := again(ctx, d, func(ctx context.Context) (*clientv3.GetResponse, error) { return d.read(ctx, d.prefix) })
		if err != nil {
			return err
		}
		if now.Header.RaftTerm != c.term {
			continue
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		l.until = max(l.until, c.sent+int64(min(l.ttl, time.Duration(c.ttl)*time.Second)))
		return nil
	}
}

// ensure keeps the lease alive unless so much of it is left, from then on.
func (d *Driver) ensure(ctx context.Context, l *lease, then int64, least time.Duration) error {
	d.mu.Lock()
	enough := l.left(then) >= least
	d.mu.Unlock()
	if enough {
		return nil
	}
	return d.keep(ctx, l)
}

// keeping is keep in the background; the channel gets its error.
func (d *Driver) keeping(ctx context.Context, l *lease) <-chan error {
	done := make(chan error, 1)
	go func() { done <- d.keep(ctx, l) }()
	return done
}

// stale is how long ago a lease may have been kept alive when it takes a new lock.
func (l *lease) stale() time.Duration { return min(l.ttl/10, 500*time.Millisecond) }

// freshen keeps the lease alive in the background if it is stale and nobody else does so. The channel, which may be
// nil, is closed when that has ended.
func (d *Driver) freshen(ctx context.Context, l *lease) <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if l.asking || l.left(d.clock.Now()) >= l.ttl-l.stale() {
		return nil
	}
	l.asking = true
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = d.keep(ctx, l) // what it brings is in l.until
		d.mu.Lock()
		l.asking = false
		d.mu.Unlock()
	}()
	return done
}

// keeper sends keepalives on one stream, which is opened when it is needed and again after it broke. The
// client library's own KeepAlive does not tell when it has sent, and its KeepAliveOnce opens a stream for each
// one, with an authentication if there is a password.
type keeper struct {
	d  *Driver
	mu sync.Mutex
	s  *keepStream // nil if there is none
}

type keepStream struct {
	cancel context.CancelFunc
	wake   chan struct{} // of capacity 1: something was queued
	queue  []*keepalive  // to be sent; guarded by keeper.mu, as the next two
	asked  []*keepalive  // sent: answers come in the same order
	broken error
}

// keepalive is one request.
type keepalive struct {
	id   int64
	done chan struct{} // closed when the fields below are set
	sent int64
	ttl  int64 // in seconds; 0 if the server does not know the lease
	term uint64
	err  error
}

// A stream whose answer takes longer than that, when the caller gives up, is replaced: its member may hang.
const keepPatience = memberPatience

// ask keeps a lease alive and waits for the answer.
func (k *keeper) ask(ctx context.Context, id int64) (*keepalive, error) {
	c := &keepalive{id: id, done: make(chan struct{})}
	began := k.d.clock.Now()
	k.mu.Lock()
	s := k.s
	if s == nil {
		if k.d.open.Err() != nil {
			k.mu.Unlock()
			return nil, errClosed
		}
		s = k.start()
	}
	s.queue = append(s.queue, c)
	k.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
	select {
	case <-c.done:
		return c, c.err
	case <-ctx.Done():
		if k.d.clock.Now()-began >= int64(keepPatience) {
			k.fail(s, fmt.Errorf("etcd: no answer to a keepalive: %w", ctx.Err()))
		}
		return nil, ctx.Err()
	}
}

// start opens a stream in the background. k.mu is held.
func (k *keeper) start() *keepStream {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(k.d.open))
	s := &keepStream{cancel: cancel, wake: make(chan struct{}, 1)}
	k.s = s
	go func() {
		stream, err := k.d.leasing.LeaseKeepAlive(ctx)
		if err != nil {
			k.fail(s, failure(err))
			return
		}
		go k.receive(s, stream)
		k.send(ctx, s, stream)
	}()
	return s
}

func (k *keeper) send(ctx context.Context, s *keepStream, stream pb.Lease_LeaseKeepAliveClient) {
	for {
		k.mu.Lock()
		var c *keepalive
		if len(s.queue) > 0 && s.broken == nil {
			c, s.queue = s.queue[0], s.queue[1:]
			s.asked = append(s.asked, c)
			c.sent = k.d.clock.Now()
		}
		k.mu.Unlock()
		if c == nil {
			select {
			case <-s.wake:
				continue
			case <-ctx.Done():
				return
			}
		}
		if err := stream.Send(&pb.LeaseKeepAliveRequest{ID: c.id}); err != nil {
			return // receive gets the reason
		}
	}
}

func (k *keeper) receive(s *keepStream, stream pb.Lease_LeaseKeepAliveClient) {
	for {
		resp, err := stream.Recv()
		if err != nil {
			k.fail(s, failure(err))
			return
		}
		k.mu.Lock()
		if len(s.asked) == 0 || s.asked[0].id != resp.ID {
			k.mu.Unlock()
			k.fail(s, fmt.Errorf("etcd: a keepalive was answered that was not asked for: %x", resp.ID))
			return
		}
		c := s.asked[0]
		s.asked = s.asked[1:]
		c.ttl, c.term = resp.TTL, resp.Header.RaftTerm
		close(c.done)
		k.mu.Unlock()
	}
}

// fail ends a stream and all that waits for it.
func (k *keeper) fail(s *keepStream, err error) {
	s.cancel()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.s == s {
		k.s = nil
	}
	if s.broken != nil {
		return
	}
	s.broken = err
	for _, c := range append(s.asked, s.queue...) {
		c.err = err
		close(c.done)
	}
	s.asked, s.queue = nil, nil
}

func (k *keeper) close() {
	k.mu.Lock()
	s := k.s
	k.mu.Unlock()
	if s != nil {
		k.fail(s, errClosed)
	}
}
