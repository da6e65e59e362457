package etcdguard_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/guard/etcdguard"
	"github.com/fencelock/fencelock/guard/guardtest"
)

func startEtcd(t *testing.T) *servers.Etcd {
	t.Helper()
	s, err := servers.StartEtcd(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func newClient(t testing.TB, s *servers.Etcd) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Addr()}, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// viaDo writes to a key by the guard's own transaction.
type viaDo struct {
	c    *clientv3.Client
	name string
}

func (w viaDo) key() string { return "value/" + w.name }

func (w viaDo) Write(ctx context.Context, t guard.Token, value string) error {
	_, err := etcdguard.New(w.c, nil).Do(ctx, w.name, t, clientv3.OpPut(w.key(), value))
	return err
}

func (w viaDo) Raise(ctx context.Context, t guard.Token) error {
	return etcdguard.New(w.c, nil).Raise(ctx, w.name, t)
}

func (w viaDo) Read(ctx context.Context) (string, error) {
	r, err := w.c.Get(ctx, w.key())
	if err != nil || len(r.Kvs) == 0 {
		return "", err
	}
	return string(r.Kvs[0].Value), nil
}

func TestGuard(t *testing.T) {
	s := startEtcd(t)
	guardtest.Run(t, guardtest.Harness{
		Open: func(t testing.TB, resource string) guardtest.Writer { return viaDo{newClient(t, s), resource} },
		Restart: func(t testing.TB) {
			if err := errors.Join(s.Kill(), s.Start(t.Context())); err != nil {
				t.Fatal(err)
			}
		},
	})
}

// TestCurrent is a condition of transactions of the caller's.
func TestCurrent(t *testing.T) {
	c := newClient(t, startEtcd(t))
	g := etcdguard.New(c, nil)
	write := func(token guard.Token, want bool) {
		t.Helper()
		r, err := c.Txn(t.Context()).If(g.Current("a", token)).Then(clientv3.OpPut("k", "v")).Commit()
		if err != nil || r.Succeeded != want {
			t.Fatalf("transaction with token %d: got %v, %v, want %v", token, r, err, want)
		}
	}
	write(42, false) // nobody has raised the mark
	for _, token := range []guard.Token{42, 43} {
		if err := g.Raise(t.Context(), "a", token); err != nil {
			t.Fatal(err)
		}
		write(token, true)
		write(token, true)
		write(token-1, false)
		write(token+1, false)
	}
}

// TestResponses are those of the caller's operations, on the first write and on later ones.
func TestResponses(t *testing.T) {
	c := newClient(t, startEtcd(t))
	g := etcdguard.New(c, &etcdguard.Options{Prefix: "marks"})
	for range 2 {
		r, err := g.Do(t.Context(), "a", 42, clientv3.OpPut("k", "v"), clientv3.OpGet("k"))
		if err != nil || len(r) != 2 || r[0].GetResponsePut() == nil || string(r[1].GetResponseRange().GetKvs()[0].Value) != "v" {
			t.Fatalf("Do: got %v, %v, want the responses to a put and a get of v", r, err)
		}
	}
	if r, err := c.Get(t.Context(), "marks/a"); err != nil || len(r.Kvs) != 1 || g.MarkKey("a") != "marks/a" {
		t.Fatalf("mark: got %v, %v, want it at marks/a", r, err)
	}
}

// TestFailures writes nothing.
func TestFailures(t *testing.T) {
	c := newClient(t, startEtcd(t))
	g := etcdguard.New(c, nil)
	if err := g.Raise(t.Context(), "", 42); !errors.Is(err, driver.ErrInvalid) {
		t.Fatalf("Raise without a resource: got %v, want ErrInvalid", err)
	}
	// Twice the same key is refused as a whole.
	_, err := g.Do(t.Context(), "a", 42, clientv3.OpPut("k", "1"), clientv3.OpPut("k", "2"))
	if err == nil || errors.Is(err, guard.ErrStale) || !strings.Contains(err.Error(), "duplicate key") {
		t.Fatalf("Do that writes a key twice: got %v, want the server's error", err)
	}
	if err := g.Raise(t.Context(), "a", 41); err != nil {
		t.Fatalf("Raise after that: got %v, want nil: the mark must not have been raised", err)
	}
}
