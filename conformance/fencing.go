package conformance

import (
	"slices"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var fencingTests = []test{
	{name: "StepTokensRise", run: stepTokensRise, permit: true},
	{name: "StepTokensRiseFast", run: stepTokensRiseFast, permit: true},
	{name: "StepTokensAreNearTheClock", run: stepTokensAreNearTheClock, permit: true},
	{name: "StepFloor", run: stepFloor, permit: true},
	{name: "StepNothingForgetsTokens", run: stepNothingForgetsTokens, permit: true},
	{name: "StepFloorOfWaiter", run: stepFloorOfWaiter, permit: true, needs: []Need{Queueing}},
	{name: "StepLargeTokensAreExact", run: stepLargeTokensAreExact, permit: true},
	{name: "StepNextToken", run: stepMintsTokens, needs: []Need{Tokens}},
	{name: "StepAdvance", run: stepAdvances, permit: true, needs: []Need{Tokens}},
	{name: "TokensRise", run: tokensRise, permit: true},
	{name: "TokenIsStable", run: tokenIsStable, permit: true},
	{name: "NextTokenSharesTheDomain", run: nextTokenSharesTheDomain, needs: []Need{Tokens}},
	{name: "NextTokenIsUnique", run: nextTokenIsUnique, needs: []Need{Tokens}},
	{name: "StaleWriterIsRefused", run: staleWriterIsRefused},
	{name: "ForceUnlockKeepsOrder", run: forceUnlockKeepsOrder, permit: true, needs: []Need{ForceUnlocks}},
	{name: "ServerCrashed", run: tokensAfterServerCrashed, permit: true, needs: []Need{Server}},
	{name: "ServerForgot", run: tokensAfterServerForgot, permit: true, needs: []Need{Server, Tokens}},
}

// stepTokensRise: over release, expiry, and whoever takes the lock.
func stepTokensRise(t *T) {
	drivers := []driver.Driver{t.driver(), t.driver()}
	var last driver.Token
	for i := range 12 {
		r := t.request(t.key(), t.long())
		if i%4 == 3 {
			r.TTL = t.short()
		}
		a := t.takesOver(drivers[i%2], r, t.short())
		if a.Token <= last {
			t.Fatalf("token of grant %d: got %v after %v, want more (T1)", i, a.Token, last)
		}
		last = a.Token
		if i%4 != 3 {
			t.give(drivers[(i+1)%2], r.Owner, true, "of the holder", "L7")
		}
	}
}

// stepTokensRiseFast: grants may be as close together as the backend can make them.
func stepTokensRiseFast(t *T) {
	d := t.driver()
	var last driver.Token
	for i := range 300 {
		r := t.request(t.key(), t.long())
		a := t.asked(d, r, driver.Granted, "that is free", "L1")
		if a.Token <= last {
			t.Fatalf("token of grant %d in a row: got %v after %v, want more (T1)", i, a.Token, last)
		}
		last = a.Token
		t.give(d, r.Owner, true, "of the holder", "L7")
	}
}

// stepTokensAreNearTheClock: so that they stay in order when the backend is swapped.
func stepTokensAreNearTheClock(t *T) {
	d := t.driver()
	before := time.Now()
	r := t.request(t.key(), t.long())
	a := t.asked(d, r, driver.Granted, "that is free", "L1")
	ahead := time.Until(time.UnixMicro(int64(a.Token)))
	if behind := before.Sub(time.UnixMicro(int64(a.Token))); behind > time.Second {
		t.Fatalf("token %v: got %v behind the clock, want not below it (T4)", a.Token, behind)
	}
	if bound := max(t.TokenAhead, time.Second); ahead > bound {
		t.Fatalf("token %v: got %v ahead of the clock, want at most %v (T4)", a.Token, ahead, bound)
	}
	if a.Token >= 1<<53 {
		t.Fatalf("token %v: got more than 53 bits (T4)", a.Token)
	}
}

// future is a floor ahead of every clock.
func future() driver.Token { return driver.Token(time.Now().Add(24 * time.Hour).UnixMicro()) }

// stepNothingForgetsTokens: a last token that is ahead of the clock is remembered whatever ends a lease. (One that
// is not would be remembered by the clock.)
func stepNothingForgetsTokens(t *T) {
	d := t.driver()
	r := t.request(t.key(), t.short())
	r.Floor = future()
	last := t.asked(d, r, driver.Granted, "with a floor", "T4").Token
	rises := func(a driver.Answer, after string) {
		t.Helper()
		if a.Token <= last {
			t.Fatalf("token after %s: got %v, want more than %v (T5)", after, a.Token, last)
		}
		last = a.Token
	}
	next := t.request(t.key(), t.long())
	rises(t.takesOver(d, next, t.short()), "an expiry")
	t.give(d, next.Owner, true, "of the holder", "L7")
	next = t.request(t.key(), t.long())
	rises(t.asked(d, next, driver.Granted, "just released", "L7"), "a release")
	f, ok := driver.As[driver.ForceUnlocker](d)
	if !ok {
		return
	}
	if n, err := f.ForceUnlock(t.Context(), next.Name); n != 1 || err != nil {
		t.Fatalf("step ForceUnlock of a holder: got %d, %v, want 1", n, orNil(err))
	}
	rises(t.asked(d, t.request(t.key(), t.long()), driver.Granted, "just taken away", "L7"), "a force-unlock")
}

func stepFloor(t *T) {
	d := t.driver()
	r := t.request(t.key(), t.long())
	r.Floor = future()
	a := t.asked(d, r, driver.Granted, "with a floor", "T4")
	if a.Token <= r.Floor {
		t.Fatalf("token with floor %v: got %v, want more (T4)", r.Floor, a.Token)
	}
	if again := t.asked(d, r, driver.Granted, "with a floor, again", "L5"); again.Token != a.Token {
		t.Fatalf("repeated step with a floor: got token %v, want %v (T3)", again.Token, a.Token)
	}
	t.give(d, r.Owner, true, "of the holder", "L7")
	next := t.asked(d, t.request(t.key(), t.long()), driver.Granted, "without a floor after one with", "T1")
	if next.Token <= a.Token {
		t.Fatalf("token after one of a floor, %v: got %v, want more (T1)", a.Token, next.Token)
	}
}

// stepFloorOfWaiter: the floor travels with the entry, and counts in the step that grants.
func stepFloorOfWaiter(t *T) {
	d := t.driver()
	h := t.holder(d, t.long())
	w := waiting(t.request(t.key(), t.long()), t.long())
	w.Floor = future()
	t.asked(d, w, driver.Waiting, "that is held", "W4")
	t.give(d, h.Owner, true, "of the holder", "L7")
	if a := t.stands(d, w, driver.Granted, "a waiter with a floor", "W4"); a.Token <= w.Floor {
		t.Fatalf("token of a waiter with floor %v: got %v, want more (T4)", w.Floor, a.Token)
	}
}

// stepLargeTokensAreExact: up to 53 bits no digit is lost on the way.
func stepLargeTokensAreExact(t *T) {
	d := t.driver()
	const floor = driver.Token(1<<52 + 12345677)
	last := floor
	for i := range 5 {
		r := t.request(t.key(), t.long())
		if i == 0 {
			r.Floor = floor
		}
		a := t.asked(d, r, driver.Granted, "with a large floor before", "T4")
		if a.Token <= last || a.Token > floor+1_000_000 {
			t.Fatalf("token %d after a floor of %v: got %v, want more than %v and about that (T4)", i, floor, a.Token, last)
		}
		last = a.Token
		if x := t.extend(d, r.Owner, t.long()); x.Token != a.Token {
			t.Fatalf("token of an extension: got %v, want %v (T3)", x.Token, a.Token)
		}
		t.give(d, r.Owner, true, "of the holder", "L7")
	}
}

func (t *T) nextToken(d driver.Driver, n driver.Name, floor driver.Token) driver.Token {
	t.Helper()
	s, ok := driver.As[driver.FencingSource](d)
	if !ok {
		t.Fatalf("driver: no FencingSource")
	}
	token, err := s.NextToken(t.Context(), n, floor)
	if err != nil {
		t.Fatalf("step NextToken: got %v, want a token", err)
	}
	return token
}

func stepMintsTokens(t *T) {
	d := t.driver()
	n := driver.Name{Kind: driver.KindLock, Name: t.key()}
	first := t.nextToken(d, n, 0)
	t.nothingLeft(n, "after NextToken")
	second := t.nextToken(d, n, 0)
	if first == 0 || second <= first {
		t.Fatalf("step NextToken: got %v after %v, want more (T1)", second, first)
	}
	h := t.request(t.key(), t.long())
	a := t.asked(d, h, driver.Granted, "of which tokens were minted", "L1")
	if a.Token <= second {
		t.Fatalf("token of a lock after NextToken %v: got %v, want more (T1)", second, a.Token)
	}
	if third := t.nextToken(d, n, 0); third <= a.Token {
		t.Fatalf("step NextToken while a lock is held with %v: got %v, want more (T1)", a.Token, third)
	}
	if x := t.extend(d, h.Owner, t.long()); x.State != driver.Granted || x.Token != a.Token {
		t.Fatalf("step Extend after NextToken: got %v, token %v, want granted, %v (T3)", x.State, x.Token, a.Token)
	}
	t.asked(d, t.request(t.key(), t.long()), driver.Held, "held while tokens are minted", "L1")
	floor := future()
	if token := t.nextToken(d, n, floor); token <= floor {
		t.Fatalf("step NextToken with floor %v: got %v, want more (T4)", floor, token)
	}
}

func stepAdvances(t *T) {
	d := t.driver()
	s, _ := driver.As[driver.FencingSource](d)
	n := t.name(t.key())
	advance := func(floor driver.Token) {
		t.Helper()
		if err := s.Advance(t.Context(), n, floor); err != nil {
			t.Fatalf("step Advance: got %v, want nil", err)
		}
	}
	floor := future()
	advance(floor)
	t.nothingLeft(n, "after Advance")
	first := t.nextToken(d, n, 0)
	if first <= floor {
		t.Fatalf("token after Advance to %v: got %v, want more (T4)", floor, first)
	}
	advance(floor)
	advance(1)
	r := t.request(t.key(), t.long())
	a := t.asked(d, r, driver.Granted, "of which the last token was advanced", "L1")
	if a.Token <= first {
		t.Fatalf("token after Advance to lower ones: got %v, want more than %v (T1)", a.Token, first)
	}
	advance(a.Token + 1000)
	if x := t.extend(d, r.Owner, t.long()); x.Token != a.Token {
		t.Fatalf("token of a holder after Advance: got %v, want %v (T3)", x.Token, a.Token)
	}
	t.give(d, r.Owner, true, "of the holder", "L7")
	next := t.asked(d, t.request(t.key(), t.long()), driver.Granted, "just released", "L7")
	if next.Token <= a.Token+1000 {
		t.Fatalf("token after Advance to %v: got %v, want more (T4)", a.Token+1000, next.Token)
	}
}

func tokensRise(t *T) {
	clients := []fencelock.Locker{t.locker(t.client()), t.locker(t.client()), t.locker(t.clientOn(t.withoutQueue()))}
	var last fencelock.Token
	for i := range 30 {
		l, err := clients[i%3].Lock(t.Context(), t.key(), fencelock.TTL(t.long()))
		if err != nil {
			t.Fatalf("Lock: got %v, want a lease", err)
		}
		if l.Token() <= last {
			t.Fatalf("token of lease %d: got %v after %v, want more (T1)", i, l.Token(), last)
		}
		last = l.Token()
		t.release(l)
	}
}

func tokenIsStable(t *T) {
	c, f := t.faulty()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.steady()))
	token := l.Token()
	t.awaitReply(f, stepExtend, 2)
	if err := l.Extend(t.Context(), t.long()); err != nil {
		t.Fatalf("Extend: got %v, want nil", err)
	}
	if l.Token() != token {
		t.Fatalf("token after extensions: got %v, want %v (T3)", l.Token(), token)
	}
	t.release(l)
	if l.Token() != token {
		t.Fatalf("token after Release: got %v, want %v (T3)", l.Token(), token)
	}
}

func nextTokenSharesTheDomain(t *T) {
	a, b := t.client(), t.client()
	var last fencelock.Token
	for i := range 20 {
		var token fencelock.Token
		if i%2 == 0 {
			l := t.lock(a, t.key())
			token = l.Token()
			t.release(l)
		} else {
			var err error
			if token, err = b.NextToken(t.Context(), t.key()); err != nil {
				t.Fatalf("NextToken: got %v, want a token", err)
			}
		}
		if token <= last {
			t.Fatalf("token %d, of locks and NextToken in turn: got %v after %v, want more (T1)", i, token, last)
		}
		last = token
	}
}

func nextTokenIsUnique(t *T) {
	const clients, each = 4, 100
	tokens := make([][]fencelock.Token, clients)
	var all sync.WaitGroup
	for i := range clients {
		c := t.client()
		all.Go(func() {
			for range each {
				token, err := c.NextToken(t.Context(), t.key())
				if err != nil {
					t.Errorf("NextToken: got %v, want a token", err)
					return
				}
				tokens[i] = append(tokens[i], token)
			}
		})
	}
	all.Wait()
	seen := make(map[fencelock.Token]bool)
	for _, some := range tokens {
		if !slices.IsSorted(some) {
			t.Errorf("tokens of one client: got them out of order, want each greater than the one before (T1)")
		}
		for _, token := range some {
			if seen[token] {
				t.Errorf("NextToken of several clients: got %v twice, want each once (T2)", token)
			}
			seen[token] = true
		}
	}
	if len(seen) != clients*each && !t.Failed() {
		t.Errorf("tokens: got %d, want %d (T2)", len(seen), clients*each)
	}
}

// staleWriterIsRefused: what tokens are for. A resource that remembers the highest one refuses a holder that
// was asleep while its lease ended.
func staleWriterIsRefused(t *T) {
	a, b := t.client(), t.client()
	var highest fencelock.Token
	write := func(l *fencelock.Lease) bool {
		if l.Token() < highest {
			return false
		}
		highest = l.Token()
		return true
	}
	old := t.lock(a, t.key(), fencelock.TTL(t.short()), fencelock.NoRenew())
	if !write(old) {
		t.Fatalf("write with the first token: got refused, want admitted")
	}
	successor := t.lockLater(t.Context(), b, t.key(), fencelock.TTL(t.long())).lease(patience)
	if !write(successor) {
		t.Fatalf("write with the successor's token %v: got refused, want admitted (T1)", successor.Token())
	}
	if write(old) {
		t.Fatalf("write with the token %v of a holder that lost the lock to %v: got admitted, want refused (T1)", old.Token(), successor.Token())
	}
}

// forceUnlockKeepsOrder: a lock taken away by force does not set tokens back.
func forceUnlockKeepsOrder(t *T) {
	c, op := t.client(), t.client()
	var last fencelock.Token
	for range 5 {
		l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.long()), fencelock.NoRenew())
		if l.Token() <= last {
			t.Fatalf("token after ForceUnlock: got %v after %v, want more (T5)", l.Token(), last)
		}
		last = l.Token()
		if n, err := op.ForceUnlock(t.Context(), t.kind, t.key()); n != 1 || err != nil {
			t.Fatalf("ForceUnlock of a held lock: got %d, %v, want 1", n, orNil(err))
		}
	}
}

// tokensAfterServerForgot: a server that comes back empty goes on above the clock. A floor ahead of the clock it
// cannot remember, unless it is durable.
func tokensAfterServerForgot(t *T) {
	d := t.driver()
	r := t.request(t.key(), t.long())
	before := t.asked(d, r, driver.Granted, "that is free", "L1")
	t.serverDo("killing", t.Server.Kill())
	t.serverDo("starting", t.Server.StartEmpty(t.Context()))
	t.works(t.locker(t.client()), "after the server is back")
	after := t.asked(t.driver(), t.request(t.key(), t.long()), driver.Granted, "that the server forgot", "T4")
	if after.Token <= before.Token {
		t.Fatalf("token after the server forgot the one before, %v: got %v, want more (T4)", before.Token, after.Token)
	}
}

// tokensAfterServerCrashed: what a server answered just before it died, one that is durable remembers, also when
// it is ahead of the clock. Others go on above the clock.
func tokensAfterServerCrashed(t *T) {
	floor := driver.Token(0)
	if t.driver().Info().Durable {
		floor = future()
	}
	last := floor
	for range 3 {
		d := t.driver()
		for range 20 {
			r := t.request(t.key(), t.long())
			r.Floor = floor
			a := t.asked(d, r, driver.Granted, "that is free", "L1")
			if a.Token <= last {
				t.Fatalf("token after the server crashed: got %v, want more than %v (T1)", a.Token, last)
			}
			last = a.Token
			t.give(d, r.Owner, true, "of the holder", "L7")
		}
		floor = 0 // the server knows it
		t.serverDo("killing", t.Server.Kill())
		t.serverDo("starting", t.Server.Start(t.Context()))
		t.works(t.locker(t.client()), "after the server is back")
	}
}
