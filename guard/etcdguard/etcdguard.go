// Package etcdguard refuses stale writers to keys of etcd (3.5 or later), in the transactions that write them, through the client
// go.etcd.io/etcd/client/v3. The fencing tokens may come from any backend.
//
// The mark of a resource, the highest token that was admitted for it, is the value of a key of its own, "<prefix>/<resource>",
// which lives as long as nobody deletes it. [Guard.Do] compares it and executes operations in one transaction. To have
// conditions as well, raise the mark first, best with guard.Fenced, and add [Guard.Current] to the conditions.
//
// # Errors
//
// What is stale matches [guard.ErrStale]. Other errors are the client's own. If no answer came, the transaction may have
// been executed; to repeat it with the same token is as safe as to repeat its operations is.
package etcdguard

import (
	"context"
	"fmt"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/guard"
)

// DefaultPrefix is where marks are kept.
const DefaultPrefix = "fencelock-guard"

// Options of [New].
type Options struct {
	// Prefix is the beginning of the keys of marks, without the slash that follows. Default [DefaultPrefix].
	Prefix string
}

// Guard guards resources of one cluster. It is safe for concurrent use.
type Guard struct {
	kv     clientv3.KV
	prefix string
}

// New makes a guard that uses the client; nil options are the defaults. It sends nothing.
func New(kv clientv3.KV, o *Options) *Guard {
	g := &Guard{kv, DefaultPrefix + "/"}
	if o != nil && o.Prefix != "" {
		g.prefix = o.Prefix + "/"
	}
	return g
}

// MarkKey is the key of a resource's mark.
func (g *Guard) MarkKey(resource string) string { return g.prefix + resource }

// text writes tokens so that they compare as numbers do.
func text(t guard.Token) string { return fmt.Sprintf("%016d", uint64(t)) }

// Current is the condition that the token is the highest that was admitted for the resource, for a transaction of the
// caller's. It does not raise the mark: until [Guard.Raise] or [Guard.Do] has, it does not hold. Nothing but that
// makes it true, so an invalid token is never current.
func (g *Guard) Current(resource string, t guard.Token) clientv3.Cmp {
	return clientv3.Compare(clientv3.Value(g.MarkKey(resource)), "=", text(t))
}

// Do executes the operations in one transaction if the token is admitted for the resource. The answers to them are the
// last ones of the response. The server bounds a transaction to 128 operations by default, one of which is for the mark.
func (g *Guard) Do(ctx context.Context, resource string, t guard.Token, ops ...clientv3.Op) ([]*etcdserverpb.ResponseOp, error) {
	if resource == "" {
		return nil, driver.Invalid("resource", resource, "must not be empty")
	}
	if err := guard.CheckToken(t); err != nil {
		return nil, err
	}
	mark := g.MarkKey(resource)
	write := append([]clientv3.Op{clientv3.OpPut(mark, text(t))}, ops...)
	// A comparison with the value of a key that is not there never holds.
	higher := clientv3.OpTxn([]clientv3.Cmp{clientv3.Compare(clientv3.Value(mark), ">", text(t))}, nil, write)
	r, err := g.kv.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(mark), "=", 0)).Then(write...).Else(higher).Commit()
	if err != nil {
		return nil, fmt.Errorf("guard: %.80q: %w", resource, err)
	}
	responses := r.Responses
	if !r.Succeeded {
		inner := responses[0].GetResponseTxn()
		if inner.Succeeded {
			return nil, guard.Stale(resource)
		}
		responses = inner.Responses
	}
	return responses[1:], nil
}

// Raise admits the token without another operation, so that lower ones are refused from now on. It is for
// guard.Fenced.
func (g *Guard) Raise(ctx context.Context, resource string, t guard.Token) error {
	_, err := g.Do(ctx, resource, t)
	return err
}
