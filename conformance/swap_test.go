package conformance_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/servers"
	_ "github.com/fencelock/fencelock/driver/etcd"
	_ "github.com/fencelock/fencelock/driver/file"
	_ "github.com/fencelock/fencelock/driver/goredis"
	_ "github.com/fencelock/fencelock/driver/memory"
	_ "github.com/fencelock/fencelock/driver/postgres"
	_ "github.com/fencelock/fencelock/driver/redlock"
	_ "github.com/fencelock/fencelock/driver/rueidis"
)

// TestSwap changes the backend of an application by its URL, from each to each and back, as somebody does who stops all
// processes and starts them again. Tokens of one name keep rising, though no backend knows of another (T4).
func TestSwap(t *testing.T) {
	t.Parallel()
	urls := backends(t)
	last := make(map[string]fencelock.Token)
	visit := func(url string) {
		t.Helper()
		backend, _, _ := strings.Cut(url, ":")
		c, err := fencelock.Open(t.Context(), url)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		take := func(name string, lock func(context.Context, string) (*fencelock.Lease, error)) {
			t.Helper()
			for range 3 {
				l, err := lock(t.Context(), name)
				if err != nil {
					t.Fatalf("%s: lock %s: %v", backend, name, err)
				}
				if l.Token() <= last[name] {
					t.Fatalf("%s: token of %s: got %d, want more than %d, which another backend gave (T4)", backend, name, l.Token(), last[name])
				}
				last[name] = l.Token()
				if err := l.Release(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		take("lock", func(ctx context.Context, name string) (*fencelock.Lease, error) { return c.TryLock(ctx, name) })
		take("semaphore", func(ctx context.Context, name string) (*fencelock.Lease, error) { return c.TryAcquire(ctx, name, 1) })
		minted, err := c.NextToken(t.Context(), "lock")
		if err != nil || minted <= last["lock"] {
			t.Fatalf("%s: NextToken: got %d, %v, want more than %d", backend, minted, err, last["lock"])
		}
		last["lock"] = minted
	}
	for _, from := range urls {
		for _, to := range urls {
			visit(from)
			soon(t, last)
			visit(to)
			soon(t, last)
		}
	}
}

// soon waits until the clock has passed all tokens: they may be ahead of it by a second, which a restart of an
// application takes anyhow.
func soon(t *testing.T, last map[string]fencelock.Token) {
	t.Helper()
	for name, token := range last {
		ahead := time.Until(time.UnixMicro(int64(token)))
		if ahead > time.Second {
			t.Fatalf("token of %s: got %v ahead of the clock, want at most 1 s (T4)", name, ahead)
		}
		time.Sleep(ahead + time.Millisecond)
	}
}

// backends are the URLs of one server of each kind.
func backends(t *testing.T) []string {
	t.Helper()
	redis, err := servers.StartRedis(t.Context(), nil)
	closing(t, redis, err)
	etcd, err := servers.StartEtcd(t.Context(), nil)
	closing(t, etcd, err)
	pg, err := servers.StartPostgres(t.Context(), nil)
	closing(t, pg, err)
	masters := make([]string, 3)
	for i := range masters {
		one, err := servers.StartRedis(t.Context(), nil)
		closing(t, one, err)
		masters[i] = one.Addr()
	}
	return []string{"memory:", "file://" + t.TempDir(), "redis://" + redis.Addr(), "rueidis://" + redis.Addr() + "?namespace=other",
		"etcd://" + etcd.Addr(), pg.URL(), "redlock://" + strings.Join(masters, ",")}
}

func closing(t *testing.T, s interface{ Close() error }, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}
