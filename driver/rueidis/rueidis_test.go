package rueidis_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"time"

	client "github.com/redis/rueidis"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/rueidis"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// TestInterop lets clients of both libraries meet on one server: what one holds the other is refused, and sees; they
// stand in one queue, and hand over to each other by message; permits count together; tokens rise across.
func TestInterop(t *testing.T) {
	s := redisbackend.Rueidis.Start(t)
	drivers := []redisbackend.Full{s.Driver(t), redisbackend.GoRedis.Connect(t, redisbackend.Options{Addr: s.Addr()})}
	var events []redisbackend.Events
	for _, d := range drivers {
		events = append(events, redisbackend.ListenTo(d))
	}
	warm := redisbackend.LockName("warm up")
	redisbackend.MustLock(t, drivers[0], redisbackend.Request(warm, redisbackend.NewID(), time.Minute), driver.Granted)
	for i, d := range drivers {
		redisbackend.MustLock(t, d, redisbackend.Waiting(warm, redisbackend.NewID(), time.Minute), driver.Waiting)
		events[i].Next(t, driver.EventRecheck, "when the subscription stands")
	}
	for _, n := range []driver.Name{{Kind: driver.KindLock, Name: "a{b}c"}, {Kind: driver.KindPermit, Name: "}x{"}} {
		for i, holder := range drivers {
			waiter := drivers[1-i]
			r := driver.Request{Owner: driver.Owner{Name: n, ID: redisbackend.NewID()}, TTL: time.Minute, Limit: 1, Holder: "me"}
			first := redisbackend.MustLock(t, holder, r, driver.Granted)
			rival := driver.Request{Owner: driver.Owner{Name: n, ID: redisbackend.NewID()}, TTL: time.Minute, Limit: 1}
			redisbackend.MustLock(t, waiter, rival, driver.Held)
			seen := 0
			if err := waiter.List(t.Context(), n, func(h driver.Holding) bool {
				if h.Owner == r.Owner && h.Holder == "me" && h.Token == first.Token {
					seen++
				}
				return true
			}); err != nil || seen != 1 {
				t.Errorf("List through the other client: got %d, %v, want the holder once", seen, err)
			}
			waits := driver.Request{Owner: driver.Owner{Name: n, ID: redisbackend.NewID()}, TTL: time.Minute, Limit: 1, Wait: true, Claim: 30 * time.Second}
			redisbackend.MustLock(t, waiter, waits, driver.Waiting)
			redisbackend.MustRelease(t, holder, r.Owner)
			e := events[1-i].Next(t, driver.EventGranted, "when the other client releases")
			if e.Owner != waits.Owner || e.Token <= first.Token {
				t.Errorf("event: got %+v, want %+v and a token above %v (T1)", e, waits.Owner, first.Token)
			}
			redisbackend.MustRelease(t, holder, waits.Owner)
		}
	}

	n := driver.Name{Kind: driver.KindPermit, Name: "count"}
	for i := range 4 {
		redisbackend.MustLock(t, drivers[i%2], driver.Request{Owner: driver.Owner{Name: n, ID: redisbackend.NewID()}, TTL: time.Minute, Limit: 4}, driver.Granted)
	}
	for _, d := range drivers {
		redisbackend.MustLock(t, d, driver.Request{Owner: driver.Owner{Name: n, ID: redisbackend.NewID()}, TTL: time.Minute, Limit: 4}, driver.Held)
	}
}

func TestOpen(t *testing.T) {
	redisbackend.Rueidis.TestOpen(t, "dial_timeout=1s&timeout=2s", map[string]string{
		"pool_size=1":     "pool_size",
		"read_timeout=1s": "read_timeout",
		"timeout=1":       "timeout",
		"master=x":        "master",
	})
}

func TestNewRefuses(t *testing.T) {
	var none *nothing
	for _, c := range []client.Client{nil, none} {
		if d, err := rueidis.New(c, nil); d != nil || !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("New with nothing: got %v, %v, want ErrInvalid", d, err)
		}
	}
	c := newClient(t, redisbackend.Options{Addr: redisbackend.Rueidis.Start(t).Addr()})
	if d, err := rueidis.New(c, &rueidis.Options{Namespace: "a:b"}); d != nil || !errors.Is(err, driver.ErrInvalid) {
		t.Errorf("New with a bad namespace: got %v, %v, want ErrInvalid", d, err)
	}
	for _, namespace := range []string{"", "a", "a.b-c_D"} {
		d, err := rueidis.New(c, &rueidis.Options{Namespace: namespace})
		if err != nil {
			t.Fatalf("New with namespace %q: got %v, want nil", namespace, err)
		}
		if want := (driver.Info{Backend: "rueidis"}); d.Info() != want {
			t.Errorf("Info: got %+v, want %+v", d.Info(), want)
		}
	}
}

// nothing is a client that is not there.
type nothing struct{ client.Client }

func newClient(tb testing.TB, o redisbackend.Options) client.Client {
	tb.Helper()
	c, err := redisbackend.NewRueidis(o)
	if err != nil {
		tb.Fatalf("NewClient: got %v, want nil", err)
	}
	tb.Cleanup(c.Close)
	return c
}

// TestCloseLeavesTheClient closes a driver that was made with the user's client.
func TestCloseLeavesTheClient(t *testing.T) {
	c := newClient(t, redisbackend.Options{Addr: redisbackend.Rueidis.Start(t).Addr()})
	d, err := rueidis.New(c, nil)
	if err != nil {
		t.Fatal(err)
	}
	redisbackend.MustLock(t, d, redisbackend.Request(redisbackend.LockName("x"), redisbackend.NewID(), time.Minute), driver.Granted)
	if err := d.Close(); err != nil {
		t.Errorf("Close: got %v, want nil", err)
	}
	if err := c.Do(t.Context(), c.B().Ping().Build()).Error(); err != nil {
		t.Errorf("the user's client after Close: got %v, want that it works", err)
	}
}

// TestContextsAreApart: the end of one request's context, with which rueidis makes a connection, is not that of the
// others that wait for it.
func TestContextsAreApart(t *testing.T) {
	s := redisbackend.Rueidis.Start(t)
	p, err := servers.NewProxy(s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	c, err := client.NewClient(client.ClientOption{InitAddress: []string{p.Addr()}, DisableCache: true, AlwaysPipelining: true,
		PipelineMultiplex: -1}) // one connection
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d, err := rueidis.New(c, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	ask := func(ctx context.Context) error {
		_, err := d.Lock(ctx, redisbackend.Request(redisbackend.LockName(redisbackend.NewID()), redisbackend.NewID(), time.Minute))
		return err
	}
	if err := ask(t.Context()); err != nil {
		t.Fatalf("Lock: got %v, want nil", err)
	}
	p.Hold(servers.ToClient)
	p.Reset()
	waits := func(where string) int {
		buffer := make([]byte, 1<<20)
		return strings.Count(string(buffer[:runtime.Stack(buffer, true)]), where)
	}
	connections := p.Stats().Connections
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	first := make(chan error)
	go func() {
		for { // the first ones may still have gone the way of the connection that was cut
			if err := ask(ctx); errors.Is(err, context.DeadlineExceeded) {
				first <- err
				return
			}
		}
	}()
	redisbackend.Eventually(t, "a connection being made", func() bool { return p.Stats().Connections > connections })
	others := make(chan error, 5)
	for range cap(others) {
		go func() { others <- ask(t.Context()) }()
	}
	redisbackend.Eventually(t, "requests that wait for it", func() bool { return waits("sync.(*WaitGroup).Wait") >= cap(others) })
	<-first
	p.Pass(servers.ToClient)
	for range cap(others) {
		if err := <-others; err != nil {
			t.Errorf("Lock that waited for the same connection: got %v, want nil", err)
		}
	}
}
