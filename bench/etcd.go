package main

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/fencelock/fencelock/driver/etcd"
)

func etcdSubjects() []subject {
	return []subject{
		{name: "two transactions", backend: "etcd", floor: []string{"pair", "crowd"}, open: openRawEtcd},
		{name: "hand-written queue", backend: "etcd", floor: []string{"handover"}, open: openQueueEtcd},
		{name: "fencelock etcd", backend: "etcd", fenced: true,
			open: func(_ context.Context, s *server, ttl time.Duration) (locker, error) {
				c, err := dialEtcd(s)
				if err != nil {
					return locker{}, err
				}
				d, err := etcd.New(c, nil)
				return ours(d, err, ttl, c.Close)
			}},
		{name: "concurrency.Mutex, a session each", backend: "etcd", open: openMutex},
		// Two goroutines with one session both hold the lock, so it can only take part where each has a name of its own.
		{name: "concurrency.Mutex, a shared session (unsafe)", backend: "etcd", also: []string{"pair", "crowd"}, open: openSharedMutex},
	}
}

func openMutex(_ context.Context, s *server, ttl time.Duration) (locker, error) {
	c, err := dialEtcd(s)
	if err != nil {
		return locker{}, err
	}
	return locker{close: c.Close, lock: func(ctx context.Context, name string) (held, error) {
		session, err := concurrency.NewSession(c, concurrency.WithTTL(int(ttl.Seconds())))
		if err != nil {
			return held{}, err
		}
		h, err := lockMutex(ctx, session, name)
		if err != nil {
			_ = session.Close()
			return held{}, err
		}
		unlock := h.unlock
		h.unlock = func(ctx context.Context) error { return errors.Join(unlock(ctx), session.Close()) }
		return h, nil
	}}, nil
}

func openSharedMutex(_ context.Context, s *server, ttl time.Duration) (locker, error) {
	c, err := dialEtcd(s)
	if err != nil {
		return locker{}, err
	}
	session, err := concurrency.NewSession(c, concurrency.WithTTL(int(ttl.Seconds())))
	if err != nil {
		return locker{}, errors.Join(err, c.Close())
	}
	return locker{close: func() error { return errors.Join(session.Close(), c.Close()) },
		lock: func(ctx context.Context, name string) (held, error) { return lockMutex(ctx, session, name) }}, nil
}

func lockMutex(ctx context.Context, session *concurrency.Session, name string) (held, error) {
	m := concurrency.NewMutex(session, "mutex/"+name)
	if err := m.Lock(ctx); err != nil {
		return held{}, err
	}
	return held{unlock: m.Unlock, err: func() error {
		select {
		case <-session.Done():
			return errNotHeld
		default:
			return nil
		}
	}}, nil
}

func dialEtcd(s *server) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: []string{s.url}, Logger: zap.NewNop(), DialTimeout: 10 * time.Second})
}

// leased is a client with one lease that is kept alive.
func leased(ctx context.Context, s *server, ttl time.Duration) (*clientv3.Client, clientv3.LeaseID, error) {
	c, err := dialEtcd(s)
	if err != nil {
		return nil, 0, err
	}
	granted, err := c.Grant(ctx, int64(ttl.Seconds()))
	if err != nil {
		return nil, 0, err
	}
	alive, err := c.KeepAlive(context.Background(), granted.ID)
	if err != nil {
		return nil, 0, err
	}
	go func() {
		for range alive { // until the client is closed
		}
	}()
	return c, granted.ID, nil
}

func openRawEtcd(ctx context.Context, s *server, ttl time.Duration) (locker, error) {
	c, lease, err := leased(ctx, s, ttl)
	if err != nil {
		return locker{}, err
	}
	return locker{close: c.Close, lock: func(ctx context.Context, name string) (held, error) {
		key := "raw/" + name
		absent := clientv3.Compare(clientv3.CreateRevision(key), "=", 0)
		put, err := c.Txn(ctx).If(absent).Then(clientv3.OpPut(key, "host 4711", clientv3.WithLease(lease))).Commit()
		if err != nil {
			return held{}, err
		}
		if !put.Succeeded {
			return held{}, errNotHeld
		}
		return held{unlock: func(ctx context.Context) error {
			same := clientv3.Compare(clientv3.CreateRevision(key), "=", put.Header.Revision)
			del, err := c.Txn(ctx).If(same).Then(clientv3.OpDelete(key)).Commit()
			if err == nil && !del.Succeeded {
				err = errNotHeld
			}
			return err
		}}, nil
	}}, nil
}

// openQueueEtcd is the queue that one writes by hand: a key for each waiter, who watches the one before it.
func openQueueEtcd(ctx context.Context, s *server, ttl time.Duration) (locker, error) {
	c, lease, err := leased(ctx, s, ttl)
	if err != nil {
		return locker{}, err
	}
	var last atomic.Int64
	return locker{close: c.Close, lock: func(ctx context.Context, name string) (held, error) {
		prefix := "queue/" + name + "/"
		key := prefix + strconv.FormatInt(int64(lease), 16) + "-" + strconv.FormatInt(last.Add(1), 10)
		put, err := c.Put(ctx, key, "", clientv3.WithLease(lease))
		if err != nil {
			return held{}, err
		}
		remove := func(ctx context.Context) error {
			_, err := c.Delete(ctx, key)
			return err
		}
		before := append(clientv3.WithLastCreate(), clientv3.WithMaxCreateRev(put.Header.Revision-1))
		for {
			head, err := c.Get(ctx, prefix, before...)
			if err == nil && len(head.Kvs) == 0 {
				return held{unlock: remove}, nil
			}
			if err == nil {
				err = deleted(ctx, c, string(head.Kvs[0].Key), head.Header.Revision+1)
			}
			if err != nil {
				_ = remove(context.WithoutCancel(ctx))
				return held{}, err
			}
		}
	}}, nil
}

// deleted waits until the key is deleted in that revision or a later one.
func deleted(ctx context.Context, c *clientv3.Client, key string, from int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for resp := range c.Watch(ctx, key, clientv3.WithRev(from)) {
		for _, e := range resp.Events {
			if e.Type == clientv3.EventTypeDelete {
				return nil
			}
		}
		if err := resp.Err(); err != nil {
			return err
		}
	}
	return ctx.Err()
}
