package redlock_test

import (
	"testing"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/internal/redlockbackend"
)

// atOnce spares the machine: each client has connections to five servers.
const atOnce = 8

func TestConformance(t *testing.T) {
	redlockbackend.Run(t, "process", atOnce, func(t testing.TB) redlockbackend.Masters {
		// Of a server that may forget a restart is held against it for the longest TTL.
		return redlockbackend.Start(t, 5, &servers.RedisOptions{AppendFsync: "always"})
	})
}
