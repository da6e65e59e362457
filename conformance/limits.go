package conformance

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var limitsTests = []test{
	{name: "StepNamesAreApart", run: stepNamesAreApart, permit: true},
	{name: "StepLongestName", run: stepLongestName, permit: true},
	{name: "StepHolderIsAnyText", run: stepHolderIsAnyText, permit: true},
	{name: "Names", run: badNames, permit: true},
	{name: "TTLs", run: badTTLs, permit: true},
	{name: "ShortestTTL", run: shortestTTL, permit: true},
	{name: "LongestTTL", run: longestTTL, permit: true},
	{name: "PermitLimits", run: badPermitLimits, needs: []Need{Semaphores}},
	{name: "Options", run: badOptions},
	{name: "ClientOptions", run: badClientOptions},
	{name: "NilContext", run: nilContext},
	{name: "BareDriver", run: bareDriver},
	{name: "ClosedDriver", run: closedDriver},
	{name: "ClosedClient", run: closedClient, permit: true},
	{name: "CloseEndsBelief", run: closeEndsBelief, permit: true},
	{name: "CloseEndsWaits", run: closeEndsWaits, permit: true},
	{name: "CloseWhileBackendHangs", run: closeWhileBackendHangs},
}

// oddNames are names that a backend's own syntax, an encoding, or a careless escape could confuse. All are
// different.
func oddNames() []string {
	names := []string{
		"a", "A", "aa", "a ", " a", "a/", "/a", "a/b", "a//b", "a:b", "a:b:", ":", "::", "a.b", ".", "..", "../a", "a/../b", "~", "-a", "--",
		"{a}", "{a}b", "{a}c", "b{a}", "{}", "{}a", "{", "}", "}{", "{{a}}", "{a}{b}", "{a", "a}", "%", "%7B", "%7Ba%7D", "%%", "%25", "{%25}", "a%", "%a",
		"*", "a*", "?", "a?", "[a]", "\\", "\\a", "a\\b", "'", "''", "\"", "`", "$1", "$$", "$(a)", ";", "a;b", "--a", "/*a*/", "#", "a#b", "|", "&", "<a>", "!", "@", "=", "+", ",", "^",
		"a\nb", "a\r\nb", "a\tb", "\n", "\x00", "a\x00", "a\x00b", "\x00a", "\x7f", "\x1b[0m",
		"é", "e\u0301", "É", "ß", "SS", "ss", "İ", "i", "I", "ı", "日本語", "😀", "\u202eabc", "\ufeffa", "\u00a0", "ﬁ", "fi",
		"\xff", "\xff\xfe", "\xc3", "\xc3\x28", "a\x80", "\xed\xa0\x80",
		"null", "nil", "true", "0", "00", "1", "01", "1e1", "10", "NaN", "lock", "permit", "queue", "fence", "lease", "config", "CON", "NUL", "a.lock", "a.tmp",
		"lock:a", "l:a", "f:a", "a:f", "a:q", "q:a", "sem:a", "fencelock", "fencelock:a", "fencelock/a",
	}
	for _, n := range []int{63, 64, 65, 127, 128, 129, 250, 254, 255, 256, 257, 511} {
		names = append(names, strings.Repeat("x", n), strings.Repeat("x", n-1)+"y", strings.Repeat("/", n), strings.Repeat("\xff", n))
	}
	return names
}

// stepNamesAreApart: all at once are held, each by its own owner, and listed as they are.
func stepNamesAreApart(t *T) {
	d := t.driver()
	held := make(map[string]driver.Request)
	for _, name := range oddNames() {
		if _, twice := held[name]; twice {
			t.Fatalf("name %q stands twice in the test", name)
		}
		r := t.request(name, t.long())
		if a := t.ask(d, r); a.State != driver.Granted {
			t.Errorf("step for a %s named %q, while %d others are held: got %v, want granted (L1)", t.kind, name, len(held), a.State)
			continue
		}
		held[name] = r
	}
	for name := range held {
		if a := t.ask(d, t.request(name, t.long())); a.State != driver.Held {
			t.Errorf("step of a rival for a %s named %q: got %v, want held (L1)", t.kind, name, a.State)
		}
	}
	if l, ok := driver.As[driver.Lister](d); ok {
		listed := make(map[string]int)
		err := l.List(t.Context(), driver.Name{}, func(h driver.Holding) bool {
			listed[h.Name.Name]++
			if r := held[h.Name.Name]; r.Owner != h.Owner {
				t.Errorf("step List, %q: got owner %v, want %v", h.Name.Name, h.Owner, r.Owner)
			}
			return true
		})
		if err != nil {
			t.Fatalf("step List: got %v, want nil", err)
		}
		for name := range held {
			if listed[name] != 1 {
				t.Errorf("step List, %q: got it %d times, want once", name, listed[name])
			}
		}
	}
	for name, r := range held {
		if found, err := d.Release(t.Context(), r.Owner); !found || err != nil {
			t.Errorf("step Release of %q: got %v, %v, want true", name, found, orNil(err))
		}
	}
}

func stepLongestName(t *T) {
	d := t.driver()
	a, b := strings.Repeat("n", fencelock.MaxName-1)+"a", strings.Repeat("n", fencelock.MaxName-1)+"b"
	for _, name := range []string{a, b, strings.Repeat("\x00", fencelock.MaxName), strings.Repeat("{", fencelock.MaxName), strings.Repeat("%", fencelock.MaxName)} {
		r := t.request(name, t.long())
		t.asked(d, r, driver.Granted, "with a name of 512 bytes", "L1")
		t.asked(d, t.request(name, t.long()), driver.Held, "with a name of 512 bytes", "L1")
		t.give(d, r.Owner, true, "of a name of 512 bytes", "L7")
	}
}

// stepHolderIsAnyText: the driver does not read what is stored about the holder.
func stepHolderIsAnyText(t *T) {
	d := t.driver()
	l, lists := driver.As[driver.Lister](d)
	_, queues := driver.As[driver.Queue](d)
	for _, text := range []string{"", " ", "a b", " a", "a ", "a\nb", `{"a":"b"}`, "'\"\\", "%s", "\x00", "a\x00b", "日本語", strings.Repeat("x", 1024)} {
		r := t.request(t.key(), t.long())
		r.Holder = text
		a := t.asked(d, r, driver.Granted, "with odd holder data", "L1")
		check := func(r driver.Request, token driver.Token) {
			t.Helper()
			if !lists {
				return
			}
			n := 0
			err := l.List(t.Context(), r.Name, func(h driver.Holding) bool {
				if n++; h.Owner != r.Owner || h.Holder != text || h.Token != token || h.Left <= 0 || h.Left > a.TTL {
					t.Errorf("step List: got %+v, want owner %v, token %v, holder %q, up to %v left", h, r.Owner, token, text, r.TTL)
				}
				return true
			})
			if n != 1 || err != nil {
				t.Errorf("step List of one name: got %d holders, %v, want 1", n, orNil(err))
			}
		}
		check(r, a.Token)
		if again := t.asked(d, r, driver.Granted, "with odd holder data, again", "L5"); again.Token != a.Token {
			t.Errorf("repeated step with holder %q: got token %v, want %v (T3)", text, again.Token, a.Token)
		}
		if !queues {
			t.give(d, r.Owner, true, "of the holder", "L7")
			continue
		}
		w := waiting(t.request(t.key(), t.long()), t.long())
		w.Holder = text
		t.asked(d, w, driver.Waiting, "that is held", "W4")
		t.give(d, r.Owner, true, "of the holder", "L7")
		won := t.stands(d, w, driver.Granted, "a waiter with odd holder data", "W4")
		check(w, won.Token)
		t.give(d, w.Owner, true, "of the winner", "L7")
	}
}

// invalid checks that a call is refused with ErrInvalid, in words that name what is wrong, and nothing sent.
func (t *T) invalid(f *faults, what string, err error) {
	t.Helper()
	if !errors.Is(err, fencelock.ErrInvalid) {
		t.Errorf("%s: got %v, want ErrInvalid", what, orNil(err))
	}
	if n := f.requests(); n != 0 {
		t.Errorf("%s: got %d requests, want 0", what, n)
	}
}

// all calls of one client with a name.
func (t *T) calls(c *fencelock.Client) map[string]func(name string, opts ...fencelock.Option) error {
	l := t.locker(c)
	return map[string]func(name string, opts ...fencelock.Option) error{
		"Lock": func(name string, opts ...fencelock.Option) error {
			_, err := l.Lock(t.Context(), name, opts...)
			return err
		},
		"TryLock": func(name string, opts ...fencelock.Option) error {
			_, err := l.TryLock(t.Context(), name, opts...)
			return err
		},
	}
}

func badNames(t *T) {
	c, f := t.faulty()
	for call, do := range t.calls(c) {
		t.invalid(f, call+" of no name", do(""))
		t.invalid(f, call+" of a name of 513 bytes", do(strings.Repeat("n", 513)))
	}
	_, err := c.NextToken(t.Context(), "")
	t.invalid(f, "NextToken of no name", err)
	_, err = c.LockAll(t.Context(), nil)
	t.invalid(f, "LockAll of no names", err)
	_, err = c.LockAll(t.Context(), []string{"", ""})
	t.invalid(f, "LockAll of an empty name", err)
	l := t.lock(t.locker(c), strings.Repeat("é", 256))
	if l.Name() != strings.Repeat("é", 256) {
		t.Errorf("Name of a lease: got %q, want what was locked", l.Name())
	}
	t.release(l)
}

func badTTLs(t *T) {
	c, f := t.faulty()
	for call, do := range t.calls(c) {
		for _, ttl := range []time.Duration{0, -1, 1, -time.Second, 500 * time.Microsecond, fencelock.MinTTL - 1, fencelock.MaxTTL + 1, 25 * time.Hour, 1 << 62} {
			err := do(t.key(), fencelock.TTL(ttl))
			t.invalid(f, fmt.Sprintf("%s with TTL %v", call, ttl), err)
			if err != nil && !strings.Contains(err.Error(), ttl.String()) {
				t.Errorf("%s with TTL %v: got %q, want the value named", call, ttl, err)
			}
		}
		if least := f.Info().MinTTL; least > fencelock.MinTTL {
			t.invalid(f, call+" with a TTL that this backend cannot count", do(t.key(), fencelock.TTL(fencelock.MinTTL)))
			t.invalid(f, call+" with a TTL that this backend cannot count", do(t.key(), fencelock.TTL(least-1)))
		}
	}
}

// shortestTTL: a lease of so short a life may end before its answer comes, and then that is said.
func shortestTTL(t *T) {
	c, b := t.client(), t.driver()
	ttl := t.ttl(fencelock.MinTTL)
	leases := make(map[string]*fencelock.Lease)
	for i := range 10 {
		name := fmt.Sprintf("%s/%d", t.key(), i)
		l, err := t.locker(c).TryLock(t.Context(), name, fencelock.TTL(ttl), fencelock.NoRenew())
		if err != nil {
			t.is("TryLock with the shortest TTL", err, fencelock.ErrUncertain, "L8")
			continue
		}
		leases[name] = l
	}
	for name, l := range leases {
		t.takesOver(b, t.request(name, t.long()), ttl)
		t.is("Err of a lease when a rival was granted the lock", l.Err(), fencelock.ErrLost, "L1")
	}
}

func longestTTL(t *T) {
	c, d := t.client(), t.driver()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(fencelock.MaxTTL))
	if left := time.Until(l.Deadline()); left < 23*time.Hour || left > fencelock.MaxTTL {
		t.Fatalf("Deadline with TTL 24h: got %v ahead, want almost that", left)
	}
	t.asked(d, t.request(t.key(), t.short()), driver.Held, "for a day", "L1")
	t.release(l)
	r := t.request(t.key(), fencelock.MaxTTL)
	a := t.asked(d, r, driver.Granted, "just released", "L7")
	if a.TTL < 23*time.Hour {
		t.Fatalf("step for 24h: got TTL %v, want that", a.TTL)
	}
	t.give(d, r.Owner, true, "of the holder", "L7")
}

func badPermitLimits(t *T) {
	c, f := t.faulty()
	for _, limit := range []int{0, -1, math.MinInt} {
		_, err := c.TryAcquire(t.Context(), t.key(), limit)
		t.invalid(f, fmt.Sprintf("TryAcquire with limit %d", limit), err)
		_, err = c.Acquire(t.Context(), t.key(), limit)
		t.invalid(f, fmt.Sprintf("Acquire with limit %d", limit), err)
	}
	_, err := c.TryAcquire(t.Context(), t.key(), 2, fencelock.Holder("me"))
	t.invalid(f, "TryAcquire with Holder", err)
	l, err := c.TryAcquire(t.Context(), t.key(), 1<<30)
	if err != nil {
		t.Fatalf("TryAcquire with a large limit: got %v, want a permit", err)
	}
	t.release(l)
}

func badOptions(t *T) {
	c, f := t.faulty()
	for what, o := range map[string]fencelock.Option{
		"WaitFor(0)": fencelock.WaitFor(0), "WaitFor(-1)": fencelock.WaitFor(-1),
		"MaxHold(0)": fencelock.MaxHold(0), "MaxHold(-1)": fencelock.MaxHold(-1),
		"Backoff(0, 0)": fencelock.Backoff(0, 0), "Backoff(-1, 1)": fencelock.Backoff(-1, 1), "Backoff(2, 1)": fencelock.Backoff(2, 1),
		"Backoff(1, 2h)": fencelock.Backoff(1, 2*time.Hour),
		"Holder of none": fencelock.Holder(""),
		"Label too long": fencelock.Label(strings.Repeat("x", fencelock.MaxLabel+1)), "Label no UTF-8": fencelock.Label("\xff"),
		"nil": nil,
	} {
		for call, do := range t.calls(c) {
			t.invalid(f, call+" with option "+what, do(t.key(), o))
		}
	}
	for what, o := range map[string]fencelock.Option{
		"WaitFor(1ns)": fencelock.WaitFor(1), "MaxHold(1ns)": fencelock.MaxHold(1), "Backoff(1ns, 1ns)": fencelock.Backoff(1, 1),
		"longest label": fencelock.Label(strings.Repeat("x", fencelock.MaxLabel)), "empty label": fencelock.Label(""),
	} {
		if _, err := c.TryLock(t.Context(), t.key()+"/"+what, o); errors.Is(err, fencelock.ErrInvalid) {
			t.Errorf("TryLock with option %s: got %v, want it taken", what, err)
		}
	}
	// The first of several wrong ones is as good as another, but one right one does not hide it.
	if err := t.calls(c)["TryLock"](t.key(), fencelock.TTL(0), fencelock.TTL(t.long())); !errors.Is(err, fencelock.ErrInvalid) {
		t.Errorf("TryLock with a bad TTL before a good one: got %v, want ErrInvalid", orNil(err))
	}
}

func badClientOptions(t *T) {
	d := t.driver()
	for what, o := range map[string]fencelock.ClientOption{
		"WithTTL(0)": fencelock.WithTTL(0), "WithTTL(-1)": fencelock.WithTTL(-1), "WithTTL(1ns)": fencelock.WithTTL(1), "WithTTL(25h)": fencelock.WithTTL(25 * time.Hour),
		"WithRequestTimeout(0)": fencelock.WithRequestTimeout(0), "WithRequestTimeout(1ns)": fencelock.WithRequestTimeout(1),
		"WithRequestTimeout(1h)": fencelock.WithRequestTimeout(time.Hour),
	} {
		if c, err := fencelock.New(d, o); c != nil || !errors.Is(err, fencelock.ErrInvalid) {
			t.Errorf("New with %s: got %v, %v, want ErrInvalid", what, c, orNil(err))
		}
	}
	if c, err := fencelock.New(nil); c != nil || !errors.Is(err, fencelock.ErrInvalid) {
		t.Errorf("New without a driver: got %v, %v, want ErrInvalid", c, orNil(err))
	}
	// None of these has touched the driver.
	r := t.request(t.key(), t.long())
	t.asked(d, r, driver.Granted, "of a driver that New refused", "L8")
	t.give(d, r.Owner, true, "of the holder", "L7")
}

func nilContext(t *T) {
	c, f := t.faulty()
	var none context.Context
	_, err := c.TryLock(none, t.key())
	t.invalid(f, "TryLock without context", err)
	_, err = c.Lock(none, t.key())
	t.invalid(f, "Lock without context", err)
	_, err = c.LockAll(none, []string{t.key()})
	t.invalid(f, "LockAll without context", err)
	if c.Supports(fencelock.Semaphores) {
		_, err = c.TryAcquire(none, t.key(), 1)
		t.invalid(f, "TryAcquire without context", err)
	}
	if c.Supports(fencelock.Tokens) {
		_, err = c.NextToken(none, t.key())
		t.invalid(f, "NextToken without context", err)
	}
	l := t.lock(c, t.key())
	t.is("Extend without context", l.Extend(none, t.long()), fencelock.ErrInvalid, "L8")
	t.is("Release without context", l.Release(none), fencelock.ErrInvalid, "L8")
	t.held(l, "after Release without context")
	t.release(l)
}

// bareDriver: what a driver lacks is said by an error, at the latest by the call; locks work without all of it.
func bareDriver(t *T) {
	c := t.clientOn(bare{t.Driver(t.TB)})
	unsupported := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s on a driver without it: got %v, want errors.ErrUnsupported (C1)", what, orNil(err))
		}
	}
	_, err := c.Acquire(t.Context(), t.key(), 1)
	unsupported("Acquire", err)
	_, err = c.TryAcquire(t.Context(), t.key(), 1)
	unsupported("TryAcquire", err)
	_, err = c.NextToken(t.Context(), t.key())
	unsupported("NextToken", err)
	_, err = c.List(t.Context())
	unsupported("List", err)
	_, err = c.Inspect(t.Context(), fencelock.KindLock, t.key())
	unsupported("Inspect", err)
	_, err = c.ForceUnlock(t.Context(), fencelock.KindLock, t.key())
	unsupported("ForceUnlock", err)
	_, err = c.TryLock(t.Context(), t.key(), fencelock.Fair())
	unsupported("TryLock with Fair", err)
	for _, what := range []fencelock.Capability{fencelock.Semaphores, fencelock.Tokens, fencelock.Queueing, fencelock.Listing, fencelock.ForceUnlocks, "nonsense"} {
		if c.Supports(what) {
			t.Errorf("Supports(%q) on a driver without it: got true, want false (C1)", what)
		}
		_, err := fencelock.New(bare{t.driver()}, fencelock.Require(what))
		unsupported(fmt.Sprintf("New with Require(%q)", what), err)
	}
	l := t.lock(c, t.key())
	t.refused(c, t.key(), "on a driver that only locks", "L1")
	t.release(l)

	full := t.client()
	for _, what := range fencelock.Capabilities() {
		if full.Supports(what) {
			c, err := fencelock.New(t.Driver(t.TB), fencelock.Require(what))
			if err != nil {
				t.Errorf("New with Require(%q), which is there: got %v, want a client (C1)", what, err)
				continue
			}
			c.Close()
		}
	}
}

// closedDriver: calls after Close fail for sure, a second Close does nothing, and no lock is released by it.
func closedDriver(t *T) {
	d := t.Driver(t.TB)
	r := t.request(t.key(), t.long())
	t.asked(d, r, driver.Granted, "that is free", "L1")
	for range 2 {
		if err := d.Close(); err != nil {
			t.Fatalf("Close of a driver: got %v, want nil", err)
		}
	}
	check := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("step %s of a closed driver: got %v, want ErrUnavailable (L8)", what, orNil(err))
		}
	}
	_, err := d.Lock(t.Context(), t.request(t.key(), t.long()))
	check("Lock", err)
	_, err = d.Release(t.Context(), r.Owner)
	check("Release", err)
	check("Extend", d.Extend(t.Context(), []driver.Extension{{Owner: r.Owner, TTL: t.long()}})[0].Err)
	if q, ok := driver.As[driver.Queue](d); ok {
		check("Poll", q.Poll(t.Context(), []driver.Poll{{Owner: r.Owner, TTL: t.long(), Claim: t.long()}})[0].Err)
	}
	if s, ok := driver.As[driver.FencingSource](d); ok {
		_, err := s.NextToken(t.Context(), r.Name, 0)
		check("NextToken", err)
	}
	if l, ok := driver.As[driver.Lister](d); ok {
		check("List", l.List(t.Context(), driver.Name{}, func(driver.Holding) bool { return true }))
	}
	t.asked(t.driver(), t.request(t.key(), t.long()), driver.Held, "by the owner of a driver that was closed", "L7")
}

func closedClient(t *T) {
	c := t.client()
	if err := c.Close(); err != nil {
		t.Fatalf("Close: got %v, want nil", err)
	}
	if err := c.Close(); err != nil {
		t.Fatalf("second Close: got %v, want nil", err)
	}
	for call, do := range t.calls(c) {
		t.is(call+" of a closed client", do(t.key()), fencelock.ErrClosed, "L8")
	}
	if c.Supports(fencelock.Tokens) {
		_, err := c.NextToken(t.Context(), t.key())
		t.is("NextToken of a closed client", err, fencelock.ErrClosed, "L8")
	}
	if c.Supports(fencelock.Listing) {
		_, err := c.List(t.Context())
		t.is("List of a closed client", err, fencelock.ErrClosed, "L8")
	}
}

// closeEndsBelief: all leases are lost, before their locks are given back.
func closeEndsBelief(t *T) {
	c, f := t.faulty()
	var all []*fencelock.Lease
	for i := range 5 {
		all = append(all, t.lock(t.locker(c), fmt.Sprintf("%s/%d", t.key(), i), fencelock.TTL(t.long())))
	}
	gate := make(chan struct{})
	x := f.on(stepRelease, late(gate))
	closed := make(chan error, 1)
	go func() { closed <- c.Close() }()
	t.await(x.came, "step Release of a client that closes", patience)
	for _, l := range all {
		t.is("Err when the client's first lock is given back", l.Err(), fencelock.ErrLost, "L2")
		t.is("Err when the client's first lock is given back", l.Err(), fencelock.ErrClosed, "L2")
		t.await(l.Done(), "Done of a lease whose client closes", patience)
	}
	close(gate)
	select {
	case err := <-closed:
		if err != nil {
			t.Fatalf("Close: got %v, want nil", err)
		}
	case <-time.After(patience):
		t.Fatalf("Close: got no return within %v, want one", patience)
	}
	other := t.locker(t.client())
	for i, l := range all {
		t.release(t.lock(other, fmt.Sprintf("%s/%d", t.key(), i)))
		t.is("Release of a lease whose client was closed", l.Release(t.Context()), fencelock.ErrNotHeld, "L3")
	}
}

func closeEndsWaits(t *T) {
	give := t.holdFor(t.key())
	c, f := t.faulty()
	line := t.clientOn(t.withoutQueue())
	var waits []*pending
	for range 3 {
		waits = append(waits, t.lockLater(t.Context(), t.locker(c), t.key(), fencelock.TTL(t.long())),
			t.lockLater(t.Context(), t.locker(line), t.key(), fencelock.TTL(t.long()), fencelock.Backoff(time.Second, time.Minute)))
	}
	t.awaitReply(f, stepLock, 1)
	t.inTime("Close while calls wait", time.Second, "L7", func() {
		c.Close()
		line.Close()
	})
	for _, p := range waits {
		l, err := p.wait(patience)
		if l != nil {
			t.Fatalf("Lock whose client was closed: got a lease, want ErrClosed (L8)")
		}
		t.is("Lock whose client was closed", err, fencelock.ErrClosed, "L8")
	}
	give()
	t.release(t.lock(t.locker(t.client()), t.key()))
	t.nothingLeft(t.name(t.key()), "after a client closed with calls that waited")
}

// closeWhileBackendHangs: Close is bounded, whatever the backend does.
func closeWhileBackendHangs(t *T) {
	const bound = 300 * time.Millisecond
	c, f := t.faulty(fencelock.WithRequestTimeout(bound))
	var all []*fencelock.Lease
	for i := range 20 {
		l, err := c.Lock(t.Context(), fmt.Sprintf("%s/%d", t.key(), i), fencelock.TTL(t.long()))
		if err != nil {
			t.is("Lock on a busy machine", err, fencelock.ErrUncertain, "L8")
			continue
		}
		all = append(all, l)
	}
	f.all(f.hang, stepLock, stepExtend, stepRelease, stepPoll)
	p := t.lockLater(t.Context(), c, t.key()+"/another")
	t.inTime("Close while the backend hangs", bound+slack, "L7", func() { c.Close() })
	for _, l := range all {
		t.is("Err after Close", l.Err(), fencelock.ErrLost, "L2")
	}
	if l, err := p.wait(patience); l != nil || err == nil {
		t.Fatalf("Lock whose client was closed while the backend hangs: got %v, %v, want an error (L8)", l, err)
	}
}
