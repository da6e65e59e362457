// Package redislua is the part of the Redis drivers that does not depend on a client library: the Lua
// scripts, the keys, the reading of replies and errors, batches, and the subscription. A driver brings
// a [Client] and embeds a [Driver].
package redislua

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// Driver implements driver.Driver and its optional interfaces on one Redis server or Cluster.
type Driver struct {
	client   Client
	backend  string
	space    keyspace
	replicas int // that must confirm a lease

	closed  atomic.Bool
	checked atomic.Bool // the servers' policy, since the last failure

	// The goroutines that work in the background end with ctx.
	ctx    context.Context
	cancel context.CancelFunc
	mu     sync.Mutex // before background.Go, and Wait
	tasks  sync.WaitGroup

	sink          func(driver.Event)
	channel       string // empty until somebody listens to events
	subscriptions map[string]*subscription
}

// New makes a driver of the name that driver.Info tells. The namespace may be empty for the default. Unless waitReplicas is 0,
// a lease counts only when so many replicas have it. It sends nothing.
func New(c Client, backend, namespace string, waitReplicas int) (*Driver, error) {
	if namespace == "" {
		namespace = driver.DefaultNamespace
	}
	if err := driver.CheckNamespace(namespace); err != nil {
		return nil, err
	}
	if waitReplicas < 0 {
		return nil, driver.Invalid("WaitReplicas", waitReplicas, "must be at least 0")
	}
	d := &Driver{client: c, backend: backend, replicas: waitReplicas, space: keyspace(namespace + ":"), subscriptions: make(map[string]*subscription)}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d, nil
}

// maxPatience is how long replicas may take to follow, at most.
const maxPatience = time.Second

// confirm lets the call, about a lease of the TTL, wait for replicas.
func (d *Driver) confirm(c *Call, ttl time.Duration) {
	if d.replicas == 0 {
		return
	}
	patience := max(time.Millisecond, min(ttl/4, maxPatience))
	if c.Replicas == 0 || patience < c.Patience {
		c.Replicas, c.Patience = d.replicas, patience
	}
}

// unconfirmed is the error of a call that too few replicas have followed, nil if enough have.
func (c *Call) unconfirmed() error {
	if c.Acked >= c.Replicas {
		return nil
	}
	return fmt.Errorf("redis: %d of the %d replicas asked for have confirmed the lease within %v", c.Acked, c.Replicas, c.Patience)
}

// Info implements driver.Driver.
func (d *Driver) Info() driver.Info {
	return driver.Info{Backend: d.backend, Deadlines: d.client.Deadlines()}
}

// closePatience bounds how long Close waits for goroutines that a connection may hold up.
const closePatience = time.Second

// Close implements driver.Driver.
func (d *Driver) Close() error {
	if d.closed.Swap(true) {
		return nil
	}
	d.cancel()
	err := d.client.Close()
	ended := make(chan struct{})
	go func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.tasks.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(closePatience):
	}
	return err
}

// background runs a task until Close.
func (d *Driver) background(task func(ctx context.Context)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed.Load() {
		d.tasks.Go(func() { task(d.ctx) })
	}
}

var errClosed = errors.New("redis: the driver is closed")

// begin refuses requests that need not be sent.
func (d *Driver) begin(ctx context.Context) error {
	if d.closed.Load() {
		return errClosed
	}
	return ctx.Err()
}

// eval runs a call, with the script's text if the server does not know its hash.
func (d *Driver) eval(ctx context.Context, c *Call) {
	if c.Err = d.begin(ctx); c.Err != nil {
		return
	}
	d.client.Eval(ctx, c)
	if c.forgotten() {
		d.client.Eval(ctx, c)
	}
	d.contact(c)
}

// evalAll is eval for many calls.
func (d *Driver) evalAll(ctx context.Context, calls []*Call) {
	if err := d.begin(ctx); err != nil {
		for _, c := range calls {
			c.Err = err
		}
		return
	}
	d.send(ctx, calls)
	var again []*Call
	for _, c := range calls {
		if c.forgotten() {
			again = append(again, c)
		}
	}
	if again != nil {
		d.send(ctx, again)
	}
	for _, c := range calls {
		d.contact(c)
	}
}

// send sends calls together, or at the same time if each must wait for replicas on a connection of its own.
func (d *Driver) send(ctx context.Context, calls []*Call) {
	if len(calls) == 0 || calls[0].Replicas == 0 {
		d.client.EvalAll(ctx, calls)
		return
	}
	var all sync.WaitGroup
	for _, c := range calls {
		all.Go(func() { d.client.Eval(ctx, c) })
	}
	all.Wait()
}

// contact notes that a server answered, or that a connection broke. It sees to it that at the first
// answer after that the servers' policy is looked at.
func (d *Driver) contact(c *Call) {
	switch {
	case d.sink == nil:
	case c.Err != nil && c.Refusal == "":
		d.checked.Store(false)
	case !d.checked.Load() && !d.checked.Swap(true):
		d.background(d.checkPolicies)
	}
}

// checkPolicies asks by INFO, which more servers allow than CONFIG.
func (d *Driver) checkPolicies(ctx context.Context) {
	var mu sync.Mutex
	var policies []string
	err := d.client.Info(ctx, "memory", func(info string) {
		for line := range strings.Lines(info) {
			if policy, ok := strings.CutPrefix(line, "maxmemory_policy:"); ok {
				mu.Lock()
				policies = append(policies, strings.TrimSpace(policy))
				mu.Unlock()
			}
		}
	})
	if err != nil {
		return // it may be forbidden to ask
	}
	for _, p := range policies {
		if p != "noeviction" {
			d.sink(driver.Event{Kind: driver.EventWarning, Err: fmt.Errorf(
				"redis: maxmemory-policy is %s: under memory pressure locks and tokens may be evicted; set noeviction", p)})
			return
		}
	}
}

// newCall makes a call about all keys of a name.
func (d *Driver) newCall(s *Script, n driver.Name) *Call {
	c := newCall(s)
	d.space.keys(&c.Keys, n)
	return c
}

// Lock implements driver.Locker.
func (d *Driver) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	c := d.newCall(scripts[r.Name.Kind].acquire, r.Name)
	c.Args.add(r.ID, " ", r.Holder)
	c.Args.duration(r.TTL)
	if r.Wait || r.Floor != 0 || r.Limit != 1 {
		d.manner(&c.Args, r)
	}
	if r.Floor != 0 {
		c.Args.number(uint64(r.Floor))
	}
	d.confirm(c, r.TTL)
	d.eval(ctx, c)
	if c.Err != nil {
		return driver.Answer{}, c.result()
	}
	a, err := answer(c.Reply, r.TTL)
	switch {
	case a.State == driver.Waiting:
		d.listen(r.Name, r.Claim)
	case a.State == driver.Granted && c.unconfirmed() != nil:
		return driver.Answer{}, d.undo(ctx, r.Owner, c.unconfirmed())
	}
	return a, err
}

// manner adds how the request is to be granted: claim, limit and channel, in one word.
func (d *Driver) manner(w *Words, r driver.Request) {
	claim, channel := time.Duration(0), ""
	if r.Wait {
		claim, channel = r.Claim, d.channel
	}
	w.add(strconv.FormatUint(milliseconds(claim), 10), " ", strconv.Itoa(r.Limit), " ", channel)
}

// undo gives back a lease that was not confirmed. If that works it surely was not taken.
func (d *Driver) undo(ctx context.Context, o driver.Owner, why error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), maxPatience)
	defer cancel()
	if _, err := d.Release(ctx, o); err != nil {
		return errors.Join(why, err)
	}
	return driver.Unavailable(why)
}

// Acquire implements driver.Semaphore.
func (d *Driver) Acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return d.Lock(ctx, r)
}

// Release implements driver.Locker.
func (d *Driver) Release(ctx context.Context, o driver.Owner) (bool, error) {
	c := d.newCall(scripts[o.Name.Kind].release, o.Name)
	c.Args.add(o.ID)
	n, err := d.number(ctx, c)
	return n != 0, err
}

// ForceUnlock implements driver.ForceUnlocker.
func (d *Driver) ForceUnlock(ctx context.Context, n driver.Name) (int, error) {
	c := d.newCall(scripts[n.Kind].force, n)
	c.Args.add()
	ended, err := d.number(ctx, c)
	return int(ended), err
}

// number runs a call that answers how much it ended. Zero says nothing if the client library repeated
// the call by itself: then the first try may have ended it all.
func (d *Driver) number(ctx context.Context, c *Call) (int64, error) {
	d.eval(ctx, c)
	if c.Err != nil {
		return 0, c.result()
	}
	n, ok := c.Reply.(int64)
	if !ok {
		return 0, unexpected(c.Reply)
	}
	if n == 0 && c.Sent > 1 {
		return 0, errors.New("redis: the client library lost the first reply and sent the request again")
	}
	return n, nil
}

// NextToken implements driver.FencingSource.
func (d *Driver) NextToken(ctx context.Context, n driver.Name, floor driver.Token) (driver.Token, error) {
	c := d.fenceCall(n, floor, "next")
	d.eval(ctx, c)
	if c.Err != nil {
		return 0, c.result()
	}
	a, err := answer(c.Reply, 0)
	if err == nil && a.State != driver.Granted {
		err = unexpected(c.Reply)
	}
	return a.Token, err
}

// Advance implements driver.FencingSource.
func (d *Driver) Advance(ctx context.Context, n driver.Name, floor driver.Token) error {
	c := d.fenceCall(n, floor, "raise")
	d.eval(ctx, c)
	return c.result()
}

func (d *Driver) fenceCall(n driver.Name, floor driver.Token, do string) *Call {
	c := newCall(fence)
	d.space.some(&c.Keys, n, []string{"f"})
	c.Args.number(uint64(floor))
	c.Args.add(do)
	return c
}
