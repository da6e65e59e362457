package redlock

import (
	"context"
	"errors"
	"net/url"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/driver/internal/dialurl"
	"github.com/fencelock/fencelock/driver/internal/redisurl"
)

func init() {
	driver.Register("redlock", openURL)
	driver.Register("redlocks", openURL)
}

// openURL connects to the nodes of a URL.
func openURL(ctx context.Context, u *url.URL) (driver.Driver, error) {
	p := driver.NewParams(u)
	o := &Options{Namespace: p.String("namespace", driver.DefaultNamespace),
		NodeTimeout: p.Duration("node_timeout", defaultTimeout), RestartWait: p.Duration("restart_wait", 0)}
	if o.NodeTimeout == 0 {
		return nil, driver.Invalid("url parameter node_timeout", "0", "must be 10ms to 1m")
	}
	for _, name := range []string{"read_timeout", "write_timeout"} {
		if u.Query().Has(name) {
			return nil, driver.Invalid("url parameter", name, "is node_timeout here")
		}
	}
	server, err := redisurl.Options(u, p, u.Scheme == "redlocks")
	if err != nil {
		return nil, err
	}
	addrs, err := dialurl.Hosts(u, "6379")
	if err != nil {
		return nil, err
	}
	// The driver gives up on an answer after the node timeout, and so should the client.
	server.DialTimeout = min(server.DialTimeout, o.NodeTimeout)
	server.ReadTimeout, server.WriteTimeout = o.NodeTimeout, o.NodeTimeout
	var clients []*redis.Client
	var nodes []Node
	finish := func() {
		for _, c := range clients {
			c.Close()
		}
	}
	for _, addr := range addrs {
		one := *server
		one.Addr = addr
		c := redis.NewClient(&one)
		clients = append(clients, c)
		n, err := goredis.NewNode(c)
		if err != nil {
			finish()
			return nil, err
		}
		nodes = append(nodes, n)
	}
	d, err := New(nodes, o)
	if err != nil {
		finish()
		return nil, err
	}
	d.finish = finish
	if err := d.Verify(ctx); err != nil {
		d.Close()
		if ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
			err = errors.Join(err, ctx.Err())
		}
		return nil, err
	}
	return d, nil
}
