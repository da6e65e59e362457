package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// RedisSentinelName is the name under which the sentinels of [StartRedisSentinels] know their primary.
const RedisSentinelName = "primary"

// RedisSentinelOptions says how to run a Redis server with replicas under Redis Sentinel. The zero value of
// each field is its default.
type RedisSentinelOptions struct {
	// Redis are the options of the primary and its replicas, of which Binary holds for the sentinels too.
	Redis RedisOptions

	// SentinelPassword, if not empty, is what clients of the sentinels must authenticate with.
	SentinelPassword string

	// DownAfter is after how much silence a sentinel thinks that the primary is down: at least 1 ms, default 1 s.
	DownAfter time.Duration
}

// RedisSentinels is a Redis server with replicas, watched by sentinels.
type RedisSentinels struct {
	// Nodes are a primary, the first one at the start, and two replicas.
	Nodes []*Redis
	// Sentinels are three, of which two must agree that the primary is down.
	Sentinels []*Redis
}

// StartRedisSentinels runs a primary, two replicas and three sentinels and returns when all know each other and the
// replicas are in step; nil options are the defaults. The context bounds the start only, which takes at most 30 s.
//
// Errors are those of [StartRedis]. On failure no process and no file is left behind.
func StartRedisSentinels(ctx context.Context, opts *RedisSentinelOptions) (*RedisSentinels, error) {
	var o RedisSentinelOptions
	if opts != nil {
		o = *opts
	}
	if o.DownAfter == 0 {
		o.DownAfter = time.Second
	}
	if o.DownAfter < time.Millisecond {
		return nil, fmt.Errorf("servers: redis: DownAfter %v: want at least 1ms", o.DownAfter)
	}
	if o.Redis.Binary == "" {
		o.Redis.Binary = "redis-server"
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	s := &RedisSentinels{Nodes: make([]*Redis, 3), Sentinels: make([]*Redis, 3)}
	err := s.start(ctx, o)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *RedisSentinels) start(ctx context.Context, o RedisSentinelOptions) error {
	o.Redis.Args = append([]string{"--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"}, o.Redis.Args...)
	if o.Redis.Password != "" {
		o.Redis.Args = append(o.Redis.Args, "--masterauth", o.Redis.Password)
	}
	for i := range s.Nodes {
		own := o.Redis
		if i > 0 {
			host, port, err := net.SplitHostPort(s.Nodes[0].Addr())
			if err != nil {
				return err
			}
			own.Args = append([]string{"--replicaof", host + " " + port}, own.Args...)
		}
		var err error
		if s.Nodes[i], err = StartRedis(ctx, &own); err != nil {
			return err
		}
	}
	// The sentinels look first at once, and then every 10 s.
	if err := await(ctx, "replicas", func() error { return linked(ctx, s.Nodes[0], 2) }); err != nil {
		return err
	}
	errs := make([]error, len(s.Sentinels))
	var starts sync.WaitGroup
	for i := range s.Sentinels {
		starts.Go(func() { s.Sentinels[i], errs[i] = startSentinel(ctx, s.Nodes[0].Addr(), o) })
	}
	starts.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return await(ctx, "sentinels", func() error {
		for _, n := range s.Sentinels {
			about, err := s.about(ctx, n)
			if err != nil {
				return err
			}
			if about["num-slaves"] != "2" || about["num-other-sentinels"] != "2" {
				return fmt.Errorf("servers: redis %s: knows %s replicas and %s sentinels, want 2 and 2",
					n.Addr(), about["num-slaves"], about["num-other-sentinels"])
			}
		}
		return nil
	})
}

// startSentinel runs a sentinel that watches the primary.
func startSentinel(ctx context.Context, primary string, o RedisSentinelOptions) (*Redis, error) {
	binary, err := exec.LookPath(o.Redis.Binary)
	if err != nil {
		return nil, fmt.Errorf("servers: redis: %w", err)
	}
	addr, release, err := ReservePort()
	if err != nil {
		return nil, fmt.Errorf("servers: redis: choose a port: %w", err)
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, errors.Join(err, release())
	}
	host, primaryPort, err := net.SplitHostPort(primary)
	if err != nil {
		return nil, errors.Join(err, release())
	}
	lines := []string{
		"port " + port, "bind 127.0.0.1", "daemonize no", `logfile ""`, "sentinel resolve-hostnames no",
		fmt.Sprintf("sentinel monitor %s %s %s 2", RedisSentinelName, host, primaryPort),
		fmt.Sprintf("sentinel down-after-milliseconds %s %d", RedisSentinelName, o.DownAfter.Milliseconds()),
		fmt.Sprintf("sentinel failover-timeout %s 2000", RedisSentinelName),
		fmt.Sprintf("sentinel parallel-syncs %s 2", RedisSentinelName),
	}
	if o.Redis.Password != "" {
		lines = append(lines, fmt.Sprintf("sentinel auth-pass %s %q", RedisSentinelName, o.Redis.Password))
	}
	if o.SentinelPassword != "" {
		lines = append(lines, fmt.Sprintf("requirepass %q", o.SentinelPassword), fmt.Sprintf("sentinel sentinel-pass %q", o.SentinelPassword))
	}
	return runRedis(ctx, addr, release, o.SentinelPassword, "", func(_ context.Context, data string) (*exec.Cmd, error) {
		// A sentinel keeps what it learns in its file of settings.
		file := filepath.Join(data, "sentinel.conf")
		if _, err := os.Stat(file); errors.Is(err, os.ErrNotExist) {
			text := strings.Join(append([]string{"dir " + data}, lines...), "\n") + "\n"
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				return nil, err
			}
		}
		return exec.Command(binary, file, "--sentinel"), nil
	})
}

// about is what a sentinel knows of the primary.
func (s *RedisSentinels) about(ctx context.Context, sentinel *Redis) (map[string]string, error) {
	reply, err := sentinel.Do(ctx, "SENTINEL", "MASTER", RedisSentinelName)
	if err != nil {
		return nil, err
	}
	list, _ := reply.([]any)
	fields := make(map[string]string)
	for i := 0; i+1 < len(list); i += 2 {
		fields[fmt.Sprint(list[i])] = fmt.Sprint(list[i+1])
	}
	return fields, nil
}

// linked answers nil if so many replicas of the node are in step.
func linked(ctx context.Context, n *Redis, replicas int) error {
	info, err := n.text(ctx, "INFO", "replication")
	if err != nil {
		return err
	}
	if got := strings.Count(info, "state=online"); got != replicas {
		return fmt.Errorf("servers: redis %s: %d replicas are in step, want %d", n.Addr(), got, replicas)
	}
	return nil
}

// Primary answers the node that all sentinels that run take for the primary, if it is one.
func (s *RedisSentinels) Primary(ctx context.Context) (*Redis, error) {
	at := ""
	for _, n := range s.Sentinels {
		if n.PID() == 0 {
			continue
		}
		about, err := s.about(ctx, n)
		if err != nil {
			return nil, err
		}
		addr := net.JoinHostPort(about["ip"], about["port"])
		if at != "" && at != addr {
			return nil, fmt.Errorf("servers: redis: the sentinels do not agree: %s and %s", at, addr)
		}
		at = addr
	}
	for _, n := range s.Nodes {
		if n.Addr() != at || n.PID() == 0 {
			continue
		}
		try, cancel := context.WithTimeout(ctx, tryTimeout)
		info, err := n.text(try, "INFO", "replication")
		cancel()
		if err != nil {
			return nil, err
		}
		if strings.Contains(info, "role:master") {
			return n, nil
		}
	}
	return nil, fmt.Errorf("servers: redis: %q, which the sentinels name, is no primary that runs", at)
}

// AwaitPrimary waits until the sentinels agree on a primary other than the one given, and answers it.
func (s *RedisSentinels) AwaitPrimary(ctx context.Context, other *Redis) (primary *Redis, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	err = await(ctx, "a new primary", func() error {
		if primary, err = s.Primary(ctx); err == nil && primary == other {
			err = errors.New("it is the old one")
		}
		return err
	})
	return primary, err
}

// Detach cuts the replicas off from their primary without anybody's being told: they stay as they are, and what is
// written from then on is lost if one of them is promoted. The sentinels attach them again, but not within 8 s.
func (s *RedisSentinels) Detach(ctx context.Context) error {
	primary, err := s.Primary(ctx)
	if err != nil {
		return err
	}
	for _, n := range s.Nodes {
		if n == primary || n.PID() == 0 {
			continue
		}
		if _, err := n.Do(ctx, "REPLICAOF", "127.0.0.1", "1"); err != nil {
			return err
		}
	}
	return await(ctx, "no replicas", func() error { return linked(ctx, primary, 0) })
}

// SentinelAddrs answers the addresses of the sentinels.
func (s *RedisSentinels) SentinelAddrs() (addrs []string) {
	for _, n := range s.Sentinels {
		addrs = append(addrs, n.Addr())
	}
	return addrs
}

// Close closes all nodes and sentinels.
func (s *RedisSentinels) Close() error {
	return errors.Join(closeAll(s.Sentinels), closeAll(s.Nodes))
}
