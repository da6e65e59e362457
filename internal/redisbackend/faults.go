package redisbackend

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/internal/hashtag"
)

// Request asks for a name once.
func Request(n driver.Name, id string, ttl time.Duration) driver.Request {
	return driver.Request{Owner: driver.Owner{Name: n, ID: id}, TTL: ttl, Limit: 1}
}

// Waiting is a request that queues.
func Waiting(n driver.Name, id string, ttl time.Duration) driver.Request {
	r := Request(n, id, ttl)
	r.Wait, r.Claim = true, ttl/2
	return r
}

// MustLock expects the answer to a request.
func MustLock(t *testing.T, d Full, r driver.Request, want driver.State) driver.Answer {
	t.Helper()
	a, err := d.Lock(t.Context(), r)
	if err != nil || a.State != want {
		t.Fatalf("Lock %v %q: got %v, %v, want %v", r.Name.Kind, r.Name.Name, a.State, err, want)
	}
	return a
}

// MustRelease gives back what must be held.
func MustRelease(t *testing.T, d Full, o driver.Owner) {
	t.Helper()
	if found, err := d.Release(t.Context(), o); !found || err != nil {
		t.Fatalf("Release of a held %v: got %v, %v, want true", o.Name.Kind, found, err)
	}
}

// Step is one method of the driver, in a state in which its answer is known.
type Step struct {
	What string
	Do   func(Full) error
}

// StepsOn holds the name for one owner, queues another, and answers all steps there are, each of which
// can be repeated.
func StepsOn(t *testing.T, d Full, n driver.Name) []Step {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	holder, waiter := driver.Owner{Name: n, ID: NewID()}, driver.Owner{Name: n, ID: NewID()}
	MustLock(t, d, Request(n, holder.ID, time.Minute), driver.Granted)
	MustLock(t, d, Waiting(n, waiter.ID, time.Minute), driver.Waiting)
	state := func(got driver.State, want driver.State, err error) error {
		if err == nil && got != want {
			err = fmt.Errorf("got %v, want %v", got, want)
		}
		return err
	}
	steps := []Step{
		{"Lock", func(d Full) error {
			a, err := d.Lock(ctx, Request(n, holder.ID, 2*time.Minute)) // an expiry that is there already is not written again
			return state(a.State, driver.Granted, err)
		}},
		{"Lock by a rival", func(d Full) error {
			a, err := d.Lock(ctx, Request(n, NewID(), time.Minute))
			return state(a.State, driver.Held, err)
		}},
		{"Lock by a waiter", func(d Full) error {
			a, err := d.Lock(ctx, Waiting(n, waiter.ID, time.Minute))
			return state(a.State, driver.Waiting, err)
		}},
		{"Extend", func(d Full) error {
			r := d.Extend(ctx, []driver.Extension{{Owner: holder, TTL: 3 * time.Minute}})[0]
			return state(r.State, driver.Granted, r.Err)
		}},
		{"Poll", func(d Full) error {
			r := d.Poll(ctx, []driver.Poll{{Owner: waiter, TTL: time.Minute, Claim: 30 * time.Second}})[0]
			return state(r.State, driver.Waiting, r.Err)
		}},
		{"NextToken", func(d Full) error {
			token, err := d.NextToken(ctx, n, 0)
			if err == nil && token == 0 {
				err = errors.New("got no token")
			}
			return err
		}},
		{"Advance", func(d Full) error { return d.Advance(ctx, n, 1) }},
		{"List", func(d Full) error {
			found := 0
			err := d.List(ctx, n, func(driver.Holding) bool { found++; return true })
			if err == nil && found != 1 {
				err = fmt.Errorf("got %d leases, want 1", found)
			}
			return err
		}},
		{"Release", func(d Full) error {
			o := driver.Owner{Name: n, ID: NewID()}
			if a, err := d.Lock(ctx, Waiting(n, o.ID, time.Minute)); err != nil {
				return state(a.State, driver.Waiting, err)
			}
			found, err := d.Release(ctx, o)
			if err == nil && !found {
				err = errors.New("got false, want true")
			}
			return err
		}},
		{"ForceUnlock", func(d Full) error {
			// Gives the name to the waiter; then the old holder queues and all is as before, with the
			// roles exchanged.
			_, err := d.ForceUnlock(ctx, n)
			if err != nil {
				return err
			}
			holder, waiter = waiter, driver.Owner{Name: n, ID: NewID()}
			a, err := d.Lock(ctx, Waiting(n, waiter.ID, time.Minute))
			return state(a.State, driver.Waiting, err)
		}},
	}
	if n.Kind == driver.KindLock {
		tag, ok := hashtag.Of(n.Name)
		if !ok {
			tag = n.Name
		}
		steps = append(steps, Step{"LockAndWrite", func(d Full) error {
			a, err := d.LockAndWrite(ctx, Request(n, holder.ID, 2*time.Minute), appending("fencelock:{"+tag+"}", "not again"))
			return state(a.State, driver.Granted, err)
		}})
	}
	return steps
}

// BothKinds runs a test for a lock and for a semaphore.
func BothKinds(t *testing.T, f func(t *testing.T, n driver.Name)) {
	for _, n := range []driver.Name{LockName("x"), PermitName("x")} {
		t.Run(n.Kind.String(), func(t *testing.T) { f(t, n) })
	}
}

// TestScriptsForgotten flushes the scripts before every step, and counts what that costs.
func (b Driver) TestScriptsForgotten(t *testing.T) {
	BothKinds(t, func(t *testing.T, n driver.Name) {
		s := b.Start(t)
		d := s.Driver(t)
		for _, step := range StepsOn(t, d, n) {
			for range 2 {
				s.Must(t, "SCRIPT", "FLUSH")
				before := s.Commands(t)
				if err := step.Do(d); err != nil {
					t.Fatalf("%s after SCRIPT FLUSH: got %v, want nil", step.What, err)
				}
				if full := s.Commands(t)["eval"] - before["eval"]; full < 1 || full > 2 {
					t.Errorf("%s after SCRIPT FLUSH: sent %d scripts in full, want one for each request", step.What, full)
				}
				if err := step.Do(d); err != nil {
					t.Fatalf("%s: got %v, want nil", step.What, err)
				}
			}
		}
	})
}

// TestOneRequestPerStep counts the requests of each step when the server knows the scripts.
func (b Driver) TestOneRequestPerStep(t *testing.T) {
	BothKinds(t, func(t *testing.T, n driver.Name) {
		s := b.Start(t)
		d := s.Driver(t)
		for _, step := range StepsOn(t, d, n) {
			if err := step.Do(d); err != nil {
				t.Fatalf("%s: got %v, want nil", step.What, err)
			}
			before := s.Commands(t)
			if err := step.Do(d); err != nil {
				t.Fatalf("%s: got %v, want nil", step.What, err)
			}
			after := s.Commands(t)
			want := 1
			if step.What == "Release" || step.What == "ForceUnlock" {
				want = 2 // with the Lock that goes with it
			}
			if got := after["evalsha"] - before["evalsha"]; got != want || after["eval"] != before["eval"] {
				t.Errorf("%s: got %d EVALSHA and %d EVAL, want %d and 0 (W2)", step.What, got, after["eval"]-before["eval"], want)
			}
		}
	})
}

// TestOutOfMemory fills the server up: nothing new is granted, what is held can be kept and given back.
func (b Driver) TestOutOfMemory(t *testing.T) {
	BothKinds(t, func(t *testing.T, n driver.Name) {
		s := b.Start(t)
		d := s.Driver(t)
		ctx := t.Context()
		holder, waiter := driver.Owner{Name: n, ID: NewID()}, driver.Owner{Name: n, ID: NewID()}
		MustLock(t, d, Request(n, holder.ID, time.Minute), driver.Granted)
		MustLock(t, d, Waiting(n, waiter.ID, time.Minute), driver.Waiting)
		s.Must(t, "CONFIG", "SET", "maxmemory", "1")

		refused := func(what string, err error) {
			t.Helper()
			if !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), "OOM") {
				t.Errorf("%s without memory: got %v, want ErrUnavailable with the cause (F108, L8)", what, err)
			}
		}
		free := driver.Name{Kind: n.Kind, Name: "free"}
		_, err := d.Lock(ctx, Request(free, NewID(), time.Minute))
		refused("Lock of a free name", err)
		_, err = d.Lock(ctx, Waiting(n, NewID(), time.Minute))
		refused("Lock that would queue", err)
		MustLock(t, d, Request(n, NewID(), time.Minute), driver.Held)
		_, err = d.NextToken(ctx, free, 0)
		refused("NextToken", err)
		if n.Kind == driver.KindLock {
			_, err = d.LockAndWrite(ctx, Request(free, NewID(), time.Minute), appending("list", ""))
			refused("LockAndWrite", err)
		}

		if r := d.Extend(ctx, []driver.Extension{{Owner: holder, TTL: time.Hour}})[0]; r.Err != nil || r.State != driver.Granted {
			t.Errorf("Extend without memory: got %+v, want granted (F108)", r)
		}
		poll := []driver.Poll{{Owner: waiter, TTL: time.Minute, Claim: time.Minute}}
		if r := d.Poll(ctx, poll)[0]; r.Err != nil || r.State != driver.Waiting {
			t.Errorf("Poll without memory: got %+v, want waiting (F108)", r)
		}
		MustRelease(t, d, holder) // gives it to the waiter
		if r := d.Poll(ctx, poll)[0]; r.Err != nil || r.State != driver.Granted {
			t.Errorf("Poll after the handover without memory: got %+v, want granted (F108)", r)
		}
		MustRelease(t, d, waiter)
		if found, err := d.Release(ctx, waiter); found || err != nil {
			t.Errorf("Release of nothing without memory: got %v, %v, want false (F108)", found, err)
		}

		s.Must(t, "CONFIG", "SET", "maxmemory", "0")
		MustLock(t, d, Request(n, NewID(), time.Minute), driver.Granted)
		if v := s.Must(t, "EXISTS", "fencelock:l:{free}", "fencelock:p:{free}"); v != int64(0) {
			t.Errorf("after a refused Lock: got %v keys, want none (L7)", v)
		}
	})
}

// TestForeignType puts another type, and a foreign string, under each key of a name in turn.
func (b Driver) TestForeignType(t *testing.T) {
	BothKinds(t, func(t *testing.T, n driver.Name) {
		s := b.Start(t)
		d := s.Driver(t)
		raw := s.Client(t)
		steps := StepsOn(t, d, n)
		keys := raw.Keys(t.Context(), "*").Val()
		if want := map[driver.Kind]int{driver.KindLock: 3, driver.KindPermit: 4}[n.Kind]; len(keys) != want {
			t.Fatalf("keys of a name that is held and waited for: got %q, want %d", keys, want)
		}
		for _, key := range keys {
			ours, kind := raw.Dump(t.Context(), key).Val(), raw.Type(t.Context(), key).Val()
			for _, foreign := range []struct{ command, says string }{{"RPUSH", "WRONGTYPE"}, {"SET", "FENCELOCK"}} {
				if foreign.command == "SET" && kind != "string" {
					foreign.says = "WRONGTYPE"
				}
				s.Must(t, "DEL", key)
				s.Must(t, foreign.command, key, "app")
				for _, step := range steps {
					err := step.Do(d)
					switch needs := needsKey(step.What, key); {
					case needs && (!errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), foreign.says)):
						t.Errorf("%s after %s %s: got %v, want ErrUnavailable with %s (F028)", step.What, foreign.command, key, err, foreign.says)
					case !needs && err != nil:
						t.Errorf("%s after %s %s, which it does not need: got %v, want nil", step.What, foreign.command, key, err)
					}
				}
			}
			raw.Del(t.Context(), key)
			if err := raw.Restore(t.Context(), key, time.Hour, ours).Err(); err != nil {
				t.Fatalf("RESTORE %s: %v", key, err)
			}
		}
		for _, step := range steps {
			if err := step.Do(d); err != nil {
				t.Errorf("%s after all that: got %v, want nil", step.What, err)
			}
		}

		letter := map[driver.Kind]string{driver.KindLock: "l", driver.KindPermit: "p"}[n.Kind]
		s.Must(t, "RPUSH", "fencelock:"+letter+"f:{free}", "app")
		_, err := d.Lock(t.Context(), Request(driver.Name{Kind: n.Kind, Name: "free"}, NewID(), time.Minute))
		if !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), "WRONGTYPE") {
			t.Errorf("Lock of a free name with a list for a fence: got %v, want ErrUnavailable with WRONGTYPE (F028)", err)
		}
		if v := s.Must(t, "EXISTS", "fencelock:"+letter+":{free}"); v != int64(0) {
			t.Errorf("after that: got %v holders, want none (L7)", v)
		}
	})
}

func needsKey(step, key string) bool {
	part := strings.Split(key, ":")[1][1:]
	switch step {
	case "NextToken", "Advance":
		return part == "f"
	case "Extend", "List":
		return part == "" || part == "d"
	}
	return true
}

// TestEvictedParts removes each key of a name in turn: nothing may get stuck.
func (b Driver) TestEvictedParts(t *testing.T) {
	BothKinds(t, func(t *testing.T, n driver.Name) {
		s := b.Start(t)
		d := s.Driver(t)
		for _, part := range []string{"", "d", "f", "q"} {
			s.Must(t, "FLUSHALL")
			StepsOn(t, d, n)
			for _, letter := range []string{"l", "p"} {
				s.Must(t, "DEL", "fencelock:"+letter+part+":{x}")
			}
			Eventually(t, fmt.Sprintf("a new owner after the loss of key %q", part), func() bool {
				if _, err := d.ForceUnlock(t.Context(), n); err != nil {
					t.Fatalf("ForceUnlock after the loss of key %q: got %v, want nil", part, err)
				}
				a, err := d.Lock(t.Context(), Request(n, NewID(), time.Minute))
				if err != nil {
					t.Fatalf("Lock after the loss of key %q: got %v, want nil", part, err)
				}
				return a.State == driver.Granted
			})
		}
	})
}

// TestNoOvertaking ends a lease that two wait for: a release gives it to the first of them at once, and when it has ended by
// itself whoever tries next does not pass them. That is so after steps that know of no queue, too, and when the last token was
// not used for so long that it is forgotten.
func (b Driver) TestNoOvertaking(t *testing.T) {
	BothKinds(t, func(t *testing.T, n driver.Name) {
		for what, meanwhile := range map[string]func(t *testing.T, s Server, d Full, holder driver.Owner){
			"nothing": func(*testing.T, Server, Full, driver.Owner) {},
			"NextToken": func(t *testing.T, _ Server, d Full, _ driver.Owner) {
				if _, err := d.NextToken(t.Context(), n, 0); err != nil {
					t.Fatalf("NextToken: got %v, want nil", err)
				}
			},
			"Extend": func(t *testing.T, _ Server, d Full, holder driver.Owner) {
				if r := d.Extend(t.Context(), []driver.Extension{{Owner: holder, TTL: time.Hour}})[0]; r.State != driver.Granted {
					t.Fatalf("Extend: got %+v, want granted", r)
				}
			},
			"48 hours": func(t *testing.T, s Server, _ Full, _ driver.Owner) {
				s.Must(t, "DEL", "fencelock:lf:{x}", "fencelock:pf:{x}")
			},
		} {
			t.Run(what, func(t *testing.T) {
				s := b.Start(t)
				d := s.Driver(t)
				for _, released := range []bool{true, false} {
					owners := []driver.Owner{{Name: n, ID: NewID()}, {Name: n, ID: NewID()}, {Name: n, ID: NewID()}}
					MustLock(t, d, Request(n, owners[0].ID, time.Minute), driver.Granted)
					for _, waiter := range owners[1:] {
						MustLock(t, d, Waiting(n, waiter.ID, time.Minute), driver.Waiting)
					}
					for i, o := range owners[:2] {
						meanwhile(t, s, d, o)
						if released {
							MustRelease(t, d, o)
						} else {
							s.Must(t, "DEL", "fencelock:l:{x}", "fencelock:p:{x}")
							MustLock(t, d, Request(n, NewID(), time.Minute), driver.Held)
						}
						var holder string
						if err := d.List(t.Context(), n, func(h driver.Holding) bool { holder = h.ID; return true }); err != nil {
							t.Fatalf("List: got %v, want nil", err)
						}
						if want := owners[i+1].ID; holder != want {
							t.Errorf("holder after lease %d has ended, released %v: got %q, want the first waiter, %q (W4)", i, released, holder, want)
						}
					}
					MustRelease(t, d, owners[2])
				}
			})
		}
	})
}

// Refusal is a way to make a server refuse what it is asked, with a code.
type Refusal struct {
	Code   string
	Refuse func(t *testing.T, s Server) (end func())
	Reads  bool // what writes nothing is still answered
}

// Refusals are some of the ways there are. LOADING ends with the server.
var Refusals = []Refusal{
	{"READONLY", func(t *testing.T, s Server) func() {
		s.Must(t, "REPLICAOF", "127.0.0.1", "1")
		return func() { s.Must(t, "REPLICAOF", "NO", "ONE") }
	}, true},
	{"MASTERDOWN", func(t *testing.T, s Server) func() {
		s.Must(t, "CONFIG", "SET", "replica-serve-stale-data", "no")
		s.Must(t, "REPLICAOF", "127.0.0.1", "1")
		return func() { s.Must(t, "REPLICAOF", "NO", "ONE") }
	}, false},
	{"MISCONF", func(t *testing.T, s Server) func() {
		// A directory where the snapshot should be lets saving fail.
		dir, _ := s.Must(t, "CONFIG", "GET", "dir").([]any)
		if len(dir) != 2 {
			t.Fatalf("CONFIG GET dir: got %v", dir)
		}
		if err := os.MkdirAll(filepath.Join(dir[1].(string), "dump.rdb", "x"), 0o700); err != nil {
			t.Fatal(err)
		}
		s.Must(t, "CONFIG", "SET", "save", "3600 1")
		s.Must(t, "BGSAVE")
		Eventually(t, "a snapshot that fails", func() bool {
			info, _ := s.Must(t, "INFO", "persistence").(string)
			return strings.Contains(info, "rdb_last_bgsave_status:err")
		})
		return func() { s.Must(t, "CONFIG", "SET", "save", "") }
	}, true},
	{"LOADING", func(t *testing.T, s Server) func() {
		s.Must(t, "DEBUG", "POPULATE", "2000")
		s.Must(t, "CONFIG", "SET", "key-load-delay", "5000", "loading-process-events-interval-bytes", "1024")
		loaded := make(chan struct{})
		go func() {
			defer close(loaded)
			_, _ = s.Do(context.Background(), "DEBUG", "RELOAD")
		}()
		AwaitRefusal(t, s, "LOADING")
		return func() {
			if err := s.Kill(); err != nil {
				t.Error(err)
			}
			<-loaded
		}
	}, false},
	{"NOREPLICAS", func(t *testing.T, s Server) func() {
		s.Must(t, "CONFIG", "SET", "min-replicas-to-write", "1")
		return func() { s.Must(t, "CONFIG", "SET", "min-replicas-to-write", "0") }
	}, true},
	{"NOPERM", func(t *testing.T, s Server) func() {
		s.Must(t, "ACL", "SETUSER", "default", "-evalsha", "-eval")
		return func() { s.Must(t, "ACL", "SETUSER", "default", "+evalsha", "+eval") }
	}, false},
	{"BUSY", func(t *testing.T, s Server) func() {
		s.Must(t, "CONFIG", "SET", "busy-reply-threshold", "1")
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = s.Do(context.Background(), "EVAL", "while true do end", "0")
		}()
		AwaitRefusal(t, s, "BUSY")
		return func() {
			s.Must(t, "SCRIPT", "KILL")
			<-ended
		}
	}, false},
}

// TestRefusals makes the server refuse, in each of the ways.
func (b Driver) TestRefusals(t *testing.T) {
	writesNothing := []string{"List", "Lock by a rival", "Advance"}
	for _, test := range Refusals {
		t.Run(test.Code, func(t *testing.T) {
			s := b.Start(t)
			d := s.Driver(t)
			steps := StepsOn(t, d, LockName("x"))
			t.Cleanup(test.Refuse(t, s))
			for _, step := range steps {
				err := step.Do(d)
				if test.Reads && slices.Contains(writesNothing, step.What) {
					if err != nil {
						t.Errorf("%s: got %v, want nil", step.What, err)
					}
				} else if !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), test.Code) {
					t.Errorf("%s: got %v, want ErrUnavailable with %s (L8)", step.What, err, test.Code)
				}
			}
		})
	}
}

// AwaitRefusal waits until the server refuses everything, with the code.
func AwaitRefusal(t testing.TB, s servers.Server, code string) {
	t.Helper()
	client := newClient(Options{Addr: s.Addr()})
	defer client.Close()
	Eventually(t, "a server that says "+code, func() bool {
		err := client.Get(t.Context(), "k").Err()
		return err != nil && strings.HasPrefix(err.Error(), code)
	})
}

// TestHalfAStep takes away the right to a command that a step needs in its middle. What was begun must
// not be reported as not done.
func (b Driver) TestHalfAStep(t *testing.T) {
	s := b.Start(t)
	d := s.Driver(t)
	n := LockName("x")
	holder := driver.Owner{Name: n, ID: NewID()}
	MustLock(t, d, Request(n, holder.ID, time.Minute), driver.Granted)
	MustLock(t, d, Waiting(n, NewID(), time.Minute), driver.Waiting)
	s.Must(t, "ACL", "SETUSER", "default", "-set")
	_, err := d.Release(t.Context(), holder)
	if err == nil || errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), "FENCELOCKHALF") {
		t.Errorf("Release that failed in its middle: got %v, want an unknown outcome (L8)", err)
	}
	if v := s.Must(t, "EXISTS", "fencelock:l:{x}"); v != int64(0) {
		t.Errorf("void: Release did nothing")
	}
}

// TestUnknownOutcome loses replies under a client that does not repeat.
func (b Driver) TestUnknownOutcome(t *testing.T) {
	s, p := b.proxied(t)
	d := b.at(t, p.Addr())
	for _, step := range StepsOn(t, d, LockName("x")) {
		if err := step.Do(d); err != nil {
			t.Fatalf("%s: got %v, want nil", step.What, err)
		}
		done := p.DropNextReply(&servers.DropOptions{RequestWith: "fencelock:"}) // not that to a PING of the client's own
		err := step.Do(d)
		<-done
		if err == nil || errors.Is(err, driver.ErrUnavailable) != (step.What == "List") {
			t.Errorf("%s whose reply is lost: got %v, want an unknown outcome (L8)", step.What, err)
		}
		if err := step.Do(d); err != nil && step.What != "ForceUnlock" {
			t.Errorf("%s again: got %v, want nil (L5)", step.What, err)
		}
	}

	o := driver.Owner{Name: LockName("z"), ID: NewID()} // the server knows the scripts by now
	MustLock(t, d, Request(o.Name, o.ID, time.Minute), driver.Granted)
	done := p.DropNextReply(&servers.DropOptions{RequestWith: o.ID})
	found, err := d.Release(t.Context(), o)
	<-done
	if found || err == nil || errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Release whose reply is lost: got %v, %v, want an unknown outcome (L8)", found, err)
	}
	if found, err := d.Release(t.Context(), o); found || err != nil {
		t.Errorf("Release again: got %v, %v, want false (L5)", found, err)
	}

	if err := s.Pause(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err = d.Lock(ctx, Request(LockName("y"), NewID(), time.Minute))
	if err == nil || errors.Is(err, driver.ErrUnavailable) || time.Since(began) > Patience {
		t.Errorf("Lock on a paused server: got %v, want an unknown outcome soon after the deadline (L8)", err)
	}
	if err := s.Resume(); err != nil {
		t.Fatal(err)
	}
}

// TestNeverSent asks servers that cannot be reached, and with contexts that have ended.
func (b Driver) TestNeverSent(t *testing.T) {
	s, p := b.proxied(t)
	d := s.Driver(t)
	n := LockName("x")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := d.Lock(ended, Request(n, NewID(), time.Minute))
	if !errors.Is(err, driver.ErrUnavailable) || !errors.Is(err, context.Canceled) {
		t.Errorf("Lock with a cancelled context: got %v, want ErrUnavailable and context.Canceled", err)
	}

	gone := b.at(t, p.Addr())
	if err := p.Refuse(); err != nil {
		t.Fatal(err)
	}
	p.Reset()
	Eventually(t, "ErrUnavailable without a server (L8)", func() bool {
		_, err = gone.Lock(t.Context(), Request(n, NewID(), time.Minute))
		return errors.Is(err, driver.ErrUnavailable) // and unknown, until the client has noticed
	})
	var dial *net.OpError
	if !errors.As(err, &dial) || dial.Op != "dial" {
		t.Errorf("Lock without a server: got %v, want the cause", err)
	}
	Eventually(t, "ErrUnavailable for all of a batch (L8)", func() bool {
		results := gone.Extend(t.Context(), []driver.Extension{{Owner: driver.Owner{Name: n, ID: NewID()}, TTL: time.Minute},
			{Owner: driver.Owner{Name: PermitName("x"), ID: NewID()}, TTL: time.Minute}})
		return !slices.ContainsFunc(results, func(r driver.Result) bool { return !errors.Is(r.Err, driver.ErrUnavailable) })
	})

	o := driver.Owner{Name: n, ID: NewID()}
	MustLock(t, d, Request(n, o.ID, time.Minute), driver.Granted)
	d.Close()
	if _, err := d.Release(t.Context(), o); !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Release after Close: got %v, want ErrUnavailable", err)
	}
	if err := d.Close(); err != nil {
		t.Errorf("second Close: got %v, want nil", err)
	}
}
