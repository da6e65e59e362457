package redlock

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/redislua"
)

type client = redislua.Client

// fakeNode is a node whose answers a test makes up.
type fakeNode struct {
	client // nil: what is not below is never asked
	name   string
	info   func()                                     // called before it says who it is
	eval   func(args []string) (reply any, err error) // of one script; nil grants whatever is asked for
	listen func(ctx context.Context)                  // while it is subscribed to
}

var errRefused = errors.New("connection refused")

func (n *fakeNode) Name() string            { return n.name }
func (n *fakeNode) Client() redislua.Client { return n }

func (n *fakeNode) Info(_ context.Context, _ string, each func(string)) error {
	if n.info != nil {
		n.info()
	}
	each("run_id:" + strings.Repeat(n.name, 40) + "\r\nrole:master\r\nuptime_in_seconds:1\r\n")
	return nil
}

func (n *fakeNode) Eval(_ context.Context, c *redislua.Call) {
	args := c.Args.Strings()
	c.Sent = 1
	switch {
	case n.eval != nil:
		if c.Reply, c.Err = n.eval(args); errors.Is(c.Err, errRefused) {
			c.Sent = 0
		}
	case isAcquire(args):
		c.Reply = []any{int64(mine), args[2], "0", ""}
	case len(args)%2 == 0: // extend
		var all []any
		for range len(args) / 2 {
			all = append(all, []any{"7", time.Hour.Milliseconds(), "0"})
		}
		c.Reply = all
	default: // release
		c.Reply = int64(1)
	}
}

// isAcquire tells by the arguments: it is the only step that says what is to be stored.
func isAcquire(args []string) bool { return strings.Contains(args[0], " ") }

func (n *fakeNode) EvalAll(ctx context.Context, calls []*redislua.Call) {
	for _, c := range calls {
		n.Eval(ctx, c)
	}
}

func (n *fakeNode) Listen(ctx context.Context, _ string, _ func(), _ func(string)) error {
	n.listen(ctx)
	return ctx.Err()
}

// newTestDriver makes a driver of three nodes, a, b and c.
func newTestDriver(t *testing.T, timeout time.Duration) (*Driver, []*fakeNode) {
	t.Helper()
	fakes := []*fakeNode{{name: "a"}, {name: "b"}, {name: "c"}}
	var nodes []Node
	for _, f := range fakes {
		nodes = append(nodes, f)
	}
	d, err := New(nodes, &Options{NodeTimeout: timeout})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d, fakes
}

const testPatience = 30 * time.Second

func within[T any](t *testing.T, what string, c <-chan T) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(testPatience):
		t.Fatalf("%s: not within %v", what, testPatience)
	}
}

// TestFullQueueWhileIdentified: a node whose queue is full of releases is looked through while another goroutine notes
// who the node is, and neither waits for the other.
func TestFullQueueWhileIdentified(t *testing.T) {
	t.Parallel()
	d, _ := newTestDriver(t, 0)
	n := d.nodes[0]
	n.working = true // so that nothing is sent
	o := &owner{Owner: driver.Owner{ID: "A"}}
	for range maxQueue {
		u := &undoing{d: d, o: o, n: n}
		n.queue = append(n.queue, &ask{step: releaseStep, void: u.stale, done: func(reply) {}})
	}
	d.mu.Lock() // as claim does before it locks the node
	pushed := make(chan struct{})
	go func() {
		defer close(pushed)
		n.push(&ask{step: hello, done: func(reply) {}})
	}()
	select {
	case <-pushed:
	case <-time.After(testPatience):
		t.Error("push to a full queue with the driver locked: got a wait, want none")
	}
	d.mu.Unlock()
	<-pushed
}

// TestLateAcquire: a node that hangs until after the release may still grant what it was sent before. Nobody waited for
// that reply, since the others had granted it, and the release is sent again all the same (L7).
func TestLateAcquire(t *testing.T) {
	t.Parallel()
	d, fakes := newTestDriver(t, 100*time.Millisecond)
	var once sync.Once
	hangs, goOn := make(chan struct{}), make(chan struct{})
	releases := make(chan struct{}, echoes+1)
	fakes[2].eval = func(args []string) (any, error) {
		if isAcquire(args) {
			once.Do(func() { close(hangs) })
			<-goOn
			return nil, errors.New("the connection is closed")
		}
		select {
		case releases <- struct{}{}:
		default:
		}
		return int64(0), nil // there is nothing yet
	}
	defer close(goOn)
	r := driver.Request{Owner: driver.Owner{Name: driver.Name{Kind: driver.KindLock, Name: "x"}, ID: "A"}, TTL: time.Hour, Limit: 1}
	var granted bool
	for deadline := time.Now().Add(testPatience); !granted && time.Now().Before(deadline); {
		a, err := d.Lock(t.Context(), r) // the two others may be slow as well
		granted = err == nil && a.State == driver.Granted
	}
	if !granted {
		t.Fatal("Lock with two of three nodes: not granted")
	}
	within(t, "request to the node that hangs", hangs)
	if _, err := d.Release(t.Context(), r.Owner); err != nil {
		t.Fatalf("Release: got %v, want nil", err)
	}
	for range 2 {
		within(t, "release to the node that hung, and the same again", releases)
	}
}

// TestLateIdentity: who a node is counts only if it says so in time, for what it was asked meanwhile is over.
func TestLateIdentity(t *testing.T) {
	t.Parallel()
	d, fakes := newTestDriver(t, 100*time.Millisecond)
	goOn := make(map[string]chan struct{})
	for _, f := range fakes[1:] {
		c := make(chan struct{})
		defer close(c)
		goOn[f.name] = c
		f.info = func() { <-c }
	}
	if err := d.Verify(t.Context()); !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Verify while two of three nodes do not say who they are: got %v, want ErrUnavailable", err)
	}
	for _, n := range d.nodes[1:] {
		stuck := func() (int, string) {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.stuck, n.run
		}
		eventually := func(want int) (run string) {
			for deadline := time.Now().Add(testPatience); ; time.Sleep(time.Millisecond) {
				count, run := stuck()
				if count == want {
					return run
				}
				if time.Now().After(deadline) {
					t.Fatalf("batches that node %s has not given back: got %d, want %d", n.name, count, want)
				}
			}
		}
		eventually(1)
		goOn[n.name] <- struct{}{}
		if run := eventually(0); run != "" {
			t.Errorf("run id of node %s after its late answer: got %q, want none", n.name, run)
		}
	}
}

// TestHolderOnNodesThatFail: one node has the lock for a holder of which no more is seen. That this does not give way is
// found out after a few proposals.
func TestHolderOnNodesThatFail(t *testing.T) {
	t.Parallel()
	d, fakes := newTestDriver(t, time.Minute)
	var proposals atomic.Int32
	fakes[1].eval = func(args []string) (any, error) {
		if !isAcquire(args) {
			return int64(0), nil
		}
		proposals.Add(1)
		return []any{int64(other), "5", "0", "0:B"}, nil
	}
	fakes[2].eval = func([]string) (any, error) { return nil, errRefused }
	r := driver.Request{Owner: driver.Owner{Name: driver.Name{Kind: driver.KindLock, Name: "x"}, ID: "A"}, TTL: time.Hour, Limit: 1}
	a, err := d.Lock(t.Context(), r) // of equals the lesser id leads
	if n := proposals.Load(); err != nil || a.State != driver.Held || n > maxBlocked {
		t.Errorf("Lock beside a holder on one of two nodes that answer: got %v, %v after %d proposals, want held after %d", a.State, err, n, maxBlocked)
	}
}

// TestExtensionInQueue: one that a node that hangs has not been sent yet does not go out after the release, and those of
// other leases do (L3).
func TestExtensionInQueue(t *testing.T) {
	t.Parallel()
	d, fakes := newTestDriver(t, time.Minute)
	goOn, got := make(chan struct{}), make(chan []string, 8)
	fakes[2].eval = func(args []string) (any, error) {
		if isAcquire(args) {
			<-goOn
			return nil, errRefused
		}
		got <- args
		return nil, errRefused
	}
	ended := sync.OnceFunc(func() { close(goOn) })
	defer ended()
	name := driver.Name{Kind: driver.KindLock, Name: "x"}
	var leases []driver.Extension
	for _, id := range []string{"A", "B"} {
		r := driver.Request{Owner: driver.Owner{Name: name, ID: id}, TTL: time.Hour, Limit: 1}
		if a, err := d.Lock(t.Context(), r); err != nil || a.State != driver.Granted {
			t.Fatalf("Lock: got %v, %v, want granted", a.State, err)
		}
		leases = append(leases, driver.Extension{Owner: r.Owner, TTL: time.Hour})
	}
	for _, x := range d.Extend(t.Context(), leases) {
		if x.Err != nil || x.State != driver.Granted {
			t.Fatalf("Extend: got %v, %v, want granted", x.State, x.Err)
		}
	}
	if _, err := d.Release(t.Context(), leases[0].Owner); err != nil {
		t.Fatal(err)
	}
	ended()
	for extended := false; ; {
		select {
		case args := <-got:
			switch {
			case len(args) == 1: // the release, which is the last one
				if !extended {
					t.Error("extension of the other lease: got none, want one")
				}
				return
			case slices.Contains(args, "A"):
				t.Errorf("extension after Release has returned: got %q, want none of A", args)
			}
			extended = true
		case <-time.After(testPatience):
			t.Fatalf("release on the node that hung: not within %v", testPatience)
		}
	}
}

// TestCloseEndsSubscriptions: they end first, for Close waits for what is under way before it ends everything.
func TestCloseEndsSubscriptions(t *testing.T) {
	t.Parallel()
	d, fakes := newTestDriver(t, time.Minute)
	d.Notify(func(driver.Event) {})
	begun, ended := make(chan struct{}, len(fakes)), make(chan error, len(fakes))
	for _, f := range fakes {
		f.listen = func(ctx context.Context) {
			begun <- struct{}{}
			<-ctx.Done()
			ended <- d.ctx.Err()
		}
	}
	d.listen(time.Hour)
	for range fakes {
		within(t, "subscription", begun)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	for range fakes {
		if err := <-ended; err != nil {
			t.Errorf("end of a subscription in Close: got it with everything else, want it before")
		}
	}
}

// TestVerifyAsks: also a node that is known.
func TestVerifyAsks(t *testing.T) {
	t.Parallel()
	d, fakes := newTestDriver(t, time.Minute)
	var asked atomic.Int32
	for _, f := range fakes {
		f.info = func() { asked.Add(1) }
	}
	for i := range 2 {
		if err := d.Verify(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n, want := int(asked.Load()), (i+1)*len(fakes); n != want {
			t.Errorf("nodes asked who they are by %d times Verify: got %d, want %d", i+1, n, want)
		}
	}
}
