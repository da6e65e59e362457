package redisbackend

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

// Events is a sink that keeps what comes.
type Events chan driver.Event

// ListenTo sets the sink of a driver.
func ListenTo(d Full) Events {
	e := make(Events, 1000)
	d.Notify(func(ev driver.Event) { e <- ev })
	return e
}

// Next waits for an event of the kind and passes over others.
func (e Events) Next(t *testing.T, kind driver.EventKind, why string) driver.Event {
	t.Helper()
	deadline := time.After(Patience)
	for {
		select {
		case ev := <-e:
			if ev.Kind == kind {
				return ev
			}
		case <-deadline:
			t.Fatalf("event of kind %d %s: not within %v (W1)", kind, why, Patience)
		}
	}
}

// Channels answers what is subscribed to.
func (s Server) Channels(t testing.TB) []any {
	t.Helper()
	all, _ := s.Must(t, "PUBSUB", "CHANNELS").([]any)
	return all
}

// ClientsOfType counts the connections of a type.
func (s Server) ClientsOfType(t testing.TB, kind string) int {
	t.Helper()
	text, _ := s.Must(t, "CLIENT", "LIST", "TYPE", kind).(string)
	return strings.Count(text, "\n")
}

// TestPush hands a lock over and expects one message, to the waiter's client only.
func (b Driver) TestPush(t *testing.T) {
	BothKinds(t, func(t *testing.T, n driver.Name) {
		s := b.Start(t)
		holder, waiter := s.Driver(t), s.Driver(t)
		toHolder, toWaiter := ListenTo(holder), ListenTo(waiter)
		h, w := driver.Owner{Name: n, ID: NewID()}, driver.Owner{Name: n, ID: NewID()}
		first := MustLock(t, holder, Waiting(n, h.ID, time.Minute), driver.Granted)
		if got := s.Channels(t); len(got) != 0 {
			t.Errorf("channels after an uncontended Lock: got %v, want none", got)
		}
		MustLock(t, waiter, Waiting(n, w.ID, time.Minute), driver.Waiting)
		toWaiter.Next(t, driver.EventRecheck, "when the subscription stands")
		if got := s.Channels(t); len(got) != 1 {
			t.Errorf("channels with one waiting client: got %v, want one", got)
		}
		MustRelease(t, holder, h)
		e := toWaiter.Next(t, driver.EventGranted, "when the lock is handed over")
		if e.Owner != w || e.Token <= first.Token {
			t.Errorf("event: got %+v, want owner %+v and a token above %v (T1)", e, w, first.Token)
		}
		r := waiter.Poll(t.Context(), []driver.Poll{{Owner: w, TTL: time.Minute, Claim: time.Minute}})[0]
		if r.State != driver.Granted || r.Token != e.Token {
			t.Errorf("Poll after the event: got %+v, want granted with token %v (T3)", r, e.Token)
		}
		select {
		case e := <-toHolder:
			t.Errorf("event to the client that released: got %+v, want none", e)
		case e := <-toWaiter:
			t.Errorf("second event: got %+v, want none", e)
		default:
		}
	})
}

// TestSubscriptionComesBack kills the subscription, and then cuts it silently.
func (b Driver) TestSubscriptionComesBack(t *testing.T) {
	s, p := b.proxied(t)
	holder := s.Driver(t)
	waiter := b.at(t, p.Addr())
	e := ListenTo(waiter)
	n := LockName("x")
	h := driver.Owner{Name: n, ID: NewID()}
	MustLock(t, holder, Request(n, h.ID, time.Hour), driver.Granted)
	MustLock(t, waiter, Waiting(n, NewID(), time.Hour), driver.Waiting)
	e.Next(t, driver.EventRecheck, "when the subscription stands")
	for range 3 {
		if killed := s.Must(t, "CLIENT", "KILL", "TYPE", "pubsub"); killed != int64(1) {
			t.Fatalf("CLIENT KILL TYPE pubsub: got %v, want 1", killed)
		}
		e.Next(t, driver.EventRecheck, "after the subscription was killed")
	}
	p.Reset()
	e.Next(t, driver.EventRecheck, "after all connections were reset")

	// What was subscribed last receives.
	MustRelease(t, holder, h)
	e.Next(t, driver.EventGranted, "on the new subscription")
}

// TestSubscriptionGoesDead lets the network swallow everything without a word.
func (b Driver) TestSubscriptionGoesDead(t *testing.T) {
	t.Parallel() // it takes two heartbeats of a subscription, 10 s
	s, p := b.proxied(t)
	waiter := b.at(t, p.Addr())
	e := ListenTo(waiter)
	n := LockName("x")
	MustLock(t, s.Driver(t), Request(n, NewID(), time.Hour), driver.Granted)
	MustLock(t, waiter, Waiting(n, NewID(), time.Hour), driver.Waiting)
	e.Next(t, driver.EventRecheck, "when the subscription stands")
	before := p.Stats()
	p.Drop(servers.ToClient)
	for deadline := time.Now().Add(3 * Patience); p.Stats().Connections == before.Connections; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("subscription that is dead: not given up within %v", 3*Patience)
		}
	}
	p.Pass(servers.ToClient)
	e.Next(t, driver.EventRecheck, "after the subscription had gone dead")
}

// TestSubscriptionEnds expects the connection to be given up when nobody waits, and to come back.
func (b Driver) TestSubscriptionEnds(t *testing.T) {
	t.Parallel()
	s := b.Start(t)
	d := s.Driver(t)
	e := ListenTo(d)
	n := LockName("x")
	MustLock(t, d, Request(n, NewID(), time.Hour), driver.Granted)
	for range 2 {
		w := driver.Owner{Name: n, ID: NewID()}
		MustLock(t, d, Waiting(n, w.ID, 200*time.Millisecond), driver.Waiting)
		e.Next(t, driver.EventRecheck, "when the subscription stands")
		Eventually(t, "end of the subscription", func() bool { return len(s.Channels(t)) == 0 && s.ClientsOfType(t, "pubsub") == 0 })
	}

	// It stays as long as somebody polls.
	w := driver.Owner{Name: n, ID: NewID()}
	MustLock(t, d, Waiting(n, w.ID, 4*time.Second), driver.Waiting)
	e.Next(t, driver.EventRecheck, "when the subscription stands")
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		r := d.Poll(t.Context(), []driver.Poll{{Owner: w, TTL: 4 * time.Second, Claim: 2 * time.Second}})[0]
		if r.State != driver.Waiting {
			t.Fatalf("Poll of a waiter that polls: got %+v, want waiting", r)
		}
		if got := len(s.Channels(t)); got != 1 {
			t.Fatalf("channels while a waiter polls: got %d, want 1", got)
		}
	}
}

// TestOneSubscription waits for many names.
func (b Driver) TestOneSubscription(t *testing.T) {
	s := b.Start(t)
	d := s.Driver(t)
	e := ListenTo(d)
	for i := range 200 {
		n := LockName(strings.Repeat("n", i+1))
		MustLock(t, d, Request(n, NewID(), time.Hour), driver.Granted)
		MustLock(t, d, Waiting(n, NewID(), time.Hour), driver.Waiting)
	}
	e.Next(t, driver.EventRecheck, "when the subscription stands")
	if got := s.ClientsOfType(t, "pubsub"); got != 1 {
		t.Errorf("subscribed connections of a client that waits for 200 names: got %d, want 1 (F074)", got)
	}
}

// TestCloseLeavesNothing closes a driver that waits.
func (b Driver) TestCloseLeavesNothing(t *testing.T) {
	s := b.Start(t)
	d := s.Driver(t)
	e := ListenTo(d)
	n := LockName("x")
	MustLock(t, d, Request(n, NewID(), time.Hour), driver.Granted)
	MustLock(t, d, Waiting(n, NewID(), time.Hour), driver.Waiting)
	e.Next(t, driver.EventRecheck, "when the subscription stands")
	if err := d.Close(); err != nil {
		t.Errorf("Close: got %v, want nil", err)
	}
	if all := stacks(); strings.Contains(all, "redislua.") {
		t.Errorf("goroutines after Close: got\n%s\nwant none of the driver", all)
	}
	Eventually(t, "no subscription after Close", func() bool { return len(s.Channels(t)) == 0 })
}

func stacks() string {
	buffer := make([]byte, 1<<20)
	return string(buffer[:runtime.Stack(buffer, true)])
}

// TestPolicyWarning reports a policy that may evict locks, at the first answer and after a disturbance.
func (b Driver) TestPolicyWarning(t *testing.T) {
	s, p := b.proxied(t, "--maxmemory-policy", "allkeys-lru")
	d := b.at(t, p.Addr())
	e := ListenTo(d)
	n := LockName("x")
	id := NewID()
	MustLock(t, d, Request(n, id, time.Minute), driver.Granted)
	w := e.Next(t, driver.EventWarning, "about allkeys-lru")
	if w.Err == nil || !strings.Contains(w.Err.Error(), "allkeys-lru") {
		t.Errorf("warning: got %v, want the policy (F105)", w.Err)
	}
	before := s.Commands(t)
	for range 100 {
		MustLock(t, d, Request(n, id, time.Minute), driver.Granted)
	}
	if after := s.Commands(t); after["info"]-before["info"] != 1 { // this test's own
		t.Errorf("100 more steps: got %d INFO, want none", after["info"]-before["info"]-1)
	}

	done := p.DropNextReply(nil)
	if _, err := d.Lock(t.Context(), Request(n, id, time.Minute)); err == nil {
		t.Fatal("void: the reply was not lost")
	}
	<-done
	MustLock(t, d, Request(n, id, time.Minute), driver.Granted)
	e.Next(t, driver.EventWarning, "after a connection was lost")

	quiet := b.Start(t).Driver(t)
	none := ListenTo(quiet)
	MustLock(t, quiet, Request(n, NewID(), time.Minute), driver.Granted)
	if err := quiet.Close(); err != nil { // waits for the look at the policy
		t.Fatal(err)
	}
	select {
	case e := <-none:
		t.Errorf("event with noeviction: got %+v, want none", e)
	default:
	}
}
