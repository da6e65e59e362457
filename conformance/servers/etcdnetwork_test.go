//go:build linux

package servers

import (
	"errors"
	"fmt"
	"testing"
	"time"
)

// TestEtcdIsolate: a leader that is cut off from the others loses its place and decides nothing, and comes back.
func TestEtcdIsolate(t *testing.T) {
	c, err := StartEtcdCluster(t.Context(), 3, &EtcdOptions{Network: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("Close: got %v, want nil", err)
		}
	})
	old := c.Leader(t.Context())
	if old == nil {
		t.Fatal("Leader of a healthy cluster: got none, want one")
	}
	mustPut(t, old, "k", "1")
	if err := c.Isolate(t.Context(), old); err != nil {
		t.Fatalf("Isolate: got %v, want nil", err)
	}
	if err := c.Isolate(t.Context(), old); err == nil {
		t.Error("Isolate of two members: got nil, want an error")
	}
	// Its clients reach it, and it knows after an election timeout that nobody follows.
	err = poll(20*time.Second, func() error {
		if name, err := old.leader(t.Context()); err != nil || name != "" {
			return fmt.Errorf("got leader %q, %w, want none", name, err)
		}
		return nil
	})
	if err != nil {
		t.Errorf("the member that is cut off: %v", err)
	}
	if err := old.put(t.Context(), "k", "lost"); err == nil {
		t.Error("put through the member that is cut off: got nil, want an error")
	}
	others := &EtcdCluster{}
	for _, m := range c.Members {
		if m != old {
			others.Members = append(others.Members, m)
		}
	}
	var next *Etcd
	err = poll(20*time.Second, func() error {
		if next = others.Leader(t.Context()); next == nil {
			return errors.New("got none, want one of the two others")
		}
		return nil
	})
	if err != nil {
		t.Fatalf("leader of the others: %v", err)
	}
	mustPut(t, next, "k", "2")
	c.Heal()
	mustGet(t, old, "k", "2")
}
