package goredis

import (
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver/internal/redislua"
)

// adapter is go-redis as a [redislua.Client].
type adapter struct {
	client  redis.UniversalClient
	cluster *redis.ClusterClient                     // nil on one server
	shards  *shards                                  // of the cluster
	process func(context.Context, redis.Cmder) error // nil for the client's
	owned   bool
}

// word is an argument that costs no allocation of its own.
type word []byte

// MarshalBinary implements encoding.BinaryMarshaler.
func (w *word) MarshalBinary() ([]byte, error) { return *w, nil }

// String is for hooks that log commands, and for finding the slot of a key.
func (w *word) String() string { return string(*w) }

// counted is a word that counts how often it was written to a connection. go-redis repeats a command by
// itself (Options.MaxRetries, redirections) and tells neither that nor whether it was sent at all, but
// asks for the bytes each time.
type counted struct {
	word
	sent int
}

// MarshalBinary implements encoding.BinaryMarshaler.
func (c *counted) MarshalBinary() ([]byte, error) {
	c.sent++
	return c.word, nil
}

// tracked is a command that is told of the outcome of each try that a ClusterClient makes.
type tracked struct {
	*redis.Cmd
	request *request
}

// SetErr implements redis.Cmder.
func (t *tracked) SetErr(err error) {
	t.request.tried(err)
	t.Cmd.SetErr(err)
}

// request is a call on its way.
type request struct {
	call *redislua.Call
	cmd  tracked
	last counted // the call's last argument

	told    int  // value of last.sent when an outcome was told
	refused int  // tries that surely did nothing
	final   bool // the latest try is one of them

	// Room for a call about one name.
	words [12]word
	args  [15]any
}

// tried notes the outcome of the latest try, which may be told more than once, and to be another one if nothing was
// sent any more.
func (r *request) tried(err error) {
	if r.last.sent == r.told {
		return
	}
	r.told = r.last.sent
	if r.final = redislua.Refused(refusal(err)); r.final {
		r.refused++
	}
}

// refusal answers what the server wrote, if the error is one that it wrote.
func refusal(err error) string {
	if err == nil {
		return ""
	}
	var answered redis.Error // not before: it costs an allocation
	if !errors.As(err, &answered) {
		return ""
	}
	return answered.Error()
}

func (r *request) prepare(ctx context.Context, c *redislua.Call) {
	args := r.args[:0]
	if c.Full {
		args = append(args, "eval", c.Script.Text, c.Keys.Len())
	} else {
		args = append(args, "evalsha", c.Script.Hash, c.Keys.Len())
	}
	words := r.words[:]
	last := c.Args.Len() - 1
	if n := c.Keys.Len() + last; n > len(words) {
		words = make([]word, n)
	}
	for i := range c.Keys.Len() {
		words[i] = c.Keys.At(i)
		args = append(args, &words[i])
	}
	words = words[c.Keys.Len():]
	for i := range last {
		words[i] = c.Args.At(i)
		args = append(args, &words[i])
	}
	r.last.word = c.Args.At(last)
	r.call, r.cmd = c, tracked{redis.NewCmd(ctx, append(args, &r.last)...), r}
}

// finish takes over the results. whole is the error of the pipeline, which older versions of go-redis do
// not set on its commands if there was no connection for them.
func (r *request) finish(whole error) {
	c := r.call
	c.Reply, c.Err = r.cmd.Val(), r.cmd.Err()
	if c.Reply == nil && c.Err == nil {
		c.Err = whole
	}
	c.Sent += r.last.sent - r.refused
	c.Refusal = refusal(c.Err)
	switch {
	case r.final && c.Refusal != "":
		c.Sent++
	case r.last.sent > 0 && redislua.Refused(c.Refusal):
		c.Refusal = "" // of another try, which did not get as far as to send it
	}
}

// Eval implements redislua.Client.
func (a *adapter) Eval(ctx context.Context, c *redislua.Call) {
	if c.Replicas > 0 {
		a.evalAndWait(ctx, c)
		return
	}
	var r request
	r.prepare(ctx, c)
	a.process1(ctx, &r)
	a.look(ctx, c)
}

// process1 sends one call.
func (a *adapter) process1(ctx context.Context, r *request) {
	if a.process == nil {
		r.finish(a.client.Process(ctx, &r.cmd))
		return
	}
	err := a.process(ctx, &r.cmd)
	if one, ok := a.client.(*redis.Client); ok && one.Options().MaxRetries <= 0 {
		r.last.sent = min(r.last.sent, 1) // it also asks for the bytes to know how many they are
	}
	r.finish(err)
}

// How often a call that asks replicas goes to the node where a ClusterClient thinks its slot is, and after which pause again.
const (
	nodeTries = 5
	nodePause = 20 * time.Millisecond
)

// evalAndWait is Eval for a call that replicas must follow. A ClusterClient would send the two commands to different nodes,
// so it is asked for the node.
func (a *adapter) evalAndWait(ctx context.Context, c *redislua.Call) {
	for try := 1; ; try++ {
		node := redis.Cmdable(a.client)
		if a.cluster != nil {
			one, err := a.cluster.MasterForKey(ctx, string(c.Keys.At(0)))
			if err != nil {
				c.Err = err
				return
			}
			node = one
		}
		var r request
		r.prepare(ctx, c)
		pipe := node.Pipeline()
		_ = pipe.Process(ctx, &r.cmd)
		acked := redis.NewIntCmd(ctx, "wait", c.Replicas, c.Patience.Milliseconds())
		_ = pipe.Process(ctx, acked)
		_, err := pipe.Exec(ctx)
		r.finish(err)
		if c.Err == nil {
			c.Acked = int(acked.Val())
		}
		a.look(ctx, c)
		if a.cluster == nil || !strings.HasPrefix(c.Refusal, "MOVED") || try == nodeTries {
			return
		}
		a.cluster.ReloadState(ctx)
		select {
		case <-ctx.Done():
			return
		case <-time.After(nodePause):
		}
		c.Err, c.Refusal = nil, ""
		c.Sent-- // it surely did nothing
	}
}

// EvalAll implements redislua.Client.
func (a *adapter) EvalAll(ctx context.Context, calls []*redislua.Call) {
	requests := make([]request, len(calls))
	pipe := a.client.Pipeline()
	for i, c := range calls {
		requests[i].prepare(ctx, c)
		_ = pipe.Process(ctx, &requests[i].cmd)
	}
	_, err := pipe.Exec(ctx)
	for i, c := range calls {
		requests[i].finish(err)
		a.look(ctx, c)
	}
}

// look makes a ClusterClient find out where the slots are, when a node is gone or the Cluster is down. By itself it does so
// every 10 s only, unless it is redirected.
func (a *adapter) look(ctx context.Context, c *redislua.Call) {
	if a.cluster != nil && c.Err != nil && (c.Refusal == "" || strings.HasPrefix(c.Refusal, "CLUSTERDOWN")) {
		a.cluster.ReloadState(ctx)
	}
}

// pulse is after how much silence a subscription is tested, and how long an answer to that may take.
const pulse = 5 * time.Second

// farewell is how long a subscription that ends waits for the server's answer.
const farewell = 300 * time.Millisecond

// Listen implements redislua.Client.
func (a *adapter) Listen(ctx context.Context, channel string, up func(), message func(string)) error {
	if a.shards != nil {
		return a.shards.listen(ctx, channel, up, message)
	}
	sub := a.client.Subscribe(ctx, channel)
	defer sub.Close()
	stop := context.AfterFunc(ctx, func() {
		// go-redis logs an error when a connection is closed that it reads, so it gets an answer to read.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), farewell)
		defer cancel()
		if sub.Unsubscribe(ctx, channel) != nil {
			sub.Close()
			return
		}
		time.AfterFunc(farewell, func() { sub.Close() })
	})
	defer stop()
	return receive(ctx, sub, true, func(reply any) bool {
		switch m := reply.(type) {
		case *redis.Subscription:
			if ctx.Err() != nil {
				return false
			}
			up()
		case *redis.Message:
			message(m.Payload)
		}
		return true
	})
}

// receive passes on what a subscription brings until ctx ends, it breaks or is silent, or pass wants no more. With again
// it may break once and be set up anew by go-redis.
func receive(ctx context.Context, sub *redis.PubSub, again bool, pass func(reply any) bool) error {
	silent, failed := false, !again
	for {
		reply, err := sub.ReceiveTimeout(ctx, pulse)
		var timeout net.Error
		switch {
		case err == nil:
			silent, failed = false, !again
			if !pass(reply) {
				return ctx.Err()
			}
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.As(err, &timeout) && timeout.Timeout() && !silent && failed == !again:
			silent = true
			if err := sub.Ping(ctx); err != nil {
				return err
			}
		case !failed && !silent:
			failed = true // go-redis has connected again already
		default:
			return err
		}
	}
}

// scanPage is how many keys a server looks at in one step of a scan.
const scanPage = 256

// Scan implements redislua.Client.
func (a *adapter) Scan(ctx context.Context, pattern, redisType string, page func([]string) error) error {
	var mu sync.Mutex // the nodes of a Cluster are scanned at the same time
	return a.each(ctx, func(ctx context.Context, c redis.Cmdable) error {
		var cursor uint64
		for {
			keys, next, err := c.ScanType(ctx, cursor, pattern, scanPage, redisType).Result()
			if err != nil {
				return err
			}
			mu.Lock()
			err = page(keys)
			mu.Unlock()
			if err != nil || next == 0 {
				return err
			}
			cursor = next
		}
	})
}

// Info implements redislua.Client.
func (a *adapter) Info(ctx context.Context, section string, each func(string)) error {
	return a.each(ctx, func(ctx context.Context, c redis.Cmdable) error {
		info, err := c.Info(ctx, section).Result()
		if err == nil {
			each(info)
		}
		return err
	})
}

// each calls f for every primary.
func (a *adapter) each(ctx context.Context, f func(context.Context, redis.Cmdable) error) error {
	if a.cluster == nil {
		return f(ctx, a.client)
	}
	return a.cluster.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error { return f(ctx, c) })
}

// SameSlot implements redislua.Client.
func (a *adapter) SameSlot() bool { return a.cluster != nil }

// Deadlines implements redislua.Client.
func (a *adapter) Deadlines() bool {
	if a.process != nil {
		return false
	}
	if a.cluster != nil {
		return a.owned // older versions do not hand the setting down to the clients of the nodes
	}
	one, ok := a.client.(*redis.Client)
	if !ok || !one.Options().ContextTimeoutEnabled || one.Options().Addr == failover {
		return false
	}
	// The dialer that go-redis has for TLS heeds no context.
	return a.owned || one.Options().TLSConfig == nil
}

// failover is the address that go-redis gives to a client of Sentinel, whose dialer asks the sentinels first and does
// not heed the context meanwhile.
const failover = "FailoverClient"

// Close implements redislua.Client. That a connection is closed already is no failure: after a failover the client library
// closes those to the old primary, and sometimes once more at the end.
func (a *adapter) Close() error {
	if !a.owned {
		return nil
	}
	if err := a.client.Close(); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}
