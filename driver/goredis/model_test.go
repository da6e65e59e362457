package goredis_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/state"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// TestAgainstReference runs random steps of several clients on a server and on the reference of what a
// name does, and compares after each step the answers, all that is stored, and the messages.
//
// TTLs are so long that nothing expires by itself; what the model lets expire is put into the past on
// the server. The server's clock is this machine's, so a step's time is known to lie between two
// readings; stored expiries may differ from the model's by the longest such gap.
func TestAgainstReference(t *testing.T) {
	for range 4 {
		seed := rand.Uint64()
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			newComparison(t, seed).run(700)
		})
	}
}

// refKeys are the ends of the names' keys, written down rather than computed.
var refKeys = map[driver.Name]string{
	lockName("x"):         "{x}",
	lockName("pay:{7}:a"): "pay:{7}:a.",
	permitName("x"):       "{x}",
	permitName("50%}"):    "{50%25%7D}",
}

type comparison struct {
	t       *testing.T
	rng     *rand.Rand
	raw     *redis.Client
	drivers []redisbackend.Full // of both client libraries
	names   []driver.Name
	model   map[driver.Name]*state.Name
	ids     map[driver.Name][]string // that have asked for something
	channel map[string]string        // by client in the model
	slack   time.Duration            // longest step
	did     map[string]int           // what was covered
	doing   string

	mu     sync.Mutex
	events []map[driver.Event]int // by driver: what came
	pushes []map[driver.Event]int // what should have
	ready  []bool
}

func newComparison(t *testing.T, seed uint64) *comparison {
	s := startRedis(t)
	c := &comparison{t: t, rng: rand.New(rand.NewPCG(seed, 1)), raw: s.client(t),
		model: map[driver.Name]*state.Name{}, ids: map[driver.Name][]string{},
		channel: map[string]string{}, did: map[string]int{}}
	for n := range refKeys {
		c.names = append(c.names, n)
		c.model[n] = &state.Name{}
	}
	slices.SortFunc(c.names, func(a, b driver.Name) int {
		return strings.Compare(a.Kind.String()+a.Name, b.Kind.String()+b.Name)
	})
	for i := range 3 {
		d := redisbackend.Full(s.driver(t))
		if i == 0 {
			d = redisbackend.Rueidis.Connect(t, redisbackend.Options{Addr: s.Addr()})
		}
		c.drivers = append(c.drivers, d)
		c.events = append(c.events, map[driver.Event]int{})
		c.pushes = append(c.pushes, map[driver.Event]int{})
		c.ready = append(c.ready, false)
		d.Notify(func(e driver.Event) {
			c.mu.Lock()
			defer c.mu.Unlock()
			switch e.Kind {
			case driver.EventGranted:
				c.events[i][e]++
			case driver.EventRecheck:
				c.ready[i] = true
			default:
				t.Errorf("client %d: unexpected event %+v", i, e)
			}
		})
	}
	// The subscriptions must stand before the first grant that is to be announced.
	other := lockName("warm up")
	if a, err := c.drivers[0].Lock(t.Context(), driver.Request{Owner: driver.Owner{Name: other, ID: newID()}, TTL: time.Hour, Limit: 1}); a.State != driver.Granted {
		t.Fatalf("Lock: got %v, %v, want granted", a.State, err)
	}
	for i, d := range c.drivers {
		o := driver.Owner{Name: other, ID: newID()}
		if a, err := d.Lock(t.Context(), driver.Request{Owner: o, TTL: time.Hour, Limit: 1, Wait: true, Claim: time.Hour}); a.State != driver.Waiting {
			t.Fatalf("Lock of a held lock with Wait: got %v, %v, want waiting", a.State, err)
		}
		eventually(t, "subscription", func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.ready[i]
		})
	}
	for _, key := range c.raw.Keys(t.Context(), "*").Val() {
		c.raw.Del(t.Context(), key)
	}
	return c
}

// minutes is a duration that does not pass during the test.
func (c *comparison) minutes() time.Duration {
	return time.Duration(10+10*c.rng.IntN(6))*time.Minute + time.Duration(c.rng.IntN(3))*time.Microsecond
}

func (c *comparison) pick(n driver.Name) string {
	ids := c.ids[n]
	if len(ids) == 0 || c.rng.IntN(20) == 0 {
		return newID()
	}
	return ids[max(0, len(ids)-1-c.rng.IntN(8))]
}

func (c *comparison) run(steps int) {
	for done := 0; done < steps || done < 10*steps && c.missing() != ""; done++ {
		if c.rng.IntN(4) == 0 {
			c.raw.ScriptFlush(c.t.Context())
		}
		client := c.rng.IntN(len(c.drivers))
		n := c.names[c.rng.IntN(len(c.names))]
		switch p := c.rng.IntN(100); {
		case p < 30:
			c.lock(client, n)
		case p < 50:
			c.release(client, n)
		case p < 62:
			c.poll(client)
		case p < 75:
			c.extend(client)
		case p < 80:
			c.token(client, n)
		case p < 84:
			c.force(client, n)
		case p < 92:
			c.expireHolder(n)
		default:
			c.expireWaiter(n)
		}
		if c.t.Failed() {
			return
		}
		c.checkTTLs()
	}
	// Messages that should not have come would have come by now: each step has waited for its own.
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range c.events {
		if !reflect.DeepEqual(c.events[i], c.pushes[i]) {
			c.t.Errorf("messages to client %d: got %v, want %v (W1)", i, c.events[i], c.pushes[i])
		}
	}
	if what := c.missing(); what != "" {
		c.t.Errorf("void: no step had %q in it: %v", what, c.did)
	}
}

// missing names something that no step has brought about yet.
func (c *comparison) missing() string {
	for _, what := range []string{"lock granted", "lock held", "lock waiting", "poll granted", "poll waiting", "poll gone",
		"extend granted", "extend gone", "extend later", "release", "release nothing", "handover", "repeat",
		"token", "advance", "force", "holder expired", "waiter expired", "floor", "several grants"} {
		if c.did[what] == 0 {
			return what
		}
	}
	return ""
}

// step runs do on the server and apply on the model until an instant within the step is found at which
// both have the same tokens and answers.
func (c *comparison) step(client int, names []driver.Name, what string, do func() any, apply func(m *state.Name, n driver.Name, now state.Now, answers []any) []state.Grant, answers int) {
	c.t.Helper()
	c.doing = fmt.Sprintf("client %d: %s", client, what)
	lo := time.Now()
	got, _ := do().([]any)
	hi := time.Now()
	c.slack = max(c.slack, hi.Sub(lo))

	want := make([]any, answers)
	for _, n := range names {
		found := c.stored(n)
		instants := []int64{lo.UnixMicro(), hi.UnixMicro()}
		for _, t := range append(found.tokens(), found.Last) {
			for back := range 4 {
				if at := int64(t) - int64(back); at > lo.UnixMicro() && at < hi.UnixMicro() {
					instants = append(instants, at)
				}
			}
		}
		var first string
		matched := false
		for _, at := range instants {
			m := clone(c.model[n])
			a := slices.Clone(want)
			grants := apply(m, n, state.Now{Lease: lo.UnixNano(), Token: at}, a)
			m.Live(state.Now{Lease: hi.UnixNano()}) // drops what has expired
			diff := c.compare(m, found)
			for i, w := range a {
				if diff == "" && w != nil && want[i] == nil {
					diff = c.compareAnswer(i, got[i], w)
				}
			}
			if diff == "" {
				if len(grants) > 1 {
					c.did["several grants"]++
				}
				c.model[n], want, matched = m, a, true
				c.expectPushes(n, grants)
				break
			}
			if first == "" {
				first = diff
			}
		}
		if !matched {
			c.t.Errorf("%s on %v %q differs from the reference: %s", c.doing, n.Kind, n.Name, first)
		}
	}
}

func clone(m *state.Name) *state.Name {
	return &state.Name{Last: m.Last, Holders: slices.Clone(m.Holders), Queue: slices.Clone(m.Queue)}
}

// found is what the server stores about a name.
type found struct{ state.Name }

func (f found) tokens() (all []driver.Token) {
	for _, h := range f.Holders {
		all = append(all, h.Token)
	}
	return all
}

func (c *comparison) key(n driver.Name, part string) string {
	return "fencelock:" + map[driver.Kind]string{driver.KindLock: "l", driver.KindPermit: "p"}[n.Kind] + part + ":" + refKeys[n]
}

// stored reads the server's state, without what has expired.
func (c *comparison) stored(n driver.Name) (f found) {
	c.t.Helper()
	ctx := c.t.Context()
	number := func(s string) driver.Token {
		s, marked := strings.CutPrefix(s, "w")
		if waits := c.raw.Exists(ctx, c.key(n, "q")).Val() == 1; waits && !marked && n.Kind == driver.KindLock {
			c.t.Errorf("%s: stored %q while somebody waits: got no mark in front", c.doing, s)
		}
		v, err := strconv.ParseUint(s, 10, 64)
		if err != nil || len(s) != 16 {
			c.t.Fatalf("%s: stored token: got %q, want 16 digits (T4)", c.doing, s)
		}
		return driver.Token(v)
	}
	if s, err := c.raw.Get(ctx, c.key(n, "f")).Result(); err == nil {
		f.Last = number(s)
	}
	now := time.Now()
	if n.Kind == driver.KindLock {
		if s, err := c.raw.Get(ctx, c.key(n, "")).Result(); err == nil {
			at, _ := c.raw.Do(ctx, "PEXPIRETIME", c.key(n, "")).Int64()
			p := strings.SplitN(s, " ", 3)
			f.Holders = append(f.Holders, state.Holder{ID: p[1], Token: number(p[0]), Info: p[2], Expires: at * int64(time.Millisecond)})
		}
	} else {
		for _, z := range c.raw.ZRangeWithScores(ctx, c.key(n, ""), 0, -1).Val() {
			if id := fmt.Sprint(z.Member); int64(z.Score) > now.UnixMicro() {
				p := strings.SplitN(c.raw.HGet(ctx, c.key(n, "d"), id).Val(), " ", 2)
				f.Holders = append(f.Holders, state.Holder{ID: id, Token: number(p[0]), Info: p[1], Expires: int64(z.Score) * 1000})
			}
		}
	}
	queue := c.raw.ZRangeWithScores(ctx, c.key(n, "q"), 0, -1).Val()
	expires := map[string]int64{}
	for _, z := range queue[len(queue)/3*2:] {
		expires[strings.TrimPrefix(fmt.Sprint(z.Member), ".")] = int64(z.Score)
	}
	for i := range len(queue) / 3 {
		id, p := fmt.Sprint(queue[2*i].Member), strings.SplitN(fmt.Sprint(queue[2*i+1].Member), " ", 6)
		if id != p[0] || queue[2*i].Score != queue[2*i+1].Score || len(expires) != len(queue)/3 {
			c.t.Fatalf("%s: queue: got %v, want id, request and expiry of each waiter", c.doing, queue)
		}
		if expires[id] > now.UnixMicro() {
			claim, _ := strconv.Atoi(p[1])
			limit, _ := strconv.Atoi(p[2])
			floor, _ := strconv.Atoi(p[3])
			f.Queue = append(f.Queue, state.Waiter{ID: id, Limit: limit, Floor: driver.Token(floor), Client: p[4], Info: p[5],
				Claim: time.Duration(claim) * time.Millisecond, Expires: expires[id] * 1000})
		}
	}
	return f
}

func (c *comparison) near(got, want int64) bool {
	d := time.Duration(got - want)
	return d > -2*time.Millisecond && d < c.slack+5*time.Millisecond
}

// compare tells how the server differs from the model.
func (c *comparison) compare(m *state.Name, f found) string {
	if f.Last != m.Last {
		return fmt.Sprintf("last token: got %v, want %v (T1, T4)", f.Last, m.Last)
	}
	byID := func(a, b state.Holder) int { return strings.Compare(a.ID, b.ID) }
	got, want := slices.SortedFunc(slices.Values(f.Holders), byID), slices.SortedFunc(slices.Values(m.Holders), byID)
	if len(got) != len(want) {
		return fmt.Sprintf("holders: got %v, want %v (L1, S1)", got, want)
	}
	for i, g := range got {
		w := want[i]
		if g.ID != w.ID || g.Token != w.Token || g.Info != w.Info || !c.near(g.Expires, w.Expires) {
			return fmt.Sprintf("holder: got %+v, want %+v", g, w)
		}
	}
	if len(f.Queue) != len(m.Queue) {
		return fmt.Sprintf("queue: got %v, want %v (W4)", f.Queue, m.Queue)
	}
	for i, g := range f.Queue {
		w := m.Queue[i]
		if c.channel[w.Client] == "" {
			c.channel[w.Client] = g.Client
		}
		if g.ID != w.ID || g.Limit != w.Limit || g.Floor != w.Floor || g.Info != w.Info || g.Client != c.channel[w.Client] ||
			g.Claim-w.Claim >= time.Millisecond || g.Claim < w.Claim || !c.near(g.Expires, w.Expires) {
			return fmt.Sprintf("waiter %d: got %+v, want %+v (W4)", i, g, w)
		}
	}
	return ""
}

func (c *comparison) compareAnswer(i int, got, want any) string {
	g, ok := got.(driver.Answer)
	w, ok2 := want.(driver.Answer)
	if ok && ok2 {
		off := w.TTL - g.TTL // a longer lease was granted in one step and is looked at in another
		if g.State != w.State || g.Token != w.Token || off.Abs() > c.slack+2*time.Millisecond {
			return fmt.Sprintf("answer %d: got %+v, want %+v", i, g, w)
		}
		return ""
	}
	if got != want {
		return fmt.Sprintf("answer %d: got %v, want %v", i, got, want)
	}
	return ""
}

func (c *comparison) expectPushes(n driver.Name, grants []state.Grant) {
	for _, g := range grants {
		c.did["handover"]++
		i, _ := strconv.Atoi(g.Client)
		e := driver.Event{Kind: driver.EventGranted, Owner: driver.Owner{Name: n, ID: g.ID}, Token: g.Token}
		c.pushes[i][e]++
		eventually(c.t, fmt.Sprintf("%s: message about %+v", c.doing, e), func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.events[i][e] == c.pushes[i][e]
		})
	}
}

func (c *comparison) checkTTLs() {
	for _, key := range c.raw.Keys(c.t.Context(), "*").Val() {
		ttl := c.raw.PTTL(c.t.Context(), key).Val()
		most := time.Hour + time.Second
		if strings.Contains(key, "f:") {
			most = 49 * time.Hour
		}
		if ttl <= 0 && ttl != -2 || ttl > most {
			c.t.Errorf("%s: TTL of %s: got %v, want up to %v (L7, T5)", c.doing, key, ttl, most)
		}
	}
}

func (c *comparison) result(what string, a driver.Answer, err error) any {
	if err != nil {
		c.t.Errorf("%s: got error %v, want nil", c.doing, err)
	}
	c.did[what+" "+a.State.String()]++
	return a
}

func (c *comparison) lock(client int, n driver.Name) {
	id := newID()
	if c.rng.IntN(4) == 0 {
		id = c.pick(n)
		c.did["repeat"]++
	}
	c.ids[n] = append(c.ids[n], id)
	r := driver.Request{Owner: driver.Owner{Name: n, ID: id}, TTL: c.minutes(), Limit: 1,
		Holder: []string{"", "host 1 2026", "ünï\ncode \x00 {}"}[c.rng.IntN(3)]}
	if n.Kind == driver.KindPermit {
		r.Limit = 1 + c.rng.IntN(4)
	}
	if c.rng.IntN(3) > 0 || c.waits(n, id) {
		r.Wait, r.Claim = true, c.minutes()
	}
	switch c.rng.IntN(12) {
	case 0:
		r.Floor = driver.Token(1 + c.rng.IntN(1000))
	case 1:
		r.Floor = driver.Token(time.Now().Add(time.Duration(c.rng.IntN(100)) * time.Millisecond).UnixMicro())
		c.did["floor"]++
	}
	do := c.drivers[client].Lock
	if n.Kind == driver.KindPermit {
		do = c.drivers[client].Acquire
	}
	c.step(client, []driver.Name{n}, fmt.Sprintf("Lock %+v", r), func() any {
		a, err := do(c.t.Context(), r)
		return []any{c.result("lock", a, err)}
	}, func(m *state.Name, _ driver.Name, now state.Now, answers []any) (grants []state.Grant) {
		answers[0], grants = m.Lock(now, r, strconv.Itoa(client))
		return grants
	}, 1)
}

func (c *comparison) waits(n driver.Name, id string) bool {
	return slices.ContainsFunc(c.model[n].Queue, func(w state.Waiter) bool { return w.ID == id })
}

func (c *comparison) release(client int, n driver.Name) {
	o := driver.Owner{Name: n, ID: c.pick(n)}
	if m := c.model[n]; len(m.Holders) > 0 && c.rng.IntN(2) == 0 {
		o.ID = m.Holders[c.rng.IntN(len(m.Holders))].ID
	}
	c.step(client, []driver.Name{n}, fmt.Sprintf("Release %+v", o), func() any {
		ok, err := c.drivers[client].Release(c.t.Context(), o)
		if err != nil {
			c.t.Errorf("Release: got error %v, want nil", err)
		}
		c.did[map[bool]string{true: "release", false: "release nothing"}[ok]]++
		return []any{ok}
	}, func(m *state.Name, _ driver.Name, now state.Now, answers []any) (grants []state.Grant) {
		answers[0], grants = m.Release(now, o.ID)
		return grants
	}, 1)
}

// several picks distinct owners of distinct or equal names.
func (c *comparison) several() (owners []driver.Owner) {
	for range 1 + c.rng.IntN(6) {
		n := c.names[c.rng.IntN(len(c.names))]
		o := driver.Owner{Name: n, ID: c.pick(n)}
		if !slices.Contains(owners, o) {
			owners = append(owners, o)
		}
	}
	return owners
}

func namesOf(owners []driver.Owner) (names []driver.Name) {
	for _, o := range owners {
		if !slices.Contains(names, o.Name) {
			names = append(names, o.Name)
		}
	}
	return names
}

func (c *comparison) extend(client int) {
	owners := c.several()
	leases := make([]driver.Extension, len(owners))
	for i, o := range owners {
		leases[i] = driver.Extension{Owner: o, TTL: c.minutes()}
	}
	c.step(client, namesOf(owners), fmt.Sprintf("Extend %+v", leases), func() any {
		var all []any
		for i, r := range c.drivers[client].Extend(c.t.Context(), leases) {
			all = append(all, c.result("extend", r.Answer, r.Err))
			if r.TTL > leases[i].TTL {
				c.did["extend later"]++
			}
		}
		return all
	}, func(m *state.Name, n driver.Name, now state.Now, answers []any) []state.Grant {
		for i, e := range leases {
			if e.Name == n {
				answers[i] = m.Extend(now, e.ID, e.TTL)
			}
		}
		return nil
	}, len(leases))
}

func (c *comparison) poll(client int) {
	owners := c.several()
	for i, o := range owners {
		if q := c.model[o.Name].Queue; len(q) > 0 && c.rng.IntN(2) == 0 {
			o.ID = q[c.rng.IntN(len(q))].ID
			if !slices.Contains(owners, o) {
				owners[i] = o
			}
		}
	}
	polls := make([]driver.Poll, len(owners))
	for i, o := range owners {
		polls[i] = driver.Poll{Owner: o, TTL: c.minutes(), Claim: c.minutes()}
	}
	c.step(client, namesOf(owners), fmt.Sprintf("Poll %+v", polls), func() any {
		var all []any
		for _, r := range c.drivers[client].Poll(c.t.Context(), polls) {
			all = append(all, c.result("poll", r.Answer, r.Err))
		}
		return all
	}, func(m *state.Name, n driver.Name, now state.Now, answers []any) (grants []state.Grant) {
		for i, p := range polls {
			if p.Name == n {
				a, g := m.Poll(now, p)
				answers[i], grants = a, append(grants, g...)
			}
		}
		return grants
	}, len(polls))
}

func (c *comparison) token(client int, n driver.Name) {
	floor := driver.Token(0)
	if c.rng.IntN(2) == 0 {
		floor = driver.Token(time.Now().Add(time.Duration(c.rng.IntN(200)-100) * time.Millisecond).UnixMicro())
	}
	if c.rng.IntN(2) == 0 {
		c.did["advance"]++
		c.step(client, []driver.Name{n}, fmt.Sprintf("Advance %v", floor), func() any {
			if err := c.drivers[client].Advance(c.t.Context(), n, floor); err != nil {
				c.t.Errorf("Advance: got error %v, want nil", err)
			}
			return nil
		}, func(m *state.Name, _ driver.Name, _ state.Now, _ []any) []state.Grant {
			m.Advance(floor)
			return nil
		}, 0)
		return
	}
	c.did["token"]++
	c.step(client, []driver.Name{n}, fmt.Sprintf("NextToken %v", floor), func() any {
		t, err := c.drivers[client].NextToken(c.t.Context(), n, floor)
		if err != nil {
			c.t.Errorf("NextToken: got error %v, want nil", err)
		}
		return []any{t}
	}, func(m *state.Name, _ driver.Name, now state.Now, answers []any) []state.Grant {
		answers[0] = m.NextToken(now, floor)
		return nil
	}, 1)
}

func (c *comparison) force(client int, n driver.Name) {
	c.did["force"]++
	c.step(client, []driver.Name{n}, "ForceUnlock", func() any {
		ended, err := c.drivers[client].ForceUnlock(c.t.Context(), n)
		if err != nil {
			c.t.Errorf("ForceUnlock: got error %v, want nil", err)
		}
		return []any{ended}
	}, func(m *state.Name, _ driver.Name, now state.Now, answers []any) (grants []state.Grant) {
		answers[0], grants = m.ForceUnlock(now)
		return grants
	}, 1)
}

func (c *comparison) expireHolder(n driver.Name) {
	m := c.model[n]
	if len(m.Holders) == 0 {
		return
	}
	c.did["holder expired"]++
	h := &m.Holders[c.rng.IntN(len(m.Holders))]
	h.Expires = 1
	if n.Kind == driver.KindLock {
		c.raw.Del(context.Background(), c.key(n, ""))
	} else {
		c.raw.ZAdd(context.Background(), c.key(n, ""), redis.Z{Score: 1, Member: h.ID})
	}
}

func (c *comparison) expireWaiter(n driver.Name) {
	m := c.model[n]
	if len(m.Queue) == 0 {
		return
	}
	c.did["waiter expired"]++
	w := &m.Queue[c.rng.IntN(len(m.Queue))]
	w.Expires = 1
	c.raw.ZAdd(context.Background(), c.key(n, "q"), redis.Z{Score: 1e12, Member: "." + w.ID}) // no place is so high
}
