package goredis

import (
	"context"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/redislua"
)

// Node is a server as one of several independent ones, for package redlock.
type Node struct{ adapter adapter }

// NewNode makes a node of a client, which stays yours. It sends nothing. The client must be one of a single server; nil,
// and a client of Sentinel, whose server may be another one tomorrow, is an error matching [driver.ErrInvalid].
func NewNode(client *redis.Client) (*Node, error) {
	switch {
	case client == nil:
		return nil, driver.Invalid("client", "nil", "must not be nil")
	case client.Options().Addr == failover:
		return nil, driver.Invalid("client", "of Sentinel", "must be of one server that stays the same")
	}
	return &Node{adapter{client: client}}, nil
}

// Name is the server's address.
func (n *Node) Name() string { return n.adapter.client.(*redis.Client).Options().Addr }

// Client is for package redlock.
func (n *Node) Client() redislua.Client { return &n.adapter }

// Config implements redislua.Client.
func (a *adapter) Config(ctx context.Context, parameter string) (string, error) {
	settings, err := a.client.ConfigGet(ctx, parameter).Result()
	return settings[parameter], err
}
