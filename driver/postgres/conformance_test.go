package postgres_test

import (
	"testing"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/internal/postgresbackend"
)

// atOnce spares the machine: each connection is a process of the server, and many would make it too slow for the TTLs.
const atOnce = 8

func TestConformance(t *testing.T) {
	postgresbackend.Run(t, "process", atOnce, func(t testing.TB) servers.Server {
		s, err := servers.StartPostgres(t.Context(), &servers.PostgresOptions{Args: postgresbackend.Args()})
		if err != nil {
			t.Fatalf("start PostgreSQL: got %v, want a server", err)
		}
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Errorf("Close of a server: got %v, want nil", err)
			}
		})
		return s
	})
}
