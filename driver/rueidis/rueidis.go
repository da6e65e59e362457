// Package rueidis keeps locks, semaphores and fencing tokens in one Redis server, or one Cluster, through
// the client github.com/redis/rueidis. It is written for Redis 6.2 or later and Valkey 7.2 or later; a Cluster needs Redis 7.0. The
// conformance suite runs on Redis 7.0 and Redis 8, and on a Cluster of Redis 7.0; Redis 6.2 and Valkey were never tried.
//
// [New] takes a client that you have. By URL, rueidis://, rueidis+sentinel:// and rueidis+cluster:// open one.
//
// It runs the same scripts on the same keys as package goredis: clients of both exclude each other, stand in one
// queue and hand over to each other. Which one to take is a question of the client library. rueidis sends
// the requests of all goroutines over a few connections, many at a time, which pays when many are at work.
//
// # Guarantees
//
// Those of package goredis, under the same assumptions: every step is one Lua script, times are the server's,
// there is one primary that keeps what it acknowledged and never evicts.
//
// # Options
//
// See [Options]. A URL is one of these, and one with rueidiss in place of rueidis for TLS:
//
//	rueidis://user:password@host:port/database                                a server, port 6379 by default
//	rueidis+sentinel://user:password@host:port,host:port/database?master=name the primary that sentinels know, port 26379
//	rueidis+cluster://user:password@host:port,host:port                       a Cluster, port 6379
//
// Its parameters, all optional but for master:
//
//	namespace                        beginning of all keys, default "fencelock"
//	dial_timeout                     how long connecting may take, default 5s
//	wait_replicas                    how many replicas must have confirmed a lease, default 0
//	timeout                          after how much silence a connection counts as dead, default 3s
//	master                           the name by which the sentinels know the primary
//	sentinel_user sentinel_password  with which to log in at the sentinels
//	ca cert key server-name          of TLS: file of the authorities to trust, files of the client's own certificate, name
//	                                 expected in the server's; by default the system's, none, and the host
//
// All requests share a few connections. When one goes dead in silence rueidis finds that out by a PING, sent after a second
// without an answer, and waits for the answer for as long as the timeout says; until then requests go its way, and their
// outcome is unknown. A lease is not believed for longer because of that, but it may be lost if that takes longer than it
// has left. Your own client should be set likewise: ClientOption.ConnWriteTimeout well below the TTLs (its default is 10 s),
// AlwaysPipelining, so that a connection which ends while it is idle is noticed at once, and DisableRetry. Client-side
// caching is not used, and DisableCache spares it.
//
// Keys, and the rights that a user of the server needs, are those of package goredis, and on a Cluster +role and
// +cluster|shards.
//
// # Errors
//
// What the server refused (OOM, READONLY, LOADING, NOAUTH, NOPERM, WRONGTYPE, ...), and what could not be dialled,
// matches [driver.ErrUnavailable]. A request that got no answer may have been executed, for rueidis does not tell
// whether it was sent: its outcome is unknown. The driver sends a request again by itself only if the context of another
// one ended while both waited for a connection to be made. When Redis is out of memory, nothing new is granted,
// but leases are extended and released as usual.
//
// # Fencing
//
// As in package goredis, and from the same counters: a token is the server's clock in microseconds, or one more than the
// last token or the floor if that is greater.
//
// # What it does not do
//
// It does not spread a lock over independent servers. It needs no other part of
// rueidis; rueidislock is a lock of another kind, and the two do not exclude each other.
package rueidis

import (
	"reflect"

	"github.com/redis/rueidis"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/redislua"
)

// Options of [New].
type Options struct {
	// Namespace is the beginning of all keys: 1 to 64 of a-z A-Z 0-9 . - _, not beginning with a dot.
	// Default "fencelock". Clients exclude each other only within one namespace.
	Namespace string

	// WaitReplicas is how many replicas must have confirmed a lease before it is answered, by WAIT on a connection of
	// its own; what that promises and what not is said at package goredis. That may take a second, so the connection's
	// timeout must be longer. On a Cluster no redirection is followed then. Default 0: none. Not negative.
	WaitReplicas int
}

// Driver implements [driver.Driver] and all its optional interfaces: [driver.Semaphore],
// [driver.FencingSource], [driver.Queue], [driver.Notifier], [driver.Lister], [driver.ForceUnlocker] and [driver.Writer].
type Driver struct{ *steps }

type steps = redislua.Driver

// New makes a driver that uses the client; nil options are the defaults. It sends nothing. Close leaves
// the client open. A nil client, and a bad namespace, is an error matching [driver.ErrInvalid].
func New(client rueidis.Client, opts *Options) (*Driver, error) {
	if client == nil || reflect.ValueOf(client).Kind() == reflect.Pointer && reflect.ValueOf(client).IsNil() {
		return nil, driver.Invalid("client", "nil", "must not be nil")
	}
	return newDriver(client, opts, false)
}

func newDriver(client rueidis.Client, opts *Options, owned bool) (*Driver, error) {
	a := &adapter{client: client, owned: owned}
	if a.SameSlot() {
		a.shards = &shards{client: client, lines: make(map[string]*line)}
	}
	if opts == nil {
		opts = &Options{}
	}
	d, err := redislua.New(a, "rueidis", opts.Namespace, opts.WaitReplicas)
	if err != nil {
		return nil, err
	}
	return &Driver{d}, nil
}
