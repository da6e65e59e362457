package rueidis

import (
	"context"
	"reflect"

	"github.com/redis/rueidis"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/redislua"
)

// Node is a server as one of several independent ones, for package redlock.
type Node struct {
	adapter adapter
	name    string
}

// NewNode makes a node of a client, which stays yours; name, usually the server's address, is for errors and warnings.
// It sends nothing. The client must be one of a single server; nil, and a client of a Cluster or of Sentinel, is an error
// matching [driver.ErrInvalid].
func NewNode(client rueidis.Client, name string) (*Node, error) {
	if client == nil || reflect.ValueOf(client).Kind() == reflect.Pointer && reflect.ValueOf(client).IsNil() {
		return nil, driver.Invalid("client", "nil", "must not be nil")
	}
	if m := client.Mode(); m != rueidis.ClientModeStandalone {
		return nil, driver.Invalid("client", string(m), "must be of one server")
	}
	return &Node{adapter{client: client}, name}, nil
}

// Name is what [NewNode] was told.
func (n *Node) Name() string { return n.name }

// Client is for package redlock.
func (n *Node) Client() redislua.Client { return &n.adapter }

// Config implements redislua.Client.
func (a *adapter) Config(ctx context.Context, parameter string) (string, error) {
	settings, err := do(ctx, a.client, "CONFIG", "GET", parameter).AsStrMap()
	return settings[parameter], err
}
