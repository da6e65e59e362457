package rueidis_test

import (
	"testing"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

func TestConformance(t *testing.T) {
	redisbackend.Rueidis.Run(t, "process", 0,
		func(t testing.TB) servers.Server { return redisbackend.Rueidis.Start(t).Redis })
}

func TestClusterConformance(t *testing.T) {
	redisbackend.Rueidis.RunCluster(t, "cluster-process", redisbackend.StartCluster(t, 0))
}
