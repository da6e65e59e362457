package goredis_test

import (
	"testing"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

func TestConformance(t *testing.T) {
	redisbackend.GoRedis.Run(t, "process", 0, func(t testing.TB) servers.Server { return startRedis(t).Redis })
}

func TestClusterConformance(t *testing.T) {
	redisbackend.GoRedis.RunCluster(t, "cluster-process", startCluster(t, 0).RedisCluster)
}
