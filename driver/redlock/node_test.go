package redlock

import (
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/redislua"
)

// newTestDriver makes a driver of three nodes without clients: nothing can be sent.
func newTestDriver(t *testing.T) *Driver {
	t.Helper()
	d, err := New([]Node{testNode{}, testNode{}, testNode{}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// TestFullQueueWhileIdentified: a node whose queue is full of releases is looked through while another goroutine notes
// who the node is, and neither waits for the other.
func TestFullQueueWhileIdentified(t *testing.T) {
	t.Parallel()
	d := newTestDriver(t)
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
	case <-time.After(30 * time.Second):
		t.Error("push to a full queue with the driver locked: got a wait, want none")
	}
	d.mu.Unlock()
	<-pushed
}

// testNode is a node that is never asked anything.
type testNode struct{}

func (testNode) Name() string            { return "test" }
func (testNode) Client() redislua.Client { return nil }
