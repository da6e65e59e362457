package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
)

// A Backend is what a scenario runs on: servers that it starts itself, as local processes unless asked for [Backend.InContainers]. The test binary must import the driver.
type Backend struct {
	// Name is that of the backend in tables.
	Name string
	// TTL is that of the leases: short, so that a run is short, but not so short that a busy machine loses them.
	TTL time.Duration

	start func(ctx context.Context) (*system, error)
	// Why something cannot be done to it, empty if it can: stop or kill one of its clients, stop or kill a server, cut the
	// network in between.
	noProcesses, noServers, noNetwork string
	// contained is the backend that this one is in containers.
	contained *Backend
}

const noServers, noNetwork = "there is no server", "there is no network"

// The backends.
var (
	// Memory is that of a process, so all clients of a lane are one process.
	Memory = &Backend{
		Name: "memory", TTL: time.Second, start: startMemory,
		noProcesses: "holder and rival are goroutines of one process", noServers: noServers, noNetwork: noNetwork,
	}
	// File is a directory.
	File = &Backend{Name: "file", TTL: time.Second, start: startFile, noServers: noServers, noNetwork: noNetwork}
	// Redis is one server that flushes each write to the disk.
	Redis = &Backend{Name: "redis", TTL: time.Second, start: startRedis}
	// RedisSentinel is a primary with two replicas and three sentinels. A failover takes seconds, so does the lease.
	RedisSentinel = &Backend{
		Name: "redis-sentinel", TTL: 5 * time.Second, start: startSentinel,
		noNetwork: "its clients find the servers by themselves, so nothing can be put in between",
	}
	// Redlock is five independent Redis servers that flush to the disk every second.
	Redlock = &Backend{Name: "redlock", TTL: time.Second, start: startRedlock}
	// Etcd is a cluster of three members.
	Etcd = &Backend{Name: "etcd", TTL: 2 * time.Second, start: startEtcd}
	// Postgres is a primary with an asynchronous standby.
	Postgres = &Backend{Name: "postgres", TTL: time.Second, start: startPostgres}
)

// Backends are all of them, in the order of tables.
func Backends() []*Backend {
	return []*Backend{Memory, File, Redis, RedisSentinel, Redlock, Etcd, Postgres}
}

// system is a backend that runs.
type system struct {
	servers []servers.Server
	// sentinels is set for RedisSentinel only.
	sentinels *servers.RedisSentinels
	// url is that of a client which reaches the servers at these addresses, in their order.
	url func(addrs []string) string
	// leader is the server without which nothing goes on.
	leader func(ctx context.Context) (servers.Server, error)
	// isolate cuts one server off from the others and not from clients, until heal; both are set for Etcd only.
	isolate func(ctx context.Context, server int) error
	heal    func()
	close   func() error
	// oneProcess: all clients of a lane must be one process.
	oneProcess bool
	// request is a text that each request of a driver has in it, empty if that is the lock's name.
	request string
}

func (s *system) addrs() (addrs []string) {
	for _, server := range s.servers {
		addrs = append(addrs, server.Addr())
	}
	return addrs
}

// single is a system of one server.
func single(s servers.Server, url func(addr string) string) *system {
	return &system{
		servers: []servers.Server{s},
		url:     func(addrs []string) string { return url(addrs[0]) },
		leader:  func(context.Context) (servers.Server, error) { return s, nil },
		close:   s.Close,
	}
}

func startMemory(context.Context) (*system, error) {
	return &system{
		url:        func([]string) string { return "memory:" },
		close:      func() error { return nil },
		oneProcess: true,
	}, nil
}

func startFile(context.Context) (*system, error) {
	dir, err := os.MkdirTemp("", "fencelock-lab")
	if err != nil {
		return nil, err
	}
	return &system{
		url:   func([]string) string { return "file://" + filepath.ToSlash(dir) },
		close: func() error { return os.RemoveAll(dir) },
	}, nil
}

// startOfRedis starts a server with that policy of flushing.
type startOfRedis func(ctx context.Context, fsync string) (servers.Server, error)

func redisProcess(ctx context.Context, fsync string) (servers.Server, error) {
	return servers.StartRedis(ctx, &servers.RedisOptions{AppendFsync: fsync, Clock: true})
}

func startRedis(ctx context.Context) (*system, error) { return oneRedis(ctx, redisProcess) }

func startRedlock(ctx context.Context) (*system, error) { return fiveRedis(ctx, redisProcess) }

func oneRedis(ctx context.Context, start startOfRedis) (*system, error) {
	s, err := start(ctx, "always")
	if err != nil {
		return nil, err
	}
	return single(s, func(addr string) string { return "redis://" + addr }), nil
}

func fiveRedis(ctx context.Context, start startOfRedis) (*system, error) {
	s := &system{
		url: func(addrs []string) string { return "redlock://" + strings.Join(addrs, ",") },
	}
	s.leader = func(context.Context) (servers.Server, error) { return s.servers[0], nil } // one is as good as another
	s.close = func() error { return closeAll(s.servers) }
	for range 5 {
		node, err := start(ctx, "everysec")
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.servers = append(s.servers, node)
	}
	return s, nil
}

func etcdURL(addrs []string) string { return "etcd://" + strings.Join(addrs, ",") }

func startEtcd(ctx context.Context) (*system, error) {
	c, err := servers.StartEtcdCluster(ctx, 3, &servers.EtcdOptions{Network: true})
	if err != nil {
		return nil, err
	}
	var members []servers.Server
	for _, m := range c.Members {
		members = append(members, m)
	}
	return &system{
		servers: members,
		url:     etcdURL,
		leader: func(ctx context.Context) (servers.Server, error) {
			if m := c.Leader(ctx); m != nil {
				return m, nil
			}
			return nil, errNoLeader
		},
		isolate: func(ctx context.Context, server int) error { return c.Isolate(ctx, c.Members[server]) },
		heal:    c.Heal,
		close:   c.Close,
	}, nil
}

func startSentinel(ctx context.Context) (*system, error) {
	s, err := servers.StartRedisSentinels(ctx, nil)
	if err != nil {
		return nil, err
	}
	url := "redis+sentinel://" + strings.Join(s.SentinelAddrs(), ",") + "/0?master=" + servers.RedisSentinelName
	return &system{
		sentinels: s,
		url:       func([]string) string { return url },
		leader:    func(ctx context.Context) (servers.Server, error) { return s.Primary(ctx) },
		close:     s.Close,
	}, nil
}

// postgresRequest is in each request, since the name is binary there.
const postgresRequest = `"fencelock".`

func startPostgres(ctx context.Context) (*system, error) {
	connections := []string{"-c", "max_connections=400"} // a pool for each process of each lane
	primary, err := servers.StartPostgres(ctx, &servers.PostgresOptions{Args: connections})
	if err != nil {
		return nil, err
	}
	standby, err := servers.StartPostgres(ctx, &servers.PostgresOptions{StandbyOf: primary, Args: connections})
	if err != nil {
		return nil, errors.Join(err, primary.Close())
	}
	return &system{
		servers: []servers.Server{primary, standby},
		url: func(addrs []string) string {
			return strings.Replace(primary.URL(), primary.Addr(), strings.Join(addrs, ","), 1) + "&target_session_attrs=read-write"
		},
		leader:  func(context.Context) (servers.Server, error) { return primary, nil },
		close:   func() error { return errors.Join(standby.Close(), primary.Close()) },
		request: postgresRequest,
	}, nil
}

// line is the network between one worker and the servers.
type line struct{ proxies []*servers.Proxy }

func newLine(s *system) (*line, error) {
	l := &line{}
	for _, addr := range s.addrs() {
		p, err := servers.NewProxy(addr)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("lab: %w", err), l.close())
		}
		l.proxies = append(l.proxies, p)
	}
	return l, nil
}

func (l *line) addrs() (addrs []string) {
	for _, p := range l.proxies {
		addrs = append(addrs, p.Addr())
	}
	return addrs
}

// cut drops what is sent in a direction until heal; without numbers of servers, to and from all of them.
func (l *line) cut(d servers.Direction, only ...int) {
	for i, p := range l.proxies {
		if len(only) == 0 || slices.Contains(only, i) {
			p.Drop(d)
		}
	}
}

func (l *line) heal() {
	for _, p := range l.proxies {
		p.Pass(servers.ToServer | servers.ToClient)
		p.Reset() // a connection that has lost bytes is of no use
	}
}

func (l *line) close() error {
	var err error
	for _, p := range slices.Backward(l.proxies) {
		err = errors.Join(err, p.Close())
	}
	return err
}
