package file

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// TestSocketLife: the socket stands while a waiter asks and goes after one claim without.
func TestSocketLife(t *testing.T) {
	d := openReal(t, t.TempDir())
	c := newClient(d)
	o, w := owner("n"), owner("n")
	mustLock(t, d, o, time.Minute)
	if got := sockets(t, d); len(got) != 0 {
		t.Fatalf("sockets with nobody waiting: got %v, want none", got)
	}
	const claim = 300 * time.Millisecond
	mustState(t, d, wait(w, time.Minute, claim), driver.Waiting, "W4")
	<-c.recheck
	for end := time.Now().Add(2 * claim); time.Now().Before(end); time.Sleep(claim / 10) {
		if r := d.Poll(t.Context(), []driver.Poll{{Owner: w, TTL: time.Minute, Claim: time.Minute}})[0]; r.Err != nil {
			t.Fatal(r.Err)
		}
		// The entry's life is the poll's claim; the socket's, too.
		if got := sockets(t, d); len(got) != 1 {
			t.Fatalf("sockets while a waiter asks: got %v, want one", got)
		}
	}
	d.Close()

	d = openReal(t, filepath.Dir(d.dir))
	newClient(d)
	for range 2 { // it comes again
		mustState(t, d, wait(owner("n"), time.Minute, claim), driver.Waiting, "W4")
		eventually(t, "the socket stands", 5*time.Second, func() bool { return len(sockets(t, d)) == 1 })
		eventually(t, "the socket goes after one claim (L7)", claim+5*time.Second, func() bool { return len(sockets(t, d)) == 0 })
	}
}

// TestPushMany: many grants of one step to one client come in few datagrams, so that the receiver's
// short queue does not lose them; other clients get theirs.
func TestPushMany(t *testing.T) {
	// A path that no socket address could hold.
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	d := openReal(t, dir)
	n := driver.Name{Kind: driver.KindPermit, Name: "n"}
	request := func(id string, limit int) driver.Request {
		return driver.Request{Owner: driver.Owner{Name: n, ID: id}, TTL: time.Minute, Limit: limit, Wait: true, Claim: 30 * time.Second}
	}
	const many = 100
	if a, err := d.Acquire(t.Context(), request("holder", 1)); err != nil || a.State != driver.Granted {
		t.Fatalf("Acquire: got %v, %v, want granted", a.State, err)
	}
	clients := []*client{newClient(openReal(t, dir)), newClient(openReal(t, dir))}
	told := make(map[string]<-chan driver.Token)
	limit := 1
	for i := range many {
		id := fmt.Sprint("waiter ", i)
		told[id], _ = clients[i%2].expect(id)
		// The head alone waits for the holder; then all are granted in one step.
		if a, err := clients[i%2].Acquire(t.Context(), request(id, limit)); err != nil || a.State != driver.Waiting {
			t.Fatalf("Acquire: got %v, %v, want waiting", a.State, err)
		}
		limit = many
	}
	for _, c := range clients {
		<-c.recheck
	}
	if ended, err := d.ForceUnlock(t.Context(), n); ended != 1 || err != nil {
		t.Fatalf("ForceUnlock: got %d, %v, want 1, nil", ended, err)
	}
	late := time.After(20 * time.Second)
	var last driver.Token
	for i := range many {
		id := fmt.Sprint("waiter ", i)
		select {
		case token := <-told[id]:
			if token <= last {
				t.Fatalf("%s: told of token %d after %d, want a greater one (T1)", id, token, last)
			}
			last = token
		case <-late:
			t.Fatalf("%s: not told of its grant", id)
		}
	}
}

// TestNoSocket: without a socket the client is warned, and its waiters find their grant by polling.
func TestNoSocket(t *testing.T) {
	dir := t.TempDir()
	d, other := openReal(t, dir), openReal(t, dir)
	push := filepath.Join(d.dir, ".push")
	if err := os.RemoveAll(push); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(push, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := newClient(d)
	o, w := owner("n"), owner("n")
	mustLock(t, d, o, time.Minute)
	mustState(t, d, wait(w, time.Minute, time.Minute), driver.Waiting, "W4")
	eventually(t, "EventWarning", 5*time.Second, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.warned) == 1 && strings.Contains(c.warned[0].Error(), push)
	})
	mustRelease(t, other, o)
	r := d.Poll(t.Context(), []driver.Poll{{Owner: w, TTL: time.Minute, Claim: time.Minute}})[0]
	if r.Err != nil || r.State != driver.Granted {
		t.Fatalf("Poll: got %v, %v, want granted (W1)", r.State, r.Err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestSocketBreaks: a socket that fails is made anew, and the client asked to check again.
func TestSocketBreaks(t *testing.T) {
	d := openReal(t, t.TempDir())
	events := make(chan driver.EventKind, 10)
	d.Notify(func(e driver.Event) { events <- e.Kind })
	mustLock(t, d, owner("n"), time.Minute)
	mustState(t, d, wait(owner("n"), time.Minute, time.Minute), driver.Waiting, "W4")
	next := func() driver.EventKind {
		t.Helper()
		select {
		case e := <-events:
			return e
		case <-time.After(10 * time.Second):
			t.Fatal("event: got none, want EventRecheck")
			return 0
		}
	}
	if e := next(); e != driver.EventRecheck {
		t.Fatalf("event: got %v, want EventRecheck", e)
	}
	d.inbox.mu.Lock()
	d.inbox.conn.Close()
	d.inbox.mu.Unlock()
	if e := next(); e != driver.EventRecheck {
		t.Fatalf("event after the socket broke: got %v, want EventRecheck", e)
	}
	if got := sockets(t, d); !slices.Equal(got, []string{d.inbox.name}) {
		t.Fatalf("sockets: got %v, want the new one", got)
	}
}
