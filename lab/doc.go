// Package lab shows what a lock does when things go wrong: the same scenarios on real servers, with real faults, on
// every backend. It is what `fencelock compare` runs, and it is for tests of your own code:
//
//	func TestMain(m *testing.M) {
//		lab.Code("orders", orders.Write) // what writes under the lock, with the token
//		lab.Main()
//		os.Exit(m.Run())
//	}
//
//	func TestOrdersUnderPause(t *testing.T) {
//		result, err := lab.Run(t.Context(), lab.Redis, lab.HolderPaused, &lab.Options{Code: "orders"})
//		if err == nil {
//			err = result.Err() // a stale write came through, or the run proves nothing
//		}
//		if err != nil {
//			t.Error(err)
//		}
//	}
//
// The test must import the driver of the backend, and the backend's programs must be installed: redis-server, etcd or Go to build it,
// PostgreSQL. What writes is called in processes that the lab starts, which are the test binary once more: it finds its resource by
// itself, such as by an environment variable, and not in the memory of the test. Whether it is tested at all shows with
// a run of code that has no guard: on HolderPaused its late writes come through.
//
// A run has lanes. In each a holder and a rival, both processes of their own, want one lock (on [Memory] goroutines of one process); each writes while it
// believes in its lease, to a resource that compares fencing tokens and to one that does not, and to yours. What they
// do is recorded on one clock and judged afterwards, by package history. A lane in which the fault met nothing, or in
// which too little happened around it, is void: it counts neither for nor against the backend.
package lab

import (
	"context"
	"fmt"
	"net/http"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/worker"
	"github.com/fencelock/fencelock/guard/httpguard"
)

// Main makes the process a worker if a run has started it as one, and then never returns. Call it first in TestMain, or
// in main, after [Code].
func Main() {
	worker.Handle(double, writeDouble)
	worker.Main()
}

// Code makes what writes under a lock known by a name, for [Options]. write answers nil if the write was done, an error
// that matches guard.ErrStale if the resource refused the token, and any other error if it may or may not have been.
// It is called in processes of their own, so it must reach the resource by itself; resource is the name of the lane.
func Code(name string, write func(ctx context.Context, resource string, token fencelock.Token) error) {
	worker.Handle(name, write)
}

// double is the name of the writer to the resource doubles.
const double = "lab double"

// writeDouble writes to a resource of the process that runs the lab.
func writeDouble(ctx context.Context, resource string, token fencelock.Token) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, resource, nil)
	if err != nil {
		return err
	}
	client := http.Client{Transport: &httpguard.Transport{Lease: unchecked(token)}}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := httpguard.Check(resp); err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("lab: the resource answered %s", resp.Status)
	}
	return nil
}

// unchecked is a lease that is not looked at once more before the request is sent: what comes late shall come.
type unchecked fencelock.Token

func (u unchecked) Token() fencelock.Token { return fencelock.Token(u) }
func (u unchecked) Err() error             { return nil }
