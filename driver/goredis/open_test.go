package goredis_test

import (
	"errors"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

func TestOpen(t *testing.T) {
	redisbackend.GoRedis.TestOpen(t, "dial_timeout=1s&read_timeout=2s&write_timeout=2s&pool_size=3", map[string]string{
		"pool_sise=1":      "pool_sise",
		"pool_size=0":      "pool_size",
		"read_timeout=1":   "read_timeout",
		"wait_replicas=-1": "wait_replicas",
		"master=x":         "master",
	})
}

func TestNewRefuses(t *testing.T) {
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	defer ring.Close()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer client.Close()
	for name, test := range map[string]struct {
		client redis.UniversalClient
		opts   *goredis.Options
	}{
		"a Ring":          {ring, nil},
		"nothing":         {nil, nil},
		"a nil client":    {(*redis.Client)(nil), nil},
		"a nil cluster":   {(*redis.ClusterClient)(nil), nil},
		"a bad namespace": {client, &goredis.Options{Namespace: "a:b"}},
	} {
		if d, err := goredis.New(test.client, test.opts); d != nil || !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("New with %s: got %v, %v, want ErrInvalid", name, d, err)
		}
	}
	for _, namespace := range []string{"", "a", "a.b-c_D"} {
		if _, err := goredis.New(client, &goredis.Options{Namespace: namespace}); err != nil {
			t.Errorf("New with namespace %q: got %v, want nil", namespace, err)
		}
	}
}

func TestInfo(t *testing.T) {
	for _, heeds := range []bool{false, true} {
		one := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: heeds})
		defer one.Close()
		cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}, ContextTimeoutEnabled: heeds})
		defer cluster.Close()
		failover := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "x", SentinelAddrs: []string{"127.0.0.1:1"}, ContextTimeoutEnabled: heeds})
		defer failover.Close()
		for _, test := range []struct {
			client redis.UniversalClient
			want   bool
		}{{one, heeds}, {cluster, false}, {failover, false}} {
			d := newDriver(t, test.client)
			if want := (driver.Info{Backend: "redis", Deadlines: test.want}); d.Info() != want {
				t.Errorf("Info with %T to %v, ContextTimeoutEnabled %v: got %+v, want %+v", test.client, test.client, heeds, d.Info(), want)
			}
		}
	}
}
