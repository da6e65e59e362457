package lab

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/conformance/history"
	"github.com/fencelock/fencelock/conformance/servers"
)

// A Scenario is something that goes wrong, always in the same way.
type Scenario struct {
	// Name is that of the scenario in tables.
	Name string
	// Law is the one at stake, as in docs/contract.md.
	Law string
	// Text says what is done to whom, and when.
	Text string

	on     func(b *Backend) bool                     // nil: every backend
	before func(ctx context.Context, s *stage) error // with the processes there, and nothing begun
	fault  func(ctx context.Context, s *stage) error
	late   bool      // the rival begins its work in the fault
	longer bool      // a server may grant more than was asked for
	may    []Finding // beside none
	shows  Finding   // what at least one lane of all must show, if set
}

// A Finding is something that a run has shown of a backend.
type Finding string

// The findings.
const (
	// Overlap: two held the lock at the same moment, by their own belief.
	Overlap Finding = "overlap"
	// StaleUnfenced: a write with a lower token was let through after one with a higher, where no guard compares.
	StaleUnfenced Finding = "stale write without a guard"
	// StaleFenced is the same where a guard compares. It must never be.
	StaleFenced Finding = "stale write with a guard"
	// StaleCode is the same for the code of [Options].
	StaleCode Finding = "stale write by the code"
	// Disorder: a token was not greater than one before it, or not unique.
	Disorder Finding = "tokens out of order"
	// LateLoss: a holder that was not stopped was told of its loss late, or believed longer than it might.
	LateLoss Finding = "late loss"
)

// The scenarios.
var (
	HolderPaused = &Scenario{
		Name: "holder-paused", Law: "L2",
		Text:  "The holder's process is stopped (SIGSTOP) between its look at the lease and its write, until the rival holds and has written.",
		fault: holderPaused,
		may:   []Finding{StaleUnfenced}, shows: StaleUnfenced,
	}
	HolderKilled = &Scenario{
		Name: "holder-killed", Law: "W3",
		Text:  "The holder's process is killed (SIGKILL).",
		fault: holderKilled,
	}
	HolderCutOff = &Scenario{
		Name: "holder-cut-off", Law: "L2",
		Text: "The network between the holder and the servers drops everything, until the rival holds.",
		on:   hasLines, fault: holderCut(servers.Both),
		may: []Finding{StaleUnfenced}, // by a write that was decided on just before the end
	}
	RepliesLost = &Scenario{
		Name: "replies-lost", Law: "L2",
		Text: "The holder's requests arrive and the replies are dropped, until its lease has ended.",
		on:   hasLines, fault: repliesLost,
		may: []Finding{StaleUnfenced},
	}
	RequestsLost = &Scenario{
		Name: "requests-lost", Law: "L2",
		Text: "The holder's requests are dropped and what the servers send arrives, until the rival holds.",
		on:   hasLines, fault: holderCut(servers.ToServer),
		may: []Finding{StaleUnfenced},
	}
	ServerPaused = &Scenario{
		Name: "server-paused", Law: "L2",
		Text: "The server, of a cluster the leader, is stopped (SIGSTOP) for one and a half TTL.",
		on:   hasServers, fault: serverPaused,
		may: []Finding{StaleUnfenced},
	}
	ServerRestarted = &Scenario{
		Name: "server-restarted", Law: "T1",
		Text: "The server, of a cluster the leader, is killed (SIGKILL) and started again with its data after half a TTL.",
		on:   hasServers, fault: serverRestarted,
		may: []Finding{StaleUnfenced},
	}
	ServerEmptied = &Scenario{
		Name: "server-emptied", Law: "T1",
		Text: "The server is killed and started again at once without its data: it has forgotten who holds.",
		on:   only(Redis), fault: serverEmptied,
		may: []Finding{Overlap, StaleUnfenced},
	}
	Flushed = &Scenario{
		Name: "flushall", Law: "T1",
		Text: "An operator deletes all keys (FLUSHALL).",
		on:   only(Redis), fault: flushed,
		may: []Finding{Overlap, StaleUnfenced}, shows: Overlap,
	}
	Evicted = &Scenario{
		Name: "eviction", Law: "L1",
		Text: "The server runs out of memory with a policy that evicts: what was written last recently goes first, the lock with it.",
		on:   only(Redis), fault: evicted,
		may: []Finding{Overlap, StaleUnfenced},
	}
	GrantLost = &Scenario{
		Name: "grant-lost", Law: "L5",
		Text: "The holder releases while the network drops what the servers send to the rival, for a quarter of a TTL: the grant does not arrive.",
		on:   hasLines, fault: grantLost,
		may: []Finding{StaleUnfenced},
	}
	ClockAhead = &Scenario{
		Name: "clock-ahead", Law: "S2",
		Text: "The server's clock is stepped ahead by a TTL. With Redlock it is the clock of the one node that the holder's and the rival's " +
			"majorities share; each reaches only three of five.",
		on: only(Redis, Redlock), before: shareOneNode, fault: clockAhead,
		may: []Finding{Overlap, StaleUnfenced, LateLoss},
	}
	ClockBack = &Scenario{
		Name: "clock-back", Law: "T1",
		Text:   "The same, with the clock stepped back by 60 s.",
		on:     only(Redis, Redlock),
		before: shareOneNode, fault: clockBack, longer: true, // the server says that the lease lives for a minute
		may: []Finding{StaleUnfenced},
	}
	NodeEmptied = &Scenario{
		Name: "node-emptied", Law: "L1",
		Text: "The one node that the holder's and the rival's majorities share is killed and started again without its data; each reaches " +
			"only three of five.",
		on: only(Redlock), before: shareOneNode, fault: nodeEmptied,
		may: []Finding{StaleUnfenced},
	}
	TwoPaused = &Scenario{
		Name: "two-of-five-paused", Law: "L1",
		Text: "Two of five nodes are stopped (SIGSTOP) for one and a half TTL.",
		on:   only(Redlock), fault: nodesPaused(2),
		may: []Finding{StaleUnfenced},
	}
	ThreePaused = &Scenario{
		Name: "three-of-five-paused", Law: "L2",
		Text: "Three of five nodes are stopped (SIGSTOP) for one and a half TTL.",
		on:   only(Redlock), fault: nodesPaused(3),
		may: []Finding{StaleUnfenced},
	}
	AcquireReplyLost = &Scenario{
		Name: "acquire-reply-lost", Law: "L5",
		Text: "The lock is free, the rival asks for it, and the reply that grants it is dropped.",
		on:   hasLines, late: true, fault: acquireReplyLost,
	}
	ReplicaPromoted = &Scenario{
		Name: "replica-promoted", Law: "L1",
		Text: "The replicas are cut off before the lock is taken; then the primary is killed, and one that never saw the lock is promoted.",
		on:   only(RedisSentinel), before: detach, fault: promoted,
		may: []Finding{Overlap, StaleUnfenced},
	}
	LeaseRevoked = &Scenario{
		Name: "lease-revoked", Law: "L3",
		Text: "An operator revokes all leases of the cluster.",
		on:   only(Etcd), fault: leasesRevoked,
		may: []Finding{Overlap, StaleUnfenced},
	}
	FollowerPaused = &Scenario{
		Name: "follower-paused", Law: "L1",
		Text: "One member that does not lead is stopped (SIGSTOP) for one and a half TTL.",
		on:   only(Etcd), fault: followersPaused(1),
		may: []Finding{StaleUnfenced},
	}
	MajorityPaused = &Scenario{
		Name: "majority-paused", Law: "L2",
		Text: "Two of three members are stopped (SIGSTOP) for one and a half TTL.",
		on:   only(Etcd), fault: followersPaused(2),
		may: []Finding{StaleUnfenced},
	}
	BackendsTerminated = &Scenario{
		Name: "backends-terminated", Law: "L7",
		Text: "An administrator ends the connections of all clients (pg_terminate_backend).",
		on:   only(Postgres), fault: backendsTerminated,
		may: []Finding{StaleUnfenced},
	}
	StandbyPromoted = &Scenario{
		Name: "standby-promoted", Law: "L1",
		Text: "The standby is cut off before the lock is taken; then the primary is killed, and the standby, which never saw the lock, is promoted.",
		on:   only(Postgres), before: cutStandby, fault: standbyPromoted,
		may: []Finding{Overlap, StaleUnfenced},
	}
)

// Scenarios are all of them, in the order of tables.
func Scenarios() []*Scenario {
	return []*Scenario{
		HolderPaused, HolderKilled, HolderCutOff, RepliesLost, RequestsLost,
		AcquireReplyLost, GrantLost, ServerPaused, ServerRestarted, ServerEmptied, Flushed, Evicted, ClockAhead, ClockBack,
		NodeEmptied, TwoPaused, ThreePaused, ReplicaPromoted,
		FollowerPaused, MajorityPaused, LeaseRevoked, BackendsTerminated, StandbyPromoted,
	}
}

// Fits reports whether the scenario can happen to the backend: there are no servers to a directory, for example.
func (s *Scenario) Fits(b *Backend) bool { return s.on == nil || s.on(b) }

func hasServers(b *Backend) bool { return b != File }

func hasLines(b *Backend) bool { return hasServers(b) && !b.found }

func only(which ...*Backend) func(*Backend) bool {
	return func(b *Backend) bool { return slices.Contains(which, b) }
}

// patience bounds each step of a scenario; if it ends, the lane is void.
const patience = 30 * time.Second

func holderPaused(ctx context.Context, s *stage) error {
	return s.each(func(l *lane) error {
		if err := l.holder.PauseBetween(); err != nil {
			return err
		}
		s.rec.FaultHit(l.name)
		return first(l.rivalWrites(ctx), l.holder.Resume())
	})
}

func holderKilled(ctx context.Context, s *stage) error {
	return s.each(func(l *lane) error {
		if err := l.holder.Kill(); err != nil {
			return err
		}
		s.rec.FaultHit(l.name)
		return l.rivalWrites(ctx)
	})
}

// holderCut cuts the holder's network in a direction.
func holderCut(d servers.Direction) func(context.Context, *stage) error {
	return func(ctx context.Context, s *stage) error {
		return s.each(func(l *lane) error {
			l.lines[0].cut(d)
			defer l.lines[0].heal()
			s.rec.FaultHit(l.name)
			return l.rivalWrites(ctx)
		})
	}
}

// repliesLost lets the holder's renewals arrive, so that the rival must wait for longer than the holder believes.
func repliesLost(ctx context.Context, s *stage) error {
	return s.each(func(l *lane) error {
		l.lines[0].cut(servers.ToClient)
		defer l.lines[0].heal()
		s.rec.FaultHit(l.name)
		return l.holder.AwaitEvent(ctx, isType(history.LossTold))
	})
}

func serverPaused(ctx context.Context, s *stage) error {
	server, err := s.leader(ctx)
	if err != nil {
		return err
	}
	return s.paused(ctx, []servers.Server{server})
}

func serverRestarted(ctx context.Context, s *stage) error {
	server, err := s.leader(ctx)
	if err == nil {
		err = server.Kill()
	}
	if err != nil {
		return err
	}
	s.hit()
	return first(sleep(ctx, s.ttl/2), server.Start(ctx))
}

func serverEmptied(ctx context.Context, s *stage) error { return s.emptied(ctx, s.servers[0]) }

// emptied kills a server and starts it again without its data.
func (s *stage) emptied(ctx context.Context, server servers.Server) error {
	if err := server.Kill(); err != nil {
		return err
	}
	s.hit()
	return server.StartEmpty(ctx)
}

func flushed(ctx context.Context, s *stage) error {
	if _, err := s.servers[0].(*servers.Redis).Do(ctx, "FLUSHALL"); err != nil {
		return err
	}
	s.hit()
	return nil
}

// evicted fills the server with keys that are used all the time until those of the lanes are gone.
func evicted(ctx context.Context, s *stage) (err error) {
	redis := s.servers[0].(*servers.Redis)
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errors.New("lab: nothing was evicted"))
	defer cancel()
	info, err := redis.Do(ctx, "INFO", "memory")
	if err != nil {
		return err
	}
	_, used, _ := strings.Cut(fmt.Sprint(info), "used_memory:")
	var bytes int64
	if _, err := fmt.Sscan(used, &bytes); err != nil {
		return fmt.Errorf("lab: memory in use: %w", err)
	}
	for _, args := range [][]string{{"CONFIG", "SET", "maxmemory-policy", "allkeys-lru"}, {"CONFIG", "SET", "maxmemory", fmt.Sprint(bytes + 1<<20)}} {
		if _, err := redis.Do(ctx, args...); err != nil {
			return err
		}
	}
	defer func() {
		_, enough := redis.Do(ctx, "CONFIG", "SET", "maxmemory", "0")
		err = first(err, enough)
	}()
	filler := strings.Repeat("x", 16<<10)
	for i := 0; ; i++ {
		if _, err := redis.Do(ctx, "SET", fmt.Sprintf("filler:%d", i), filler); err != nil {
			return err
		}
		left, err := redis.Do(ctx, "EVAL", "return #redis.call('KEYS', 'fencelock:l:*')", "0")
		if err != nil {
			return err
		}
		if left == int64(0) {
			s.hit()
			return nil
		}
	}
}

func acquireReplyLost(ctx context.Context, s *stage) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return s.each(func(l *lane) error {
		l.stopHolder()
		if err := l.holder.AwaitEvent(ctx, isType(history.ReleaseReturned)); err != nil {
			return err
		}
		dropped := make(chan struct{}, len(l.lines[1].proxies))
		for _, p := range l.lines[1].proxies {
			hit := p.DropNextReply(&servers.DropOptions{RequestWith: cmp.Or(s.request, l.name)})
			go func() {
				select {
				case <-hit:
					dropped <- struct{}{}
				case <-ctx.Done():
				}
			}()
		}
		l.beginRival(s)
		select {
		case <-dropped:
			s.rec.FaultHit(l.name)
		case <-time.After(patience):
			return errors.New("lab: no reply was dropped")
		}
		return l.rivalWrites(ctx)
	})
}

func grantLost(ctx context.Context, s *stage) error {
	return s.each(func(l *lane) error {
		l.lines[1].cut(servers.ToClient)
		l.stopHolder()
		s.rec.FaultHit(l.name)
		err := sleep(ctx, s.ttl/4)
		l.lines[1].heal()
		return first(err, l.rivalWrites(ctx))
	})
}

// shared is the node of a Redlock that both majorities of shareOneNode have.
const shared = 2

// shareOneNode lets holder and rival each reach three nodes of a Redlock only, one of which is the same.
func shareOneNode(_ context.Context, s *stage) error {
	if len(s.servers) == 5 {
		for _, l := range s.lanes {
			l.lines[0].cut(servers.Both, 3, 4)
			l.lines[1].cut(servers.Both, 0, 1)
		}
	}
	return nil
}

// sharedNode is the only server, or the one that both majorities of shareOneNode have.
func (s *stage) sharedNode() *servers.Redis {
	return s.servers[min(shared, len(s.servers)-1)].(*servers.Redis)
}

func clockAhead(ctx context.Context, s *stage) error {
	return s.clockStepped(ctx, s.ttl+100*time.Millisecond)
}

func clockBack(ctx context.Context, s *stage) error { return s.clockStepped(ctx, -time.Minute) }

// clockStepped steps the clock of the shared node, and waits a TTL.
func (s *stage) clockStepped(ctx context.Context, by time.Duration) error {
	if err := s.sharedNode().SetClock(by); err != nil {
		return err
	}
	s.hit()
	return sleep(ctx, s.ttl)
}

func nodeEmptied(ctx context.Context, s *stage) error {
	return first(s.emptied(ctx, s.sharedNode()), sleep(ctx, s.ttl))
}

func nodesPaused(n int) func(context.Context, *stage) error {
	return func(ctx context.Context, s *stage) error { return s.paused(ctx, s.servers[:n]) }
}

func detach(ctx context.Context, s *stage) error { return s.sentinels.Detach(ctx) }

func promoted(ctx context.Context, s *stage) error {
	old, err := s.sentinels.Primary(ctx)
	if err == nil {
		err = old.Kill()
	}
	if err != nil {
		return err
	}
	s.hit()
	_, err = s.sentinels.AwaitPrimary(ctx, old)
	return err
}

// followersPaused stops so many members that do not lead.
func followersPaused(n int) func(context.Context, *stage) error {
	return func(ctx context.Context, s *stage) error {
		leader, err := s.leader(ctx)
		if err != nil {
			return err
		}
		followers := slices.DeleteFunc(slices.Clone(s.servers), func(m servers.Server) bool { return m == leader })
		return s.paused(ctx, followers[:n])
	}
}

// paused stops servers for one and a half TTL.
func (s *stage) paused(ctx context.Context, which []servers.Server) error {
	var errs []error
	for _, server := range which {
		errs = append(errs, server.Pause())
	}
	s.hit()
	errs = append(errs, sleep(ctx, s.ttl*3/2))
	for _, server := range which {
		errs = append(errs, server.Resume())
	}
	return first(errs...)
}

func leasesRevoked(ctx context.Context, s *stage) error {
	member := s.servers[0].(*servers.Etcd)
	text, err := member.Call(ctx, "/v3/lease/leases", "{}")
	if err != nil {
		return err
	}
	var listed struct{ Leases []struct{ ID string } }
	if err := json.Unmarshal(text, &listed); err != nil {
		return err
	}
	for _, l := range listed.Leases {
		if _, err := member.Call(ctx, "/v3/lease/revoke", fmt.Sprintf(`{"ID": %q}`, l.ID)); err != nil {
			return err
		}
	}
	s.hit()
	return nil
}

func backendsTerminated(ctx context.Context, s *stage) error {
	n, err := s.servers[0].(*servers.Postgres).TerminateBackends(ctx)
	if err == nil && n > 0 {
		s.hit()
	}
	return err
}

func cutStandby(ctx context.Context, s *stage) error {
	return s.servers[1].(*servers.Postgres).Detach(ctx)
}

func standbyPromoted(ctx context.Context, s *stage) error {
	if err := s.servers[0].Kill(); err != nil {
		return err
	}
	s.hit()
	_, err := s.servers[1].(*servers.Postgres).SQL(ctx, "", "SELECT pg_promote()")
	return err
}

// first is the first error of several, all of which have been done.
func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return fmt.Errorf("lab: %w", context.Cause(ctx))
	}
}

func isType(t history.Type) func(history.Event) bool {
	return func(e history.Event) bool { return e.Type == t }
}
