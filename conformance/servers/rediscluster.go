package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"
)

// slots is how many hash slots a Redis Cluster has.
const slots = 16384

// A RedisCluster is a Redis Cluster on one machine. It needs Redis 7.0 or later, or Valkey.
type RedisCluster struct {
	// Nodes are its servers: first those that began as primaries, which share the slots in their order, then the
	// replicas, the first one of each primary in the primaries' order, then the second ones. Each can be
	// paused, killed and started by itself. A node that is started empty does not know the cluster any more.
	Nodes []*Redis
}

// StartRedisCluster runs a new, empty cluster and returns when all its nodes agree that it works and every
// replica is in step; nil options are the defaults, and hold for each node. A node is thought to be down
// after 2 s of silence, unless the options say otherwise by "--cluster-node-timeout". The context bounds the
// start only, which takes at most 30 s.
//
// Errors are those of [StartRedis]. On failure no process and no file is left behind.
func StartRedisCluster(ctx context.Context, primaries, replicas int, opts *RedisOptions) (*RedisCluster, error) {
	if primaries < 1 || replicas < 0 {
		return nil, fmt.Errorf("servers: redis cluster of %d primaries with %d replicas each: want at least 1 and 0", primaries, replicas)
	}
	var o RedisOptions
	if opts != nil {
		o = *opts
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	c := &RedisCluster{Nodes: make([]*Redis, primaries*(1+replicas))}
	errs := make([]error, len(c.Nodes))
	var starts sync.WaitGroup
	for i := range c.Nodes {
		starts.Go(func() { c.Nodes[i], errs[i] = startRedisNode(ctx, o) })
	}
	starts.Wait()
	err := errors.Join(errs...)
	if err == nil {
		err = c.join(ctx, primaries)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// startRedisNode runs a server that is to become a node of a cluster.
func startRedisNode(ctx context.Context, o RedisOptions) (*Redis, error) {
	bus, release, err := ReservePort()
	if err != nil {
		return nil, fmt.Errorf("servers: redis cluster: choose a port: %w", err)
	}
	_, port, err := net.SplitHostPort(bus)
	if err != nil {
		return nil, errors.Join(err, release())
	}
	o.Args = append([]string{
		"--cluster-enabled", "yes", "--cluster-port", port, "--cluster-announce-ip", "127.0.0.1",
		"--cluster-node-timeout", "2000", "--cluster-replica-validity-factor", "0",
		"--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1",
	}, o.Args...)
	if o.Password != "" {
		o.Args = append(o.Args, "--masterauth", o.Password)
	}
	r, err := StartRedis(ctx, &o)
	if err != nil {
		return nil, errors.Join(err, release())
	}
	r.bus = port
	releaseMain := r.spec.release
	r.spec.release = func() error { return errors.Join(releaseMain(), release()) }
	return r, nil
}

// join makes one cluster of the nodes.
func (c *RedisCluster) join(ctx context.Context, primaries int) error {
	var ids []string
	for i, n := range c.Nodes {
		// Epochs of their own, so that the nodes need not quarrel about them first.
		if _, err := n.Do(ctx, "CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1)); err != nil {
			return err
		}
		id, err := c.ID(ctx, n)
		if err != nil {
			return err
		}
		ids = append(ids, id)
		if i < primaries {
			from, to := i*slots/primaries, (i+1)*slots/primaries-1
			if _, err := n.Do(ctx, "CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(from), strconv.Itoa(to)); err != nil {
				return err
			}
		}
	}
	// Every node meets every other one: to wait until they have heard of each other takes longer.
	for i, n := range c.Nodes {
		for _, other := range c.Nodes[:i] {
			host, port, err := net.SplitHostPort(other.Addr())
			if err != nil {
				return err
			}
			if _, err := n.Do(ctx, "CLUSTER", "MEET", host, port, other.bus); err != nil {
				return err
			}
		}
	}
	for i, n := range c.Nodes[primaries:] {
		primary := ids[i%primaries]
		if err := await(ctx, "CLUSTER REPLICATE", func() error {
			_, err := n.Do(ctx, "CLUSTER", "REPLICATE", primary)
			return err
		}); err != nil {
			return err
		}
	}
	return await(ctx, "a working cluster", func() error { return c.Healthy(ctx, len(c.Nodes)-primaries) })
}

// Healthy answers nil if every node that runs says that the cluster works, knows all that run for sound, and
// so many replicas are linked with their primaries.
func (c *RedisCluster) Healthy(ctx context.Context, replicas int) error {
	linked, running := 0, 0
	for _, n := range c.Nodes {
		if n.PID() != 0 {
			running++
		}
	}
	for _, n := range c.Nodes {
		if n.PID() == 0 {
			continue
		}
		info, err := n.text(ctx, "CLUSTER", "INFO")
		if err != nil {
			return err
		}
		if !strings.Contains(info, "cluster_state:ok") {
			return fmt.Errorf("servers: redis %s: the cluster is down", n.Addr())
		}
		nodes, err := c.view(ctx, n)
		if err != nil {
			return err
		}
		sound := 0
		for _, v := range nodes {
			if !strings.Contains(v.flags, "fail") && !strings.Contains(v.flags, "handshake") {
				sound++
			}
		}
		if sound != running {
			return fmt.Errorf("servers: redis %s: knows %d sound nodes, want %d", n.Addr(), sound, running)
		}
		link, err := n.text(ctx, "INFO", "replication")
		if err != nil {
			return err
		}
		if strings.Contains(link, "master_link_status:up") {
			linked++
		}
	}
	if linked != replicas {
		return fmt.Errorf("servers: redis cluster: %d replicas are linked, want %d", linked, replicas)
	}
	return nil
}

// clusterNode is a line of CLUSTER NODES.
type clusterNode struct{ id, addr, flags, primary string }

// view is what a node knows of all.
func (c *RedisCluster) view(ctx context.Context, n *Redis) ([]clusterNode, error) {
	text, err := n.text(ctx, "CLUSTER", "NODES")
	if err != nil {
		return nil, err
	}
	var nodes []clusterNode
	for line := range strings.Lines(text) {
		// id host:port@bus[,hostname] flags primary ...
		f := strings.Fields(line)
		if len(f) < 8 {
			return nil, fmt.Errorf("servers: redis %s: CLUSTER NODES: %q", n.Addr(), line)
		}
		addr, _, _ := strings.Cut(f[1], "@")
		nodes = append(nodes, clusterNode{id: f[0], addr: addr, flags: f[2], primary: f[3]})
	}
	return nodes, nil
}

// ID answers the node's id.
func (c *RedisCluster) ID(ctx context.Context, n *Redis) (string, error) {
	return n.text(ctx, "CLUSTER", "MYID")
}

// Slot answers the slot of a key.
func (c *RedisCluster) Slot(ctx context.Context, key string) (int, error) {
	for _, n := range c.Nodes {
		if n.PID() != 0 {
			slot, err := n.Do(ctx, "CLUSTER", "KEYSLOT", key)
			if err != nil {
				return 0, err
			}
			i, _ := slot.(int64)
			return int(i), nil
		}
	}
	return 0, ErrNotRunning
}

// Primary answers the node that serves the slot, if all nodes that answer agree about it and it runs.
func (c *RedisCluster) Primary(ctx context.Context, slot int) (*Redis, error) {
	at := ""
	for _, n := range c.Nodes {
		if n.PID() == 0 {
			continue
		}
		try, cancel := context.WithTimeout(ctx, tryTimeout)
		addr, err := n.ownerOf(try, slot)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			continue // it is paused
		}
		if err != nil {
			return nil, err
		}
		if at != "" && at != addr {
			return nil, fmt.Errorf("servers: redis cluster: the nodes do not agree about slot %d: %s and %s", slot, at, addr)
		}
		at = addr
	}
	for _, n := range c.Nodes {
		if n.Addr() == at && n.PID() != 0 {
			return n, nil
		}
	}
	return nil, fmt.Errorf("servers: redis cluster: %q, which should serve slot %d, does not run", at, slot)
}

// AwaitPrimary waits until [RedisCluster.Primary] has an answer.
func (c *RedisCluster) AwaitPrimary(ctx context.Context, slot int) (primary *Redis, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	err = await(ctx, "a primary", func() error {
		primary, err = c.Primary(ctx, slot)
		return err
	})
	return primary, err
}

// ownerOf answers the address of the node that serves the slot in this one's eyes.
func (r *Redis) ownerOf(ctx context.Context, slot int) (string, error) {
	all, err := r.Do(ctx, "CLUSTER", "SLOTS")
	if err != nil {
		return "", err
	}
	list, _ := all.([]any)
	for _, entry := range list {
		// from, to, [host, port, id], replicas...
		e, _ := entry.([]any)
		if len(e) < 3 {
			continue
		}
		from, _ := e[0].(int64)
		to, _ := e[1].(int64)
		if at, _ := e[2].([]any); len(at) >= 2 && from <= int64(slot) && int64(slot) <= to {
			return net.JoinHostPort(fmt.Sprint(at[0]), fmt.Sprint(at[1])), nil
		}
	}
	return "", fmt.Errorf("servers: redis %s: knows nobody for slot %d", r.Addr(), slot)
}

// Replica answers a replica of the node that runs.
func (c *RedisCluster) Replica(ctx context.Context, primary *Redis) (*Redis, error) {
	nodes, err := c.view(ctx, primary)
	if err != nil {
		return nil, err
	}
	id, err := c.ID(ctx, primary)
	if err != nil {
		return nil, err
	}
	for _, v := range nodes {
		for _, n := range c.Nodes {
			if v.primary == id && v.addr == n.Addr() && n.PID() != 0 {
				return n, nil
			}
		}
	}
	return nil, fmt.Errorf("servers: redis %s: it has no replica that runs", primary.Addr())
}

// Failover makes the replica the primary, with its primary's consent, and returns when that is done. Nothing is
// lost by it.
func (c *RedisCluster) Failover(ctx context.Context, replica *Redis) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	asked := time.Time{}
	return await(ctx, "CLUSTER FAILOVER", func() error {
		role, err := replica.text(ctx, "INFO", "replication")
		if err != nil {
			return err
		}
		if strings.Contains(role, "role:master") {
			return c.agree(ctx, replica)
		}
		if time.Since(asked) > 5*time.Second { // it gives up after that time, without a word
			asked = time.Now()
			if _, err := replica.Do(ctx, "CLUSTER", "FAILOVER"); err != nil {
				return err
			}
		}
		return fmt.Errorf("servers: redis %s: still a replica", replica.Addr())
	})
}

// agree answers nil if all nodes that run know the node for a primary.
func (c *RedisCluster) agree(ctx context.Context, primary *Redis) error {
	for _, n := range c.Nodes {
		if n.PID() == 0 {
			continue
		}
		nodes, err := c.view(ctx, n)
		if err != nil {
			return err
		}
		for _, v := range nodes {
			if v.addr == primary.Addr() && !strings.Contains(v.flags, "master") {
				return fmt.Errorf("servers: redis %s: does not know of it yet", n.Addr())
			}
		}
	}
	return nil
}

// MigrateSlot moves a slot with its keys to another primary, as resharding does. Between its two halves, when
// one primary gives the slot away and the other one takes it, it calls the function, if there is one, with no
// key moved, and again with all keys moved. In that time requests for keys of the slot are redirected
// (ASK) or refused (TRYAGAIN).
func (c *RedisCluster) MigrateSlot(ctx context.Context, slot int, to *Redis, between func(moved bool) error) error {
	from, err := c.Primary(ctx, slot)
	if err != nil {
		return err
	}
	fromID, err := c.ID(ctx, from)
	if err != nil {
		return err
	}
	toID, err := c.ID(ctx, to)
	if err != nil {
		return err
	}
	s := strconv.Itoa(slot)
	if _, err := to.Do(ctx, "CLUSTER", "SETSLOT", s, "IMPORTING", fromID); err != nil {
		return err
	}
	if _, err := from.Do(ctx, "CLUSTER", "SETSLOT", s, "MIGRATING", toID); err != nil {
		return err
	}
	if between != nil {
		if err := between(false); err != nil {
			return err
		}
	}
	if err := c.moveKeys(ctx, s, from, to); err != nil {
		return err
	}
	if between != nil {
		if err := between(true); err != nil {
			return err
		}
	}
	// Keys may have been made since.
	if err := c.moveKeys(ctx, s, from, to); err != nil {
		return err
	}
	// The new owner first: the old one would redirect to one that refuses.
	for _, n := range []*Redis{to, from} {
		if _, err := n.Do(ctx, "CLUSTER", "SETSLOT", s, "NODE", toID); err != nil {
			return err
		}
	}
	_, err = c.AwaitPrimary(ctx, slot)
	return err
}

func (c *RedisCluster) moveKeys(ctx context.Context, slot string, from, to *Redis) error {
	host, port, err := net.SplitHostPort(to.Addr())
	if err != nil {
		return err
	}
	for {
		keys, err := from.Do(ctx, "CLUSTER", "GETKEYSINSLOT", slot, "100")
		if err != nil {
			return err
		}
		list, _ := keys.([]any)
		if len(list) == 0 {
			return nil
		}
		args := []string{"MIGRATE", host, port, "", "0", "5000", "REPLACE"}
		if to.password != "" {
			args = append(args, "AUTH", to.password)
		}
		args = append(args, "KEYS")
		for _, key := range list {
			args = append(args, fmt.Sprint(key))
		}
		if _, err := from.Do(ctx, args...); err != nil {
			return err
		}
	}
}

// Addrs answers the addresses of all nodes.
func (c *RedisCluster) Addrs() (addrs []string) {
	for _, n := range c.Nodes {
		addrs = append(addrs, n.Addr())
	}
	return addrs
}

// Close closes all nodes.
func (c *RedisCluster) Close() error { return closeAll(c.Nodes) }

func closeAll(nodes []*Redis) error {
	var errs []error
	for _, n := range nodes {
		if n != nil {
			errs = append(errs, n.Close())
		}
	}
	return errors.Join(errs...)
}

// text is Do for a command that answers with a text.
func (r *Redis) text(ctx context.Context, args ...string) (string, error) {
	reply, err := r.Do(ctx, args...)
	text, ok := reply.(string)
	if err == nil && !ok {
		err = fmt.Errorf("servers: redis %s: %s answered %v", r.Addr(), args[0], reply)
	}
	return text, err
}

// await tries until it works or ctx ends.
func await(ctx context.Context, what string, try func() error) error {
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("servers: wait for %s: %w: %w", what, ctx.Err(), err)
		case <-time.After(tryInterval):
		}
	}
}
