package lab

import (
	"context"
	"fmt"
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

	on    func(b *Backend) bool // nil: every backend
	fault func(ctx context.Context, s *stage) error
	may   func(b *Backend) []Finding // beside none
	shows Finding                    // what at least one lane of all must show, if set
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
		may:   always(StaleUnfenced), shows: StaleUnfenced,
	}
	HolderKilled = &Scenario{
		Name: "holder-killed", Law: "W3",
		Text:  "The holder's process is killed (SIGKILL).",
		fault: holderKilled,
	}
	HolderCutOff = &Scenario{
		Name: "holder-cut-off", Law: "L2",
		Text: "The network between the holder and the servers drops everything, until the rival holds.",
		on:   hasServers, fault: holderCut(servers.Both),
		may: always(StaleUnfenced), // by a write that was decided on just before the end
	}
	RepliesLost = &Scenario{
		Name: "replies-lost", Law: "L2",
		Text: "The holder's requests arrive and the replies are dropped, until its lease has ended.",
		on:   hasServers, fault: repliesLost,
		may: always(StaleUnfenced),
	}
	RequestsLost = &Scenario{
		Name: "requests-lost", Law: "L2",
		Text: "The holder's requests are dropped and what the servers send arrives, until the rival holds.",
		on:   hasServers, fault: holderCut(servers.ToServer),
		may: always(StaleUnfenced),
	}
	ServerPaused = &Scenario{
		Name: "server-paused", Law: "L2",
		Text: "The server, of a cluster the leader, is stopped (SIGSTOP) for one and a half TTL.",
		on:   hasServers, fault: serverPaused,
		may: always(StaleUnfenced),
	}
	ServerRestarted = &Scenario{
		Name: "server-restarted", Law: "T1",
		Text: "The server, of a cluster the leader, is killed (SIGKILL) and started again with its data after half a TTL.",
		on:   hasServers, fault: serverRestarted,
		may: always(StaleUnfenced),
	}
	ServerEmptied = &Scenario{
		Name: "server-emptied", Law: "T1",
		Text: "The server is killed and started again at once without its data: it has forgotten who holds.",
		on:   only(Redis), fault: serverEmptied,
		may: always(Overlap, StaleUnfenced),
	}
	Flushed = &Scenario{
		Name: "flushall", Law: "T1",
		Text: "An operator deletes all keys (FLUSHALL).",
		on:   only(Redis), fault: flushed,
		may: always(Overlap, StaleUnfenced), shows: Overlap,
	}
)

// Scenarios are all of them, in the order of tables.
func Scenarios() []*Scenario {
	return []*Scenario{
		HolderPaused, HolderKilled, HolderCutOff, RepliesLost, RequestsLost,
		ServerPaused, ServerRestarted, ServerEmptied, Flushed,
	}
}

// Fits reports whether the scenario can happen to the backend: there are no servers to a directory, for example.
func (s *Scenario) Fits(b *Backend) bool { return s.on == nil || s.on(b) }

func hasServers(b *Backend) bool { return b != File }

func only(which *Backend) func(*Backend) bool { return func(b *Backend) bool { return b == which } }

func always(f ...Finding) func(*Backend) []Finding { return func(*Backend) []Finding { return f } }

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
			l.line.cut(d)
			defer l.line.heal()
			s.rec.FaultHit(l.name)
			return l.rivalWrites(ctx)
		})
	}
}

// repliesLost lets the holder's renewals arrive, so that the rival must wait for longer than the holder believes.
func repliesLost(ctx context.Context, s *stage) error {
	return s.each(func(l *lane) error {
		l.line.cut(servers.ToClient)
		defer l.line.heal()
		s.rec.FaultHit(l.name)
		return l.holder.AwaitEvent(ctx, isType(history.LossTold))
	})
}

func serverPaused(ctx context.Context, s *stage) error {
	server, err := s.leader(ctx)
	if err == nil {
		err = server.Pause()
	}
	if err != nil {
		return err
	}
	s.hit()
	return first(sleep(ctx, s.ttl*3/2), server.Resume())
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

func serverEmptied(ctx context.Context, s *stage) error {
	if err := s.servers[0].Kill(); err != nil {
		return err
	}
	s.hit()
	return s.servers[0].StartEmpty(ctx)
}

func flushed(ctx context.Context, s *stage) error {
	if _, err := s.servers[0].(*servers.Redis).Do(ctx, "FLUSHALL"); err != nil {
		return err
	}
	s.hit()
	return nil
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
