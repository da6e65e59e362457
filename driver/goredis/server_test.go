package goredis_test

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

const patience = redisbackend.Patience

// What the tests of all drivers for Redis share.
var (
	newID       = redisbackend.NewID
	lockName    = redisbackend.LockName
	permitName  = redisbackend.PermitName
	request     = redisbackend.Request
	waiting     = redisbackend.Waiting
	mustLock    = redisbackend.MustLock
	mustRelease = redisbackend.MustRelease
	stepsOn     = redisbackend.StepsOn
	bothKinds   = redisbackend.BothKinds
	listenTo    = redisbackend.ListenTo
	eventually  = redisbackend.Eventually
)

type events = redisbackend.Events

// server is a Redis of one test.
type server struct{ *servers.Redis }

func startRedis(tb testing.TB, args ...string) server {
	tb.Helper()
	return server{redisbackend.GoRedis.Start(tb, args...).Redis}
}

func (s server) shared() redisbackend.Server { return redisbackend.GoRedis.On(s.Redis) }

// client makes a client as a driver opened by URL would have it.
func (s server) client(tb testing.TB) *redis.Client { return s.shared().Client(tb) }

func newClient(tb testing.TB, o *redis.Options) *redis.Client {
	c := redis.NewClient(o)
	tb.Cleanup(func() { c.Close() })
	return c
}

// driver makes a driver with a client of its own.
func (s server) driver(tb testing.TB) *goredis.Driver {
	return newDriver(tb, s.client(tb))
}

func newDriver(tb testing.TB, c redis.UniversalClient) *goredis.Driver {
	tb.Helper()
	d, err := goredis.New(c, nil)
	if err != nil {
		tb.Fatalf("New: got %v, want nil", err)
	}
	tb.Cleanup(func() { d.Close() })
	return d
}

func (s server) do(tb testing.TB, args ...string) any {
	tb.Helper()
	return s.shared().Must(tb, args...)
}

func (s server) commands(tb testing.TB) map[string]int {
	tb.Helper()
	return s.shared().Commands(tb)
}

// TestCloseLeavesTheClient closes a driver that was made with the user's client.
func TestCloseLeavesTheClient(t *testing.T) {
	client := startRedis(t).client(t)
	d := newDriver(t, client)
	mustLock(t, d, request(lockName("x"), newID(), time.Minute), driver.Granted)
	if err := d.Close(); err != nil {
		t.Errorf("Close: got %v, want nil", err)
	}
	if err := client.Ping(t.Context()).Err(); err != nil {
		t.Errorf("the user's client after Close: got %v, want that it works", err)
	}
}
