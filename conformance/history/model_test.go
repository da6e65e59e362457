package history

import (
	"strings"
	"testing"
	"time"
)

func TestModel(t *testing.T) {
	wait := Request{Client: "w", Kind: Lock, Name: "a", Wait: true, TTL: 100 * time.Millisecond}
	try := wait
	try.Wait = false
	for _, c := range []struct {
		name  string
		rules ModelRules
		run   func(s *script)
		want  string // in the reason of a failure; "" = legal
	}{
		{name: "one after another", run: func(s *script) { s.held(0, 10, 1); s.held(11, 20, 2) }},
		{name: "refused while held", run: func(s *script) { s.held(0, 10, 1); s.lock(5).refused(6) }},
		{name: "refused while free", want: `lock "a": no legal order`, run: func(s *script) {
			s.held(0, 10, 1)
			s.lock(11).refused(12)
		}},
		{name: "refused before anybody came", want: "does not fit: refuse: 3600.000000s started", run: func(s *script) {
			s.lock(0).refused(1)
			s.held(2, 10, 1)
		}},
		{name: "refused while another was being granted", run: func(s *script) {
			s.lock(0).refused(3)
			s.lock(1).got(4, 1, 0).released(5, 6, OK)
		}},
		{name: "refused while a release was under way", run: func(s *script) {
			s.lock(0).got(1, 1, 0).released(5, 9, OK)
			s.lock(8).refused(10)
		}},
		{name: "refused after the release had returned", want: "does not fit", run: func(s *script) {
			s.lock(0).got(1, 1, 0).released(5, 9, OK)
			s.lock(9.5).refused(10)
		}},
		{name: "refused for a waiter that was not granted yet", run: func(s *script) {
			s.lock(0).got(1, 1, 0).released(5, 6, OK)
			s.start(2, wait).got(20, 2, 0).released(30, 31, OK)
			s.lock(7).refused(8)
		}},
		{name: "refused at the moment a waiter came or went", run: func(s *script) {
			s.start(1, wait).failed(7, Context)
			s.lock(7).refused(8)
			s.lock(9).refused(10)
			s.start(10, wait).failed(12, Context)
			s.held(20, 21, 1)
		}},
		{name: "refused before a waiter came", want: "does not fit", run: func(s *script) {
			s.lock(7).refused(8)
			s.start(8.1, wait).got(20, 2, 0).released(30, 31, OK)
		}},
		{name: "refused for a waiter that was cancelled", run: func(s *script) {
			s.start(2, wait).failed(9, Context)
			s.lock(7).refused(8)
			s.held(20, 21, 1)
		}},
		{name: "refused after the waiter's cancellation had returned", want: "does not fit", run: func(s *script) {
			s.start(2, wait).failed(9, Context)
			s.lock(9.5).refused(10)
		}},
		{name: "refused for what an uncertain attempt left", run: func(s *script) {
			s.start(0, try).failed(9, Uncertain)
			s.lock(100).refused(101)
			s.held(200, 201, 1)
		}},
		{name: "refused later than it can have left anything", want: "does not fit", run: func(s *script) {
			s.start(0, try).failed(9, Uncertain)
			s.lock(109.5).refused(110)
		}},
		{name: "refused for one that was surely not granted", want: "does not fit", run: func(s *script) {
			s.start(0, try).failed(9, Unavailable)
			s.lock(5).refused(6)
		}},
		{name: "two refuse each other", want: "does not fit", run: func(s *script) {
			s.lock(0).refused(5)
			s.lock(1).refused(6)
		}},
		{name: "split votes", rules: ModelRules{SplitVotes: true}, run: func(s *script) {
			s.lock(0).refused(5)
			s.lock(1).refused(6)
			s.held(20, 21, 1)
		}},
		{name: "split votes need two", rules: ModelRules{SplitVotes: true}, want: "does not fit", run: func(s *script) {
			s.lock(0).refused(5)
			s.lock(6).refused(7)
		}},
		{name: "granted while held", want: "no legal order", run: func(s *script) {
			s.lock(0).got(1, 1, 0).released(10, 11, OK)
			s.lock(5).got(6, 2, 0).released(12, 13, OK)
		}},
		{name: "granted while a release was under way", run: func(s *script) {
			s.lock(0).got(1, 1, 0).released(5, 9, OK)
			s.lock(6).got(7, 2, 0).released(12, 13, OK)
		}},
		{name: "tokens against the order of grants", want: "no legal order", run: func(s *script) {
			s.lock(0).got(5, 2, 0).released(6, 7, OK)
			s.lock(1).got(9, 1, 0).released(12, 13, OK)
		}},
		{name: "overlapping attempts, order only by tokens", run: func(s *script) {
			s.lock(0).got(9, 1, 0).released(10, 20, OK)
			s.lock(1).got(12, 2, 0).released(13, 20, OK)
			s.lock(0).got(15, 3, 0).released(16, 20, OK)
		}},
		{name: "the owner is told it does not hold", want: "not-held", run: func(s *script) {
			s.lock(0).got(1, 1, 0).released(2, 3, NotHeld)
		}},
		{name: "not held after V", run: func(s *script) { s.lock(0).got(1, 1, 50).lost(51).released(52, 53, NotHeld) }},
		{name: "not held because V came first", run: func(s *script) { s.lock(0).got(1, 1, 50).released(49, 51, NotHeld) }},
		{name: "not held by the holder's clock, not yet by the backend's", run: func(s *script) {
			s.lock(0).got(1, 1, 50).released(49, 51, NotHeld)
			s.lock(52).refused(53)
		}},
		{name: "not held before V", want: "not-held", run: func(s *script) { s.lock(0).got(1, 1, 50).released(48, 49, NotHeld) }},
		{name: "released again", run: func(s *script) { s.lock(0).got(1, 1, 0).released(2, 3, OK).released(4, 5, OK) }},
		{name: "released again, refused before that", want: "does not fit", run: func(s *script) {
			a := s.lock(0).got(1, 1, 0).released(2, 3, OK)
			s.lock(4).refused(5)
			a.released(6, 7, OK)
		}},
		{name: "released again, then another holds", run: func(s *script) {
			a := s.lock(0).got(1, 1, 0).released(2, 3, OK)
			s.lock(4).got(5, 2, 0).released(20, 21, OK)
			a.released(6, 7, OK)
			s.lock(8).refused(9)
		}},
		{name: "a second release frees the lock of another", want: "does not fit", run: func(s *script) {
			a := s.lock(0).got(1, 1, 0).released(2, 3, OK)
			s.lock(4).got(5, 2, 0).released(20, 21, OK)
			a.released(6, 7, OK)
			s.lock(8).got(9, 3, 0).released(10, 11, OK)
		}},
		{name: "an uncertain release may have freed it", run: func(s *script) {
			s.lock(0).got(1, 1, 0).released(2, 3, Uncertain)
			s.lock(8).got(9, 2, 0).released(10, 11, OK)
		}},
		{name: "or not", run: func(s *script) {
			s.lock(0).got(1, 1, 0).released(2, 3, Uncertain)
			s.lock(8).refused(9)
		}},
		{name: "but not both, in this order", want: "does not fit", run: func(s *script) {
			s.lock(0).got(1, 1, 0).released(2, 3, Uncertain)
			s.held(8, 9, 2)
			s.lock(10).refused(11)
		}},
		{name: "an uncertain release, then one that succeeds", run: func(s *script) {
			a := s.lock(0).got(1, 1, 0).released(2, 3, Uncertain)
			s.lock(4).got(5, 2, 0).released(20, 21, OK)
			a.released(6, 7, OK)
		}},
		{name: "an uncertain release, then one that comes too late", want: "no legal order", run: func(s *script) {
			s.lock(0).got(1, 1, 0).released(2, 3, Uncertain).released(6, 7, OK)
			s.lock(8).refused(9)
		}},
		{name: "an uncertain release, then one that finds nothing", run: func(s *script) {
			a := s.lock(0).got(1, 1, 0).released(2, 3, Uncertain)
			s.lock(4).got(5, 2, 0).released(20, 21, OK)
			a.released(6, 7, NotHeld)
		}},
		{name: "an unavailable release did nothing", want: "no legal order", run: func(s *script) {
			s.lock(0).got(1, 1, 0).released(2, 3, Unavailable)
			s.lock(8).got(9, 2, 0).released(10, 11, OK)
		}},
		{name: "expired, then granted", run: func(s *script) {
			s.lock(0).got(1, 1, 50).lost(51)
			s.lock(60).refused(61) // the backend may keep it a little longer
			s.lock(62).got(63, 2, 0).released(70, 71, OK)
		}},
		{name: "lost, then granted before V", run: func(s *script) {
			s.lock(0).got(1, 1, 50).lost(20)
			s.held(30, 40, 2)
		}},
		{name: "granted before the loss", want: "no legal order", run: func(s *script) {
			s.lock(0).got(1, 1, 50).lost(20)
			s.held(19, 40, 2)
		}},
		{name: "granted before V", want: "no legal order", run: func(s *script) {
			s.lock(0).got(1, 1, 50).lost(51)
			s.lock(40).got(49, 2, 0).released(70, 71, OK)
		}},
		{name: "permits up to their limits", run: func(s *script) {
			s.heldPermit(0, 10, 1, 1)
			s.heldPermit(1, 10, 2, 2)
			s.permit(2, 2).refused(3)
			s.heldPermit(4, 10, 3, 3)
		}},
		{name: "a permit too many", want: `permit "a": no legal order`, run: func(s *script) {
			s.heldPermit(0, 10, 1, 2)
			s.heldPermit(1, 10, 2, 2)
			s.heldPermit(2, 10, 3, 2)
		}},
		{name: "a permit refused below its limit", want: "does not fit", run: func(s *script) {
			s.heldPermit(0, 10, 1, 2)
			s.permit(1, 2).refused(2)
		}},
		{name: "only the order of two grants is against it", want: "no legal order", run: func(s *script) {
			// The limits allow it, each grant alone allows it: S1 as Check sees it finds nothing.
			s.permit(0, 1).got(5, 1, 0).released(10, 11, OK)
			s.permit(0, 9).got(4, 2, 0).released(10, 11, OK)
			s.heldPermit(2, 3, 3, 9)
			s.permit(3.5, 9).refused(3.6)
		}},
		{name: "a lock and a permit of one name", run: func(s *script) { s.held(0, 10, 1); s.heldPermit(1, 9, 1, 1) }},
		{name: "an event that makes no sense", want: "never started", run: func(s *script) {
			s.held(0, 1, 1)
			s.add(Event{T: at(2), Type: Refused, Attempt: 99})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var s script
			c.run(&s)
			rep := CheckModel(s.h, c.rules)
			want := Pass
			if c.want != "" {
				want = Fail
			}
			if rep.Verdict != want || !strings.Contains(rep.Reason, c.want) || (rep.Err() == nil) != (want == Pass) {
				t.Errorf("CheckModel: got %+v, want %s with %q", rep, want, c.want)
			}
		})
	}
}

func TestModelVoid(t *testing.T) {
	var s script
	s.start(0, Request{Kind: Token, Name: "a"}).got(1, 1, 0)
	s.start(1, Request{Kind: Permit, Name: "a", Limit: 1, Wait: true}).failed(9, Context)
	s.permit(2, 1).refused(3)
	if rep := CheckModel(s.h, ModelRules{}); rep.Verdict != Void || rep.Reason != "nothing to judge" {
		t.Errorf("nothing to judge: got %+v, want void", rep)
	}
	for i := range modelOps/2 + 1 {
		s.held(float64(2*i), float64(2*i+1), uint64(i+1))
	}
	if rep := CheckModel(s.h, ModelRules{}); rep.Verdict != Void || !strings.Contains(rep.Reason, "at most 20000") {
		t.Errorf("too many operations: got %+v, want void", rep)
	}
	if rep := CheckModel(s.h[:100], ModelRules{Timeout: 1}); rep.Verdict != Void || rep.Reason == "" {
		t.Errorf("no time: got %+v, want void", rep)
	}

	// 40 permits of limit 20, all at once, and a refusal that no order explains.
	var hard script
	for i := range 40 {
		hard.permit(0, 20).got(100, uint64(i+1), 0).released(101, 200, OK)
	}
	hard.permit(300, 20).refused(301)
	begun := time.Now()
	rep := CheckModel(hard.h, ModelRules{Timeout: 300 * time.Millisecond})
	if took := time.Since(begun); rep.Verdict == Pass || took > 10*time.Second {
		t.Errorf("a hard history: got %+v after %v, want no pass within the timeout", rep, took)
	}
}
