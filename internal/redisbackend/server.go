package redisbackend

import (
	"context"
	"crypto/rand"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

// Patience is how long a test waits for what must happen soon.
const Patience = 10 * time.Second

// Server is a Redis of one test.
type Server struct {
	*servers.Redis
	of Driver
}

// Start starts a server for a test of the driver.
func (b Driver) Start(tb testing.TB, args ...string) Server {
	tb.Helper()
	return b.start(tb, &servers.RedisOptions{Args: args})
}

func (b Driver) start(tb testing.TB, o *servers.RedisOptions) Server {
	tb.Helper()
	s, err := servers.StartRedis(tb.Context(), o)
	if err != nil {
		tb.Fatalf("start redis: %v", err)
	}
	tb.Cleanup(func() {
		if err := s.Close(); err != nil {
			tb.Errorf("stop redis: %v", err)
		}
	})
	return Server{s, b}
}

// On is a server that runs.
func (b Driver) On(s *servers.Redis) Server { return Server{s, b} }

// proxied is a server behind a proxy.
func (b Driver) proxied(tb testing.TB, args ...string) (Server, *servers.Proxy) {
	tb.Helper()
	s := b.Start(tb, args...)
	p, err := servers.NewProxy(s.Addr())
	if err != nil {
		tb.Fatalf("NewProxy: got %v, want nil", err)
	}
	tb.Cleanup(func() { p.Close() })
	return s, p
}

// at makes a driver with a client of its own.
func (b Driver) at(tb testing.TB, addr string) Full {
	tb.Helper()
	return b.Connect(tb, Options{Addr: addr})
}

// Driver makes a driver with a client of its own.
func (s Server) Driver(tb testing.TB) Full {
	tb.Helper()
	return s.of.at(tb, s.Addr())
}

// Client makes a client of go-redis, for looking at the server.
func (s Server) Client(tb testing.TB) *redis.Client {
	c := newClient(Options{Addr: s.Addr()})
	tb.Cleanup(func() { c.Close() })
	return c
}

// Must runs a command that must succeed.
func (s Server) Must(tb testing.TB, args ...string) any {
	tb.Helper()
	reply, err := s.Do(context.WithoutCancel(tb.Context()), args...)
	if err != nil {
		tb.Fatalf("%s: got %v, want nil", strings.Join(args, " "), err)
	}
	return reply
}

// Commands counts what the server has executed, by command, in scripts as well as sent by a client.
func (s Server) Commands(tb testing.TB) map[string]int {
	tb.Helper()
	counts := make(map[string]int)
	text, _ := s.Must(tb, "INFO", "commandstats").(string)
	for line := range strings.Lines(text) {
		name, rest, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
		calls, _, ok2 := strings.Cut(rest, ",")
		if n, err := strconv.Atoi(calls); ok && ok2 && err == nil {
			counts[name] = n
		}
	}
	if len(counts) == 0 {
		tb.Fatalf("INFO commandstats: got nothing of use: %q", text)
	}
	return counts
}

// NewID makes an owner's id.
func NewID() string { return rand.Text() }

// LockName is the name of a lock.
func LockName(name string) driver.Name { return driver.Name{Kind: driver.KindLock, Name: name} }

// PermitName is the name of a semaphore.
func PermitName(name string) driver.Name { return driver.Name{Kind: driver.KindPermit, Name: name} }

// Nobody is an address at which nobody listens.
func Nobody(tb testing.TB) string {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// Eventually waits for a condition.
func Eventually(tb testing.TB, what string, done func() bool) {
	tb.Helper()
	deadline := time.Now().Add(Patience)
	for !done() {
		if time.Now().After(deadline) {
			tb.Fatalf("%s: not within %v", what, Patience)
		}
		time.Sleep(2 * time.Millisecond)
	}
}
