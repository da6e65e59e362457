package goredis

import (
	"context"
	"net"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/conformance/servers"
)

// TestCloseTwice: a connection that the client library has closed before is no failure of Close.
func TestCloseTwice(t *testing.T) {
	s, err := servers.StartRedis(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	client := redis.NewClient(&redis.Options{Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", s.Addr())
		return closedBefore{c}, err
	}})
	if err := client.Ping(t.Context()).Err(); err != nil { // leaves a connection in the pool
		t.Fatal(err)
	}
	if err := (&adapter{client: client, owned: true}).Close(); err != nil {
		t.Errorf("Close: got %v, want nil", err)
	}
}

type closedBefore struct{ net.Conn }

func (c closedBefore) Close() error {
	_ = c.Conn.Close()
	return c.Conn.Close()
}
