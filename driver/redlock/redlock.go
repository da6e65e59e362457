// Package redlock keeps locks, semaphores and fencing tokens in several independent Redis or Valkey servers: what a
// majority of them says is true, so the failure of a minority stops nothing. It needs Redis 6.2 or later, or Valkey.
//
// [New] takes nodes, which packages goredis and rueidis make of clients that you have. By URL, redlock:// opens one with
// clients of go-redis, and redlocks:// does so with TLS.
//
// # Guarantees
//
// A request goes to all nodes at the same time, and is decided as soon as a majority has answered; a node that is down
// or hangs delays nobody. A lock is held when a majority has granted it with one and the same token. It stays held while
// a majority still has it, as each extension finds out; nodes that lack it are given it again meanwhile. Each permit of a
// semaphore is such a lock on one of its slots. All times are relative, or those of the servers.
//
// Exclusion holds under these assumptions: no node that has granted a lock forgets it (by a restart without appendfsync
// always, by eviction, by FLUSHALL), or has its clock stepped forward by more than a lease's margin. One node is enough if
// others were away, for two majorities may have no more in common. A node that has
// restarted is noticed by its run id, and what it grants does not count until the longest lease that this driver has seen
// would have ended; see [Options] for leases that it has not seen. Nodes are warned about through the client's Observer, at the
// first contact and after a connection was lost, if they may evict, or may forget when they restart.
//
// There is no queue. A release wakes the client that has waited longest, which tries again; others may be faster.
//
// # Options
//
// See [Options]. The URL is
//
//	redlock://user:password@host1:port,host2:port,host3:port/database
//
// with an odd number of hosts, at least 3, which share user, password and database. The port defaults to 6379; the last
// host must have one if any has. The parameters are optional; one that is unknown is an error:
//
//	namespace     beginning of all keys, default "fencelock"
//	node_timeout  how long the answer of one node is waited for, default 2s
//	restart_wait  for how long a node that has started does not count, default 0s, see Options.RestartWait
//	dial_timeout  how long connecting may take, default 5s, and never longer than node_timeout
//	pool_size     connections at most to each node, default 10 for each CPU
//	ca, cert, key, server-name  as in package goredis, with TLS
//
// Opening asks all nodes who they are. A replica, a member of a Cluster, and one server given twice are refused;
// nodes that do not answer are not, if a majority does.
//
// Your own clients should repeat nothing by themselves (go-redis: MaxRetries -1; rueidis: DisableRetry), and give up on
// an answer after NodeTimeout or sooner (go-redis: ReadTimeout, or ContextTimeoutEnabled; rueidis: ConnWriteTimeout). A
// client that gives up later holds a connection until then, and at most 4 requests of a node.
//
// A user of the nodes needs these rights, with the namespace in place of fencelock, and may do without the last line (each
// node counts as one that forgets when it restarts, no list of all locks):
//
//	~fencelock:* +evalsha +eval +info +ping
//	+time +exists +get +set +del +pttl +pexpire +pexpireat +hgetall +hset +hdel
//	+zadd +zrem +zscore +zrange +zrangebyscore +zremrangebyscore +zpopmin
//	&fencelock:rc:* +publish +subscribe +unsubscribe
//	+config|get +scan
//
// A database other than 0 needs +select as well.
//
// # Errors
//
// An error tells what became of the request on each node, see [QuorumError]. It matches [driver.ErrUnavailable] if the
// request surely did nothing, and will do nothing, on any node; a lock that only a minority has granted has then been
// given back. Otherwise the outcome is unknown. A failed attempt, and every release, goes to all nodes that were asked,
// and again to those that do not answer, in the background, until the lease would have ended.
//
// # Fencing
//
// A token is the client's clock in microseconds, or one more than the greatest that is known of the name or the floor if
// that is greater. A node accepts only a token above all that it has accepted, and a lease has one that a majority has
// accepted; so tokens are unique and rise, whatever clocks and pauses do, as long as no node forgets. A
// client whose clock is more than a minute ahead of a node's gets a token by that node's. The greatest token of a name is kept
// on each node for 48 hours after its last use.
//
// # What it does not do
//
// It has no queue, so waiters are not served in order and [fencelock.Fair] is refused. It does not make up for nodes
// that forget unnoticed: with others that are free they give away locks that are held, and may repeat tokens that lie ahead
// of their clocks.
//
// [fencelock.Fair]: https://pkg.go.dev/github.com/fencelock/fencelock#Fair
package redlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/redislua"
	"github.com/fencelock/fencelock/internal/leaseclock"
)

// Node is one of the masters: what goredis.NewNode and rueidis.NewNode make of a client.
type Node interface {
	// Name stands for the node in errors and warnings, usually by its address.
	Name() string
	// Client is for this package.
	Client() redislua.Client
}

// Options of [New].
type Options struct {
	// Namespace is the beginning of all keys: 1 to 64 of a-z A-Z 0-9 . - _, not beginning with a dot.
	// Default "fencelock". Clients exclude each other only within one namespace and with the same nodes.
	Namespace string

	// NodeTimeout is how long the answer of one node is waited for, 10 ms to 1 min; a request returns earlier when a
	// majority has decided it or its context ends. Default 2 s.
	NodeTimeout time.Duration

	// RestartWait is for how long after its start a node's grants do not count, unless it runs with appendfsync always.
	// It should be the longest TTL that any client of these nodes uses: then a node that has forgotten a lock by a
	// restart cannot help to give it away. The driver notices a restart that happens while it runs without this, and
	// then waits for the longest TTL that it has seen itself. Default 0, at most 24 h.
	RestartWait time.Duration
}

// Bounds of Options.
const (
	defaultTimeout = 2 * time.Second
	minTimeout     = 10 * time.Millisecond
	maxTimeout     = time.Minute
	maxWait        = 24 * time.Hour
)

// Driver implements [driver.Driver], [driver.Semaphore], [driver.FencingSource], [driver.Notifier],
// [driver.Lister] and [driver.ForceUnlocker].
type Driver struct {
	nodes   []*node
	quorum  int
	space   string // the namespace and a colon
	timeout time.Duration
	safety  time.Duration // RestartWait
	clock   *leaseclock.Clock
	sink    func(driver.Event)
	channel string // of this client

	// The goroutines that work in the background end with ctx.
	ctx    context.Context
	cancel context.CancelFunc
	closed atomic.Bool
	finish func() // closes what the driver opened
	begun  sync.Mutex
	tasks  sync.WaitGroup

	order sync.Mutex // held while a request is given to all nodes, so that all get the requests in one order

	mu      sync.Mutex
	runs    map[string]*node // by run id
	owners  map[string]*owner
	seen    map[driver.Name]driver.Token // the greatest tokens told of, of some names
	longest time.Duration                // TTL
	owed    int                          // releases that are tried again
	hints   map[driver.Name]*hint
	sub     *subscription // nil if nobody waits
}

// New makes a driver that uses the nodes, an odd number and at least 3 of them, which must be independent masters; nil
// options are the defaults. It sends nothing; see [Driver.Verify]. Close leaves the clients open. Nodes and options that cannot
// be are an error matching [driver.ErrInvalid].
func New(nodes []Node, opts *Options) (*Driver, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.Namespace == "" {
		o.Namespace = driver.DefaultNamespace
	}
	if o.NodeTimeout == 0 {
		o.NodeTimeout = defaultTimeout
	}
	switch {
	case len(nodes) < 3 || len(nodes)%2 == 0:
		return nil, driver.Invalid("nodes", len(nodes), "must be an odd number of at least 3")
	case o.NodeTimeout < minTimeout || o.NodeTimeout > maxTimeout:
		return nil, driver.Invalid("NodeTimeout", o.NodeTimeout, "must be 10ms to 1m")
	case o.RestartWait < 0 || o.RestartWait > maxWait:
		return nil, driver.Invalid("RestartWait", o.RestartWait, "must be 0 to 24h")
	}
	if err := driver.CheckNamespace(o.Namespace); err != nil {
		return nil, err
	}
	d := &Driver{quorum: len(nodes)/2 + 1, space: o.Namespace + ":", timeout: o.NodeTimeout, safety: o.RestartWait,
		clock: leaseclock.New(), finish: func() {},
		runs: make(map[string]*node), owners: make(map[string]*owner), seen: make(map[driver.Name]driver.Token),
		hints: make(map[driver.Name]*hint)}
	for i, n := range nodes {
		if n == nil {
			return nil, driver.Invalid("node", i, "must not be nil")
		}
		d.nodes = append(d.nodes, &node{d: d, index: i, name: n.Name(), client: n.Client()})
	}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d, nil
}

// Info implements driver.Driver.
func (d *Driver) Info() driver.Info {
	return driver.Info{Backend: "redlock", Deadlines: true, Replicated: true}
}

func (d *Driver) warn(n *node, text string) {
	if d.sink != nil {
		d.sink(driver.Event{Kind: driver.EventWarning, Err: fmt.Errorf("redlock: node %s: %s", n.name, text)})
	}
}

// closePatience bounds how long Close waits for releases, and for goroutines that a connection may hold up.
const closePatience = time.Second

// Close implements driver.Driver.
func (d *Driver) Close() error {
	if d.closed.Swap(true) {
		return nil
	}
	d.mu.Lock()
	if d.sub != nil {
		d.sub.end() // it would be waited for with what goes out
	}
	d.mu.Unlock()
	ended := make(chan struct{})
	go func() {
		d.begun.Lock() // whoever saw the driver open has begun
		tasks := &d.tasks
		d.begun.Unlock()
		tasks.Wait()
		close(ended)
	}()
	// What was given to the nodes, releases above all, may go out.
	patience := time.NewTimer(min(d.timeout, closePatience))
	defer patience.Stop()
	select {
	case <-ended:
	case <-patience.C:
	}
	d.cancel()
	d.finish()
	select {
	case <-ended:
	case <-time.After(closePatience):
	}
	return nil
}

// background runs a task until Close, or otherwise if the driver is closed.
func (d *Driver) background(task, otherwise func()) {
	d.begun.Lock()
	closed := d.closed.Load()
	if !closed {
		d.tasks.Go(task)
	}
	d.begun.Unlock()
	if closed {
		otherwise()
	}
}

// begin refuses requests that need not be sent.
func (d *Driver) begin(ctx context.Context) error {
	if d.closed.Load() {
		return driver.Unavailable(errClosed)
	}
	if err := ctx.Err(); err != nil {
		return driver.Unavailable(err)
	}
	return nil
}

// Verify asks all nodes who they are. It fails with an error matching [driver.ErrInvalid] if one of them is a replica, a
// member of a Cluster, or the same server as another one, and with one matching [driver.ErrUnavailable] if no majority
// answers. Nodes that cannot be used do not count either way, without it as well.
func (d *Driver) Verify(ctx context.Context) error {
	if err := d.begin(ctx); err != nil {
		return err
	}
	r := d.broadcast(ctx, func(n *node) *ask { return &ask{step: hello} })
	defer r.stop()
	good := 0
	var wrong []string
	for r.next() {
		var bad *refused
		switch {
		case r.got.err == nil:
			good++
		case errors.As(r.got.err, &bad):
			wrong = append(wrong, r.got.node.name+": "+bad.why)
		}
	}
	switch {
	case len(wrong) > 0:
		return driver.Invalid("nodes", strings.Join(wrong, "; "), "must be independent masters")
	case good < d.quorum:
		return driver.Unavailable(d.failure("", r.outcomes))
	}
	return nil
}

// QuorumError says that too few nodes have done what was asked. It matches what their errors match, but for
// [driver.ErrUnavailable], which concerns the request as a whole.
type QuorumError struct {
	Why   string // empty if nodes failed
	Nodes []NodeError
	Need  int // how many nodes are needed
}

// NodeError is what became of a request on one node.
type NodeError struct {
	Node string // its name
	Text string // what it answered, if it did
	Err  error  // why it did not
}

// Error lists the nodes.
func (e *QuorumError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "redlock: %d of %d nodes are needed", e.Need, len(e.Nodes))
	if e.Why != "" {
		b.WriteString(", and " + e.Why)
	}
	for i, n := range e.Nodes {
		b.WriteString(map[bool]string{true: ": ", false: "; "}[i == 0])
		b.WriteString(n.Node + ": ")
		switch {
		case n.Err != nil:
			b.WriteString(n.Err.Error())
		case n.Text != "":
			b.WriteString(n.Text)
		default:
			b.WriteString("done")
		}
	}
	return b.String()
}

// Unwrap answers the nodes' errors.
func (e *QuorumError) Unwrap() (errs []error) {
	for _, n := range e.Nodes {
		if n.Err != nil {
			errs = append(errs, n.Err)
		}
	}
	return errs
}

// failure makes the error of a request from what became of it on each node.
func (d *Driver) failure(why string, outcomes []outcome) *QuorumError {
	e := &QuorumError{Why: why, Need: d.quorum}
	for i, o := range outcomes {
		e.Nodes = append(e.Nodes, NodeError{Node: d.nodes[i].name, Text: o.text, Err: o.err})
	}
	return e
}
