// Package goredis keeps locks, semaphores and fencing tokens in one Redis server, alone or under Sentinel, or in one
// Cluster, through the client github.com/redis/go-redis/v9. It is written for Redis 6.2 or later and Valkey 7.2 or later. The
// conformance suite runs on Redis 7.0, Redis 8 and Valkey 8, and on a Cluster of Redis 7.0; Redis 6.2 and Valkey 7.2 were never
// tried. On a Cluster waiters are told of a grant by SPUBLISH, which Redis 6.2 does not have: there it is left to their polling,
// not tried either.
//
// [New] takes a client that you have. By URL, redis://, redis+sentinel:// and redis+cluster:// open one, and with
// rediss in place of redis they do so with TLS.
//
// # Guarantees
//
// Every step is one Lua script, so it happens as a whole or not at all, and repeating it changes
// nothing. Waiters stand in a queue on the server, first come first served; the step that frees a lock
// gives it to the first of them and tells its client by a message. All times are the server's.
//
// Exclusion holds under these assumptions: there is one primary and it keeps what it acknowledged (a
// replica that is promoted, or a restart without appendfsync always, may have forgotten a lock); its
// clock is not stepped forward by more than a lease's margin; and it never evicts, that is its
// maxmemory-policy is noeviction. Another policy is reported to the client's Observer at the first
// answer, and after a connection was lost. A failover that lost writes keeps tokens in order as long as
// it takes longer than the two clocks differ; the holder of a lock that was lost is told at its next extension.
// WaitReplicas, one of the [Options], makes the loss of a lock by a failover less likely, not impossible.
//
// On a Cluster each slot's primary is what the primary is above. While a slot is on its way from one node to another, a
// step whose keys are not all on one of them is refused (TRYAGAIN): taking, handing over and giving back may fail with
// [driver.ErrUnavailable] or leave the outcome open, which is never taken for contention. Extensions of locks go on, so a
// lock survives a migration that takes longer than its TTL; a permit's extension may be refused while its two keys are on
// different nodes, and with WaitReplicas so is every extension of what has moved already, until the slot has.
//
// # Options
//
// See [Options]. The URLs are
//
//	redis://user:password@host:port/database
//	redis+sentinel://user:password@host1:port,host2:port,host3:port/database?master=name
//	redis+cluster://user:password@host1:port,host2:port,host3:port
//
// where the hosts are the server, the sentinels, or some nodes of the Cluster. The port defaults to 6379, or 26379 of a
// sentinel; in a list the last host must have one if any has. The database defaults to 0. The other parameters are
// optional; one that is unknown is an error:
//
//	namespace      beginning of all keys, default "fencelock"
//	wait_replicas  see [Options], default 0
//	dial_timeout   how long connecting may take, default 5s
//	read_timeout   how long an answer may take, default 3s
//	write_timeout  how long sending may take, default read_timeout
//	pool_size      connections at most to each server, default 10 for each CPU, 5 on a Cluster
//
//	master                            with Sentinel, required: by what name the sentinels know the primary
//	sentinel_user, sentinel_password  with Sentinel: for the sentinels; those before the hosts are for the servers
//
//	ca           with TLS: a file with the authorities to trust, default those of the system
//	cert, key    with TLS: files of the client's own certificate, which is the one for sentinels too
//	server-name  with TLS: the name to expect in all certificates, default the host that is dialled
//
// A client opened by URL heeds the deadline of a request's context (with Sentinel except while it connects), and does not
// repeat requests by itself, except on a Cluster after a redirection, a refusal or a broken connection. Your own client
// should be set likewise (ContextTimeoutEnabled: true, MaxRetries: -1): fencelock
// repeats what may be repeated, and knows until when that makes sense.
//
// All keys begin with the namespace and a colon, and end by themselves: those of a lease or a waiter
// with it, the last token of a name 48 hours after its last use. The keys of a name are in one slot of a
// Cluster; a name with a hash tag, such as "orders:{7}", keeps it.
//
// A client that waits subscribes to one channel. On a Cluster it subscribes to a sharded channel for each name that it
// waits for, over one connection to each node.
//
// A user of the server needs these rights, with the namespace in place of fencelock, and may do without
// the last line (no warning about the policy, no list of all locks):
//
//	~fencelock:* +evalsha +eval +ping
//	+time +exists +get +set +del +pttl +pexpire +pexpireat +hget +hset +hdel +hlen
//	+zadd +zrem +zcard +zscore +zrange +zrangebyscore
//	&fencelock:c:* +publish +subscribe +unsubscribe
//	+info +scan
//
// On a Cluster the line with the channels is another:
//
//	&fencelock:l:* &fencelock:p:* +spublish +ssubscribe +sunsubscribe +command +cluster|slots
//
// WaitReplicas needs +wait as well, a database other than 0 +select, and locks that are to be kept while their slot is on its way
// to another node of a Cluster need +asking.
//
// # Errors
//
// What the server refused (OOM, READONLY, LOADING, CLUSTERDOWN, TRYAGAIN, NOAUTH, NOPERM, WRONGTYPE, ...) and what was never
// sent matches [driver.ErrUnavailable]. A ClusterClient follows MOVED and ASK by itself,
// with WaitReplicas only MOVED. If a connection broke or timed out after the request was sent the
// error is go-redis's own and the outcome is unknown. When Redis is out of memory, nothing new is
// granted, but leases are extended and released as usual.
//
// # Fencing
//
// A token is the server's clock in microseconds, or one more than the last token or the floor if that is
// greater. The last token of a name is kept in a key of its own, which outlives the lock, also when it
// is released, expires or is taken away by force.
//
// A [driver.Write] is a script in Lua as EVAL runs it, without a first line "#!lua": KEYS are its keys and ARGV its arguments, of
// which the last is the token, in 16 digits. On a Cluster its keys must have the hash tag of the lock's, which is the lock's name or
// the tag in it. It has failed if it raises an error or answers one; what else it answers is dropped. It uses the rights of the
// driver's client. With WaitReplicas, if too few confirm, the lease is given back, but not the write, so the outcome counts as
// unknown. Package guard/redisguard makes such writes, with the mark that refuses stale writers.
//
// # What it does not do
//
// It does not spread a lock over independent servers; that is Redlock. It does not wait for the disk, nor, unless
// WaitReplicas says so, for replicas; and even then nothing makes the next primary one of those that have confirmed. It does
// not take a redis.Ring, whose keys move to other servers when one is down. It reads and writes at primaries only,
// also with a client that would read from replicas.
package goredis

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/redislua"
)

// Options of [New].
type Options struct {
	// Namespace is the beginning of all keys: 1 to 64 of a-z A-Z 0-9 . - _, not beginning with a dot.
	// Default "fencelock". Clients exclude each other only within one namespace.
	Namespace string

	// Process, if not nil, sends single scripts in place of the client: the method of that name of an auto-pipelining
	// client of the same servers, which newer versions of go-redis make by client.AutoPipeline, and which sends together
	// what many goroutines ask at the same time. It must return when the answer is there, not before. Batches and
	// subscriptions go through the client all the same.
	Process func(ctx context.Context, cmd redis.Cmder) error

	// WaitReplicas is how many replicas must have confirmed a lease (by WAIT) before it is answered: when it is taken,
	// handed over or extended. 0, the default, asks none. If fewer do so within a quarter of the TTL, 1 s at most, a lease
	// that was taken is given back and the error matches [driver.ErrUnavailable]; an extension fails, and is tried
	// again by the client until the lease ends. Your client's ReadTimeout must be longer than that second. A negative number
	// is an error.
	//
	// What it promises: a lease that was answered is in the memory of so many replicas. It is lost all the same if another
	// replica is promoted, for neither Sentinel nor Cluster looks at that when they choose, unless all replicas had to
	// confirm; or if those that confirmed restart meanwhile without their data. A primary that was cut off goes on alone for
	// as long as it has replicas that answer; see min-replicas-to-write. It costs the way from the primary to its replicas and
	// back for each step, and a connection meanwhile.
	WaitReplicas int
}

// Driver implements [driver.Driver] and all its optional interfaces: [driver.Semaphore],
// [driver.FencingSource], [driver.Queue], [driver.Notifier], [driver.Lister], [driver.ForceUnlocker] and [driver.Writer].
type Driver struct{ *steps }

type steps = redislua.Driver

// New makes a driver that uses the client; nil options are the defaults. It sends nothing. Close leaves
// the client open.
//
// The client must be a *redis.Client (also one made by NewFailoverClient) or a *redis.ClusterClient;
// any other, and a bad namespace, is an error matching [driver.ErrInvalid].
func New(client redis.UniversalClient, opts *Options) (*Driver, error) {
	return newDriver(client, opts, false)
}

func newDriver(c redis.UniversalClient, opts *Options, owned bool) (*Driver, error) {
	a := &adapter{client: c, owned: owned}
	switch c := c.(type) {
	case *redis.Client:
		if c == nil {
			return nil, driver.Invalid("client", "nil", "must not be nil")
		}
	case *redis.ClusterClient:
		if c == nil {
			return nil, driver.Invalid("client", "nil", "must not be nil")
		}
		a.cluster, a.shards = c, &shards{cluster: c, lines: make(map[string]*line)}
	default:
		return nil, driver.Invalid("client", fmt.Sprintf("%T", c),
			"must be a *redis.Client or a *redis.ClusterClient, of which is known what it sends when")
	}
	if opts == nil {
		opts = &Options{}
	}
	a.process = opts.Process
	d, err := redislua.New(a, "redis", opts.Namespace, opts.WaitReplicas)
	if err != nil {
		return nil, err
	}
	return &Driver{d}, nil
}
