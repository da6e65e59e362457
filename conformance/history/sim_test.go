package history

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// sim is a correct lock service with its clients, run in virtual time: queues with handover, expiry,
// extensions, cancelled waits and guarded writes; with faults on, also slow and lost replies, a stopped
// process and a killed one. Every history it writes is legal.
type sim struct {
	rng    *rand.Rand
	faults bool
	now    int64
	n      int
	todo   simQueue
	h      History
	ids    uint64

	servers map[resource]*simServer
	highest map[string]uint64 // admitted, by guarded resource
	slow    stop              // while replies are slow or lost
	stopped stop              // of process p2
	killed  int64             // of process p3
}

type simStep struct {
	t, n int64
	run  func()
}

type simQueue []simStep

func (q simQueue) Len() int { return len(q) }
func (q simQueue) Less(i, j int) bool {
	return q[i].t < q[j].t || q[i].t == q[j].t && q[i].n < q[j].n
}
func (q simQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *simQueue) Push(x any)   { *q = append(*q, x.(simStep)) }
func (q *simQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

type simServer struct {
	owners []*simAttempt
	queue  []*simAttempt
	last   uint64
}

type simAttempt struct {
	s      *sim
	id     Event
	server *simServer
	limit  int
	ttl    time.Duration
	wait   bool
	sent   int64
	done   func() // the client goes on

	// The server's:
	expiry int64
	token  uint64
	gone   bool // cancelled or released: a late request of it finds nothing
	// The client's:
	v     int64
	over  bool // ended: refused, failed, released or lost
	given bool // it gave up before an answer came
}

const us = int64(time.Microsecond)
const ms = int64(time.Millisecond)

func (s *sim) between(low, high int64) int64 { return low + s.rng.Int64N(high-low+1) }
func (s *sim) chance(percent int) bool       { return s.rng.IntN(100) < percent }

// after runs f later, on the server's side.
func (s *sim) after(d int64, f func()) {
	s.n++
	heap.Push(&s.todo, simStep{s.now + d, int64(s.n), f})
}

// client runs f later in a process: not while it is stopped, and not once it is dead.
func (s *sim) client(process string, d int64, f func()) {
	s.after(d, func() {
		switch {
		case process == "p2" && s.faults && s.stopped.from <= s.now && s.now < s.stopped.to:
			s.client(process, s.stopped.to-s.now+s.between(1, 200*us), f)
		case process == "p3" && s.faults && s.now >= s.killed:
		default:
			f()
		}
	})
}

func (s *sim) delay() int64 {
	if s.faults && s.slow.from <= s.now && s.now < s.slow.to && s.chance(30) {
		return s.between(1*ms, 90*ms)
	}
	return s.between(20*us, 600*us)
}

func (s *sim) lostReply() bool {
	return s.faults && s.slow.from <= s.now && s.now < s.slow.to && s.chance(15)
}

func (s *sim) add(e Event) {
	e.T = s.now
	s.h = append(s.h, e)
}

// simulate runs clients of three processes over two locks and two semaphores. With only one client per
// resource there is no contention.
func simulate(seed uint64, clients, rounds int, faults bool) History {
	s := &sim{
		rng: rand.New(rand.NewPCG(seed, 1)), faults: faults, now: int64(time.Hour),
		servers: map[resource]*simServer{}, highest: map[string]uint64{},
	}
	at := func(ms0 int64) int64 { return s.now + ms0*ms }
	s.slow = stop{at(40), at(160)}
	from := at(s.between(20, 150))
	s.stopped = stop{from, from + s.between(50, 250)*ms}
	s.killed = at(s.between(50, 300))
	if faults {
		for _, f := range []struct {
			t int64
			e Event
		}{
			{s.slow.from, Event{Type: FaultBegin, Process: "lab", Fault: "slow"}},
			{s.slow.to, Event{Type: FaultEnd, Process: "lab", Fault: "slow"}},
			{s.stopped.from, Event{Type: ProcessStopped, Process: "p2"}},
			{s.stopped.to, Event{Type: ProcessContinued, Process: "p2"}},
			{s.killed, Event{Type: ProcessEnded, Process: "p3"}},
		} {
			s.after(f.t-s.now, func() { s.add(f.e) })
		}
	}
	for c := range clients {
		s.work(fmt.Sprintf("p%d", c%3+1), fmt.Sprintf("c%d", c), rounds)
	}
	for len(s.todo) > 0 {
		step := heap.Pop(&s.todo).(simStep)
		s.now = step.t
		step.run()
	}
	return s.h
}

// work is the life of one client.
func (s *sim) work(process, client string, rounds int) {
	if rounds == 0 {
		return
	}
	s.client(process, s.between(0, 3*ms), func() {
		res := resource{Lock, []string{"a", "b"}[s.rng.IntN(2)]}
		if s.chance(50) {
			res.kind = Permit
		}
		s.ids++
		a := &simAttempt{
			s: s, server: s.servers[res], wait: s.chance(60), limit: 1, ttl: time.Duration(s.between(300, 900) * ms),
			id:   Event{Process: process, Attempt: s.ids, Client: client, Kind: res.kind, Name: res.name},
			done: func() { s.work(process, client, rounds-1) },
		}
		if a.server == nil {
			a.server = &simServer{last: uint64(s.between(1, 1e6))}
			s.servers[res] = a.server
		}
		if s.faults {
			a.ttl = time.Duration(s.between(15, 80) * ms)
		}
		e := a.id
		e.Type, e.Wait, e.TTL = Started, a.wait, a.ttl
		if res.kind == Permit {
			a.limit = 1 + s.rng.IntN(4)
			e.Limit = a.limit
		}
		s.add(e)
		a.request()
	})
}

func (a *simAttempt) event(typ Type, change func(e *Event)) {
	e := a.id
	e.Type = typ
	if change != nil {
		change(&e)
	}
	a.s.add(e)
}

func (a *simAttempt) inClient(d int64, f func()) { a.s.client(a.id.Process, d, f) }

// end is the end of the attempt without a lease.
func (a *simAttempt) end(typ Type, class Result) {
	a.over = true
	a.event(typ, func(e *Event) { e.Result = class })
	a.done()
}

func (a *simAttempt) request() {
	s := a.s
	if s.faults && s.chance(3) {
		a.inClient(s.delay(), func() { a.end(Failed, Unavailable) })
		return
	}
	a.sent = s.now + s.between(0, 20*us)
	s.after(a.sent-s.now+s.delay(), func() {
		if a.gone {
			return // its cancellation has overtaken it
		}
		a.server.purge(s.now)
		switch {
		case len(a.server.queue) == 0 && len(a.server.owners) < a.limit:
			a.grant(a.sent)
		case a.wait:
			a.server.queue = append(a.server.queue, a)
		case !s.lostReply():
			a.inClient(s.delay(), func() {
				if !a.over {
					a.end(Refused, "")
				}
			})
		}
	})
	if a.wait && s.chance(20) {
		a.inClient(s.between(0, 6*ms), func() { a.giveUp(Context) })
	} else if s.faults {
		a.inClient(s.between(50*ms, 400*ms), func() { a.giveUp(Uncertain) })
	}
}

// giveUp ends the attempt by the client: a cancelled wait ends when the server has confirmed.
func (a *simAttempt) giveUp(class Result) {
	if a.over || a.given || a.v != 0 {
		return
	}
	a.given = true
	if class == Uncertain {
		a.end(Failed, Uncertain)
	}
	a.s.after(a.s.delay(), func() {
		a.drop()
		if class == Context {
			a.inClient(a.s.delay(), func() { a.end(Failed, Context) })
		}
	})
}

// drop takes the attempt off the server.
func (a *simAttempt) drop() (held bool) {
	a.gone = true
	a.server.purge(a.s.now)
	if i := slices.Index(a.server.owners, a); i >= 0 {
		a.server.owners = slices.Delete(a.server.owners, i, i+1)
		held = true
	}
	if i := slices.Index(a.server.queue, a); i >= 0 {
		a.server.queue = slices.Delete(a.server.queue, i, i+1)
	}
	a.server.serve(a.s)
	return held
}

func (v *simServer) purge(now int64) {
	v.owners = slices.DeleteFunc(v.owners, func(a *simAttempt) bool { return a.expiry <= now })
}

// serve grants to the head of the queue, judged by its own limit, as long as there is room.
func (v *simServer) serve(s *sim) {
	v.purge(s.now)
	for len(v.queue) > 0 && len(v.owners) < v.queue[0].limit {
		head := v.queue[0]
		v.queue = v.queue[1:]
		head.grant(s.between(head.sent, s.now)) // one of its polls
	}
}

func (v *simServer) watch(a *simAttempt) {
	a.s.after(a.expiry-a.s.now, func() { v.serve(a.s) })
}

func (a *simAttempt) grant(sent int64) {
	s := a.s
	a.server.last += uint64(s.between(1, 3))
	a.token = a.server.last
	a.expiry = s.now + int64(a.ttl)
	a.server.owners = append(a.server.owners, a)
	a.server.watch(a)
	if s.lostReply() {
		return
	}
	a.inClient(s.delay()+s.between(0, 100*us), func() {
		if a.given || a.over {
			return
		}
		a.v = sent + int64(a.ttl-margin(a.ttl))
		a.event(Acquired, func(e *Event) {
			e.Token, e.V = a.token, a.v
			if s.chance(50) {
				e.Sent, e.TTL = sent, a.ttl
			}
		})
		a.loss()
		a.hold()
	})
}

// loss tells the holder, once V has passed.
func (a *simAttempt) loss() {
	a.inClient(max(0, a.v-a.s.now), func() {
		if a.over || a.v > a.s.now {
			return
		}
		a.over = true
		a.inClient(a.s.between(0, 3*ms), func() {
			a.event(LossTold, nil)
			if a.s.chance(50) {
				a.event(ReleaseCalled, nil)
				a.event(ReleaseReturned, func(e *Event) { e.Result = NotHeld })
			}
			a.done()
		})
	})
}

func (a *simAttempt) hold() {
	s := a.s
	length := s.between(0, 4*ms)
	if s.chance(10) {
		length = s.between(0, 2*int64(a.ttl)) // beyond V, unless extended
	}
	for range s.rng.IntN(3) {
		a.inClient(s.between(0, length), a.extend)
	}
	for range s.rng.IntN(3) {
		a.inClient(s.between(0, length*3/2), a.write) // sometimes by one who does not hold any more
	}
	if s.chance(30) {
		a.inClient(s.between(0, length), func() {
			called, believed, v := s.now, Ended, a.v
			if !a.over && s.now < a.v {
				believed = Believed
			}
			a.inClient(s.between(0, 50*us), func() {
				a.event(Observed, func(e *Event) { e.Called, e.Result, e.Token, e.V = called, believed, a.token, v })
			})
		})
	}
	a.inClient(length, a.release)
}

func (a *simAttempt) extend() {
	s := a.s
	if a.over || s.now >= a.v {
		return
	}
	called, sent, ttl := s.now, s.now+s.between(0, 10*us), time.Duration(s.between(int64(a.ttl)/2, int64(a.ttl)))
	s.after(sent-s.now+s.delay(), func() {
		a.server.purge(s.now)
		if !slices.Contains(a.server.owners, a) {
			return
		}
		a.expiry = max(a.expiry, s.now+int64(ttl))
		a.server.watch(a)
		if s.lostReply() {
			return
		}
		a.inClient(s.delay(), func() {
			if a.over || s.now >= a.v {
				return
			}
			a.v = max(a.v, sent+int64(ttl-margin(ttl)))
			v := a.v
			a.loss()
			a.inClient(s.between(0, 500*us), func() {
				a.event(Extended, func(e *Event) {
					e.Token, e.V, e.Called, e.TTL = a.token, v, called, ttl
					if s.chance(50) {
						e.Sent = sent
					}
				})
			})
		})
	})
}

func (a *simAttempt) release() {
	s := a.s
	if a.over || s.now >= a.v {
		return
	}
	a.over = true
	a.event(ReleaseCalled, nil)
	s.after(s.delay(), func() {
		res := NotHeld
		if a.drop() {
			res = OK
		}
		d := s.delay()
		if s.lostReply() {
			d, res = 100*ms, Uncertain
		}
		a.inClient(d, func() {
			a.event(ReleaseReturned, func(e *Event) { e.Result = res })
			a.done()
		})
	})
}

// write is judged by a resource which refuses every token lower than one it has seen.
func (a *simAttempt) write() {
	s, called, byClient := a.s, a.s.now, a.s.chance(50)
	if a.id.Kind != Lock {
		return
	}
	s.after(s.delay(), func() {
		e := Event{Type: WriteRefused, Process: "resource", Resource: a.id.Name, Token: a.token}
		if a.token >= s.highest[a.id.Name] {
			s.highest[a.id.Name] = a.token
			e.Type = WriteAdmitted
		}
		if byClient {
			e.Called, e.Process = called, a.id.Process
			a.inClient(s.delay(), func() { s.add(e) })
			return
		}
		s.add(e)
	})
}

// seeds runs f with fresh seeds, which a failure prints.
func seeds(t *testing.T, n int, f func(t *testing.T, seed uint64)) {
	first := uint64(time.Now().UnixNano())
	t.Logf("seeds from %d", first)
	for i := range uint64(n) {
		f(t, first+i)
		if t.Failed() {
			t.Fatalf("seed %d", first+i)
		}
	}
}

func TestLegalRuns(t *testing.T) {
	t.Run("faults", func(t *testing.T) {
		t.Parallel()
		var sum Report
		seeds(t, 300, func(t *testing.T, seed uint64) {
			h := simulate(seed, 9, 12, true)
			rules := Rules{MinAcquired: 20, MinContended: 5, Faults: []FaultRule{{Name: "slow", AttemptsDuring: 1}}}
			rep := Check(h, rules)
			if rep.Verdict() != Pass {
				t.Errorf("a correct lock with faults: got %v", rep)
			}
			sum.Events += rep.Events
			sum.Acquired += rep.Acquired
			sum.Refused += rep.Refused
			sum.Failed += rep.Failed
			sum.Contended += rep.Contended
			sum.MaxLossLate = max(sum.MaxLossLate, rep.MaxLossLate)
		})
		t.Logf("in all: %v", sum)
	})
	t.Run("quiet", func(t *testing.T) {
		t.Parallel()
		seeds(t, 100, func(t *testing.T, seed uint64) {
			h := simulate(seed, 6, 12, false)
			if rep := Check(h, Rules{MinAcquired: 20}); rep.Verdict() != Pass {
				t.Errorf("a correct lock: got %v", rep)
			}
			if rep := CheckModel(h, ModelRules{}); rep.Verdict != Pass {
				t.Errorf("a correct lock: got %+v", rep)
			}
		})
	})
}
