package migrate_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"os"
	"sync"
	"testing"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/conformance/worker"
	_ "github.com/fencelock/fencelock/driver/etcd"
	_ "github.com/fencelock/fencelock/driver/file"
	_ "github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/driver/migrate"
	_ "github.com/fencelock/fencelock/driver/postgres"
)

func TestMain(m *testing.M) {
	worker.Main() // the suite's processes are this test binary
	code := m.Run()
	for _, s := range started.all {
		if err := s.Close(); err != nil {
			fmt.Fprintln(os.Stderr, "stop a server:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// started are the servers that the tests share.
var started struct {
	sync.Mutex
	all []servers.Server
}

// sharedServer starts a server at the first call.
func sharedServer[S servers.Server](start func(context.Context) (S, error)) func(testing.TB) S {
	once := sync.OnceValues(func() (S, error) {
		s, err := start(context.Background())
		if err == nil {
			started.Lock()
			defer started.Unlock()
			started.all = append(started.all, s)
		}
		return s, err
	})
	return func(t testing.TB) S {
		t.Helper()
		s, err := once()
		if err != nil {
			t.Fatalf("start a server: got %v, want one", err)
		}
		return s
	}
}

var (
	redisServer = sharedServer(func(ctx context.Context) (*servers.Redis, error) { return servers.StartRedis(ctx, nil) })
	etcdServer  = sharedServer(func(ctx context.Context) (*servers.Etcd, error) {
		return servers.StartEtcd(ctx, &servers.EtcdOptions{Binary: os.Getenv("FENCELOCK_ETCD"), Args: []string{"--unsafe-no-fsync"}})
	})
	postgresServer = sharedServer(func(ctx context.Context) (*servers.Postgres, error) {
		return servers.StartPostgres(ctx, &servers.PostgresOptions{Args: []string{"-c", "max_connections=400"}})
	})
)

// backendURL is one of a namespace of its own.
func backendURL(t testing.TB, backend string) string {
	t.Helper()
	switch backend {
	case "file":
		return "file://" + t.TempDir()
	case "redis":
		return "redis://" + redisServer(t).Addr() + "/0?namespace=" + rand.Text()
	case "etcd":
		return "etcd://" + etcdServer(t).Addr() + "?namespace=" + rand.Text()
	case "postgres":
		return "postgres://postgres@" + postgresServer(t).Addr() + "/postgres?sslmode=disable&namespace=" + rand.Text()
	}
	t.Fatalf("no backend %q", backend)
	return ""
}

// migrateURL is that of a client in a phase.
func migrateURL(from, to string, p migrate.Phase) string {
	return "migrate://?from=" + url.QueryEscape(from) + "&to=" + url.QueryEscape(to) + "&phase=" + string(p)
}

// newRedis starts a server that the test may do to what it likes.
func newRedis(t testing.TB) *servers.Redis {
	t.Helper()
	s, err := servers.StartRedis(t.Context(), nil)
	if err != nil {
		t.Fatalf("start Redis: got %v, want a server", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("Close of a server: got %v, want nil", err)
		}
	})
	return s
}
