package lab

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
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

	not    func(b *Backend) string                   // why it cannot happen to the backend; nil: it can to every one
	before func(ctx context.Context, s *stage) error // with the processes there, and nothing begun
	fault  func(ctx context.Context, s *stage) error
	late   bool          // the rival begins its work in the fault
	longer []*Backend    // where a server may grant more than was asked for
	plain  bool          // the holder does not renew
	hangs  bool          // and hangs for two TTLs between its look at the lease and its write
	keeps  bool          // a lease is lost where a lane cuts its holder off, and nowhere else
	clock  bool          // the processes have a wall clock that can be set
	ttl    time.Duration // of the leases, if it is more than the backend's
	may    []allowance   // what may be found, beside nothing
	shows  Finding       // what at least one lane of all must show, if set
}

// An allowance is a finding that is to be expected, and why that is no fault of the backend.
type allowance struct {
	finding Finding // empty for what no finding says, but is to be explained all the same
	why     string
	on      []*Backend // nil: every one
}

// of says whether it is one for a backend.
func (a allowance) of(backend string) bool { return a.on == nil || among(a.on, backend) }

// among says whether a backend of that name is among these, in containers or not.
func among(all []*Backend, name string) bool {
	return slices.ContainsFunc(all, func(b *Backend) bool { return b.Name == name })
}

// allows says whether a finding is to be expected of a backend.
func (s *Scenario) allows(f Finding, backend string) bool {
	return slices.ContainsFunc(s.may, func(a allowance) bool { return a.finding == f && a.of(backend) })
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
	// EarlyLoss: a lease was lost though nothing had happened that may end one.
	EarlyLoss Finding = "early loss"
	// LateLoss: a holder that was not stopped was told of its loss late, or believed longer than it might.
	LateLoss Finding = "late loss"
	// Crash: a worker ended by itself.
	Crash Finding = "crash"
)

// lateWrite is what a lock does not prevent.
var lateWrite = allowance{finding: StaleUnfenced, why: "A write that was decided on just before the lease ended arrived after the next holder's. " +
	"No lock prevents that, and a guard does."}

// The scenarios.
var (
	HolderPaused = &Scenario{
		Name: "holder-paused", Law: "L2",
		Text: "The holder's process is stopped (SIGSTOP) while it works, most often between a look at the lease and the write that relies on it, until " +
			"the rival holds and has written.",
		not: noProcesses, fault: holderPaused,
		may: []allowance{{finding: StaleUnfenced, why: "Nothing tells a process that was stopped before it goes on with its write. " +
			"No lock promises to prevent that, and a guard does."}},
		shows: StaleUnfenced,
	}
	HolderHangs = &Scenario{
		Name: "holder-hangs", Law: "L2",
		Text:  "The holder does not renew its lease, and its goroutine hangs between its look at it and its write for two TTLs; the process goes on.",
		plain: true, hangs: true, fault: holderHangs,
		may: []allowance{{finding: StaleUnfenced, why: "The loss was told in time, and the goroutine did not look again. " +
			"No lock promises to prevent that, and a guard does."}},
		shows: StaleUnfenced,
	}
	HolderKilled = &Scenario{
		Name: "holder-killed", Law: "W3",
		Text: "The holder's process is killed (SIGKILL).",
		not:  noProcesses, fault: holderKilled,
	}
	HolderClockAhead = &Scenario{
		Name: "holder-clock-ahead", Law: "S2",
		Text: "The wall clock of the holder's process is stepped a day ahead while it holds. A TTL and a half later it is cut off, or releases " +
			"where nothing can be cut, and asks again; its clock is stepped by one more day while it waits. After it the rival asks again.",
		not: noClock, clock: true, keeps: true, fault: holderClock(24 * time.Hour),
		may: []allowance{lateWrite, {on: []*Backend{File, Etcd}, why: "A client's clock makes the tokens. They stay in order, but run ahead of the time by as " +
			"much as that clock did; the others take them from a server or, as memory does, from a clock that is never set."}},
	}
	HolderClockBack = &Scenario{
		Name: "holder-clock-back", Law: "S2",
		Text: "The same, with the clock stepped a day back each time.",
		not:  noClock, clock: true, keeps: true, fault: holderClock(-24 * time.Hour),
		may: []allowance{lateWrite},
	}
	HolderCutOff = &Scenario{
		Name: "holder-cut-off", Law: "L2",
		Text: "The network between the holder and the servers drops everything, until the rival holds.",
		not:  cannotCut, fault: holderCut(servers.Both),
		may: []allowance{lateWrite},
	}
	RepliesLost = &Scenario{
		Name: "replies-lost", Law: "L2",
		Text: "The holder's requests arrive and the replies are dropped, until its lease has ended.",
		not:  cannotCut, fault: repliesLost,
		may: []allowance{lateWrite},
	}
	RequestsLost = &Scenario{
		Name: "requests-lost", Law: "L2",
		Text: "The holder's requests are dropped and what the servers send arrives, until the rival holds.",
		not:  cannotCut, fault: holderCut(servers.ToServer),
		may: []allowance{lateWrite},
	}
	AcquireReplyLost = &Scenario{
		Name: "acquire-reply-lost", Law: "L5",
		Text: "The lock is free, the rival asks for it, and the reply that grants it is dropped.",
		not:  cannotCut, late: true, fault: acquireReplyLost,
	}
	GrantLost = &Scenario{
		Name: "grant-lost", Law: "L5",
		Text: "The holder releases while the network drops what the servers send to the rival, for a quarter of a TTL: the grant does not arrive.",
		not:  cannotCut, fault: grantLost,
		may: []allowance{lateWrite},
	}
	ServerPaused = &Scenario{
		Name: "server-paused", Law: "L2",
		Text: "The server, of a cluster the leader, is stopped (SIGSTOP) for one and a half TTL.",
		not:  serverless, fault: serverPaused,
		may: []allowance{lateWrite, {finding: Overlap, why: endedByOldLeader, on: []*Backend{Etcd}}},
	}
	ServerRestarted = &Scenario{
		Name: "server-restarted", Law: "T1",
		Text: "The server, of a cluster the leader, is killed (SIGKILL) and started again with its data after half a TTL.",
		not:  serverless, fault: serverRestarted,
		may: []allowance{lateWrite},
	}
	ServerEmptied = &Scenario{
		Name: "server-emptied", Law: "T1",
		Text:  "The server is killed and started again at once without its data: it has forgotten who holds.",
		not:   only("of several servers see node-emptied, replica-promoted and standby-promoted; etcd lets no empty member in", Redis),
		fault: serverEmptied,
		may:   []allowance{forgotten, staleOverlap},
	}
	Flushed = &Scenario{
		Name: "flushall", Law: "T1",
		Text: "An operator deletes all keys (FLUSHALL).",
		not:  only("it is a command of Redis, shown on one server", Redis), fault: flushed,
		may: []allowance{forgotten, staleOverlap}, shows: Overlap,
	}
	Evicted = &Scenario{
		Name: "eviction", Law: "L1",
		Text: "The server runs out of memory with a policy that evicts: what was used least recently goes first, the lock with it.",
		not:  only("only Redis evicts, shown on one server", Redis), fault: evicted,
		may: []allowance{{finding: Overlap, why: "The server never evicts, assumes docs/choosing.md; the driver warns of such a policy when it is opened. " +
			"The lock was free for the rival, and the holder was told at its next renewal."}, staleOverlap},
	}
	ClockAhead = &Scenario{
		Name: "clock-ahead", Law: "S2",
		Text: "The server's clock is stepped ahead by a TTL. With Redlock it is the clock of the one node that the holder's and the rival's " +
			"majorities share; each reaches only three of five.",
		not: processesOnly(noLibrary, only(clockOfRedis, Redis, Redlock)), before: shareOneNode, fault: clockAhead,
		may: []allowance{
			{finding: Overlap, why: "The server's clock is not stepped forward, assumes docs/choosing.md. The lease ended at once by that clock, " +
				"and the holder was told at its next renewal.", on: []*Backend{Redis}},
			{finding: Overlap, why: "The clocks of a majority are not stepped forward, assumes docs/choosing.md. Each client reaches one majority, " +
				"and one of its three nodes had ended the lease.", on: []*Backend{Redlock}},
			staleOverlap,
		},
	}
	ClockBack = &Scenario{
		Name: "clock-back", Law: "T1",
		Text:   "The same, with the clock stepped back by 60 s.",
		not:    processesOnly(noLibrary, only(clockOfRedis, Redis, Redlock)),
		before: shareOneNode, fault: clockBack, longer: []*Backend{Redis}, // the server says that the lease lives for a minute
		may: []allowance{lateWrite},
	}
	NodeEmptied = &Scenario{
		Name: "node-emptied", Law: "L1",
		Text: "The one node that the holder's and the rival's majorities share is killed and started again without its data; each reaches " +
			"only three of five.",
		not: only(notFive, Redlock), before: shareOneNode, fault: nodeEmptied,
		may: []allowance{lateWrite},
	}
	NodeEmptiedNewcomer = &Scenario{
		Name: "node-emptied-newcomer", Law: "L1",
		Text: "The same, and the rival is a process that is started afterwards. The holder does not renew its lease, or it would give it to the node again.",
		not:  only(notFive, Redlock), before: shareOneNode, late: true, plain: true, ttl: 5 * time.Second, fault: nodeEmptiedNewcomer,
		may: []allowance{{finding: Overlap, why: "Servers do not forget, assumes docs/choosing.md. A client that has known the node notices, and a new one cannot: " +
			"see Options.RestartWait in docs/redlock.md."}, staleOverlap}, shows: Overlap,
	}
	TwoPaused = &Scenario{
		Name: "two-of-five-paused", Law: "L1",
		Text: "Two of five nodes are stopped (SIGSTOP) for one and a half TTL.",
		not:  only(notFive, Redlock), keeps: true, fault: nodesPaused(2),
		may: []allowance{lateWrite},
	}
	ThreePaused = &Scenario{
		Name: "three-of-five-paused", Law: "L2",
		Text: "Three of five nodes are stopped (SIGSTOP) for one and a half TTL.",
		not:  only(notFive, Redlock), fault: nodesPaused(3),
		may: []allowance{lateWrite},
	}
	ReplicaPromoted = &Scenario{
		Name: "replica-promoted", Law: "L1",
		Text: "The replicas are cut off before the lock is taken; then the primary is killed, and one that never saw the lock is promoted. The holder does " +
			"not renew its lease, or it would hear of that.",
		not: only("there are no replicas; for PostgreSQL see standby-promoted", RedisSentinel), plain: true, before: detach, fault: promoted,
		may: []allowance{{finding: Overlap, why: lostByFailover}, staleOverlap}, shows: Overlap,
	}
	FollowerPaused = &Scenario{
		Name: "follower-paused", Law: "L1",
		Text: "One member that does not lead is stopped (SIGSTOP) for one and a half TTL.",
		not:  only(noMembers, Etcd), keeps: true, fault: followersPaused(1),
		may: []allowance{lateWrite},
	}
	MajorityPaused = &Scenario{
		Name: "majority-paused", Law: "L2",
		Text: "Two of three members are stopped (SIGSTOP) for one and a half TTL.",
		not:  only(noMembers, Etcd), fault: followersPaused(2),
		may: []allowance{lateWrite},
	}
	MinorityCut = &Scenario{
		Name: "minority-cut", Law: "L2",
		Text: "The leader is cut off from the two other members for one and a half TTL. The clients reach all three.",
		not:  only("there are no members that elect a leader", Etcd), fault: minorityCut,
		may: []allowance{lateWrite},
	}
	LeaseRevoked = &Scenario{
		Name: "lease-revoked", Law: "L3",
		Text: "An operator revokes all leases of the cluster.",
		not:  only("such leases are etcd's only", Etcd), fault: leasesRevoked,
		may: []allowance{{finding: Overlap, why: "An operator took the lock away, which docs/choosing.md does not count as a failure of the cluster. " +
			"The rival had it at once, and the holder was told when it heard of it or at its next renewal."}, staleOverlap},
	}
	BackendsTerminated = &Scenario{
		Name: "backends-terminated", Law: "L7",
		Text: "An administrator ends the connections of all clients (pg_terminate_backend).",
		not:  only("it is a command of PostgreSQL", Postgres), fault: backendsTerminated,
		may: []allowance{lateWrite, {on: []*Backend{Postgres}, why: "No lock hangs on a connection, but a renewal needs one. All clients connect again at once, and each " +
			"costs the server a process: the more lanes, the more of them are too late for a TTL of a second, are told so and have to queue again."}},
	}
	StandbyPromoted = &Scenario{
		Name: "standby-promoted", Law: "L1",
		Text: "The standby is cut off before the lock is taken; then the primary is killed, and the standby, which never saw the lock, is promoted. " +
			"The holder does not renew its lease, or it would hear of that.",
		not: processesOnly("the standby is run as a process only", only("there is no standby; for Redis see replica-promoted", Postgres)), plain: true, ttl: 5 * time.Second,
		before: cutStandby, fault: standbyPromoted,
		may: []allowance{{finding: Overlap, why: lostByFailover}, staleOverlap}, shows: Overlap,
	}
)

// What several scenarios have to explain.
var (
	forgotten = allowance{finding: Overlap, why: "The server forgets nothing that it acknowledged, assumes docs/choosing.md. The lock was free for the rival, " +
		"and the holder was told at its next renewal."}
	staleOverlap = allowance{finding: StaleUnfenced, why: "Both wrote while both believed. A guard let the one with the greater token through only."}
)

const (
	lostByFailover = "A promoted server forgets what it was not sent, says docs/choosing.md. Two believe from the promotion until the end of the holder's lease " +
		"or its next renewal."
	endedByOldLeader = "A leader that was stopped ends, when it goes on and before it hears of its successor, what has run out by its own count, though the " +
		"successor has renewed it (etcd issue 15247; rare, seen on 3.5.16). The rival has the lock at once, and the holder is told when it hears of that."
	clockOfRedis = "the library that steps a server's clock is made for Redis"
	noLibrary    = "no image has the library that steps a server's clock"
	notFive      = "there are not five nodes that are equal"
	noMembers    = "there are no members that elect a leader; for Redlock see two-of-five-paused"
)

// Scenarios are all of them, in the order of tables.
func Scenarios() []*Scenario {
	return []*Scenario{
		HolderPaused, HolderHangs, HolderKilled, HolderClockAhead, HolderClockBack, HolderCutOff, RepliesLost, RequestsLost,
		AcquireReplyLost, GrantLost, ServerPaused, ServerRestarted, ServerEmptied, Flushed, Evicted, ClockAhead, ClockBack,
		NodeEmptied, NodeEmptiedNewcomer, TwoPaused, ThreePaused, ReplicaPromoted,
		FollowerPaused, MajorityPaused, MinorityCut, LeaseRevoked, BackendsTerminated, StandbyPromoted,
	}
}

// Fits reports whether the scenario can happen to the backend: there are no servers to a directory, for example.
func (s *Scenario) Fits(b *Backend) bool { return s.Not(b) == "" }

// Not says why the scenario cannot happen to the backend; empty if it can.
func (s *Scenario) Not(b *Backend) string {
	if s.not == nil {
		return ""
	}
	return s.not(b)
}

// noClock says why the wall clock of a process cannot be set here.
func noClock(*Backend) string {
	if runtime.GOOS == "linux" && runtime.GOARCH == "amd64" {
		return ""
	}
	return "a process gets a wall clock of its own on Linux on amd64 only"
}

func noProcesses(b *Backend) string { return b.noProcesses }

func serverless(b *Backend) string { return b.noServers }

func cannotCut(b *Backend) string { return b.noNetwork }

// only is for scenarios of a few backends; why says it of others that have servers.
func only(why string, which ...*Backend) func(*Backend) string {
	return func(b *Backend) string {
		if slices.Contains(which, b) || b.contained != nil && slices.Contains(which, b.contained) {
			return ""
		}
		return cmp.Or(b.noServers, why)
	}
}

// processesOnly is for what containers have no counterpart of.
func processesOnly(why string, not func(*Backend) string) func(*Backend) string {
	return func(b *Backend) string {
		if w := not(b); w != "" || b.contained == nil {
			return w
		}
		return why
	}
}

// What scenarios ask of servers, in containers or not.
type (
	redisServer interface {
		Do(ctx context.Context, args ...string) (any, error)
	}
	etcdServer interface {
		Call(ctx context.Context, path, body string) ([]byte, error)
	}
	postgresServer interface {
		TerminateBackends(ctx context.Context) (int, error)
	}
)

// patience bounds each step of a scenario; if it ends, the lane is void.
const patience = 30 * time.Second

func holderPaused(ctx context.Context, s *stage) error {
	return s.each(func(l *lane) error {
		if err := l.holder.PauseBetween(); err != nil {
			return err
		}
		s.rec.FaultHit(l.name)
		return first(l.wrote(ctx, rival, 0), l.holder.Resume())
	})
}

// holderHangs waits for what hangs to go on.
func holderHangs(ctx context.Context, s *stage) error {
	return s.each(func(l *lane) error {
		s.rec.FaultHit(l.name)
		return first(l.wrote(ctx, rival, 0), l.wrote(ctx, holder, 0))
	})
}

func holderClock(by time.Duration) func(context.Context, *stage) error {
	return func(ctx context.Context, s *stage) error {
		return s.each(func(l *lane) error {
			if err := l.holder.SetClock(by); err != nil {
				return err
			}
			s.rec.FaultHit(l.name)
			if err := sleep(ctx, s.ttl*3/2); err != nil {
				return err
			}
			l.cutAt = history.Clock(time.Now())
			if len(l.lines[0].proxies) > 0 {
				l.lines[0].cut(servers.Both)
				defer l.lines[0].heal() // for the case of an error
			} else {
				l.stopHolder()
			}
			if err := l.wrote(ctx, rival, 0); err != nil {
				return err
			}
			l.lines[0].heal()
			return l.holderWaits(ctx, s, 2*by)
		})
	}
}

// holderWaits lets the holder ask once more, with its clock stepped while it waits, and the rival once more after it.
func (l *lane) holderWaits(ctx context.Context, s *stage, clock time.Duration) error {
	asked := history.Clock(time.Now())
	l.begin(s, holder, s.ttl/2)
	err := l.await(ctx, holder, func(e history.Event) bool { return e.Type == history.Started && e.T > asked })
	if err := first(err, sleep(ctx, s.ttl/10), l.holder.SetClock(clock), l.wrote(ctx, holder, asked)); err != nil {
		return err
	}
	l.begin(s, rival, s.ttl/2)
	return nil
}

func holderKilled(ctx context.Context, s *stage) error {
	return s.each(func(l *lane) error {
		if err := l.holder.Kill(); err != nil {
			return err
		}
		s.rec.FaultHit(l.name)
		return l.wrote(ctx, rival, 0)
	})
}

// holderCut cuts the holder's network in a direction.
func holderCut(d servers.Direction) func(context.Context, *stage) error {
	return func(ctx context.Context, s *stage) error {
		return s.each(func(l *lane) error {
			l.lines[0].cut(d)
			defer l.lines[0].heal()
			s.rec.FaultHit(l.name)
			return l.wrote(ctx, rival, 0)
		})
	}
}

// repliesLost lets the holder's renewals arrive, so that the rival must wait for longer than the holder believes.
func repliesLost(ctx context.Context, s *stage) error {
	return s.each(func(l *lane) error {
		l.lines[0].cut(servers.ToClient)
		defer l.lines[0].heal()
		s.rec.FaultHit(l.name)
		return l.await(ctx, holder, isType(history.LossTold))
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
	if _, err := s.servers[0].(redisServer).Do(ctx, "FLUSHALL"); err != nil {
		return err
	}
	s.hit()
	return nil
}

// evicted fills the server with keys that are used all the time until those of the lanes are gone.
func evicted(ctx context.Context, s *stage) (err error) {
	redis := s.servers[0].(redisServer)
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
		if err := l.await(ctx, holder, isType(history.ReleaseReturned)); err != nil {
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
		l.begin(s, rival, s.ttl*3/2)
		select {
		case <-dropped:
			s.rec.FaultHit(l.name)
		case <-time.After(patience):
			return errors.New("lab: no reply was dropped")
		}
		return l.wrote(ctx, rival, 0)
	})
}

func grantLost(ctx context.Context, s *stage) error {
	return s.each(func(l *lane) error {
		l.lines[1].cut(servers.ToClient)
		l.stopHolder()
		s.rec.FaultHit(l.name)
		err := sleep(ctx, s.ttl/4)
		l.lines[1].heal()
		return first(err, l.wrote(ctx, rival, 0))
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
func (s *stage) sharedNode() servers.Server { return s.servers[min(shared, len(s.servers)-1)] }

func clockAhead(ctx context.Context, s *stage) error {
	return s.clockStepped(ctx, s.ttl+100*time.Millisecond)
}

func clockBack(ctx context.Context, s *stage) error { return s.clockStepped(ctx, -time.Minute) }

// clockStepped steps the clock of the shared node, and waits a TTL.
func (s *stage) clockStepped(ctx context.Context, by time.Duration) error {
	if err := s.sharedNode().(*servers.Redis).SetClock(by); err != nil {
		return err
	}
	s.hit()
	return sleep(ctx, s.ttl)
}

func nodeEmptied(ctx context.Context, s *stage) error {
	return first(s.emptied(ctx, s.sharedNode()), sleep(ctx, s.ttl))
}

func nodeEmptiedNewcomer(ctx context.Context, s *stage) error {
	if err := s.emptied(ctx, s.sharedNode()); err != nil {
		return err
	}
	return s.each(func(l *lane) error {
		if err := l.newcomer(ctx, s); err != nil {
			return err
		}
		l.begin(s, rival, s.ttl*3/2)
		return l.wrote(ctx, rival, 0)
	})
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

func minorityCut(ctx context.Context, s *stage) error {
	leader, err := s.leader(ctx)
	if err == nil {
		err = s.isolate(ctx, slices.Index(s.servers, leader))
	}
	if err != nil {
		return err
	}
	defer s.heal()
	s.hit()
	return sleep(ctx, s.ttl*3/2)
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
	member := s.servers[0].(etcdServer)
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
	n, err := s.servers[0].(postgresServer).TerminateBackends(ctx)
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
