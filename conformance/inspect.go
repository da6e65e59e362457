package conformance

import (
	"fmt"
	"os"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
)

var inspectTests = []test{
	{name: "StepListsWhatLives", run: stepListsWhatLives, needs: []Need{Listing}},
	{name: "StepListStops", run: stepListStops, needs: []Need{Listing}},
	{name: "StepForceUnlock", run: stepForceUnlocks, permit: true, needs: []Need{ForceUnlocks}},
	{name: "StepForceUnlockServesTheQueue", run: stepForceUnlockServesTheQueue, permit: true, needs: []Need{ForceUnlocks, Queueing}},
	{name: "List", run: listTellsWhoHolds, permit: true, needs: []Need{Listing}},
	{name: "ForceUnlock", run: forceUnlockFreesAStuckLock, permit: true, needs: []Need{ForceUnlocks}},
}

func (t *T) list(d driver.Driver, n driver.Name) map[driver.Owner]driver.Holding {
	t.Helper()
	l, _ := driver.As[driver.Lister](d)
	all := make(map[driver.Owner]driver.Holding)
	err := l.List(t.Context(), n, func(h driver.Holding) bool {
		if _, twice := all[h.Owner]; twice {
			t.Errorf("step List: got %v twice, want once", h.Owner)
		}
		all[h.Owner] = h
		return true
	})
	if err != nil {
		t.Fatalf("step List: got %v, want nil", err)
	}
	return all
}

// stepListsWhatLives: of both kinds; not what was released, has expired, or waits.
func stepListsWhatLives(t *T) {
	d := t.driver()
	kinds := []driver.Kind{driver.KindLock}
	if has[driver.Semaphore](d) {
		kinds = append(kinds, driver.KindPermit)
	}
	want := make(map[driver.Owner]driver.Token)
	var dead, mortal []driver.Request
	for i := range 60 {
		r := t.request(fmt.Sprintf("%s/%d", t.key(), i), t.long())
		r.Name.Kind = kinds[i%len(kinds)]
		if i%5 == 4 {
			r.TTL = t.short()
		}
		a := t.asked(d, r, driver.Granted, "that is free", "L1")
		switch i % 5 {
		case 3:
			t.give(d, r.Owner, true, "of the holder", "L7")
			dead = append(dead, r)
		case 4:
			mortal = append(mortal, r)
		default:
			want[r.Owner] = a.Token
		}
		if has[driver.Queue](d) && i%5 == 0 {
			w := waiting(t.request(r.Name.Name, t.long()), t.long())
			w.Name.Kind = r.Name.Kind
			t.asked(d, w, driver.Waiting, "that is held", "W4")
			dead = append(dead, w)
		}
	}
	t.passes(2*t.short(), func() {})
	most := t.granted(t.long())
	got := t.list(t.driver(), driver.Name{})
	for o, token := range want {
		h, listed := got[o]
		if !listed || h.Token != token || h.Left <= 0 || h.Left > most {
			t.Errorf("step List, %v: got %+v, listed: %v, want it with token %v and up to %v left", o, h, listed, token, t.long())
		}
		if one := t.list(d, o.Name); len(one) != 1 || one[o].Token != token {
			t.Errorf("step List of %v: got %v, want its holder alone", o.Name, one)
		}
	}
	for _, r := range append(dead, mortal...) {
		if h, listed := got[r.Owner]; listed {
			t.Errorf("step List: got %+v, want it not listed: it was released, has expired, or waits", h)
		}
	}
	if none := t.list(d, driver.Name{Kind: driver.KindLock, Name: t.key() + "/none"}); len(none) != 0 {
		t.Errorf("step List of a free lock: got %v, want nobody", none)
	}
}

func stepListStops(t *T) {
	d := t.driver()
	for i := range 10 {
		t.asked(d, t.request(fmt.Sprintf("%s/%d", t.key(), i), t.long()), driver.Granted, "that is free", "L1")
	}
	l, _ := driver.As[driver.Lister](d)
	n := 0
	if err := l.List(t.Context(), driver.Name{}, func(driver.Holding) bool { n++; return n < 3 }); err != nil {
		t.Fatalf("step List that is stopped: got %v, want nil", err)
	}
	if n != 3 {
		t.Fatalf("step List that is stopped at the third: got %d calls, want 3", n)
	}
}

func stepForceUnlocks(t *T) {
	a, b := t.driver(), t.driver()
	f, _ := driver.As[driver.ForceUnlocker](b)
	force := func(want int) {
		t.Helper()
		if n, err := f.ForceUnlock(t.Context(), t.name(t.key())); n != want || err != nil {
			t.Fatalf("step ForceUnlock: got %d, %v, want %d", n, orNil(err), want)
		}
	}
	force(0)
	h := t.request(t.key(), t.long())
	n := 1
	if t.kind == driver.KindPermit {
		n, h.Limit = 3, 3
	}
	var last driver.Token
	for range n {
		h.ID = t.request("", 1).ID
		last = t.asked(a, h, driver.Granted, "that is free", "L1").Token
	}
	force(n)
	force(0)
	if x := t.extend(a, h.Owner, t.long()); x.State != driver.Gone {
		t.Fatalf("step Extend after ForceUnlock: got %v, want gone (L3)", x.State)
	}
	t.give(a, h.Owner, false, "after ForceUnlock", "L4")
	next := t.request(t.key(), t.long())
	if token := t.asked(a, next, driver.Granted, "after ForceUnlock", "L7").Token; token <= last {
		t.Fatalf("token after ForceUnlock: got %v after %v, want more (T5)", token, last)
	}
	t.give(a, next.Owner, true, "of the holder", "L7")
	t.nothingLeft(next.Name, "after ForceUnlock")
}

func stepForceUnlockServesTheQueue(t *T) {
	d := t.driver()
	h := t.holder(d, t.long())
	first, second := t.queues(d, t.long(), t.long()), t.queues(d, t.long(), t.long())
	f, _ := driver.As[driver.ForceUnlocker](d)
	if n, err := f.ForceUnlock(t.Context(), h.Name); n != 1 || err != nil {
		t.Fatalf("step ForceUnlock of a held lock: got %d, %v, want 1", n, orNil(err))
	}
	t.stands(d, second, driver.Waiting, "the second waiter after ForceUnlock", "W4")
	t.stands(d, first, driver.Granted, "the first waiter after ForceUnlock", "W4")
}

func listTellsWhoHolds(t *T) {
	c, op := t.client(), t.client()
	l := t.lock(t.locker(c), t.key(), fencelock.TTL(t.long()), fencelock.Label("nightly \"job\" é"))
	check := func(what string, all []fencelock.Holding, err error) {
		t.Helper()
		if err != nil || len(all) != 1 {
			t.Fatalf("%s: got %d holdings, %v, want 1", what, len(all), orNil(err))
		}
		h := all[0]
		if h.Kind != t.kind || h.Name != t.key() || h.Token != l.Token() || h.Left <= 0 || h.Left > t.granted(t.long()) {
			t.Fatalf("%s: got %+v, want %v %q, token %v, up to %v left", what, h, t.kind, t.key(), l.Token(), t.long())
		}
		host, _ := os.Hostname()
		if i := h.Holder; i.Label != "nightly \"job\" é" || i.PID != os.Getpid() || i.Host != host || time.Since(i.Since).Abs() > time.Minute {
			t.Fatalf("%s: got holder %+v, want this process, now, with the label", what, i)
		}
	}
	all, err := op.List(t.Context())
	check("List", all, err)
	all, err = op.Inspect(t.Context(), t.kind, t.key())
	check("Inspect", all, err)
	t.release(l)
	if all, err := op.Inspect(t.Context(), t.kind, t.key()); len(all) != 0 || err != nil {
		t.Fatalf("Inspect of a released lock: got %v, %v, want nobody", all, orNil(err))
	}
}

// forceUnlockFreesAStuckLock: the one who waits gets it, and the old holder is told at its next renewal.
func forceUnlockFreesAStuckLock(t *T) {
	c, op := t.client(), t.client()
	stuck := t.lock(t.locker(c), t.key(), fencelock.TTL(t.steady()))
	w, f := t.faulty()
	p := t.lockLater(t.Context(), t.locker(w), t.key(), fencelock.TTL(t.steady()))
	t.awaitReply(f, stepLock, 1)
	if n, err := op.ForceUnlock(t.Context(), t.kind, t.key()); n != 1 || err != nil {
		t.Fatalf("ForceUnlock of a stuck lock: got %d, %v, want 1", n, orNil(err))
	}
	l := p.lease(patience)
	if l.Token() <= stuck.Token() {
		t.Fatalf("token after ForceUnlock: got %v after %v, want more (T5)", l.Token(), stuck.Token())
	}
	t.await(stuck.Done(), "Done of a lease that was taken away by force", t.steady()+patience)
	t.is("Err of a lease that was taken away by force", stuck.Err(), fencelock.ErrLost, "L3")
	t.is("Release of a lease that was taken away by force", stuck.Release(t.Context()), fencelock.ErrNotHeld, "L4")
	t.held(l, "of the successor")
	t.release(l)
	if n, err := op.ForceUnlock(t.Context(), t.kind, t.key()); n != 0 || err != nil {
		t.Fatalf("ForceUnlock of a free lock: got %d, %v, want 0", n, orNil(err))
	}
}
