package etcd_test

import (
	"os"
	"testing"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/internal/etcdbackend"
)

func TestConformance(t *testing.T) {
	etcdbackend.Run(t, "process", 0, func(t testing.TB) servers.Server {
		// A killed process loses nothing that it has written, and the tests are not about the disk.
		s, err := servers.StartEtcd(t.Context(), &servers.EtcdOptions{
			Binary: os.Getenv("FENCELOCK_ETCD"), Args: []string{"--unsafe-no-fsync"},
		})
		if err != nil {
			t.Fatalf("start etcd: %v", err)
		}
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Errorf("stop etcd: %v", err)
			}
		})
		return s
	})
}
