package history

import (
	"strings"
	"testing"
	"time"
)

func TestExclusion(t *testing.T) {
	runScripts(t, []scriptCase{
		{name: "one after another", run: func(s *script) { s.held(0, 10, 1); s.held(11, 20, 2) }},
		{name: "touching", run: func(s *script) { s.held(0, 10, 1); s.lock(5).got(10, 2, 0).released(12, 13, OK) }},
		{name: "attempts overlap, beliefs do not", run: func(s *script) {
			s.lock(0).got(5, 1, 0).released(20, 30, OK)
			s.lock(1).got(21, 2, 0).released(40, 41, OK) // before the first one's Release has returned
		}},
		{name: "overlap of a nanosecond", want: map[Law]int{L1: 1}, run: func(s *script) {
			s.lock(0).got(1, 1, 0).released(10.000001, 11, OK)
			s.lock(0).got(10, 2, 0).released(12, 13, OK)
		}},
		{name: "inside another", want: map[Law]int{L1: 1}, run: func(s *script) {
			s.held(0, 100, 1)
			s.held(10, 20, 2)
		}},
		{name: "two inside one, not adjacent to it", want: map[Law]int{L1: 2}, run: func(s *script) {
			s.held(0, 100, 1)
			s.held(10, 20, 2)
			s.held(50, 60, 3)
		}},
		{name: "names do not exclude each other", run: func(s *script) {
			s.held(0, 10, 1)
			s.start(1, Request{Client: "d", Kind: Lock, Name: "b"}).got(2, 1, 0).released(3, 4, OK)
		}},
		{name: "a lock and a permit of one name are two names", run: func(s *script) {
			s.held(0, 10, 1)
			s.heldPermit(1, 9, 1, 1)
		}},
		{name: "belief ends at V", run: func(s *script) {
			s.lock(0).got(1, 1, 10).lost(12)
			s.lock(2).got(10, 2, 0).released(20, 21, OK)
		}},
		{name: "taken before V", want: map[Law]int{L1: 1}, run: func(s *script) {
			s.lock(0).got(1, 1, 10).lost(12)
			s.lock(2).got(9.9, 2, 0).released(20, 21, OK)
		}},
		{name: "an extension moves V", want: map[Law]int{L1: 1}, run: func(s *script) {
			s.lock(0).got(1, 1, 10).extended(5, 6, 1, 15).lost(16)
			s.lock(2).got(12, 2, 0).released(20, 21, OK)
		}},
		{name: "loss told ends belief early", run: func(s *script) {
			s.lock(0).got(1, 1, 100).lost(8)
			s.lock(2).got(9, 2, 0).released(20, 21, OK)
		}},
		{name: "acquired after its own V: no belief at all", run: func(s *script) {
			s.lock(0).got(50, 1, 20).lost(51)
			s.lock(20).got(40, 2, 0).released(60, 61, OK)
		}},
		{name: "a dead process believes nothing", run: func(s *script) {
			s.startIn("p2", 0, Request{Kind: Lock, Name: "a"}).got(1, 1, 100)
			s.process(5, ProcessEnded, "p2")
			s.held(6, 10, 2)
		}},
		{name: "a stopped process goes on believing", want: map[Law]int{L1: 1}, run: func(s *script) {
			s.startIn("p2", 0, Request{Kind: Lock, Name: "a"}).got(1, 1, 100).lost(251)
			s.process(5, ProcessStopped, "p2")
			s.held(99, 120, 2)
			s.process(250, ProcessContinued, "p2")
		}},
		{name: "excused", rules: Rules{Excuse: []Law{L1}}, run: func(s *script) { s.held(0, 100, 1); s.held(10, 20, 2) }},
	})
}

func TestPermitBound(t *testing.T) {
	runScripts(t, []scriptCase{
		{name: "up to the limit", run: func(s *script) {
			s.heldPermit(0, 10, 1, 3)
			s.heldPermit(1, 10, 2, 3)
			s.heldPermit(2, 10, 3, 3)
		}},
		{name: "one too many", want: map[Law]int{S1: 1}, run: func(s *script) {
			for i := range 4 {
				s.heldPermit(float64(i), 10, uint64(i+1), 3)
			}
		}},
		{name: "limit one excludes", want: map[Law]int{S1: 1}, run: func(s *script) {
			s.heldPermit(0, 10, 1, 1)
			s.heldPermit(9.999, 12, 2, 1)
		}},
		{name: "touching", run: func(s *script) {
			s.heldPermit(0, 10, 1, 1)
			s.heldPermit(10, 20, 2, 1)
			s.heldPermit(20, 30, 3, 1)
		}},
		{name: "limits differ: the larger one comes last", run: func(s *script) {
			s.heldPermit(0, 10, 1, 1)
			s.heldPermit(1, 10, 2, 2)
			s.heldPermit(2, 10, 3, 3)
		}},
		{name: "limits differ: the smaller one comes last", want: map[Law]int{S1: 1}, run: func(s *script) {
			s.heldPermit(0, 10, 1, 5)
			s.heldPermit(1, 10, 2, 5)
			s.heldPermit(2, 10, 3, 2)
		}},
		{name: "the smaller one was granted first and returned last", run: func(s *script) {
			s.permit(0, 1).got(5, 1, 0).released(10, 11, OK)
			s.permit(0, 5).got(3, 2, 0).released(10, 11, OK)
		}},
		{name: "the smaller one waited until the others were gone", run: func(s *script) {
			s.heldPermit(0, 10, 1, 5)
			s.heldPermit(0, 10, 2, 5)
			s.permit(1, 1).got(10.5, 3, 0).released(12, 13, OK)
			s.permit(9, 5).got(10.2, 4, 0).released(12, 13, OK) // granted after it
		}},
		{name: "one attempt starts at the moment another returns", run: func(s *script) {
			s.permit(0, 5).got(5, 1, 0).released(10, 11, OK)
			s.permit(5, 1).got(6, 2, 0).released(10, 11, OK) // granted first
		}},
		{name: "one attempt starts just after another has returned", want: map[Law]int{S1: 1}, run: func(s *script) {
			s.permit(0, 5).got(5, 1, 0).released(10, 11, OK)
			s.permit(5.000001, 1).got(6, 2, 0).released(10, 11, OK)
		}},
		{name: "overlapping attempts, too many of a small limit", want: map[Law]int{S1: 1}, run: func(s *script) {
			// Each alone could have been first; together they cannot.
			s.permit(0, 2).got(5, 1, 0).released(10, 11, OK)
			s.permit(0, 2).got(5, 2, 0).released(10, 11, OK)
			s.permit(0, 2).got(5, 3, 0).released(10, 11, OK)
		}},
		{name: "overlapping attempts, small limits among large ones", want: map[Law]int{S1: 1}, run: func(s *script) {
			s.permit(0, 9).got(5, 1, 0).released(10, 11, OK)
			s.permit(0, 1).got(5, 2, 0).released(10, 11, OK)
			s.permit(0, 9).got(5, 3, 0).released(10, 11, OK)
			s.permit(0, 1).got(6, 4, 0).released(10, 11, OK)
		}},
		{name: "lowering the limit evicts nobody", run: func(s *script) {
			for i := range 5 {
				s.heldPermit(float64(i), 20, uint64(i+1), 5)
			}
			s.permit(6, 2).refused(7)
			s.permit(8, 2).got(20.5, 9, 0).released(21, 22, OK)
		}},
		{name: "a lost permit counts until V", want: map[Law]int{S1: 1}, run: func(s *script) {
			s.permit(0, 1).got(1, 1, 10).lost(11)
			s.permit(8, 1).got(9.5, 2, 0).released(12, 13, OK)
		}},
		{name: "a lost permit is free after V", run: func(s *script) {
			s.permit(0, 1).got(1, 1, 10).lost(11)
			s.permit(8, 1).got(10, 2, 0).released(12, 13, OK)
		}},
		{name: "a gap between two holders is enough for one that waited", run: func(s *script) {
			s.heldPermit(0, 5, 1, 1)
			s.permit(1, 1).got(5.2, 2, 0).released(5.4, 5.5, OK)
			s.permit(1, 1).got(5.6, 3, 0).released(6, 6.1, OK)
		}},
	})
}

func TestTokens(t *testing.T) {
	runScripts(t, []scriptCase{
		{name: "growing", run: func(s *script) { s.held(0, 1, 7); s.held(2, 3, 8); s.held(4, 5, 20) }},
		{name: "going back", want: map[Law]int{T1: 1}, run: func(s *script) { s.held(0, 1, 7); s.held(2, 3, 6) }},
		{name: "going back behind several", want: map[Law]int{T1: 1}, run: func(s *script) {
			s.held(0, 1, 5)
			s.held(2, 3, 9)
			s.held(4, 5, 10)
			s.held(6, 7, 8)
		}},
		{name: "equal and in order", want: map[Law]int{T1: 1, T2: 1}, run: func(s *script) { s.held(0, 1, 7); s.held(2, 3, 7) }},
		{name: "attempt began before the other returned", run: func(s *script) {
			s.lock(0).got(5, 8, 0).released(6, 7, OK)
			s.lock(4.9).got(8, 7, 0).released(9, 10, OK)
		}},
		{name: "attempt began at the moment the other returned", run: func(s *script) {
			s.lock(0).got(5, 8, 0).released(6, 7, OK)
			s.lock(5).got(8, 7, 0).released(9, 10, OK)
		}},
		{name: "attempt began just after the other returned", want: map[Law]int{T1: 1}, run: func(s *script) {
			s.lock(0).got(5, 8, 0).released(6, 7, OK)
			s.lock(5.000001).got(8, 7, 0).released(9, 10, OK)
		}},
		{name: "equal though concurrent", want: map[Law]int{T2: 1}, run: func(s *script) {
			s.lock(0).got(5, 8, 0).released(6, 7, OK)
			s.lock(1).got(7, 8, 0).released(9, 10, OK)
		}},
		{name: "equal in two names", run: func(s *script) {
			s.held(0, 1, 7)
			s.start(2, Request{Kind: Lock, Name: "b"}).got(3, 7, 0).released(4, 5, OK)
			s.heldPermit(6, 7, 7, 1)
		}},
		{name: "permits too", want: map[Law]int{T1: 1}, run: func(s *script) {
			s.heldPermit(0, 9, 7, 2)
			s.heldPermit(1, 9, 6, 2)
		}},
		{name: "three of the same token", want: map[Law]int{T2: 2}, run: func(s *script) {
			s.lock(0).got(5, 8, 0).released(6, 7, OK)
			s.lock(1).got(8, 8, 0).released(9, 10, OK)
			s.lock(2).got(11, 8, 0).released(12, 13, OK)
		}},
		{name: "a bare token shares the lock's domain", want: map[Law]int{T1: 1}, run: func(s *script) {
			s.held(0, 1, 7)
			s.start(2, Request{Kind: Token, Name: "a"}).got(3, 7-1, 0)
		}},
		{name: "a bare token is no lease", run: func(s *script) {
			s.held(0, 10, 7)
			s.start(2, Request{Kind: Token, Name: "a"}).got(3, 8, 0)
			s.idle(500)
		}},
		{name: "extension keeps the token", run: func(s *script) {
			s.lock(0).got(1, 7, 100).extended(5, 6, 7, 110).observed(7, 8, Believed, 7, 0).released(10, 11, OK)
		}},
		{name: "extension changes the token", want: map[Law]int{T3: 1}, run: func(s *script) {
			s.lock(0).got(1, 7, 100).extended(5, 6, 8, 110).released(10, 11, OK)
		}},
		{name: "extension without a token", want: map[Law]int{T3: 1}, run: func(s *script) {
			s.lock(0).got(1, 7, 100).extended(5, 6, 0, 110).released(10, 11, OK)
		}},
		{name: "re-entry with another token", want: map[Law]int{T3: 1}, run: func(s *script) {
			s.lock(0).got(1, 7, 100).observed(5, 6, Believed, 8, 0).released(10, 11, OK)
		}},
	})
}

func TestValidUntil(t *testing.T) {
	const ttl = time.Second // margin 10 ms
	try := Request{Client: "c", Kind: Lock, Name: "a", TTL: ttl}
	wait := try
	wait.Wait = true
	sent := func(ms float64) func(e *Event) { return func(e *Event) { e.Sent = at(ms) } }
	grant := func(token uint64, v float64, more func(e *Event)) func(e *Event) {
		return func(e *Event) {
			e.Token, e.V = token, vAt(v)
			if more != nil {
				more(e)
			}
		}
	}
	runScripts(t, []scriptCase{
		{name: "counted from the request", run: func(s *script) {
			s.start(0, try).event(20, Acquired, grant(1, 990, sent(0))).released(30, 31, OK)
		}},
		{name: "a nanosecond too late", want: map[Law]int{L2: 1}, run: func(s *script) {
			s.start(0, try).event(20, Acquired, grant(1, 990.000001, sent(0))).released(30, 31, OK)
		}},
		{name: "no margin", want: map[Law]int{L2: 1}, run: func(s *script) {
			s.start(0, try).event(20, Acquired, grant(1, 1000, sent(0))).released(30, 31, OK)
		}},
		{name: "margin of a short TTL is 2 ms", want: map[Law]int{L2: 1}, run: func(s *script) {
			short := try
			short.TTL = 100 * time.Millisecond
			s.start(0, short).event(1, Acquired, grant(1, 98, sent(0))).released(2, 3, OK)
			s.start(4, short).event(5, Acquired, grant(2, 103, sent(4))).released(6, 7, OK)
		}},
		{name: "counted from the reply, request seen by a proxy", want: map[Law]int{L2: 1}, run: func(s *script) {
			s.start(0, try).event(300, Acquired, grant(1, 1290, sent(5))).released(310, 311, OK)
		}},
		{name: "counted from the reply, no witness", run: func(s *script) {
			s.start(0, try).event(300, Acquired, grant(1, 1290, nil)).released(310, 311, OK)
		}},
		{name: "later than the reply allows", want: map[Law]int{L2: 1}, run: func(s *script) {
			s.start(0, try).event(300, Acquired, grant(1, 1291, nil)).released(310, 311, OK)
		}},
		{name: "counted from the reply, caught by the send delay", rules: Rules{SendDelay: 100 * time.Millisecond}, want: map[Law]int{L2: 1}, run: func(s *script) {
			s.start(0, try).event(300, Acquired, grant(1, 1290, nil)).released(310, 311, OK)
		}},
		{name: "within the send delay", rules: Rules{SendDelay: 100 * time.Millisecond}, run: func(s *script) {
			s.start(0, try).event(300, Acquired, grant(1, 1090, nil)).released(310, 311, OK)
		}},
		{name: "the send delay says nothing of a waiter", rules: Rules{SendDelay: 100 * time.Millisecond}, run: func(s *script) {
			s.start(0, wait).event(300, Acquired, grant(1, 1290, nil)).released(310, 311, OK)
		}},
		{name: "extension counted from its reply", rules: Rules{SendDelay: 100 * time.Millisecond}, want: map[Law]int{L2: 1}, run: func(s *script) {
			s.start(0, try).event(1, Acquired, grant(1, 990, nil)).extended(200, 400, 1, 1390).released(410, 411, OK)
		}},
		{name: "the granted TTL counts", want: map[Law]int{L2: 1}, run: func(s *script) {
			a := s.start(0, try).event(1, Acquired, grant(1, 1980, func(e *Event) { e.TTL, e.Sent = 2*time.Second, at(0) }))
			a.released(2, 3, OK)
			b := s.start(4, try).event(5, Acquired, grant(2, 994, func(e *Event) { e.TTL, e.Sent = 500*time.Millisecond, at(4) }))
			b.released(6, 7, OK)
		}},
		{name: "an extension by a shorter TTL leaves V", run: func(s *script) {
			s.start(0, try).event(1, Acquired, grant(1, 990, sent(0))).
				event(10, Extended, grant(1, 990, func(e *Event) { e.TTL, e.Called, e.Sent = 100*time.Millisecond, at(5), at(6) })).
				released(12, 13, OK)
		}},
		{name: "an extension shortens V", want: map[Law]int{L4: 1}, run: func(s *script) {
			s.start(0, try).event(1, Acquired, grant(1, 990, sent(0))).extended(5, 10, 1, 200).released(12, 13, OK)
		}},
		{name: "two extensions at once, recorded in the other order", run: func(s *script) {
			s.start(0, try).event(1, Acquired, grant(1, 990, sent(0))).
				extended(6, 10, 1, 996).extended(5, 11, 1, 995).released(12, 13, OK)
		}},
		{name: "readings of V", run: func(s *script) {
			s.start(0, try).event(1, Acquired, grant(1, 990, sent(0))).
				observed(2, 3, Believed, 1, 990).
				extended(100, 110, 1, 1090).
				observed(99, 101, Believed, 1, 990). // still the old one
				observed(102, 103, Believed, 1, 1090).
				observed(120, 121, Believed, 1, 1090.5). // two readings of a clock
				observed(989, 989.5, Believed, 1, 0).
				observed(1091, 1092, Ended, 1, 1090).
				lost(1095)
		}},
		{name: "V moved without an extension", want: map[Law]int{L2: 1}, run: func(s *script) {
			s.start(0, try).event(1, Acquired, grant(1, 500, sent(0))).observed(2, 3, Believed, 1, 600).released(12, 13, OK)
		}},
		{name: "V moved before the extension was called", want: map[Law]int{L2: 1}, run: func(s *script) {
			s.start(0, try).event(1, Acquired, grant(1, 500, sent(0))).observed(2, 3, Believed, 1, 600).
				extended(4, 5, 1, 600).released(12, 13, OK)
		}},
		{name: "V fell back after an extension", want: map[Law]int{L2: 1}, run: func(s *script) {
			s.start(0, try).event(1, Acquired, grant(1, 500, sent(0))).extended(4, 5, 1, 600).
				observed(6, 7, Believed, 1, 500).released(12, 13, OK)
		}},
		{name: "believed at V", run: func(s *script) {
			s.lock(0).got(1, 1, 100).observed(100, 101, Believed, 1, 0).lost(101)
		}},
		{name: "believed after V", want: map[Law]int{L2: 1}, run: func(s *script) {
			s.lock(0).got(1, 1, 100).observed(100.001, 101, Believed, 1, 0).lost(101)
		}},
	})
}

func TestLossTold(t *testing.T) {
	p2 := Request{Kind: Lock, Name: "a"}
	runScripts(t, []scriptCase{
		{name: "at V", run: func(s *script) { s.lock(0).got(1, 1, 100).lost(100) }},
		{name: "50 ms later", run: func(s *script) { s.lock(0).got(1, 1, 100).lost(150) }},
		{name: "just above 50 ms later", want: map[Law]int{L2: 1}, run: func(s *script) { s.lock(0).got(1, 1, 100).lost(150.001) }},
		{name: "other tolerance", rules: Rules{LossTolerance: time.Millisecond}, want: map[Law]int{L2: 1}, run: func(s *script) { s.lock(0).got(1, 1, 100).lost(102) }},
		{name: "before V", run: func(s *script) { s.lock(0).got(1, 1, 100).lost(5) }},
		{name: "counted from the extended V", run: func(s *script) { s.lock(0).got(1, 1, 100).extended(50, 60, 1, 200).lost(210) }},
		{name: "released before V", run: func(s *script) { s.lock(0).got(1, 1, 100).released(99, 500, OK); s.idle(900) }},
		{name: "never", want: map[Law]int{L2: 1, L7: 1}, run: func(s *script) { s.lock(0).got(1, 1, 100); s.idle(151) }},
		{name: "never, in a run that ended first", rules: Rules{Unfinished: true}, run: func(s *script) { s.lock(0).got(1, 1, 100); s.idle(149) }},
		{name: "released late, not told", want: map[Law]int{L2: 1}, run: func(s *script) { s.lock(0).got(1, 1, 100).released(160, 161, NotHeld) }},
		{name: "released just after V, not told", run: func(s *script) { s.lock(0).got(1, 1, 100).released(140, 161, NotHeld) }},
		{name: "acquired after V", run: func(s *script) { s.lock(0).got(300, 1, 100).lost(340) }},
		{name: "acquired after V, told late", want: map[Law]int{L2: 1}, run: func(s *script) { s.lock(0).got(300, 1, 100).lost(351) }},
		{name: "V unknown", run: func(s *script) { s.lock(0).got(1, 1, 0).released(9000, 9001, OK) }},
		{name: "the process was stopped", run: func(s *script) {
			s.startIn("p2", 0, p2).got(1, 1, 100).lost(840)
			s.process(50, ProcessStopped, "p2")
			s.process(800, ProcessContinued, "p2")
		}},
		{name: "the process was stopped, and late after that", want: map[Law]int{L2: 1}, run: func(s *script) {
			s.startIn("p2", 0, p2).got(1, 1, 100).lost(860)
			s.process(50, ProcessStopped, "p2")
			s.process(800, ProcessContinued, "p2")
		}},
		{name: "another process was stopped", want: map[Law]int{L2: 1}, run: func(s *script) {
			s.startIn("p2", 0, p2).got(1, 1, 100).lost(840)
			s.process(50, ProcessStopped, "p3")
			s.process(800, ProcessContinued, "p3")
		}},
		{name: "the process is still stopped", run: func(s *script) {
			s.startIn("p2", 0, p2).got(1, 1, 100)
			s.process(50, ProcessStopped, "p2")
			s.process(900, ProcessEnded, "p2")
		}},
		{name: "the process died in time", run: func(s *script) {
			s.startIn("p2", 0, p2).got(1, 1, 100)
			s.process(120, ProcessEnded, "p2")
			s.idle(900)
		}},
		{name: "the process lived too long without telling", want: map[Law]int{L2: 1}, run: func(s *script) {
			s.startIn("p2", 0, p2).got(1, 1, 100)
			s.process(160, ProcessEnded, "p2")
		}},
	})

	var s script
	s.lock(0).got(1, 1, 100).lost(112)
	s.lock(113).got(114, 2, 200).lost(207)
	s.lock(213).got(214, 3, 300).released(250, 251, OK)
	if rep := Check(s.h, Rules{}); rep.MaxLossLate != 12*time.Millisecond {
		t.Errorf("MaxLossLate: got %v, want 12ms", rep.MaxLossLate)
	}
}

func TestNoResurrection(t *testing.T) {
	runScripts(t, []scriptCase{
		{name: "extended after loss was told", want: map[Law]int{L3: 1}, run: func(s *script) {
			s.lock(0).got(1, 1, 100).lost(50).extended(51, 52, 1, 150)
		}},
		{name: "extended after loss, call not known", want: map[Law]int{L3: 1}, run: func(s *script) {
			s.lock(0).got(1, 1, 100).lost(50).extended(0, 50.001, 1, 150)
		}},
		{name: "extension returned before the loss and was recorded after it", run: func(s *script) {
			s.lock(0).got(1, 1, 100).extended(40, 50.5, 1, 140).lost(50)
		}},
		{name: "reply held past V and believed", want: map[Law]int{L3: 2}, run: func(s *script) {
			s.lock(0).got(1, 1, 100).lost(101).extended(90, 300, 1, 400)
		}},
		{name: "extended after V, loss told only at the new one", want: map[Law]int{L3: 1}, run: func(s *script) {
			s.lock(0).got(1, 1, 100).extended(90, 151, 1, 400).lost(401)
		}},
		{name: "extended before V, recorded a little later", run: func(s *script) {
			s.lock(0).got(1, 1, 100).extended(90, 149, 1, 400).lost(401)
		}},
		{name: "extended before V, then its process was stopped", run: func(s *script) {
			s.startIn("p2", 0, Request{Kind: Lock, Name: "a"}).got(1, 1, 100).extended(90, 501, 1, 190).lost(500.5)
			s.process(95, ProcessStopped, "p2")
			s.process(500, ProcessContinued, "p2")
		}},
		{name: "extended after Release was called", want: map[Law]int{L3: 1}, run: func(s *script) {
			s.lock(0).got(1, 1, 100).released(50, 55, OK).extended(50.001, 52, 1, 150)
		}},
		{name: "extended after Release has returned", want: map[Law]int{L3: 1}, run: func(s *script) {
			s.lock(0).got(1, 1, 100).released(50, 55, OK).extended(0, 56, 1, 150)
		}},
		{name: "extension under way when Release was called", run: func(s *script) {
			s.lock(0).got(1, 1, 100).released(50, 55, OK).extended(49, 52, 1, 148)
		}},
		{name: "acquired after its loss", want: map[Law]int{L3: 1}, run: func(s *script) {
			s.lock(0).lost(4).got(5, 1, 100)
		}},
		{name: "acquired after its release", want: map[Law]int{L3: 1}, run: func(s *script) {
			s.lock(0).released(3, 4, OK).got(5, 1, 100)
		}},
	})
}

func TestGuardedWrites(t *testing.T) {
	runScripts(t, []scriptCase{
		{name: "never lower", run: func(s *script) {
			for i, token := range []uint64{1, 1, 3, 3, 9} {
				s.write(0, float64(i), token, WriteAdmitted)
			}
		}},
		{name: "lower and admitted", want: map[Law]int{Guard: 1}, run: func(s *script) {
			s.write(0, 1, 5, WriteAdmitted)
			s.write(0, 2, 4, WriteAdmitted)
			s.write(0, 3, 5, WriteAdmitted)
		}},
		{name: "lower than one long ago", want: map[Law]int{Guard: 1}, run: func(s *script) {
			for i := range 10 {
				s.write(0, float64(i), uint64(10+i), WriteAdmitted)
			}
			s.write(0, 11, 18, WriteAdmitted)
		}},
		{name: "lower and refused", run: func(s *script) {
			s.write(0, 1, 5, WriteAdmitted)
			s.write(0, 2, 4, WriteRefused)
		}},
		{name: "a refused token counts for nothing", run: func(s *script) {
			s.write(0, 1, 5, WriteRefused)
			s.write(0, 2, 4, WriteAdmitted)
		}},
		{name: "seen by clients, overlapping", run: func(s *script) {
			s.write(1, 5, 5, WriteAdmitted)
			s.write(4, 6, 4, WriteAdmitted)
		}},
		{name: "seen by clients, touching", run: func(s *script) {
			s.write(1, 5, 5, WriteAdmitted)
			s.write(5, 6, 4, WriteAdmitted)
		}},
		{name: "lower than one before an overlapping one", want: map[Law]int{Guard: 1}, run: func(s *script) {
			s.write(1, 5, 5, WriteAdmitted)
			s.write(4, 6, 4, WriteAdmitted)
			s.write(7, 8, 4, WriteAdmitted)
		}},
		{name: "seen by clients, one after the other", want: map[Law]int{Guard: 1}, run: func(s *script) {
			s.write(1, 5, 5, WriteAdmitted)
			s.write(5.001, 6, 4, WriteAdmitted)
		}},
		{name: "two resources", run: func(s *script) {
			s.write(0, 1, 5, WriteAdmitted)
			s.add(Event{T: at(2), Type: WriteAdmitted, Resource: "other", Token: 4})
		}},
	})
}

func TestLeaks(t *testing.T) {
	runScripts(t, []scriptCase{
		{name: "all ends well", run: func(s *script) {
			s.held(0, 1, 1)
			s.lock(2).refused(3)
			s.lock(4).failed(5, Context)
			s.lock(6).got(7, 2, 100).lost(90)
		}},
		{name: "attempt without an end", want: map[Law]int{L7: 1}, run: func(s *script) { s.lock(0); s.idle(1) }},
		{name: "lease without an end", want: map[Law]int{L7: 1}, run: func(s *script) { s.lock(0).got(1, 1, 100); s.idle(2) }},
		{name: "release without an answer", want: map[Law]int{L7: 1}, run: func(s *script) {
			s.lock(0).got(1, 1, 100).event(2, ReleaseCalled, nil)
		}},
		{name: "second release without an answer", want: map[Law]int{L7: 1}, run: func(s *script) {
			s.lock(0).got(1, 1, 100).released(2, 3, Uncertain).event(4, ReleaseCalled, nil)
		}},
		{name: "the run was cut off", rules: Rules{Unfinished: true}, run: func(s *script) {
			s.lock(0)
			s.lock(0).got(1, 1, 100)
			s.start(3, Request{Kind: Lock, Name: "b"}).got(3, 2, 100).event(4, ReleaseCalled, nil)
		}},
		{name: "the process died", run: func(s *script) {
			s.startIn("p2", 0, Request{Kind: Lock, Name: "a"})
			s.startIn("p2", 0, Request{Kind: Lock, Name: "b"}).got(1, 1, 100)
			s.process(2, ProcessEnded, "p2")
		}},
		{name: "another process died", want: map[Law]int{L7: 2}, run: func(s *script) {
			s.startIn("p2", 0, Request{Kind: Lock, Name: "a"})
			s.startIn("p2", 0, Request{Kind: Lock, Name: "b"}).got(1, 1, 100)
			s.process(2, ProcessEnded, "p3")
		}},
	})
}

func TestIllFormed(t *testing.T) {
	runScripts(t, []scriptCase{
		{name: "no start", want: map[Law]int{IllFormed: 1}, run: func(s *script) {
			s.add(Event{T: at(1), Type: Acquired, Attempt: 9})
		}},
		{name: "the attempt of another process", want: map[Law]int{IllFormed: 1, L7: 1}, run: func(s *script) {
			s.lock(0)
			s.add(Event{T: at(1), Type: Acquired, Process: "p2", Attempt: 1})
		}},
		{name: "two starts", want: map[Law]int{IllFormed: 1}, run: func(s *script) {
			s.held(0, 1, 1).event(2, Started, nil)
		}},
		{name: "two ends", want: map[Law]int{IllFormed: 1}, run: func(s *script) { s.lock(0).refused(1).refused(2) }},
		{name: "extended without a lease", want: map[Law]int{IllFormed: 1}, run: func(s *script) { s.lock(0).refused(1).extended(2, 3, 1, 9) }},
		{name: "release of nothing", want: map[Law]int{IllFormed: 1}, run: func(s *script) { s.lock(0).failed(1, Other).released(2, 3, OK) }},
		{name: "release returned, not called", want: map[Law]int{IllFormed: 1}, run: func(s *script) {
			s.held(0, 1, 1).event(2, ReleaseReturned, nil)
		}},
		{name: "unknown kind", want: map[Law]int{IllFormed: 1}, run: func(s *script) { s.start(0, Request{Kind: "mutex", Name: "a"}) }},
		{name: "permit without a limit", want: map[Law]int{IllFormed: 1}, run: func(s *script) { s.start(0, Request{Kind: Permit, Name: "a"}) }},
		{name: "unknown type", want: map[Law]int{IllFormed: 1}, run: func(s *script) { s.add(Event{T: at(1), Type: "granted"}) }},
		{name: "fault ends first", want: map[Law]int{IllFormed: 1}, run: func(s *script) { s.fault(1, FaultEnd) }},
		{name: "fault begins twice", want: map[Law]int{IllFormed: 1}, run: func(s *script) { s.fault(1, FaultBegin); s.fault(2, FaultBegin) }},
		{name: "process continues first", want: map[Law]int{IllFormed: 1}, run: func(s *script) { s.process(1, ProcessContinued, "p2") }},
	})
}

func TestVoid(t *testing.T) {
	busy := func(s *script) {
		s.held(0, 10, 1)
		s.lock(5).refused(6)
		s.lock(8).got(12, 2, 0).released(30, 31, OK) // met the first holder; the next attempt but one meets this
		s.fault(20, FaultBegin)
		s.fault(21, FaultHit)
		s.lock(22).failed(40, Unavailable)
		s.lock(41).got(45, 3, 0).released(46, 47, OK)
		s.fault(50, FaultEnd)
		s.held(60, 61, 4)
		s.fault(70, FaultBegin)
		s.held(61, 62, 5) // after the one before it, whose belief it does not meet
		s.fault(80, FaultEnd)
		s.held(90, 91, 6)
		s.held(92, 93, 7)
	}
	full := FaultRule{Name: "cut", Hits: 1, AcquiredBefore: 2, AttemptsDuring: 2, AcquiredDuring: 1, AcquiredAfter: 2}
	with := func(change func(f *FaultRule)) Rules {
		f := full
		change(&f)
		return Rules{Faults: []FaultRule{f}}
	}
	for _, c := range []struct {
		name  string
		rules Rules
		want  string // in the only reason
	}{
		{"met", Rules{MinAcquired: 7, MinContended: 3, Faults: []FaultRule{full}}, ""},
		{"too few acquisitions", Rules{MinAcquired: 8}, "acquisitions: got 7, want at least 8"},
		{"too little contention", Rules{MinContended: 4}, "contended attempts: got 3, want at least 4"},
		{"another fault", Rules{Faults: []FaultRule{{Name: "pause"}}}, `fault "pause" never began`},
		{"no hit", with(func(f *FaultRule) { f.Hits++ }), `hits of fault "cut": got 1, want at least 2`},
		{"before", with(func(f *FaultRule) { f.AcquiredBefore++ }), `acquisitions before fault "cut": got 2, want at least 3`},
		{"attempts", with(func(f *FaultRule) { f.AttemptsDuring++ }), `attempts during fault "cut": got 2, want at least 3`},
		{"during", with(func(f *FaultRule) { f.AcquiredDuring++ }), `acquisitions during fault "cut": got 1, want at least 2`},
		{"after", with(func(f *FaultRule) { f.AcquiredAfter++ }), `acquisitions after fault "cut": got 2, want at least 3`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var s script
			busy(&s)
			rep := Check(s.h, c.rules)
			if c.want == "" {
				if rep.Verdict() != Pass || rep.Err() != nil {
					t.Errorf("got %v, want pass", rep)
				}
				return
			}
			if rep.Verdict() != Void || len(rep.Void) != 1 || rep.Void[0] != c.want || rep.Err() == nil {
				t.Errorf("got %v, want void: %s", rep, c.want)
			}
			s.held(89, 200, 8) // and a violation on top
			if rep := Check(s.h, c.rules); rep.Verdict() != Fail {
				t.Errorf("a violation in a void run: got %v, want fail", rep)
			}
		})
	}
}

func TestReportText(t *testing.T) {
	var s script
	s.startIn("p2", 0, Request{Client: "red", Kind: Lock, Name: "orders/7"}).got(1, 17, 3000).released(12.5, 13, OK)
	s.start(2, Request{Client: "blue", Kind: Lock, Name: "orders/7"}).got(10, 18, 3010).released(20, 21, OK)
	got := Check(s.h, Rules{}).String()
	want := `fail: 8 events, 2 attempts, 2 acquired, 0 refused, 0 failed, 1 contended, loss told at most 0s late
  violations: 1 of L1
  L1: two leases of lock "orders/7" believed together for 2.5ms
    0.001000s acquired lock "orders/7" token 17 V 3.000000s (client red, process p2, attempt 1)
    0.010000s acquired lock "orders/7" token 18 V 3.010000s (client blue, process p1, attempt 2)
    0.012500s release-called lock "orders/7" (client red, process p2, attempt 1)
    0.020000s release-called lock "orders/7" (client blue, process p1, attempt 2)`
	if got != want {
		t.Errorf("report: got\n%s\nwant\n%s", got, want)
	}

	excused := Check(s.h, Rules{Excuse: []Law{L1}})
	if excused.Verdict() != Pass || len(excused.Excused) != 1 || excused.ExcusedCounts[L1] != 1 || !strings.Contains(excused.String(), "excused: 1 of L1") {
		t.Errorf("excused: got\n%v", excused)
	}
}

// TestManyViolations shows that all are counted while a bounded number is kept.
func TestManyViolations(t *testing.T) {
	var s script
	s.held(0, 100000, 1)
	for i := range 5000 {
		s.heldPermit(float64(i), 100000, uint64(i+1), 1)
		s.held(float64(10*i+1), float64(10*i+2), uint64(i+2))
	}
	rep := Check(s.h, Rules{})
	if rep.Counts[L1] != 5000 || rep.Counts[S1] != 4999 || len(rep.Violations) != 2*keep {
		t.Errorf("got %v and %d kept, want 5000 of L1, 4999 of S1, %d kept", rep.Counts, len(rep.Violations), 2*keep)
	}
}
