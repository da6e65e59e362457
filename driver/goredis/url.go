package goredis

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/dialurl"
	"github.com/fencelock/fencelock/driver/internal/redisurl"
)

// topologies are what stands behind the +, if anything, of a URL's scheme.
var topologies = map[string]topology{
	"":         {port: "6379", client: standalone},
	"sentinel": {port: "26379", client: sentinel},
	"cluster":  {port: "6379", client: cluster},
}

type topology struct {
	port   string // default
	client func(*settings) redis.UniversalClient
}

func init() {
	for name := range topologies {
		for _, scheme := range []string{"redis", "rediss"} {
			if name != "" {
				scheme += "+" + name
			}
			driver.Register(scheme, open)
		}
	}
}

// settings are what a URL says.
type settings struct {
	topology
	addrs   []string
	server  *redis.Options // without the address
	options Options

	// Of Sentinel.
	primary                            string
	sentinelUsername, sentinelPassword string
}

// open connects to a URL.
func open(ctx context.Context, u *url.URL) (driver.Driver, error) {
	s, err := parse(u)
	if err != nil {
		return nil, err
	}
	client := s.client(s)
	d, err := newDriver(client, &s.options, true)
	if err != nil {
		client.Close()
		return nil, err
	}
	// The deadline bounds the request already, a cancellation closes the connection under it.
	stop := context.AfterFunc(ctx, func() { client.Close() })
	err = client.Ping(ctx).Err()
	if deadline, ok := ctx.Deadline(); ok && !time.Now().Before(deadline) {
		<-ctx.Done() // the connection's timer was faster than the context's
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		d.Close()
		return nil, driver.Unavailable(fmt.Errorf("redis %s: %w", strings.Join(s.addrs, ","), errors.Join(err, ctx.Err())))
	}
	return d, nil
}

func parse(u *url.URL) (*settings, error) {
	p := driver.NewParams(u)
	scheme, name, _ := strings.Cut(u.Scheme, "+")
	s := &settings{topology: topologies[name]}
	s.options.Namespace = p.String("namespace", driver.DefaultNamespace)
	replicas := p.String("wait_replicas", "0")
	if name == "sentinel" {
		s.primary = p.String("master", "")
		s.sentinelUsername, s.sentinelPassword = p.String("sentinel_user", ""), p.String("sentinel_password", "")
	}
	var err error
	if s.server, err = redisurl.Options(u, p, scheme == "rediss"); err != nil {
		return nil, err
	}
	if s.options.WaitReplicas, err = strconv.Atoi(replicas); err != nil || s.options.WaitReplicas < 0 {
		return nil, driver.Invalid("url parameter wait_replicas", replicas, "must be a number of at least 0")
	}
	if name == "sentinel" && s.primary == "" {
		return nil, driver.Invalid("url parameter master", "", "must be the name by which the sentinels know the primary")
	}
	if s.addrs, err = dialurl.Hosts(u, s.port); err != nil {
		return nil, err
	}
	if name == "" && len(s.addrs) > 1 {
		return nil, driver.Invalid("url host", u.Host, "must be one; several are for "+scheme+"+sentinel and "+scheme+"+cluster")
	}
	if name == "cluster" && s.server.DB != 0 {
		return nil, driver.Invalid("url path", u.Path, "must be 0 or nothing: a Cluster has no other database")
	}
	return s, nil
}

func standalone(s *settings) redis.UniversalClient {
	o := *s.server
	o.Addr = s.addrs[0]
	return redis.NewClient(&o)
}

func sentinel(s *settings) redis.UniversalClient {
	o := s.server
	return redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: s.primary, SentinelAddrs: s.addrs, SentinelUsername: s.sentinelUsername, SentinelPassword: s.sentinelPassword,
		Username: o.Username, Password: o.Password, DB: o.DB,
		PoolSize: o.PoolSize, DialTimeout: o.DialTimeout, ReadTimeout: o.ReadTimeout, WriteTimeout: o.WriteTimeout,
		ContextTimeoutEnabled: o.ContextTimeoutEnabled, MaxRetries: o.MaxRetries,
		TLSConfig: o.TLSConfig, Dialer: o.Dialer,
	})
}

func cluster(s *settings) redis.UniversalClient {
	o := s.server
	return redis.NewClusterClient(&redis.ClusterOptions{
		Addrs:    s.addrs,
		Username: o.Username, Password: o.Password,
		PoolSize: o.PoolSize, DialTimeout: o.DialTimeout, ReadTimeout: o.ReadTimeout, WriteTimeout: o.WriteTimeout,
		ContextTimeoutEnabled: o.ContextTimeoutEnabled, MaxRetries: o.MaxRetries,
		TLSConfig: o.TLSConfig, Dialer: o.Dialer,
		NewClient: func(node *redis.Options) *redis.Client {
			node.ContextTimeoutEnabled = true // older versions forget it
			return redis.NewClient(node)
		},
	})
}
