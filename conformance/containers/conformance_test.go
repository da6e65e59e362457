package containers

import (
	"os"
	"testing"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/internal/etcdbackend"
	"github.com/fencelock/fencelock/internal/postgresbackend"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// atOnce spares the proxy through which the engine publishes ports.
const atOnce = 5

func TestConformanceRedis(t *testing.T) { onRedis(t, redisbackend.GoRedis) }

func TestConformanceValkey(t *testing.T) {
	redisbackend.GoRedis.Run(t, "valkey-container", atOnce, func(t testing.TB) servers.Server {
		c, err := StartValkey(t.Context(), &Options{Image: os.Getenv("FENCELOCK_VALKEY_IMAGE")})
		return started(t, c, err)
	})
}

func TestConformanceRueidis(t *testing.T) { onRedis(t, redisbackend.Rueidis) }

func onRedis(t *testing.T, d redisbackend.Driver) {
	d.Run(t, "container", atOnce, func(t testing.TB) servers.Server {
		c, err := StartRedis(t.Context(), &Options{Image: os.Getenv("FENCELOCK_REDIS_IMAGE")})
		return started(t, c, err)
	})
}

func TestConformanceEtcd(t *testing.T) {
	etcdbackend.Run(t, "container", atOnce, func(t testing.TB) servers.Server {
		c, err := StartEtcd(t.Context(), &EtcdOptions{Image: os.Getenv("FENCELOCK_ETCD_IMAGE"), Args: []string{"--unsafe-no-fsync"}})
		return started(t, c, err)
	})
}

func TestConformancePostgres(t *testing.T) {
	const atOnce = 3 // a new server makes its data first, which leaves the others little time
	postgresbackend.Run(t, "container", atOnce, func(t testing.TB) servers.Server {
		c, err := StartPostgres(t.Context(), &PostgresOptions{Image: os.Getenv("FENCELOCK_POSTGRES_IMAGE"), Args: postgresbackend.Args()})
		return started(t, c, err)
	})
}

func started(t testing.TB, c *Container, err error) *Container {
	t.Helper()
	if err != nil {
		t.Fatalf("start a container: got %v, want a server", err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("Close of a container: got %v, want nil", err)
		}
	})
	return c
}
