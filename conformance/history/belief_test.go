package history

import (
	"slices"
	"testing"
	"time"
)

func TestBeliefs(t *testing.T) {
	const ttl = 100 * time.Millisecond // so the margin is 2 ms
	ask := Request{Client: "c", Kind: Lock, Name: "a", TTL: ttl}
	for name, c := range map[string]struct {
		run  func(s *script)
		want []Belief
	}{
		"released": {
			func(s *script) { s.start(0, ask).got(1, 7, 90).released(50, 51, OK) },
			[]Belief{{Process: "p1", Token: 7, From: at(1), To: at(50)}},
		},
		"extended, and told in time": {
			func(s *script) { s.start(0, ask).got(1, 7, 90).extended(40, 41, 7, 130).lost(130) },
			[]Belief{{Process: "p1", Token: 7, From: at(1), To: at(130), Told: at(130), Lead: 2 * time.Millisecond, LeadKnown: true}},
		},
		"told late": {
			func(s *script) { s.start(0, ask).got(1, 7, 90).lost(95) },
			[]Belief{{Process: "p1", Token: 7, From: at(1), To: at(90), Told: at(95), Lead: -3 * time.Millisecond, LeadKnown: true}},
		},
		"stopped at V": {
			func(s *script) {
				a := s.start(0, ask).got(1, 7, 90)
				s.process(50, ProcessStopped, "p1")
				s.process(200, ProcessContinued, "p1")
				a.lost(201)
			},
			[]Belief{{Process: "p1", Token: 7, From: at(1), To: at(90), Told: at(201)}},
		},
		"continued before V": {
			func(s *script) {
				a := s.start(0, ask).got(1, 7, 90)
				s.process(50, ProcessStopped, "p1")
				s.process(60, ProcessContinued, "p1")
				a.lost(90)
			},
			[]Belief{{Process: "p1", Token: 7, From: at(1), To: at(90), Told: at(90), Lead: 2 * time.Millisecond, LeadKnown: true}},
		},
		"killed, and succeeded": {
			func(s *script) {
				s.start(0, ask).got(1, 7, 90)
				s.process(50, ProcessEnded, "p1")
				s.startIn("p2", 60, ask).got(91, 8, 180)
				s.idle(100)
			},
			[]Belief{
				{Process: "p1", Token: 7, From: at(1), To: at(50)},
				{Process: "p2", Token: 8, From: at(91), To: at(100)},
			},
		},
		"never got": {func(s *script) { s.start(0, ask).refused(1) }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var s script
			c.run(&s)
			if got := Beliefs(s.h); !slices.Equal(got, c.want) {
				t.Errorf("Beliefs: got %+v, want %+v", got, c.want)
			}
		})
	}
}
