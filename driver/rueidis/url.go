package rueidis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/dialurl"
)

// ports are the default ports, by what stands behind the +, if anything, of a URL's scheme.
var ports = map[string]string{"": "6379", "sentinel": "26379", "cluster": "6379"}

func init() {
	for name := range ports {
		for _, scheme := range []string{"rueidis", "rueidiss"} {
			if name != "" {
				scheme += "+" + name
			}
			driver.Register(scheme, open)
		}
	}
}

// open connects to a URL.
func open(ctx context.Context, u *url.URL) (driver.Driver, error) {
	o, opts, err := parse(u)
	if err != nil {
		return nil, err
	}
	unavailable := func(err error) error {
		return driver.Unavailable(fmt.Errorf("redis %s: %w", strings.Join(o.InitAddress, ","), err))
	}
	type opened struct {
		client rueidis.Client
		err    error
	}
	done := make(chan opened, 1)
	go func() { // it connects, and takes no context
		client, err := connect(o)
		done <- opened{client, err}
	}()
	select {
	case r := <-done:
		if r.err != nil {
			return nil, unavailable(r.err)
		}
		d, err := newDriver(r.client, opts, true)
		if err == nil && strings.HasSuffix(u.Scheme, "+cluster") && r.client.Mode() != rueidis.ClientModeCluster {
			err = unavailable(errors.New("the server has cluster support disabled")) // rueidis makes do with it
		}
		if err == nil {
			if err = do(ctx, r.client, "PING").Error(); err != nil {
				err = unavailable(errors.Join(err, ctx.Err()))
			}
		}
		if err != nil {
			r.client.Close()
			return nil, err
		}
		return d, nil
	case <-ctx.Done():
		go func() {
			if r := <-done; r.err == nil {
				r.client.Close()
			}
		}()
		return nil, unavailable(ctx.Err())
	}
}

// connect tries the nodes of a Cluster in turn. rueidis would dial all at once, go on with the first that answers, and leave
// connections behind if it is closed before the others have.
func connect(o *rueidis.ClientOption) (rueidis.Client, error) {
	if o.ForceSingleClient || o.Sentinel.MasterSet != "" {
		return rueidis.NewClient(*o)
	}
	var failed []error
	for _, addr := range o.InitAddress {
		one := *o
		one.InitAddress = []string{addr}
		client, err := rueidis.NewClient(one)
		if err == nil {
			return client, nil
		}
		failed = append(failed, err)
	}
	return nil, errors.Join(failed...)
}

func parse(u *url.URL) (*rueidis.ClientOption, *Options, error) {
	p := driver.NewParams(u)
	scheme, name, _ := strings.Cut(u.Scheme, "+")
	opts := &Options{Namespace: p.String("namespace", driver.DefaultNamespace)}
	o := &rueidis.ClientOption{
		Dialer:            net.Dialer{Timeout: p.Duration("dial_timeout", 5*time.Second), KeepAlive: time.Second},
		ConnWriteTimeout:  p.Duration("timeout", 3*time.Second),
		DisableCache:      true,
		AlwaysPipelining:  true, // an idle connection that ends is noticed at once
		DisableRetry:      true,
		ForceSingleClient: name == "",
	}
	replicas := p.String("wait_replicas", "0")
	if name == "sentinel" {
		o.Sentinel = rueidis.SentinelOption{MasterSet: p.String("master", ""), Dialer: o.Dialer,
			Username: p.String("sentinel_user", ""), Password: p.String("sentinel_password", "")}
	}
	var files dialurl.TLS
	if scheme == "rueidiss" {
		files = dialurl.ReadTLS(p)
	}
	err := p.Err()
	if err != nil {
		return nil, nil, err
	}
	if err := driver.CheckNamespace(opts.Namespace); err != nil {
		return nil, nil, err
	}
	if opts.WaitReplicas, err = strconv.Atoi(replicas); err != nil || opts.WaitReplicas < 0 {
		return nil, nil, driver.Invalid("url parameter wait_replicas", replicas, "must be a number of at least 0")
	}
	if name == "sentinel" && o.Sentinel.MasterSet == "" {
		return nil, nil, driver.Invalid("url parameter master", "", "must be the name by which the sentinels know the primary")
	}
	if u.Host == "" || u.Opaque != "" || u.Fragment != "" {
		return nil, nil, driver.Invalid("url", u.Scheme, "must be "+u.Scheme+"://user:password@host:port/database")
	}
	if o.InitAddress, err = dialurl.Hosts(u, ports[name]); err != nil {
		return nil, nil, err
	}
	if name == "" && len(o.InitAddress) > 1 {
		return nil, nil, driver.Invalid("url host", u.Host, "must be one; several are for "+scheme+"+sentinel and "+scheme+"+cluster")
	}
	if scheme == "rueidiss" {
		if o.TLSConfig, err = files.Config(); err != nil {
			return nil, nil, err
		}
		o.Sentinel.TLSConfig = o.TLSConfig
	}
	if db := strings.Trim(u.Path, "/"); db != "" {
		if o.SelectDB, err = strconv.Atoi(db); err != nil || o.SelectDB < 0 {
			return nil, nil, driver.Invalid("url path", u.Path, "must be the number of a database")
		}
		if name == "cluster" && o.SelectDB != 0 {
			return nil, nil, driver.Invalid("url path", u.Path, "must be 0 or nothing: a Cluster has no other database")
		}
	}
	o.Username = u.User.Username()
	o.Password, _ = u.User.Password()
	return o, opts, nil
}
