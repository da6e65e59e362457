package redlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/redislua"
)

// List implements driver.Lister. It lists what a majority has, or may have if nodes do not answer, and fails if no
// majority answers. Each node is waited for as long as it goes on answering within the node timeout.
func (d *Driver) List(ctx context.Context, n driver.Name, yield func(driver.Holding) bool) error {
	if err := d.begin(ctx); err != nil {
		return err
	}
	type listed struct {
		node     *node
		holdings []driver.Holding
		err      error
	}
	replies := make(chan listed, len(d.nodes))
	ctx, cancel := ended(ctx)
	defer cancel()
	for _, node := range d.nodes {
		d.background(func() {
			holdings, err := d.listNode(ctx, node, n)
			replies <- listed{node, holdings, err}
		}, func() { replies <- listed{node, nil, errClosed} })
	}
	found := make(map[driver.Owner][]driver.Holding)
	outcomes := make([]outcome, len(d.nodes))
	good := 0
	for range d.nodes {
		r := <-replies
		outcomes[r.node.index] = outcome{came: true, err: r.err}
		if r.err != nil {
			continue
		}
		good++
		for _, h := range r.holdings {
			found[h.Owner] = append(found[h.Owner], h)
		}
	}
	if good < d.quorum {
		return driver.Unavailable(errors.Join(d.failure("", outcomes), ctx.Err()))
	}
	for _, same := range found {
		if len(same)+len(d.nodes)-good < d.quorum {
			continue
		}
		// It lives as long as a majority has it.
		slices.SortFunc(same, func(a, b driver.Holding) int { return cmp.Compare(b.Left, a.Left) })
		if !yield(same[min(len(same), d.quorum)-1]) {
			break
		}
	}
	return nil
}

// ended is a context that ends with ctx, or at its deadline even if ctx does not tell.
func ended(ctx context.Context) (context.Context, context.CancelFunc) {
	at, ok := ctx.Deadline()
	if !ok || ctx.Done() != nil {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(context.WithoutCancel(ctx), at)
}

// listNode lists what one node has.
func (d *Driver) listNode(ctx context.Context, n *node, only driver.Name) ([]driver.Holding, error) {
	if only.Name != "" {
		return d.holdings(ctx, n, only.Kind, []driver.Name{only})
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := time.AfterFunc(d.timeout, func() { cancel(fmt.Errorf("no answer within %v", d.timeout)) })
	defer silence.Stop()
	type result struct {
		all []driver.Holding
		err error
	}
	scanned := make(chan result, 1)
	go func() { // a client library may not look at the context
		all, err := d.scan(ctx, n, func() { silence.Reset(d.timeout) })
		scanned <- result{all, err}
	}()
	select {
	case r := <-scanned:
		return r.all, r.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// scan lists all that one node has, and calls alive whenever it has answered.
func (d *Driver) scan(ctx context.Context, n *node, alive func()) (all []driver.Holding, err error) {
	for kind, k := range kinds {
		if k.letter == "" || err != nil {
			continue
		}
		prefix := d.space + k.letter + ":"
		seen := make(map[string]bool) // a scan may find a key twice
		err = n.client.Scan(ctx, prefix+"*", k.redis, func(keys []string) error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			alive()
			var names []driver.Name
			for _, key := range keys {
				if name := strings.TrimPrefix(key, prefix); !seen[name] {
					seen[name] = true
					names = append(names, driver.Name{Kind: driver.Kind(kind), Name: name})
				}
			}
			for part := range slices.Chunk(names, maxItems) {
				some, err := d.holdings(ctx, n, driver.Kind(kind), part)
				if err != nil {
					return err
				}
				alive()
				all = append(all, some...)
			}
			return nil
		})
	}
	return all, err
}

// holdings lists the leases of names of one kind on one node.
func (d *Driver) holdings(ctx context.Context, n *node, kind driver.Kind, names []driver.Name) (all []driver.Holding, err error) {
	var keys []string
	for _, name := range names {
		keys = append(keys, d.keys(name)...)
	}
	r := d.single(ctx, n, &ask{step: listStep, kind: kind, keys: keys, args: noArgs})
	if r.err != nil {
		return nil, r.err
	}
	lists, _ := r.value.([]any)
	if len(lists) != len(names) {
		return nil, fmt.Errorf("answered %.80q", fmt.Sprint(r.value))
	}
	for i, name := range names {
		err := redislua.ReadHoldings(name, lists[i], func(h driver.Holding) bool {
			all = append(all, h)
			return true
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// single gives a request to one node and waits for the reply.
func (d *Driver) single(ctx context.Context, n *node, a *ask) reply {
	replies := make(chan reply, 1)
	a.by = d.clock.Now() + int64(d.timeout)
	a.done = func(r reply) { replies <- r }
	timer := time.NewTimer(d.patience(ctx))
	defer timer.Stop()
	n.push(a)
	select {
	case r := <-replies:
		return r
	case <-timer.C:
	case <-ctx.Done():
	}
	a.finish(reply{n, nil, errNoAnswer, false})
	return <-replies
}

// ForceUnlock implements driver.ForceUnlocker. It counts the leases that a majority had, or may have had if nodes do not
// answer, and fails if no majority answers; a node that does not answer keeps its part of a lease until that ends.
func (d *Driver) ForceUnlock(ctx context.Context, n driver.Name) (int, error) {
	if err := d.begin(ctx); err != nil {
		return 0, err
	}
	keys := d.keys(n)
	r := d.broadcast(ctx, func(*node) *ask { return &ask{step: forceStep, kind: n.Kind, keys: keys, args: noArgs} })
	defer r.stop()
	found := make(map[string]int)
	good, sure := 0, true
	for r.next() {
		ids, ok := r.got.value.([]any)
		switch {
		case r.got.err != nil:
			sure = sure && r.got.sure
			continue
		case !ok:
			sure = false
			continue
		}
		good++
		for _, id := range ids {
			if id, ok := id.(string); ok {
				found[id]++
			}
		}
	}
	if good < d.quorum {
		err := error(d.failure("", r.outcomes))
		if sure && good == 0 {
			return 0, driver.Unavailable(err)
		}
		return 0, errors.Join(err, ctx.Err())
	}
	ended := 0
	for _, n := range found {
		if n+len(d.nodes)-good >= d.quorum {
			ended++
		}
	}
	return ended, nil
}
