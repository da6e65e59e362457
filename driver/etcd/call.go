package etcd

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/driver"
)

// kvClient and leaseClient mark the errors of requests that were given to no connection. gRPC's codes do not
// tell them from those of a connection that broke while the answer was awaited.
//
// They also keep the client library from repeating a request, which the engine does and knows the meaning of, and
// from waiting when no member can be reached.
type (
	kvClient    struct{ pb.KVClient }
	leaseClient struct{ pb.LeaseClient }
)

// unsent is the error of a request that never left.
type unsent struct{ error }

func (e unsent) Unwrap() error              { return e.error }
func (e unsent) GRPCStatus() *status.Status { return status.Convert(e.error) }

func tracked[Q, R any](ctx context.Context, q Q, opts []grpc.CallOption, call func(context.Context, Q, ...grpc.CallOption) (R, error)) (R, error) {
	var to peer.Peer // set when the request is assigned to a connection
	// Without a bound of its own, that of gRPC is 4 MB, which the keys of one lease can exceed.
	r, err := call(ctx, q, append(opts[:len(opts):len(opts)], grpc.Peer(&to), grpc.WaitForReady(false), grpc.MaxCallRecvMsgSize(math.MaxInt32))...)
	// Canceled, though our context is not: the user has closed the client.
	if code := status.Code(err); to.Addr == nil && (code == codes.Unavailable || code == codes.Canceled && ctx.Err() == nil) {
		err = unsent{err}
	}
	return r, err
}

func (c kvClient) Range(ctx context.Context, q *pb.RangeRequest, opts ...grpc.CallOption) (*pb.RangeResponse, error) {
	return tracked(ctx, q, opts, c.KVClient.Range)
}

func (c kvClient) Txn(ctx context.Context, q *pb.TxnRequest, opts ...grpc.CallOption) (*pb.TxnResponse, error) {
	return tracked(ctx, q, opts, c.KVClient.Txn)
}

func (c leaseClient) LeaseGrant(ctx context.Context, q *pb.LeaseGrantRequest, opts ...grpc.CallOption) (*pb.LeaseGrantResponse, error) {
	return tracked(ctx, q, opts, c.LeaseClient.LeaseGrant)
}

func (c leaseClient) LeaseTimeToLive(ctx context.Context, q *pb.LeaseTimeToLiveRequest, opts ...grpc.CallOption) (*pb.LeaseTimeToLiveResponse, error) {
	return tracked(ctx, q, opts, c.LeaseClient.LeaseTimeToLive)
}

func wrap(err error) error { return fmt.Errorf("etcd: %w", rpctypes.Error(err)) }

// failure sorts an error into the two classes of package driver.
func failure(err error) error {
	if err == nil {
		return nil
	}
	var never unsent
	err = wrap(err)
	if errors.As(err, &never) || refused(err) {
		return driver.Unavailable(err)
	}
	return err
}

// failed is failure with a hint.
func (d *Driver) failed(err error) error {
	if errors.Is(rpctypes.Error(err), rpctypes.ErrPermissionDenied) {
		return driver.Unavailable(fmt.Errorf("etcd: the user needs a role that may read and write the prefix %q: %w", d.prefix, rpctypes.Error(err)))
	}
	return failure(err)
}

// refused reports whether the error is a server's word that it did not do what was asked.
func refused(err error) bool {
	var e rpctypes.EtcdError
	if !errors.As(err, &e) {
		// Whatever gRPC itself says, such as that an answer was too large, may come after the deed.
		return false
	}
	switch e.Code() {
	case codes.InvalidArgument, codes.PermissionDenied, codes.Unauthenticated, codes.FailedPrecondition,
		codes.NotFound, codes.OutOfRange, codes.ResourceExhausted:
		return true
	}
	// Checked before a request is looked at. The other errors with the code Unavailable, such as time-outs and
	// the stopping of the server, may come when the proposal is on its way.
	return e == rpctypes.ErrNoLeader || e == rpctypes.ErrNotCapable
}

// nothingYet is the error of the read that comes before a step if the driver does not know the base yet: it is the
// first word on a connection, and one that breaks there counts as one that could not be made. Time-outs
// stay what they are.
func nothingYet(err error) error {
	var e rpctypes.EtcdError
	if !errors.As(err, &e) && !errors.Is(err, driver.ErrUnavailable) && status.Code(err) == codes.Unavailable {
		return driver.Unavailable(err)
	}
	return err
}

// store is what is known about the cluster's data. Guarded by Driver.mu.
type store struct {
	cluster    uint64 // zero until known
	revision   int64  // the greatest seen
	generation int    // how often the data was found to be other data than before
}

var errRestored = errors.New("etcd: the cluster's data was restored from an earlier state, or it is another cluster: all leases of this client are lost")

// now answers what is known, to be handed to observe with the answer to a request that is sent after it.
func (d *Driver) knownStore() store {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.store
}

// observe looks at the header of a linearizable answer, whose request was sent when known was known.
func (d *Driver) observe(h *pb.ResponseHeader, known store) error {
	d.mu.Lock()
	switch {
	case known.generation != d.store.generation:
		d.mu.Unlock()
		return errRestored
	case d.store.cluster != 0 && h.ClusterId != d.store.cluster || h.Revision < known.revision:
		d.restored(h)
		d.mu.Unlock()
		d.tell(driver.Event{Kind: driver.EventWarning, Err: errRestored})
		return errRestored
	}
	d.store.cluster = h.ClusterId
	d.store.revision = max(d.store.revision, h.Revision)
	d.mu.Unlock()
	return nil
}

// restored forgets what was true of the data as it was before. The entries stay in the books until their keys, which
// the restored data may hold, have been deleted. d.mu is held.
func (d *Driver) restored(h *pb.ResponseHeader) {
	d.store = store{cluster: h.ClusterId, revision: h.Revision, generation: d.store.generation + 1}
	d.based, d.base = false, base{}
	clear(d.floors)
	d.leases.init()
	if d.listening.stands = 0; d.listening.again != nil {
		d.listening.again() // it would tell nothing until the revision is where it was
	}
	for _, e := range d.entries {
		e.lost, e.lease, e.deadline = true, nil, 0
		d.unwait(e)
	}
	d.clean()
}

// memberPatience is how long one of several members may take to answer before another one is asked.
const memberPatience = 300 * time.Millisecond

// again makes a request that may be made again without harm. If one of several members does not answer, the next try goes to
// another, and may take twice as long: one that hangs must not cost a lease.
func again[T any](ctx context.Context, d *Driver, request func(context.Context) (T, error)) (T, error) {
	if len(d.client.Endpoints()) < 2 {
		return request(ctx)
	}
	for patience := memberPatience; ; patience *= 2 {
		try, cancel := context.WithTimeout(ctx, patience)
		answer, err := request(try)
		late := try.Err() != nil || errors.Is(err, context.DeadlineExceeded) // by somebody else's patience, on the same stream
		cancel()
		if err == nil || !late || ctx.Err() != nil {
			return answer, err
		}
	}
}

// txn makes one transaction.
func (d *Driver) txn(ctx context.Context, cmps []clientv3.Cmp, then, otherwise []clientv3.Op) (*clientv3.TxnResponse, error) {
	known := d.knownStore()
	resp, err := d.kv.Txn(ctx).If(cmps...).Then(then...).Else(otherwise...).Commit()
	if err != nil {
		return nil, d.failed(err)
	}
	return resp, d.observe(resp.Header, known)
}

// read is a linearizable read of one range.
func (d *Driver) read(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	known := d.knownStore()
	resp, err := d.kv.Get(ctx, key, opts...)
	if err != nil {
		return nil, d.failed(err)
	}
	return resp, d.observe(resp.Header, known)
}
