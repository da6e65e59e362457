package history

import (
	"maps"
	"testing"
	"time"
)

// script writes a history by hand. Times are milliseconds from the start of the run.
type script struct {
	h History
	n uint64
}

func at(ms float64) int64 { return int64(time.Hour) + int64(ms*1e6) }

// vAt is a valid-until; 0 stays "unknown".
func vAt(ms float64) int64 {
	if ms == 0 {
		return 0
	}
	return at(ms)
}

func (s *script) add(e Event) {
	if e.Process == "" {
		e.Process = "p1"
	}
	s.h = append(s.h, e)
}

// hand is one attempt in a script.
type hand struct {
	s  *script
	id Event
}

func (s *script) start(ms float64, q Request) *hand { return s.startIn("p1", ms, q) }

func (s *script) startIn(process string, ms float64, q Request) *hand {
	s.n++
	a := &hand{s: s, id: Event{Process: process, Attempt: s.n, Client: q.Client, Kind: q.Kind, Name: q.Name}}
	e := a.id
	e.T, e.Type, e.Limit, e.TTL, e.Wait = at(ms), Started, q.Limit, q.TTL, q.Wait
	s.add(e)
	return a
}

func (s *script) lock(ms float64) *hand {
	return s.start(ms, Request{Client: "c", Kind: Lock, Name: "a"})
}

func (s *script) permit(ms float64, limit int) *hand {
	return s.start(ms, Request{Client: "c", Kind: Permit, Name: "a", Limit: limit})
}

func (a *hand) event(ms float64, typ Type, change func(e *Event)) *hand {
	e := a.id
	e.T, e.Type = at(ms), typ
	if change != nil {
		change(&e)
	}
	a.s.add(e)
	return a
}

func (a *hand) got(ms float64, token uint64, v float64) *hand {
	return a.event(ms, Acquired, func(e *Event) { e.Token, e.V = token, vAt(v) })
}

func (a *hand) refused(ms float64) *hand { return a.event(ms, Refused, nil) }

func (a *hand) failed(ms float64, class Result) *hand {
	return a.event(ms, Failed, func(e *Event) { e.Result = class })
}

// extended: called 0 stands for "unknown".
func (a *hand) extended(called, ms float64, token uint64, v float64) *hand {
	return a.event(ms, Extended, func(e *Event) { e.Token, e.V, e.Called = token, vAt(v), vAt(called) })
}

func (a *hand) observed(called, ms float64, res Result, token uint64, v float64) *hand {
	return a.event(ms, Observed, func(e *Event) { e.Result, e.Token, e.V, e.Called = res, token, vAt(v), vAt(called) })
}

func (a *hand) lost(ms float64) *hand { return a.event(ms, LossTold, nil) }

func (a *hand) released(called, returned float64, res Result) *hand {
	return a.event(called, ReleaseCalled, nil).
		event(returned, ReleaseReturned, func(e *Event) { e.Result = res })
}

// held is an attempt that is granted at once, and released.
func (s *script) held(from, to float64, token uint64) *hand {
	return s.lock(from).got(from, token, 0).released(to, to, OK)
}

func (s *script) heldPermit(from, to float64, token uint64, limit int) *hand {
	return s.permit(from, limit).got(from, token, 0).released(to, to, OK)
}

func (s *script) write(called, ms float64, token uint64, typ Type) {
	s.add(Event{T: at(ms), Type: typ, Resource: "r", Token: token, Called: vAt(called)})
}

func (s *script) fault(ms float64, typ Type) { s.add(Event{T: at(ms), Type: typ, Fault: "cut"}) }

func (s *script) process(ms float64, typ Type, process string) {
	s.add(Event{T: at(ms), Type: typ, Process: process})
}

// idle makes the run last until ms.
func (s *script) idle(ms float64) { s.write(0, ms, 1, WriteRefused) }

type scriptCase struct {
	name  string
	rules Rules
	run   func(s *script)
	want  map[Law]int // nil = legal
}

func runScripts(t *testing.T, cases []scriptCase) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var s script
			c.run(&s)
			rep := Check(s.h, c.rules)
			if !maps.Equal(rep.Counts, c.want) && len(rep.Counts)+len(c.want) > 0 {
				t.Errorf("Check: got violations %v, want %v\n%v", rep.Counts, c.want, rep)
			}
			if got := len(StaleWrites(s.h)); got != c.want[Guard] {
				t.Errorf("StaleWrites: got %d, want %d", got, c.want[Guard])
			}
			for _, v := range rep.Violations {
				if len(v.Events) == 0 || v.Text == "" {
					t.Errorf("violation without evidence: %+v", v)
				}
			}
		})
	}
}
