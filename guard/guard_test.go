package guard_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/memory"
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/guard/guardtest"
)

// register is a resource in the process.
type register struct {
	g      *guard.Guard
	name   string
	mu     *sync.Mutex
	values map[string]string
}

func (r *register) Write(_ context.Context, t guard.Token, value string) error {
	return r.g.Do(r.name, t, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.values[r.name] = value
		return nil
	})
}

func (r *register) Raise(_ context.Context, t guard.Token) error { return r.g.Raise(r.name, t) }

func (r *register) Read(context.Context) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.values[r.name], nil
}

func TestGuard(t *testing.T) {
	g, mu, values := new(guard.Guard), new(sync.Mutex), make(map[string]string)
	guardtest.Run(t, guardtest.Harness{
		Open: func(_ testing.TB, name string) guardtest.Writer { return &register{g, name, mu, values} },
	})
}

func TestRefused(t *testing.T) {
	var g guard.Guard
	if got := g.Highest("a"); got != 0 {
		t.Fatalf("Highest of nothing: got %d, want 0", got)
	}
	if err := errors.Join(g.Raise("a", 42), g.Raise("b", 41)); err != nil {
		t.Fatal(err)
	}
	called := false
	if err := g.Do("a", 41, func() error { called = true; return nil }); !errors.Is(err, guard.ErrStale) || called {
		t.Fatalf("Do with a lower token: got %v, called %v, want ErrStale, false", err, called)
	}
	want := fmt.Sprint([]guard.Refusal{{Resource: "a", Token: 41, Highest: 42}})
	if got := fmt.Sprint(g.Refused()); got != want {
		t.Fatalf("Refused: got %s, want %s", got, want)
	}
	if got := g.Highest("a"); got != 42 {
		t.Fatalf("Highest: got %d, want 42", got)
	}
}

// TestFailedWriteKeepsTheMark: it may have written a part.
func TestFailedWriteKeepsTheMark(t *testing.T) {
	var g guard.Guard
	failed := errors.New("disk full")
	if err := g.Do("a", 42, func() error { return failed }); !errors.Is(err, failed) {
		t.Fatalf("Do: got %v, want the error of the write", err)
	}
	if err := g.Raise("a", 41); !errors.Is(err, guard.ErrStale) {
		t.Fatalf("lower token after a write that failed: got %v, want ErrStale", err)
	}
}

func newClient(t *testing.T) *fencelock.Client {
	t.Helper()
	c, err := fencelock.New(memory.New(memory.NewStore()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// TestFenced takes a lock, and the holder before is refused at once.
func TestFenced(t *testing.T) {
	c := newClient(t)
	var g guard.Guard
	locks := guard.Fenced(c, func(_ context.Context, name string, token guard.Token) error { return g.Raise(name, token) })
	first, err := locks.TryLock(t.Context(), "orders/7")
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	second, err := locks.Lock(t.Context(), "orders/7")
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Do("orders/7", first.Token(), func() error { return nil }); !errors.Is(err, guard.ErrStale) {
		t.Fatalf("write of the first holder before the second one has written: got %v, want ErrStale", err)
	}
	if _, err := locks.TryLock(t.Context(), "orders/7"); !errors.Is(err, fencelock.ErrHeld) {
		t.Fatalf("TryLock while held: got %v, want ErrHeld (L1)", err)
	}
	if err := g.Do("orders/7", second.Token(), func() error { return nil }); err != nil {
		t.Fatal(err)
	}
}

// TestFencedFails leaves no lock behind.
func TestFencedFails(t *testing.T) {
	broken := errors.New("no such table")
	for name, test := range map[string]struct {
		raise error
		want  []error
	}{
		"failed": {broken, []error{broken}},
		"stale":  {guard.Stale("x"), []error{guard.ErrStale, fencelock.ErrLost}},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClient(t)
			locks := guard.Fenced(c, func(context.Context, string, guard.Token) error { return test.raise })
			l, err := locks.Lock(t.Context(), "orders/7")
			for _, want := range test.want {
				if l != nil || !errors.Is(err, want) {
					t.Fatalf("Lock: got %v, %v, want nil, %v", l, err, want)
				}
			}
			if l, err := c.TryLock(t.Context(), "orders/7"); err != nil {
				t.Fatalf("TryLock after that: got %v, want a lease (L7)", err)
			} else if err := l.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			func() {
				defer func() {
					if recover() == nil {
						t.Fatal("raise panics: got no panic from Lock, want it")
					}
				}()
				guard.Fenced(c, func(context.Context, string, guard.Token) error { panic("raise") }).Lock(t.Context(), "orders/7")
			}()
			if _, err := c.TryLock(t.Context(), "orders/7"); err != nil {
				t.Fatalf("TryLock after a panic: got %v, want a lease (L7)", err)
			}
		})
	}
}

// TestFencedIsLostMeanwhile: raise takes longer than the lease lives.
func TestFencedIsLostMeanwhile(t *testing.T) {
	c := newClient(t)
	locks := guard.Fenced(c, func(ctx context.Context, _ string, _ guard.Token) error {
		<-ctx.Done()
		return nil
	})
	if _, err := locks.Lock(t.Context(), "orders/7", fencelock.TTL(50*time.Millisecond), fencelock.NoRenew()); !errors.Is(err, fencelock.ErrLost) {
		t.Fatalf("Lock: got %v, want ErrLost (L8)", err)
	}
}
