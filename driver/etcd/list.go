package etcd

import (
	"context"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/driver"
)

// listPage is how many keys one request lists.
const listPage = 500

// List implements driver.Lister. It reads pages of 500 keys, and asks for the rest of each etcd lease once.
func (d *Driver) List(ctx context.Context, n driver.Name, yield func(driver.Holding) bool) error {
	ctx, end, err := d.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	var prefixes []string
	if n.Name != "" {
		prefixes = []string{d.queueKey(n)}
	} else {
		prefixes = []string{d.kindPrefix(driver.KindLock), d.kindPrefix(driver.KindPermit)}
	}
	lefts := make(map[int64]time.Duration)
	for _, prefix := range prefixes {
		var queue []*mvccpb.KeyValue // entries of one name
		var of driver.Name
		flush := func() (bool, error) {
			entries := queue
			queue = nil
			return d.listQueue(ctx, entries, lefts, yield)
		}
		for from, more := prefix, true; more; {
			resp, err := d.read(ctx, from, clientv3.WithRange(clientv3.GetPrefixRangeEnd(prefix)), clientv3.WithLimit(listPage))
			if err != nil {
				return err
			}
			for _, kv := range resp.Kvs {
				n, ok := d.name(string(kv.Key))
				if !ok {
					continue
				}
				if n != of {
					if on, err := flush(); err != nil || !on {
						return err
					}
					of = n
				}
				queue = append(queue, kv)
			}
			if more = resp.More; more {
				from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
			}
		}
		if on, err := flush(); err != nil || !on {
			return err
		}
	}
	return nil
}

// listQueue lists the holders of one name, and reports whether yield wants more.
func (d *Driver) listQueue(ctx context.Context, queue []*mvccpb.KeyValue, lefts map[int64]time.Duration, yield func(driver.Holding) bool) (bool, error) {
	held, err := holders(queue)
	if err != nil {
		return false, err
	}
	for _, kv := range held {
		r, err := readRecord(kv)
		if err != nil {
			return false, err
		}
		left, known := lefts[kv.Lease]
		if !known {
			resp, err := d.leasing.LeaseTimeToLive(ctx, &pb.LeaseTimeToLiveRequest{ID: kv.Lease})
			if err != nil {
				return false, failure(err)
			}
			left = time.Duration(resp.TTL) * time.Second
			lefts[kv.Lease] = left
		}
		if left < 0 {
			continue // it ended meanwhile
		}
		n, _ := d.name(string(kv.Key))
		if !yield(driver.Holding{Owner: driver.Owner{Name: n, ID: r.ID}, Token: r.token(kv), Left: max(left, time.Millisecond), Holder: r.Holder}) {
			return false, nil
		}
	}
	return true, nil
}

// holders answers those of a queue that hold. It orders the queue.
func holders(queue []*mvccpb.KeyValue) ([]*mvccpb.KeyValue, error) {
	slices.SortFunc(queue, func(a, b *mvccpb.KeyValue) int { return int(a.CreateRevision - b.CreateRevision) })
	for i, kv := range queue {
		r, err := readRecord(kv)
		if err != nil {
			return nil, err
		}
		if i >= r.Limit {
			return queue[:i], nil
		}
	}
	return queue, nil
}

// ForceUnlock implements driver.ForceUnlocker.
func (d *Driver) ForceUnlock(ctx context.Context, n driver.Name) (int, error) {
	ctx, end, err := d.begin(ctx)
	if err != nil {
		return 0, err
	}
	defer end()
	resp, err := d.read(ctx, d.queueKey(n), clientv3.WithPrefix())
	if err != nil {
		return 0, err
	}
	held, err := holders(resp.Kvs)
	if err != nil {
		return 0, err
	}
	ended := 0
	for chunk := range slices.Chunk(held, opsAtOnce) {
		var deletes []clientv3.Op
		for _, kv := range chunk { // unless another owner has come to the key
			same := clientv3.Compare(clientv3.CreateRevision(string(kv.Key)), "=", kv.CreateRevision)
			deletes = append(deletes, clientv3.OpTxn([]clientv3.Cmp{same}, []clientv3.Op{clientv3.OpDelete(string(kv.Key))}, nil))
		}
		resp, err := d.txn(ctx, nil, deletes, nil)
		if err != nil {
			if ended > 0 {
				err = unknown(err)
			}
			return ended, err
		}
		for _, r := range resp.Responses {
			if r.GetResponseTxn().Succeeded {
				ended++
			}
		}
	}
	return ended, nil
}
