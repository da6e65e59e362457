// Package redisurl reads what URLs say of Redis servers, for drivers that use go-redis.
package redisurl

import (
	"context"
	"crypto/tls"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/dialurl"
)

// Options are those for each server of the URL, without the address, with TLS if secure. The caller has asked p for its
// own parameters before.
func Options(u *url.URL, p *driver.Params, secure bool) (*redis.Options, error) {
	o := &redis.Options{
		DialTimeout:           p.Duration("dial_timeout", 5*time.Second),
		ReadTimeout:           p.Duration("read_timeout", 0),
		WriteTimeout:          p.Duration("write_timeout", 0),
		ContextTimeoutEnabled: true,
		MaxRetries:            -1,
	}
	pool := p.String("pool_size", "")
	var files dialurl.TLS
	if secure {
		files = dialurl.ReadTLS(p)
	}
	err := p.Err()
	if err != nil {
		return nil, err
	}
	if pool != "" {
		if o.PoolSize, err = strconv.Atoi(pool); err != nil || o.PoolSize < 1 {
			return nil, driver.Invalid("url parameter pool_size", pool, "must be a number of at least 1")
		}
	}
	if secure {
		if o.TLSConfig, err = files.Config(); err != nil {
			return nil, err
		}
		// go-redis's own dialer does not heed the context during the handshake.
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			d := tls.Dialer{NetDialer: &net.Dialer{Timeout: o.DialTimeout, KeepAlive: 5 * time.Minute}, Config: o.TLSConfig}
			return d.DialContext(ctx, network, addr)
		}
	}
	if u.Host == "" || u.Opaque != "" || u.Fragment != "" {
		return nil, driver.Invalid("url", u.Scheme, "must be "+u.Scheme+"://user:password@host:port/database")
	}
	if db := strings.Trim(u.Path, "/"); db != "" {
		if o.DB, err = strconv.Atoi(db); err != nil || o.DB < 0 {
			return nil, driver.Invalid("url path", u.Path, "must be the number of a database")
		}
	}
	o.Username = u.User.Username()
	o.Password, _ = u.User.Password()
	return o, nil
}
