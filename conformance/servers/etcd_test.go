//go:build linux

package servers

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"
)

func newEtcdCluster(t *testing.T, members int) *EtcdCluster {
	t.Helper()
	c, err := StartEtcdCluster(t.Context(), members, nil)
	if err != nil {
		t.Fatalf("StartEtcdCluster(%d): got %v, want a cluster", members, err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("Close: got %v, want nil", err)
		}
	})
	return c
}

// put and get speak to one member through etcd's JSON gateway.
func (e *Etcd) put(ctx context.Context, key, value string) error {
	b64 := base64.StdEncoding.EncodeToString
	_, err := e.Call(ctx, "/v3/kv/put", fmt.Sprintf(`{"key": %q, "value": %q}`, b64([]byte(key)), b64([]byte(value))))
	return err
}

func (e *Etcd) get(ctx context.Context, key string) (value, cluster string, err error) {
	text, err := e.Call(ctx, "/v3/kv/range", fmt.Sprintf(`{"key": %q}`, base64.StdEncoding.EncodeToString([]byte(key))))
	if err != nil {
		return "", "", err
	}
	var reply struct {
		Header struct {
			Cluster string `json:"cluster_id"`
		}
		Kvs []struct{ Value []byte }
	}
	err = json.Unmarshal(text, &reply)
	if len(reply.Kvs) > 0 {
		value = string(reply.Kvs[0].Value)
	}
	return value, reply.Header.Cluster, err
}

func mustPut(t *testing.T, e *Etcd, key, value string) {
	t.Helper()
	if err := poll(20*time.Second, func() error { return e.put(t.Context(), key, value) }); err != nil {
		t.Fatalf("put %q: got %v, want nil", key, err)
	}
}

// mustGet waits until the member answers, and checks the value.
func mustGet(t *testing.T, e *Etcd, key, want string) (cluster string) {
	t.Helper()
	err := poll(20*time.Second, func() (err error) {
		var got string
		if got, cluster, err = e.get(t.Context(), key); err == nil && got != want {
			err = fmt.Errorf("got %q", got)
		}
		return err
	})
	if err != nil {
		t.Fatalf("get %q: %v, want %q", key, err, want)
	}
	return cluster
}

func TestEtcdKeepsDataOverKill(t *testing.T) {
	e := newEtcdCluster(t, 1).Members[0]
	mustPut(t, e, "k", "1")
	if err := e.Kill(); err != nil {
		t.Fatalf("Kill: got %v, want nil", err)
	}
	saved := filepath.Join(t.TempDir(), "saved")
	if err := e.CopyData(saved); err != nil {
		t.Fatalf("CopyData: got %v, want nil", err)
	}
	if err := e.Start(t.Context()); err != nil {
		t.Fatalf("Start: got %v, want nil", err)
	}
	before := mustGet(t, e, "k", "1")
	if err := e.CopyData(saved + "2"); !errors.Is(err, ErrRunning) {
		t.Errorf("CopyData of a running server: got %v, want ErrRunning", err)
	}
	mustPut(t, e, "k", "2")

	if err := errors.Join(e.Kill(), e.StartCopy(t.Context(), saved)); err != nil {
		t.Fatalf("StartCopy: got %v, want nil", err)
	}
	mustGet(t, e, "k", "1")

	if err := errors.Join(e.Kill(), e.StartEmpty(t.Context())); err != nil {
		t.Fatalf("StartEmpty: got %v, want nil", err)
	}
	if after := mustGet(t, e, "k", ""); after == before {
		t.Errorf("cluster id after StartEmpty: got %s as before, want another one", after)
	}
}

func TestEtcdClusterOutlivesItsLeader(t *testing.T) {
	c := newEtcdCluster(t, 3)
	first := c.Leader(t.Context())
	if first == nil {
		t.Fatal("Leader of a healthy cluster: got none, want one")
	}
	mustPut(t, first, "k", "1")
	if err := first.Kill(); err != nil {
		t.Fatalf("Kill: got %v, want nil", err)
	}
	var second *Etcd
	err := poll(20*time.Second, func() error {
		if second = c.Leader(t.Context()); second == nil || second == first {
			return errors.New("no new leader")
		}
		return nil
	})
	if err != nil {
		t.Fatalf("Leader after the first was killed: got none, want one")
	}
	mustPut(t, second, "k", "2")
	if err := first.Start(t.Context()); err != nil {
		t.Fatalf("Start: got %v, want nil", err)
	}
	mustGet(t, first, "k", "2")

	// Without a majority the last member answers, but nothing is written.
	for _, m := range c.Members {
		if m != first {
			if err := m.Pause(); err != nil {
				t.Fatalf("Pause: got %v, want nil", err)
			}
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := first.put(ctx, "k", "3"); err == nil {
		t.Errorf("put without a majority: got nil, want an error")
	}
	for _, m := range c.Members {
		if err := m.Resume(); err != nil {
			t.Fatalf("Resume: got %v, want nil", err)
		}
	}
	mustPut(t, first, "k", "4")
	mustGet(t, second, "k", "4")
}

func TestEtcdReplace(t *testing.T) {
	c := newEtcdCluster(t, 3)
	mustPut(t, c.Members[0], "a", "1")
	cluster := mustGet(t, c.Members[1], "a", "1")
	if err := c.Replace(t.Context(), c.Members[1]); err != nil {
		t.Fatalf("Replace: got %v, want nil", err)
	}
	if is := mustGet(t, c.Members[1], "a", "1"); is != cluster {
		t.Errorf("cluster of a member that was replaced: got %v, want %v", is, cluster)
	}
	// It counts: without one of the others there is a majority still.
	if err := c.Members[0].Kill(); err != nil {
		t.Fatalf("Kill: got %v, want nil", err)
	}
	mustPut(t, c.Members[1], "a", "2")
}
