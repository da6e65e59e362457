// Package etcd keeps locks in an etcd cluster, version 3.5 or later.
//
// # Guarantees
//
// Exclusion, tokens, queue and semaphores are as exact as etcd's consensus, as long as a majority of the
// members lives: no crash, pause or partition of members or clients breaks them, and every step reads and
// writes linearizably. Expiry is judged by the leader's clock alone, in relative time; after a change of
// leader every lease begins anew, so a lock may live longer than its TTL then, never shorter.
//
// Every Lock queues, and a key's create revision is its place: who holds is not stored but follows from the
// order of the keys. Locks and waiters of one TTL share an etcd lease, so that TryLock and Release are one
// raft proposal each, and one keepalive a period serves any number of locks. A client that dies is gone with its
// leases, at most one TTL later. While it lives, it deletes by itself the key of a lock that nobody
// extends.
//
// A member that is restored from a snapshot or from an old disk under the running clients can bring back
// locks and tokens of the past. A driver that sees the store's revision go back, or another cluster id, gives
// up all its locks, raises the tokens again and reports it by an event of kind driver.EventWarning. Restore with
// etcdutl's --bump-revision and --mark-compacted, which keeps revisions, and so tokens, from going back at all.
//
// Use 3.5.13 or later if you can: in earlier ones a leader that was stuck while another member took its place may end
// leases that are kept alive, or answer for ones that it does not lead any more. In later ones one that was stopped may still, in the moment
// between going on and hearing of its successor (etcd issue 15247; leases were ended so by 3.5.16). Such an answer counts for nothing
// here. That a lease is ended so nobody can prevent: the holder is told, but the next one may have the lock before.
//
// # Options
//
// See [Options]. By URL:
//
//	etcd://user:password@host1:2379,host2:2379,host3:2379?namespace=x
//	etcds://host1,host2,host3?ca=/path/ca.pem&cert=/path/client.pem&key=/path/client.key&server-name=etcd
//
// where everything but one host is optional. The port is 2379 if absent. etcds speaks TLS; ca is a file with
// the authorities to trust (default those of the system), cert and key are the client's own, and
// server-name is the name to expect in the server's certificate. In a list only IPv4 addresses and names can stand.
// A driver opened by URL makes one request at once, and fails if that does. Its client tries every second to reach
// a member that is gone; one of your own should not wait much longer either (grpc.WithConnectParams), or
// leases end before it is back. A keepalive, or a read, that a member does not answer within 300 ms is asked of the next one: give
// the client all members.
//
// With authentication switched on, the user needs a role that may read and write the prefix of the namespace,
// for example "fencelock/".
//
// TTLs are whole seconds, rounded up, and at least 2 s. A server whose election timeout is more than about a
// second grants longer ones; then locks of a dead client live that long.
//
// # Errors
//
// What a server answered with a refusal (no permission, no space, no leader), and what could not be sent
// because no member was reachable, matches [driver.ErrUnavailable]. Time-outs, broken connections and
// "request timed out, possibly due to previous leader failure" are unknown outcomes. When the database is full
// etcd may say so for a write that it has carried out; the driver then removes it before it says
// ErrUnavailable. Extension and release go on working in a full database.
//
// A user's password that has changed, or an expired authentication token, is dealt with by the client
// library, which authenticates again.
//
// # Fencing
//
// A token is the key's create revision plus a base, one key per namespace, that is only ever raised: at the
// first step of a driver so that tokens are not below the clock in microseconds, when they have fallen an
// hour behind it, and when a floor demands it. It is fixed when the lock is asked for, in the order of the
// queue. Only a name that was given a floor ahead of the clock has a key of its own, until 48 h after the
// clock has passed it. The clock that is read is the client's, and only to raise: a client whose
// clock is far ahead takes the tokens of the whole namespace with it.
//
// # What it does not do
//
// Undo a restore that no client noticed: one that happened while no driver was connected, or by which
// the revision had already grown past the one seen. Tokens may then repeat unless a driver was opened since.
// Work through a client whose KV, Watcher or Lease were replaced, for example by the
// namespace package: it uses the client's connection and credentials only. Serve through etcd's grpc-proxy.
package etcd

import (
	"context"
	"crypto/rand"
	"errors"
	"net/url"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/dialurl"
	"github.com/fencelock/fencelock/internal/leaseclock"
)

func init() {
	driver.Register("etcd", open)
	driver.Register("etcds", open)
}

// MinTTL is the shortest TTL.
const MinTTL = 2 * time.Second

// Options are the settings of [New]. The zero value, and nil, are the defaults.
type Options struct {
	// Namespace keeps the locks of several applications in one cluster apart; all keys begin with it and a
	// slash. The default is [driver.DefaultNamespace]; for the bounds see [driver.CheckNamespace].
	Namespace string
}

// Driver is one client's connection to a cluster. It implements every optional interface of package driver.
type Driver struct {
	client     *clientv3.Client
	ownsClient bool
	prefix     string // of all keys
	instance   string // of the entries' keys: random
	kv         clientv3.KV
	leasing    pb.LeaseClient
	keeper     keeper
	watcher    clientv3.Watcher
	clock      *leaseclock.Clock
	replicated bool
	raising    chan struct{} // of capacity 1: who reads and raises the base

	open    context.Context // ends with Close
	end     context.CancelFunc
	closing sync.Once
	running sync.WaitGroup // the janitor and the watch

	mu       sync.Mutex
	closed   bool
	sink     func(driver.Event)
	store    store
	base     base // of the namespace
	floors   map[driver.Name]base
	based    bool // the base was raised as a new driver does
	leases   leases
	entries  map[driver.Owner]*entry
	slots    map[driver.Name]*slots
	cleaning bool // the janitor runs

	listening listening
}

// New makes a driver on the user's client, which it never closes. It sends nothing. It fails with an error
// matching [driver.ErrInvalid].
//
// The driver counts the client's endpoints: with three or more of them it claims that it is replicated. See
// [driver.Info].
func New(client *clientv3.Client, o *Options) (*Driver, error) {
	if client == nil {
		return nil, driver.Invalid("client", nil, "must not be nil")
	}
	if o == nil {
		o = &Options{}
	}
	namespace := o.Namespace
	if namespace == "" {
		namespace = driver.DefaultNamespace
	}
	if err := driver.CheckNamespace(namespace); err != nil {
		return nil, err
	}
	conn := client.ActiveConnection()
	d := &Driver{
		client:     client,
		prefix:     namespace + "/",
		instance:   rand.Text()[:12],
		kv:         clientv3.NewKVFromKVClient(kvClient{pb.NewKVClient(conn)}, client),
		leasing:    leaseClient{pb.NewLeaseClient(conn)},
		watcher:    clientv3.NewWatcher(client),
		clock:      leaseclock.New(),
		replicated: len(client.Endpoints()) >= 3,
		entries:    make(map[driver.Owner]*entry),
		slots:      make(map[driver.Name]*slots),
		floors:     make(map[driver.Name]base),
		raising:    make(chan struct{}, 1),
	}
	d.open, d.end = context.WithCancel(context.Background())
	d.keeper.d = d
	d.leases.init()
	d.listening.waiters = make(map[string]map[*entry]bool)
	return d, nil
}

const (
	dialTimeout = 5 * time.Second
	defaultPort = "2379"
)

// clientConfig is how a client is set up that a driver opens itself.
func clientConfig() clientv3.Config {
	return clientv3.Config{
		DialTimeout: dialTimeout,
		// A member that answers nothing, not even pings, is given up, and its requests go to others.
		DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 3 * time.Second,
		// One that is back is found before leases end: by itself gRPC tries again after up to two minutes.
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		})},
		Logger: zap.NewNop(),
	}
}

func open(ctx context.Context, u *url.URL) (driver.Driver, error) {
	params := driver.NewParams(u)
	o := &Options{Namespace: params.String("namespace", driver.DefaultNamespace)}
	cfg := clientConfig()
	if u.Scheme == "etcds" {
		t := dialurl.ReadTLS(params)
		if err := params.Err(); err != nil {
			return nil, err
		}
		var err error
		if cfg.TLS, err = t.Config(); err != nil {
			return nil, err
		}
		if t.ServerName != "" {
			cfg.DialOptions = append(cfg.DialOptions, grpc.WithAuthority(t.ServerName))
		}
	}
	if err := params.Err(); err != nil {
		return nil, err
	}
	if err := driver.CheckNamespace(o.Namespace); err != nil {
		return nil, err
	}
	if u.Host == "" || u.Path != "" && u.Path != "/" || u.Opaque != "" || u.Fragment != "" {
		return nil, driver.Invalid("url", u.Redacted(), "must be etcd://host1:2379,host2:2379 without a path")
	}
	var err error
	if cfg.Endpoints, err = dialurl.Hosts(u, defaultPort); err != nil {
		return nil, err
	}
	if u.User != nil {
		password, _ := u.User.Password()
		if u.User.Username() == "" || password == "" {
			return nil, driver.Invalid("url user", u.User.Username(), "must have a name and a password")
		}
		cfg.Username, cfg.Password = u.User.Username(), password
	}
	return dial(ctx, cfg, o)
}

// dial opens a client and makes its first request.
func dial(ctx context.Context, cfg clientv3.Config, o *Options) (driver.Driver, error) {
	if deadline, ok := ctx.Deadline(); ok {
		cfg.DialTimeout = min(cfg.DialTimeout, time.Until(deadline))
	}
	if err := ctx.Err(); err != nil || cfg.DialTimeout <= 0 {
		return nil, driver.Unavailable(errors.Join(err, errors.New("etcd: no time to dial")))
	}
	type result struct {
		client *clientv3.Client
		err    error
	}
	results := make(chan result, 1)
	go func() { // with a user name it authenticates, and does not look at our context
		client, err := clientv3.New(cfg)
		results <- result{client, err}
	}()
	var r result
	select {
	case r = <-results:
	case <-ctx.Done():
		go func() {
			if r := <-results; r.err == nil {
				r.client.Close()
			}
		}()
		return nil, driver.Unavailable(ctx.Err())
	}
	if r.err != nil {
		return nil, driver.Unavailable(wrap(r.err)) // nothing was asked for yet
	}
	d, err := New(r.client, o)
	if err != nil {
		r.client.Close()
		return nil, err
	}
	d.ownsClient = true
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	if _, err := d.baseFor(ctx, driver.Name{Kind: driver.KindLock}, 0); err != nil {
		d.Close()
		return nil, driver.Unavailable(err)
	}
	return d, nil
}

// Info implements driver.Driver.
func (d *Driver) Info() driver.Info {
	return driver.Info{Backend: "etcd", MinTTL: MinTTL, Deadlines: true, Durable: true, Replicated: d.replicated}
}

// Close implements driver.Driver. Its etcd leases end by themselves, at most one TTL later.
func (d *Driver) Close() error {
	var err error
	d.closing.Do(func() {
		d.mu.Lock()
		d.closed = true
		d.mu.Unlock()
		d.end()
		d.keeper.close()
		err = d.watcher.Close()
		d.running.Wait()
		if d.ownsClient {
			err = errors.Join(err, d.client.Close())
		}
		if errors.Is(err, context.Canceled) {
			err = nil // what the client library says when it ends its own streams
		}
	})
	return err
}

var errClosed = driver.Unavailable(errors.New("etcd: the driver is closed"))

// begin makes the context of a step, which also ends with Close.
func (d *Driver) begin(ctx context.Context) (context.Context, context.CancelFunc, error) {
	if d.open.Err() != nil {
		return nil, nil, errClosed
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, driver.Unavailable(err)
	}
	var cancel context.CancelFunc
	if deadline, ok := ctx.Deadline(); ok {
		ctx, cancel = context.WithDeadline(ctx, deadline) // by a timer of our own, see driver.Info.Deadlines
	} else {
		ctx, cancel = context.WithCancel(ctx)
	}
	stop := context.AfterFunc(d.open, cancel)
	return ctx, func() {
		stop()
		cancel()
	}, nil
}

// Notify implements driver.Notifier.
func (d *Driver) Notify(sink func(driver.Event)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sink = sink
}

func (d *Driver) tell(e driver.Event) {
	d.mu.Lock()
	sink := d.sink
	d.mu.Unlock()
	if sink != nil {
		sink(e)
	}
}

// Lock implements driver.Locker.
func (d *Driver) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	ctx, end, err := d.begin(ctx)
	if err != nil {
		return driver.Answer{}, err
	}
	defer end()
	return d.acquire(ctx, r)
}

// Acquire implements driver.Semaphore.
func (d *Driver) Acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return d.Lock(ctx, r)
}

// Extend implements driver.Locker. It sends one keepalive for each etcd lease, whatever the number of locks
// on it, and reads their keys in transactions of up to 100 operations.
func (d *Driver) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	asks := make([]ask, len(leases))
	for i, l := range leases {
		asks[i] = ask{owner: l.Owner, ttl: l.TTL}
	}
	return d.refreshAll(ctx, asks)
}

// Poll implements driver.Queue. See Extend for what it sends.
func (d *Driver) Poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	asks := make([]ask, len(waiters))
	for i, w := range waiters {
		asks[i] = ask{owner: w.Owner, ttl: w.TTL, waits: true, claim: w.Claim}
	}
	return d.refreshAll(ctx, asks)
}

func (d *Driver) refreshAll(ctx context.Context, asks []ask) []driver.Result {
	ctx, end, err := d.begin(ctx)
	if err != nil {
		results := make([]driver.Result, len(asks))
		for i := range results {
			results[i].Err = err
		}
		return results
	}
	defer end()
	return d.refresh(ctx, asks)
}

// Release implements driver.Locker. Whoever is next holds as soon as the key is gone.
func (d *Driver) Release(ctx context.Context, o driver.Owner) (bool, error) {
	ctx, end, err := d.begin(ctx)
	if err != nil {
		return false, err
	}
	defer end()
	key, create := d.leaving(o)
	found, err := d.delete(ctx, o, key, create)
	if err != nil {
		return false, err
	}
	d.left(o, found)
	return found, nil
}
