package redlock

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/fencelock/fencelock/driver"
)

var modelSize = flag.Int("model", 20_000, "acquisitions of the model of tokens, for each number of nodes")

// The model lets clients that decide by the ballot, and nodes that do what the scripts do, exchange messages in any
// order, late, more than once or never, while leases expire whenever they like and clocks go as they like. Tokens must
// be unique and rise all the same (T1, T2, T3), and keep to the clocks (T4).

// modelNode is what a script sees of one name. Times are microseconds.
type modelNode struct {
	id    string // of the holder, empty if there is none
	token driver.Token
	fence driver.Token // 0 is no memory
	skew  int64        // of its clock
}

func (n *modelNode) refusal(w *model, t driver.Token, mode string) (said, driver.Token) {
	now := driver.Token(w.now + n.skew)
	last := n.fence
	if last == 0 {
		last = now - 1_000_000
	}
	switch {
	case t <= last:
		return low, last
	case mode != "later" && t > now+60_000_000:
		return far, max(last, now)
	}
	return 0, last
}

func (n *modelNode) raise(w *model, t driver.Token) {
	last := n.fence
	if last == 0 {
		last = driver.Token(w.now + n.skew - 1_000_000)
	}
	n.fence = max(last, t)
}

// message is a request to a node, and then the reply to it.
type message struct {
	node  int
	what  step
	id    string
	token driver.Token // proposal, or the bound of a release
	mode  string

	to   *attempt // who waits for the reply, if anybody
	trip int
	vote *vote // the reply
}

// attempt is an acquisition, a repetition of one, or a token asked for without a lock.
type attempt struct {
	ballot  *ballot
	id      string // empty without a lock
	trip    int
	skew    int64        // of the client's clock
	began   driver.Token // the greatest token of all that had completed before
	floor   driver.Token
	advance bool
	of      *attempt // which this repeats
	done    bool
	token   driver.Token // when won
	broken  bool         // a lease of this id has expired somewhere
	busy    bool         // a repetition is under way
	over    bool         // it was released, or surely failed: nobody asks again
}

type model struct {
	*rand.Rand
	n       int
	amnesia bool
	counter bool // each node counts by itself
	now     int64
	nodes   []modelNode
	bag     []message
	live    []*attempt
	byID    map[string]*attempt
	tokens  map[driver.Token]string // who has got it
	most    driver.Token            // of the attempts that have completed
	ahead   driver.Token            // the greatest floor
	won     int
	made    int
	err     error
}

func (w *model) fail(law, format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf("%s (%s)", fmt.Sprintf(format, args...), law)
	}
}

func (w *model) begin() {
	w.made++
	a := &attempt{began: w.most}
	switch w.IntN(10) {
	case 0:
		a.floor = w.floor()
		a.ballot = newBallot("", w.n, 1, a.floor)
	case 1:
		a.advance, a.floor = true, w.floor()
		a.ballot = newBallot("", w.n, 1, 0)
		a.ballot.propose(a.floor, "")
		w.live = append(w.live, a)
		w.send(a, tokenStep)
		return
	case 2:
		if len(w.live) > 0 {
			if of := w.live[w.IntN(len(w.live))]; of.id != "" && of.of == nil && of.done && !of.busy && !of.over {
				of.busy = true                            // one after the other, as a client does
				a.of, a.id, a.began = of, of.id, of.began // it is the same acquisition
				a.ballot = newBallot(a.id, w.n, 1, of.floor)
			}
		}
	}
	if a.ballot == nil {
		a.id = fmt.Sprintf("%08d", w.made)
		if w.IntN(20) == 0 {
			a.floor = w.floor()
		}
		a.ballot = newBallot(a.id, w.n, 1, a.floor)
		w.byID[a.id] = a
	}
	skew := w.Int64N(2_000_000) - 1_000_000
	if w.IntN(50) == 0 {
		skew *= 600 // a clock that is wrong by minutes
	}
	a.skew = skew
	a.ballot.propose(max(a.floor+1, driver.Token(w.now+skew)), "0")
	w.live = append(w.live, a)
	w.put(a)
}

// floor is one that may lie ahead of the clocks.
func (w *model) floor() driver.Token {
	f := driver.Token(w.now + w.Int64N(3_000_000) - 2_000_000)
	w.ahead = max(w.ahead, f)
	return f
}

func (w *model) put(a *attempt) {
	what := acquireStep
	if a.id == "" {
		what = tokenStep
	}
	w.send(a, what)
}

func (w *model) send(a *attempt, what step) {
	a.trip++
	mode := a.ballot.mode(a.trip)
	if a.advance {
		mode = "raise"
	}
	for i := range w.n {
		w.bag = append(w.bag, message{node: i, what: what, id: a.id, token: a.ballot.proposal, mode: mode,
			to: a, trip: a.trip})
	}
}

// others sends a message that nobody waits for, to all nodes or some.
func (w *model) others(what step, id string, t driver.Token, all bool) {
	for i := range w.n {
		if all || w.IntN(2) == 0 {
			w.bag = append(w.bag, message{node: i, what: what, id: id, token: t})
		}
	}
}

// extended says that a majority still has the lease, which is when it is given to others again.
func (w *model) extended(a *attempt) bool {
	n := 0
	for _, node := range w.nodes {
		if node.id == a.id && node.token == a.token {
			n++
		}
	}
	return n > w.n/2 && w.IntN(3) > 0
}

// deliver does what the script does, and answers what it says.
func (w *model) deliver(m message) vote {
	n := &w.nodes[m.node]
	switch m.what {
	case acquireStep:
		if w.counter {
			if n.id != "" && n.id != m.id {
				return vote{said: other, busy: map[string]string{"0": n.id}}
			}
			if n.id == "" {
				n.fence++
				n.id, n.token = m.id, n.fence
			}
			return vote{said: mine, token: n.token, slot: "0"}
		}
		why, last := n.refusal(w, m.token, m.mode)
		if n.id == m.id && (m.mode == "first" || m.token <= n.token) {
			return vote{said: mine, token: n.token, slot: "0"}
		}
		switch {
		case n.id != "" && n.id != m.id:
			return vote{said: other, token: last, busy: map[string]string{"0": n.id}}
		case why != 0:
			return vote{said: why, token: last}
		}
		n.fence, n.id, n.token = m.token, m.id, m.token
		w.clock(m.token)
		return vote{said: mine, token: m.token, slot: "0"}
	case tokenStep:
		if m.mode == "raise" {
			n.raise(w, m.token)
			return vote{said: mine, token: m.token}
		}
		if why, last := n.refusal(w, m.token, m.mode); why != 0 {
			return vote{said: why, token: last}
		}
		n.fence = m.token
		w.clock(m.token)
		return vote{said: mine, token: m.token}
	case fillStep:
		if n.id == "" {
			n.raise(w, m.token)
			n.id, n.token = m.id, m.token
		}
	case releaseStep:
		if n.id == m.id && (m.token == 0 || n.token <= m.token) {
			n.id = ""
		}
	}
	return vote{}
}

// clock checks that an accepted token is no further ahead than a minute of some node's clock, unless a floor is.
func (w *model) clock(t driver.Token) {
	const skews, counted = 2_000_000, 1_000_000 // how much clocks differ; what contention may add
	if t > driver.Token(w.now+60_000_000+skews+counted) && t > w.ahead+counted {
		w.fail("T4", "token accepted: got %v ahead of the clock, want at most a minute", int64(t)-w.now)
	}
}

// heard takes a reply, or that none comes.
func (w *model) heard(m message) {
	a := m.to
	if a == nil || a.done || m.trip != a.trip || a.ballot.votes[m.node].said != 0 {
		return
	}
	a.ballot.votes[m.node] = *m.vote
	if w.counter {
		w.count(a)
		return
	}
	switch v := a.ballot.verdict(); v {
	case open:
	case won:
		w.complete(a, a.ballot.token)
	case again, yield:
		if a.advance || a.trip > 20 {
			w.end(a)
			return
		}
		if v == yield {
			w.others(releaseStep, a.id, a.ballot.proposal, true)
		}
		a.ballot.propose(a.ballot.next(driver.Token(w.now+a.skew)), "0")
		w.put(a)
	case vague:
		a.done = true // it is repeated, or released some time
		if a.of != nil {
			a.of.busy = false
		}
	default:
		w.end(a)
	}
}

// count is how a Redlock with a counter on each node would take its token: the greatest that a majority has answered.
func (w *model) count(a *attempt) {
	n, most, pending := 0, driver.Token(0), 0
	for _, v := range a.ballot.votes {
		switch v.said {
		case mine:
			n++
			most = max(most, v.token)
		case 0:
			pending++
		}
	}
	switch {
	case n >= a.ballot.quorum:
		w.complete(a, most)
	case pending == 0:
		w.end(a)
	}
}

func (w *model) end(a *attempt) {
	a.done = true
	if first := w.byID[a.id]; first != nil {
		first.busy, first.over = false, true
		w.others(releaseStep, a.id, 0, true)
	}
}

func (w *model) complete(a *attempt, t driver.Token) {
	a.done = true
	if a.of != nil {
		a.of.busy = false
	}
	if a.advance {
		w.most = max(w.most, a.floor)
		return
	}
	w.won++
	who := a.id
	if who == "" {
		who = fmt.Sprintf("token %p", a)
	}
	if by, taken := w.tokens[t]; taken && by != who {
		w.fail("T2", "token of %s: got %v, which %s has", who, t, by)
	}
	w.tokens[t] = who
	if t <= a.began {
		w.fail("T1", "token of %s: got %v, want more than %v, which was given before it began", who, t, a.began)
	}
	if a.of != nil && a.of.token != 0 && a.of.token != t && !a.of.broken {
		w.fail("T3", "repeated request of %s: got token %v, want %v again", who, t, a.of.token)
	}
	if first := a.of; first != nil {
		first.token = t // its own reply may have been lost, or its lease have ended and begun anew
	}
	a.token = t
	if t <= a.floor {
		w.fail("T4", "token: got %v, want more than the floor %v", t, a.floor)
	}
	w.most = max(w.most, t)
}

// run makes so many acquisitions, or stops at the first violation.
func (w *model) run(acquisitions int) error {
	w.nodes = make([]modelNode, w.n)
	w.byID, w.tokens = make(map[string]*attempt), make(map[driver.Token]string)
	w.now = 1_800_000_000_000_000
	for w.won < acquisitions && w.err == nil {
		w.now += w.Int64N(2000)
		switch k := w.IntN(100); {
		case k < 6:
			if len(w.live) < 8 {
				w.begin()
			}
		case k < 9: // a lease expires, too early
			n := &w.nodes[w.IntN(w.n)]
			if n.id != "" {
				w.byID[n.id].broken = true
				n.id = ""
			}
		case k < 10: // a clock is set
			w.nodes[w.IntN(w.n)].skew = w.Int64N(2_000_000) - 1_000_000
		case k < 15 && len(w.live) > 0: // somebody ends, or gives its lease to nodes again
			i := w.IntN(len(w.live))
			switch a := w.live[i]; {
			case !a.done || a.busy:
			case a.token != 0 && a.id != "" && !w.byID[a.id].over && w.extended(a):
				w.others(fillStep, a.id, a.token, false)
			default:
				if a.id != "" && a.of == nil {
					a.over = true
					w.others(releaseStep, a.id, 0, true)
				}
				w.live[i] = w.live[len(w.live)-1]
				w.live = w.live[:len(w.live)-1]
			}
		case k < 16 && w.amnesia:
			w.nodes[w.IntN(w.n)] = modelNode{}
		case len(w.bag) > 0:
			i := w.IntN(len(w.bag))
			m := w.bag[i]
			switch fate := w.IntN(100); {
			case fate < 3 && m.vote == nil: // it arrives twice
				w.deliver(m)
				continue
			case fate < 5 && m.to != nil: // no reply comes, and what it asks for may be done later
				m.vote = &vote{said: unknown}
				w.heard(m)
				continue
			case m.vote == nil:
				v := w.deliver(m)
				w.bag[i].vote = &v
				continue
			}
			w.bag[i] = w.bag[len(w.bag)-1]
			w.bag = w.bag[:len(w.bag)-1]
			w.heard(m)
		}
		if w.made%1000 == 0 && len(w.tokens) > 100_000 {
			clear(w.tokens)
		}
	}
	return w.err
}

func runModel(t *testing.T, n int, set func(*model)) error {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	w := &model{Rand: rand.New(rand.NewPCG(seed, 0)), n: n}
	if set != nil {
		set(w)
	}
	err := w.run(*modelSize)
	t.Logf("%d acquisitions, %d attempts", w.won, w.made)
	return err
}

func TestModel(t *testing.T) {
	for _, n := range []int{3, 5} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			if err := runModel(t, n, nil); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestModelFinds shows that the model would see it if tokens were made in another way, or nodes forgot.
func TestModelFinds(t *testing.T) {
	for _, n := range []int{3, 5} {
		for what, set := range map[string]func(*model){
			"amnesia": func(w *model) { w.amnesia = true },
			"counter": func(w *model) { w.counter = true },
		} {
			t.Run(fmt.Sprint(what, n), func(t *testing.T) {
				t.Parallel()
				err := runModel(t, n, set)
				t.Log(err)
				if err == nil {
					t.Errorf("model with %s: got no violation, want one", what)
				}
			})
		}
	}
}
