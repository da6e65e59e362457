package postgres

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/state"
)

// TestModel makes random steps on one name and on the reference, and compares all answers, what is listed and what
// is pushed. Time passes by moving what is stored: TTLs are odd multiples of a tick, time moves by even ones, so the
// time that the test itself takes decides nothing.
func TestModel(t *testing.T) {
	s := sharedServer(t)
	for round := range 24 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			t.Parallel()
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			kind := driver.KindLock
			if round%2 == 1 {
				kind = driver.KindPermit
			}
			m := newModel(t, s, rand.New(rand.NewPCG(seed, 0)), driver.Name{Kind: kind, Name: "na\x00me \xff{}/'%"})
			for range 80 {
				m.step()
				m.sole()
			}
			m.pushes()
		})
	}
}

const tick = 15 * time.Second

type model struct {
	t       *testing.T
	r       *rand.Rand
	server  *servers.Postgres
	ns      string
	drivers [2]*Driver
	events  [2]*events
	name    driver.Name

	want    state.Name
	moved   time.Duration
	began   time.Time
	ids     []string
	tokens  map[driver.Token]driver.Token // of the reference: of the server
	granted []string                      // "client id" of each push
	log     []string
}

func newModel(t *testing.T, s *servers.Postgres, r *rand.Rand, n driver.Name) *model {
	m := &model{t: t, r: r, server: s, ns: namespace(), name: n, tokens: make(map[driver.Token]driver.Token), began: time.Now()}
	for i := range m.drivers {
		m.drivers[i] = on(t, s.URL(), m.ns)
		m.drivers[i].sweep.close() // clearing up serves waiters: only when it is a step of the model
		m.events[i] = listen(m.drivers[i])
		// Listens from now on, for longer than the test.
		hold, wait := request("other", time.Hour), waiting(request("other", time.Hour), time.Hour)
		if i == 0 {
			locked(t, m.drivers[i], hold, driver.Granted, "L1")
		}
		locked(t, m.drivers[i], wait, driver.Waiting, "W4")
		eventually(t, func() error {
			if len(m.events[i].of(driver.EventRecheck)) == 0 {
				return fmt.Errorf("events of a waiter: got no recheck, want one (W1)")
			}
			return nil
		})
	}
	for i := range 5 {
		m.ids = append(m.ids, fmt.Sprintf("OWNER%d", i))
	}
	return m
}

func (m *model) now() state.Now {
	return state.Now{Lease: int64(m.moved), Token: time.Now().UnixMicro()}
}

// sole checks what lock and release rely on: besides the owner in the row of the name there is nobody.
func (m *model) sole() {
	m.t.Helper()
	got := psql(m.t, m.server, `SELECT n.sole, l.owners, w.owners FROM fencelock.names n
		CROSS JOIN LATERAL (SELECT string_agg(owner, ',') AS owners FROM fencelock.leases l WHERE (l.ns, l.kind, l.name) = (n.ns, n.kind, n.name)) l
		CROSS JOIN LATERAL (SELECT string_agg(owner, ',') AS owners FROM fencelock.waiters w WHERE (w.ns, w.kind, w.name) = (n.ns, n.kind, n.name)) w
		WHERE n.ns = '%s' AND n.sole IS NOT NULL AND (n.sole <> l.owners OR w.owners IS NOT NULL)`, m.ns)
	if got != "" {
		m.fail("sole owner, holders, waiters: got %s, want nobody besides (L1, W4)", got)
	}
}

func (m *model) ttl() time.Duration { return time.Duration(2*m.r.IntN(3)+1) * tick }

func (m *model) step() {
	m.t.Helper()
	// An owner belongs to one client, but anybody may release or extend it.
	n := m.r.IntN(len(m.ids))
	id, who := m.ids[n], n%2
	d := m.drivers[who]
	owner := driver.Owner{Name: m.name, ID: id}
	now := m.now()
	ctx := m.t.Context()
	switch op := m.r.IntN(100); {
	case op < 40:
		r := driver.Request{Owner: owner, TTL: m.ttl(), Limit: 1, Holder: "h\x00older of " + id, Wait: m.r.IntN(3) > 0}
		if m.name.Kind == driver.KindPermit {
			r.Limit = 1 + m.r.IntN(3)
		}
		if r.Wait {
			r.Claim = m.ttl()
		}
		if m.r.IntN(8) == 0 {
			r.Floor = driver.Token(time.Now().Add(time.Duration(m.r.IntN(100)) * time.Second).UnixMicro())
		}
		m.note("%d: lock %+v", who, r)
		want, grants := m.want.Lock(now, r, fmt.Sprint(who))
		got, err := d.Lock(ctx, r)
		m.answer("Lock", got, err, want)
		m.grants(grants)
	case op < 55:
		m.note("%d: release %s", who, id)
		want, grants := m.want.Release(now, id)
		got, err := m.drivers[m.r.IntN(2)].Release(ctx, owner)
		if err != nil || got != want {
			m.fail("Release: got %v, %v, want %v", got, err, want)
		}
		m.grants(grants)
	case op < 68:
		// Each on its own, so in any order: but a batch names each owner once.
		var batch []driver.Extension
		for _, i := range m.r.Perm(len(m.ids))[:1+m.r.IntN(3)] {
			batch = append(batch, driver.Extension{Owner: driver.Owner{Name: m.name, ID: m.ids[i]}, TTL: m.ttl()})
		}
		m.note("%d: extend %+v", who, batch)
		for i, got := range d.Extend(ctx, batch) {
			m.answer("Extend", got.Answer, got.Err, m.want.Extend(now, batch[i].ID, batch[i].TTL))
		}
	case op < 80:
		var batch []driver.Poll
		for _, i := range m.r.Perm(len(m.ids))[:1+m.r.IntN(3)] {
			if i%2 != who {
				continue
			}
			batch = append(batch, driver.Poll{Owner: driver.Owner{Name: m.name, ID: m.ids[i]}, TTL: m.ttl(), Claim: m.ttl()})
		}
		m.note("%d: poll %+v", who, batch)
		got := d.Poll(ctx, batch)
		// The driver renews all entries first and then serves, one by one in order; the reference serves in between. It
		// makes a difference only to an entry that expires in the middle, which cannot be here.
		for i := range batch {
			want, grants := m.want.Poll(now, batch[i])
			m.answer("Poll", got[i].Answer, got[i].Err, want)
			m.grants(grants)
		}
	case op < 84:
		m.note("%d: token", who)
		var floor driver.Token
		if m.r.IntN(2) == 0 {
			floor = driver.Token(time.Now().Add(time.Duration(m.r.IntN(100)) * time.Second).UnixMicro())
		}
		want := m.want.NextToken(now, floor)
		got, err := d.NextToken(ctx, m.name, floor)
		if err != nil || got <= floor {
			m.fail("NextToken: got %v, %v, want more than %v", got, err, floor)
		}
		m.token(got, want)
	case op < 87:
		floor := driver.Token(time.Now().Add(time.Duration(m.r.IntN(200)-100) * time.Second).UnixMicro())
		m.note("%d: advance %v", who, floor)
		m.want.Advance(floor)
		if err := d.Advance(ctx, m.name, floor); err != nil {
			m.fail("Advance: got %v", err)
		}
	case op < 90:
		m.note("%d: force", who)
		want, grants := m.want.ForceUnlock(now)
		got, err := d.ForceUnlock(ctx, m.name)
		if err != nil || got != want {
			m.fail("ForceUnlock: got %v, %v, want %v", got, err, want)
		}
		m.grants(grants)
	case op < 93:
		// Clearing up serves as well.
		m.note("%d: sweep", who)
		m.drivers[who].sweep.after = driver.Name{}
		if err := d.sweepPage(ctx, 1000); err != nil {
			m.fail("sweep: got %v", err)
		}
		_, grants := m.want.Release(now, "")
		m.grants(grants)
	default:
		by := time.Duration(2*(1+m.r.IntN(2))) * tick
		m.note("time passes: %v", by)
		m.moved += by
		for _, table := range []string{"leases", "waiters"} {
			psql(m.t, m.server, "UPDATE fencelock.%s SET expires = expires - interval '%d s' WHERE ns = '%s' AND name <> 'other'",
				table, by/time.Second, m.ns)
		}
	}
	m.listed()
}

// listed compares what the server says is held.
func (m *model) listed() {
	m.t.Helper()
	want := slices.Clone(m.want.Live(m.now()))
	var got []driver.Holding
	if err := m.drivers[0].List(m.t.Context(), m.name, func(h driver.Holding) bool { got = append(got, h); return true }); err != nil {
		m.fail("List: got %v", err)
	}
	slices.SortFunc(want, func(a, b state.Holder) int { return cmp.Compare(a.ID, b.ID) })
	if len(got) != len(want) {
		m.fail("List: got %+v, want %+v", got, want)
	}
	for i, w := range want {
		g := got[i]
		if g.ID != w.ID || g.Name != m.name || g.Holder != w.Info || !near(g.Left, time.Duration(w.Expires)-m.moved) {
			m.fail("List: got %+v, want %+v at %v", g, w, m.moved)
		}
		m.token(g.Token, w.Token)
	}
}

func (m *model) answer(op string, got driver.Answer, err error, want driver.Answer) {
	m.t.Helper()
	if err != nil || got.State != want.State || !near(got.TTL, want.TTL) || (got.Token == 0) != (want.Token == 0) {
		m.fail("%s: got %+v, %v, want %+v", op, got, err, want)
	}
	if want.Token != 0 {
		m.token(got.Token, want.Token)
	}
}

// near allows for the time that the test has taken.
func near(got, want time.Duration) bool { return got <= want+tick/2 && got > want-tick/2 }

// token checks that tokens are the same, and in the same order, where those of the reference are: the two clocks differ.
func (m *model) token(got, want driver.Token) {
	m.t.Helper()
	for w, g := range m.tokens {
		if cmp.Compare(w, want) != cmp.Compare(g, got) {
			m.fail("token %v for %v: got another order than %v for %v, want the same (T1, T3)", got, want, g, w)
		}
	}
	m.tokens[want] = got
}

func (m *model) grants(grants []state.Grant) {
	for _, g := range grants {
		m.granted = append(m.granted, g.Client+" "+g.ID)
	}
}

// pushes compares what was told to the clients of waiters, once all has arrived.
func (m *model) pushes() {
	m.t.Helper()
	slices.Sort(m.granted)
	eventually(m.t, func() error {
		var got []string
		for i, e := range m.events {
			for _, ev := range e.of(driver.EventGranted) {
				if ev.Owner.Name != m.name {
					return fmt.Errorf("grant: got name %+v, want %+v", ev.Owner.Name, m.name)
				}
				got = append(got, fmt.Sprint(i, " ", ev.Owner.ID))
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, m.granted) {
			return fmt.Errorf("grants that were told: got %q, want %q\n%s", got, m.granted, strings.Join(m.log, "\n"))
		}
		return nil
	})
}

func (m *model) note(format string, args ...any) {
	m.log = append(m.log, fmt.Sprintf(format, args...))
}

func (m *model) fail(format string, args ...any) {
	m.t.Helper()
	m.t.Fatalf(format+"\n%s", append(args, strings.Join(m.log, "\n"))...)
}
