package rueidis

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/fencelock/fencelock/driver/internal/redislua"
)

// adapter is rueidis as a [redislua.Client].
type adapter struct {
	client rueidis.Client
	shards *shards // of a Cluster
	owned  bool

	mu     sync.Mutex
	latest *bound
}

// command makes the command of a call. It does not say that it only reads, not even where that is so: those that do
// rueidis repeats by itself, for as long as their context lives. Of what else it repeats, redirections of a Cluster,
// nothing was executed.
func command(c rueidis.Client, words ...string) rueidis.Completed {
	return c.B().Arbitrary(words[0]).Args(words[1:]...).Build()
}

func (a *adapter) script(c *redislua.Call) rueidis.Completed {
	name, script := "EVALSHA", c.Script.SHA
	if c.Full {
		name, script = "EVAL", c.Script.Text
	}
	command := a.client.B().Arbitrary(name).Args(script, strconv.Itoa(c.Keys.Len()))
	for key := range c.Keys.All {
		command = command.Keys(key)
	}
	for arg := range c.Args.All {
		command = command.Args(arg)
	}
	return command.Build()
}

// tries bounds how often a request is sent whose connection was given up because somebody else's context had ended.
const tries = 3

// foreign says that a request failed with the end of a context that is not its own. rueidis makes a connection with the
// context of the request that needs it first, has all others wait for that, and tells them of its end.
func foreign(ctx context.Context, err error) bool {
	if err == nil || !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	if deadline, ok := ctx.Deadline(); ok && !time.Now().Before(deadline) {
		return false // a connection's timer was faster than the context's
	}
	return ctx.Err() == nil
}

// do sends one command that is not a script.
func do(ctx context.Context, c rueidis.Client, words ...string) (r rueidis.RedisResult) {
	for range tries {
		if r = c.Do(ctx, command(c, words...)); !foreign(ctx, r.Error()) {
			break
		}
	}
	return r
}

// untilDeadline is a context that heeds the deadline of ctx only. rueidis returns at once when a context is
// cancelled, and what undoes the request, over another connection, could arrive before it. The engine looks after
// cancellations itself, and undoes a request when it has been answered. It is to be given to answered in the end.
func (a *adapter) untilDeadline(ctx context.Context) context.Context {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithoutCancel(ctx)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	b := a.latest
	if b == nil || b.deadline.After(deadline) || deadline.Sub(b.deadline) > time.Until(deadline)/64 {
		fresh, cancel := context.WithDeadline(context.Background(), deadline)
		a.latest = &bound{fresh, deadline, cancel, 0}
		b.endUnused()
		b = a.latest
	}
	b.users++
	return &valued{b, ctx}
}

// answered says that a request that was given the context is over.
func (a *adapter) answered(ctx context.Context) {
	if v, ok := ctx.(*valued); ok {
		a.mu.Lock()
		defer a.mu.Unlock()
		if v.users--; v.bound != a.latest {
			v.endUnused()
		}
	}
}

// bound is a context that ends by time only. Requests share it whose own deadlines are up to 1/64 of their time later: to
// set a timer and to stop it is felt in the time of a request.
type bound struct {
	context.Context
	deadline time.Time
	cancel   context.CancelFunc
	users    int // requests that are not over; guarded by adapter.mu
}

// endUnused stops the timer of one that is not shared any more, when the last request with it is over.
func (b *bound) endUnused() {
	if b != nil && b.users == 0 {
		b.cancel()
	}
}

// valued is a context with the values of another one.
type valued struct {
	*bound
	values context.Context
}

// Value implements context.Context.
func (v *valued) Value(key any) any { return v.values.Value(key) }

// Eval implements redislua.Client.
func (a *adapter) Eval(ctx context.Context, c *redislua.Call) {
	ctx = a.untilDeadline(ctx)
	defer a.answered(ctx)
	for range tries {
		if c.Replicas > 0 {
			a.evalAndWait(ctx, c)
		} else {
			finish(c, a.client.Do(ctx, a.script(c)))
		}
		if !foreign(ctx, c.Err) {
			break
		}
	}
}

// evalAndWait sends a call that replicas must follow. It has a connection to itself meanwhile: WAIT would hold up
// what others send after it.
func (a *adapter) evalAndWait(ctx context.Context, c *redislua.Call) {
	_ = a.client.Dedicated(func(one rueidis.DedicatedClient) error {
		r := one.DoMulti(ctx, a.script(c), one.B().Arbitrary("WAIT").
			Args(strconv.Itoa(c.Replicas), strconv.FormatInt(c.Patience.Milliseconds(), 10)).Build())
		finish(c, r[0])
		if n, err := r[1].AsInt64(); err == nil && c.Err == nil {
			c.Acked = int(n)
		}
		return nil
	})
}

// EvalAll implements redislua.Client.
func (a *adapter) EvalAll(ctx context.Context, calls []*redislua.Call) {
	ctx = a.untilDeadline(ctx)
	defer a.answered(ctx)
	for range tries {
		scripts := make([]rueidis.Completed, len(calls))
		for i, c := range calls {
			scripts[i] = a.script(c)
		}
		var again []*redislua.Call
		for i, r := range a.client.DoMulti(ctx, scripts...) {
			if finish(calls[i], r); foreign(ctx, calls[i].Err) {
				again = append(again, calls[i])
			}
		}
		if calls = again; len(calls) == 0 {
			break
		}
	}
}

// finish takes over a result.
func finish(c *redislua.Call, r rueidis.RedisResult) {
	c.Reply, c.Err = r.ToAny()
	if c.Err == nil {
		c.Sent++
		return
	}
	var refusal *rueidis.RedisError
	if errors.As(c.Err, &refusal) {
		c.Refusal = refusal.Error()
	}
	if !neverSent(c.Err) {
		c.Sent++
	}
}

// neverSent says that there was no connection to send anything on.
func neverSent(err error) bool {
	var network *net.OpError
	var certificate *tls.CertificateVerificationError
	var header tls.RecordHeaderError // what answers does not speak TLS
	return errors.As(err, &network) && network.Op == "dial" || errors.As(err, &certificate) || errors.As(err, &header) ||
		errors.Is(err, rueidis.ErrNoSlot) || errors.Is(err, rueidis.ErrNoAddr)
}

// pulse is how often a subscription is tested, and how long an answer to that may take.
const pulse = 5 * time.Second

// subscriber is a connection that takes messages, and the end of them.
type subscriber struct {
	rueidis.DedicatedClient
	broken <-chan error
}

// Listen implements redislua.Client. It subscribes on a connection of its own: of the one that commands share rueidis
// does not tell when a subscription stands.
func (a *adapter) Listen(ctx context.Context, channel string, up func(), message func(string)) error {
	if a.shards != nil {
		return a.shards.listen(ctx, channel, up, message)
	}
	connected := make(chan subscriber, 1)
	go func() { // it takes no context
		c, _ := a.client.Dedicate()
		connected <- subscriber{c, c.SetPubSubHooks(rueidis.PubSubHooks{OnMessage: func(m rueidis.PubSubMessage) { message(m.Message) }})}
	}()
	var s subscriber
	select {
	case s = <-connected:
	case <-ctx.Done():
		go func() { (<-connected).Close() }()
		return ctx.Err()
	}
	defer s.Close()
	if err := s.Do(ctx, s.B().Subscribe().Channel(channel).Build()).Error(); err != nil {
		return err
	}
	up()
	beat := time.NewTicker(pulse)
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-s.broken:
			return err
		case <-beat.C:
			soon, cancel := context.WithTimeout(ctx, pulse)
			err := s.Do(soon, s.B().Arbitrary("PING").Build()).Error()
			cancel()
			if err != nil {
				return err
			}
		}
	}
}

// scanPage is how many keys a server looks at in one step of a scan.
const scanPage = "256"

// Scan implements redislua.Client.
func (a *adapter) Scan(ctx context.Context, pattern, redisType string, page func([]string) error) error {
	var mu sync.Mutex // the nodes of a Cluster are scanned at the same time
	return a.each(ctx, func(c rueidis.Client) error {
		var cursor uint64
		for {
			found, err := do(ctx, c, "SCAN", strconv.FormatUint(cursor, 10), "MATCH", pattern, "COUNT", scanPage, "TYPE", redisType).AsScanEntry()
			if err != nil {
				return err
			}
			mu.Lock()
			err = page(found.Elements)
			mu.Unlock()
			if cursor = found.Cursor; err != nil || cursor == 0 {
				return err
			}
		}
	})
}

// Info implements redislua.Client.
func (a *adapter) Info(ctx context.Context, section string, each func(string)) error {
	return a.each(ctx, func(c rueidis.Client) error {
		info, err := do(ctx, c, "INFO", section).ToString()
		if err == nil {
			each(info)
		}
		return err
	})
}

// each calls f for every primary, at the same time, and answers one of the errors.
func (a *adapter) each(ctx context.Context, f func(rueidis.Client) error) error {
	if !a.SameSlot() {
		return f(a.client)
	}
	nodes := a.client.Nodes()
	errs := make(chan error, len(nodes))
	for _, node := range nodes {
		go func() {
			role, err := do(ctx, node, "ROLE").ToArray()
			if err == nil && len(role) > 0 {
				if name, _ := role[0].ToString(); name == "master" {
					err = f(node)
				}
			}
			errs <- err
		}()
	}
	var failed error
	for range nodes {
		if err := <-errs; err != nil {
			failed = err
		}
	}
	return failed
}

// SameSlot implements redislua.Client.
func (a *adapter) SameSlot() bool { return a.client.Mode() == rueidis.ClientModeCluster }

// Deadlines implements redislua.Client. Who waits for a connection that another request makes does not heed a context.
func (a *adapter) Deadlines() bool { return false }

// Close implements redislua.Client.
func (a *adapter) Close() error {
	if a.owned {
		a.client.Close()
	}
	return nil
}
