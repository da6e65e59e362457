package history

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/anishathalye/porcupine"
)

// ModelRules bound the work of CheckModel and say what the lock may do.
type ModelRules struct {
	// SplitVotes allows that concurrent attempts refuse each other and none is granted, as with Redlock.
	// Without it, an attempt that does not wait is refused only by a holder, a waiter, or an attempt
	// whose outcome was not known.
	SplitVotes bool
	// Timeout is for the whole history; 0 = 10 s.
	Timeout time.Duration
}

// Bounds of the search for one name, since it keeps what it has seen: n operations cost n/8 bytes for
// every step that is kept.
const (
	modelOps   = 20_000
	modelBytes = 256 << 20
)

// A ModelReport is what CheckModel found.
type ModelReport struct {
	// Verdict is Void when the search was cut off by its bounds, or had nothing to search.
	Verdict Verdict
	// Reason names, unless Verdict is Pass, the lock or semaphore and says what could not be ordered or
	// why the search ended.
	Reason     string
	Operations int
}

// Err is nil for Pass; else an error whose text is the reason.
func (r ModelReport) Err() error {
	if r.Verdict == Pass {
		return nil
	}
	return fmt.Errorf("%s: %s", r.Verdict, r.Reason)
}

// CheckModel asks whether the operations of each lock and semaphore could have happened one after
// another, each at one moment between its call and its return, on an ideal one that knows its owners:
//
//   - a lock is granted only when nobody holds it, and in the order of tokens; a permit only when,
//     counting it, no more than its own limit are held;
//   - ErrHeld is only answered when that was so, or when the name was promised to a waiter;
//   - Release frees the lease of its caller and no other, and answers NotHeld to nobody who holds.
//
// It is for quiet runs, in which no process dies and the backend keeps what it knows: this is where it
// sees more than Check, since it judges refusals and the results of releases too. Leases that end by
// their V are understood. Outcomes that are not known (Failed with Uncertain, a release without an
// answer) are taken either way. Bare tokens are left to Check.
func CheckModel(h History, rules ModelRules) ModelReport {
	if rules.Timeout == 0 {
		rules.Timeout = 10 * time.Second
	}
	deadline := time.Now().Add(rules.Timeout)
	rep := ModelReport{Verdict: Pass}
	var ill string
	run := arrange(h, func(text string, events ...*Event) { ill = cmp.Or(ill, text+": "+events[0].String()) })
	if ill != "" {
		return ModelReport{Verdict: Fail, Reason: ill}
	}
	for _, res := range run.resources() {
		ops := operations(run.domains[res], rules.SplitVotes)
		rep.Operations += len(ops)
		verdict, reason := order(ops, deadline)
		if verdict == Fail || verdict == Void && rep.Verdict == Pass {
			rep.Verdict, rep.Reason = verdict, fmt.Sprintf("%s %q: %s", res.kind, res.name, reason)
		}
		if verdict == Fail {
			return rep
		}
	}
	if rep.Operations == 0 {
		rep.Verdict, rep.Reason = Void, "nothing to judge"
	}
	return rep
}

// operation is one step of the ideal lock.
type operation struct {
	verb  verb
	owner uint32
	// grant: the capacity to respect; refuse: the one that must be used up
	limit int
	// grant of a lock: its token, and the one granted just before
	token, prev uint64

	from, to  int64
	call, ret *Event // what to show for it
}

type verb string

const (
	grant  verb = "grant"
	refuse verb = "refuse"
	free   verb = "free" // by release or expiry: once for each lease
	deny   verb = "deny" // a release that finds nothing to free
)

func (o *operation) String() string {
	s := fmt.Sprintf("%s: %v", o.verb, o.call)
	if o.ret != nil {
		s += " -> " + o.ret.text(0)
	}
	return s
}

// state is what the ideal lock knows: its owners, sorted, four bytes each, and for a lock the last token.
type state struct {
	owners string
	last   uint64
}

func (s state) count() int { return len(s.owners) / 4 }

func (s state) find(owner uint32) (at int, held bool) {
	var key [4]byte
	binary.BigEndian.PutUint32(key[:], owner)
	for at = 0; at < len(s.owners); at += 4 {
		if c := strings.Compare(s.owners[at:at+4], string(key[:])); c >= 0 {
			return at, c == 0
		}
	}
	return at, false
}

// step is the ideal lock.
func (s state) step(o *operation) (bool, state) {
	at, held := s.find(o.owner)
	switch o.verb {
	case grant:
		if s.count() >= o.limit || s.last != o.prev {
			return false, s
		}
		var key [4]byte
		binary.BigEndian.PutUint32(key[:], o.owner)
		return true, state{s.owners[:at] + string(key[:]) + s.owners[at:], o.token}
	case refuse:
		return s.count() >= o.limit, s
	case deny:
		return !held, s
	}
	if held { // free
		s.owners = s.owners[:at] + s.owners[at+4:]
	}
	return held, s
}

// operations turns the attempts of one name into steps of the model.
func operations(all []*attempt, splitVotes bool) []*operation {
	var ops []*operation
	var grants []*operation
	var before spans // attempts that others may have been refused for, without a holder
	promises := func(a *attempt) bool {
		return splitVotes || a.start.Wait || a.end == nil || a.end.Type == Failed && a.end.Result != Unavailable
	}
	for i, a := range all {
		if a.start.Kind == Token {
			continue
		}
		if promises(a) {
			before.add(a.start.T, a.promisedUntil())
		}
		if a.end == nil || a.end.Type == Failed {
			continue
		}
		o := &operation{verb: refuse, owner: uint32(i), limit: max(1, a.start.Limit), call: a.start, ret: a.end, from: a.start.T, to: a.end.T}
		ops = append(ops, o)
		if !a.lease() {
			continue
		}
		o.verb = grant
		if a.start.Kind == Lock {
			o.limit, o.token = 1, a.end.Token
			grants = append(grants, o)
		}
		ops = append(ops, a.endings(o.owner)...)
	}
	// A refusal for the sake of others holds in any order: it need not be searched.
	before.sort()
	ops = slices.DeleteFunc(ops, func(o *operation) bool {
		if o.verb != refuse {
			return false
		}
		others := before.overlapping(o.from-1, o.to+1)
		if promises(all[o.owner]) {
			others--
		}
		return others > 0
	})
	// The order of a lock's grants is that of their tokens; knowing it spares the search.
	slices.SortStableFunc(grants, func(a, b *operation) int { return cmp.Compare(a.token, b.token) })
	for i, o := range grants[min(1, len(grants)):] {
		o.prev = grants[i].token
	}
	return ops
}

// promisedUntil is how long others may be refused for an attempt's sake.
func (a *attempt) promisedUntil() int64 {
	switch {
	case a.end == nil:
		return never
	case a.end.Type == Failed && a.end.Result == Uncertain:
		if a.start.TTL == 0 {
			return never
		}
		return a.end.T + int64(a.start.TTL)
	}
	return a.end.T
}

// endings are the steps by which a lease ends: one that frees it, and releases that found it gone.
func (a *attempt) endings(owner uint32) []*operation {
	var ops []*operation
	expiry := never // the earliest moment at which the backend may let it go by itself
	if a.v != 0 {
		expiry = a.v
	}
	if a.lost != nil {
		expiry = min(expiry, a.lost.T)
	}
	// Freed not before from: by the first release that may have had an effect, if there is one. The first
	// OK says that it was free by then; what was not answered may have its effect at any time.
	f := &operation{verb: free, owner: owner, from: expiry, to: never, call: a.end}
	for i, call := range a.releases {
		result, ret := Uncertain, (*Event)(nil)
		if i < len(a.returns) {
			ret = a.returns[i]
			result = ret.Result
		}
		switch {
		case result == Unavailable:
		case result == NotHeld && ret.T >= expiry: // by the holder's clock: it says nothing of the backend
		case result == NotHeld:
			ops = append(ops, &operation{verb: deny, owner: owner, from: call.T, to: ret.T, call: call, ret: ret})
		case f.ret == nil:
			if call.T < f.from || result == OK {
				f.call = call
			}
			f.from = min(f.from, call.T)
			if result == OK {
				f.to, f.ret = ret.T, ret
			}
		}
	}
	if f.from < never {
		ops = append(ops, f)
	}
	return ops
}

// order looks for a legal order of the operations of one name.
func order(ops []*operation, deadline time.Time) (Verdict, string) {
	if len(ops) > modelOps {
		return Void, fmt.Sprintf("%d operations of one name, at most %d can be searched", len(ops), modelOps)
	}
	history := make([]porcupine.Operation, len(ops))
	for i, o := range ops {
		history[i] = porcupine.Operation{Input: o, Call: o.from, Return: o.to}
	}
	budget := int64(modelBytes / (len(ops)/8 + 128))
	var steps atomic.Int64 // a search that ran into the timeout may go on for a moment
	model := porcupine.Model{
		Init: func() any { return state{} },
		Step: func(s, input, _ any) (bool, any) {
			ok, next := s.(state).step(input.(*operation))
			if ok && steps.Add(1) > budget {
				return false, s
			}
			return ok, next
		},
	}
	left := time.Until(deadline)
	if left <= 0 {
		return Void, "no time left"
	}
	result := porcupine.CheckOperationsTimeout(model, history, left)
	switch {
	case result == porcupine.Ok:
		return Pass, ""
	case result == porcupine.Unknown:
		return Void, "the search took too long"
	case steps.Load() > budget:
		return Void, "the search took too much memory"
	}
	return Fail, explain(model, history, &steps)
}

// explain searches again, keeping the longest legal order, and names the operation that does not fit.
func explain(model porcupine.Model, history []porcupine.Operation, steps *atomic.Int64) string {
	steps.Store(0)
	_, info := porcupine.CheckOperationsVerbose(model, history, 2*time.Second)
	var longest []int
	for _, partition := range info.PartialLinearizations() {
		for _, ids := range partition {
			if len(ids) > len(longest) {
				longest = ids
			}
		}
	}
	in := make([]bool, len(history))
	for _, id := range longest {
		in[id] = true
	}
	stuck := -1
	for id := range history {
		if !in[id] && (stuck < 0 || history[id].Return < history[stuck].Return) {
			stuck = id
		}
	}
	text := fmt.Sprintf("no legal order: %d of %d operations fit", len(longest), len(history))
	if len(longest) > 0 {
		text += fmt.Sprintf("\n    after: %v", history[longest[len(longest)-1]].Input)
	}
	if stuck >= 0 {
		text += fmt.Sprintf("\n    does not fit: %v", history[stuck].Input)
	}
	return text
}
