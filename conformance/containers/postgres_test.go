package containers

import (
	"context"
	"os"
	"testing"
	"time"
)

// TestStartPostgres: the server accepts connections whenever a start has returned, with its data or without, and none
// while it is paused.
func TestStartPostgres(t *testing.T) {
	c, err := StartPostgres(bounded(t), &PostgresOptions{Image: os.Getenv("FENCELOCK_POSTGRES_IMAGE"), Args: []string{"-c", "max_connections=20"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { must(t, "Close", c.Close()) })
	must(t, "connection to a new server", acceptsConnections(bounded(t), c.Addr()))

	must(t, "Pause", c.Pause())
	soon, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := acceptsConnections(soon, c.Addr()); err == nil {
		t.Error("connection to a paused server: got nil, want an error")
	}
	must(t, "Resume", c.Resume())
	must(t, "connection to a server that goes on", acceptsConnections(bounded(t), c.Addr()))

	for op, start := range map[string]func(context.Context) error{"Start": c.Start, "StartEmpty": c.StartEmpty} {
		must(t, "Kill", c.Kill())
		must(t, op, start(bounded(t)))
		must(t, "connection after "+op, acceptsConnections(bounded(t), c.Addr()))
	}
}
