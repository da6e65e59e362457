//go:build linux

package servers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// silence is how long nothing has to happen to count as nothing.
const silence = 150 * time.Millisecond

// newProxy starts a proxy for one test.
func newProxy(t *testing.T, target string) *Proxy {
	t.Helper()
	p, err := NewProxy(target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// dial connects to a server, through a proxy or not.
func dial(t *testing.T, addr string) *respConn {
	t.Helper()
	c, err := dialRedis(t.Context(), addr, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func (c *respConn) mustSend(t *testing.T, args ...string) {
	t.Helper()
	if err := c.send(args...); err != nil {
		t.Fatalf("send %q: %v", args, err)
	}
}

// mustReceive checks the next reply.
func (c *respConn) mustReceive(t *testing.T, want any) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if got, err := c.receive(0); err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("reply: got %#v, %v, want %#v", got, err, want)
	}
}

func (c *respConn) mustDo(t *testing.T, want any, args ...string) {
	t.Helper()
	c.mustSend(t, args...)
	c.mustReceive(t, want)
}

// hearsNothing checks that for a while neither bytes nor the end of the connection arrive.
func (c *respConn) hearsNothing(t *testing.T) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(silence))
	if b, err := c.r.Peek(1); !isTimeout(err) {
		t.Fatalf("received: got %q, %v, want nothing", b, err)
	}
}

// end waits for the end of the connection and returns the error.
func (c *respConn) end(t *testing.T) error {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	b, err := c.r.ReadByte()
	if err == nil {
		t.Fatalf("received: got %q, want the end of the connection", b)
	}
	return err
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// waitStats waits until the counts of p are as wanted.
func waitStats(t *testing.T, p *Proxy, what string, ok func(Stats) bool) {
	t.Helper()
	eventually(t, func() error {
		if s := p.Stats(); !ok(s) {
			return fmt.Errorf("%s: got %+v", what, s)
		}
		return nil
	})
}

// list returns what RPUSH has collected.
func list(t *testing.T, r *Redis, key string) string {
	t.Helper()
	got, err := r.Do(t.Context(), "LRANGE", key, "0", "-1")
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(got)
}

func TestProxyPasses(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c := dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")
	s := p.Stats()
	want := Stats{Connections: 1, Open: 1,
		ToServer: Traffic{Arrived: 1, Forwarded: 1, Bytes: int64(len("*1\r\n$4\r\nPING\r\n"))},
		ToClient: Traffic{Arrived: 1, Forwarded: 1, Bytes: int64(len("+PONG\r\n"))}}
	if s != want {
		t.Errorf("Stats after one PING: got %+v, want %+v", s, want)
	}

	// More than all buffers hold, each way; many connections at once.
	var running sync.WaitGroup
	for i := range 4 {
		running.Go(func() {
			c, err := dialRedis(t.Context(), p.Addr(), "")
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			key, value := strconv.Itoa(i), strings.Repeat(fmt.Sprintf("<%d>", i), 3<<20)
			if _, err := c.do(t.Context(), "SET", key, value); err != nil {
				t.Errorf("SET of %d bytes: %v", len(value), err)
			}
			if got, err := c.do(t.Context(), "GET", key); err != nil || got != value {
				t.Errorf("GET of %d bytes: got something else, %v", len(value), err)
			}
		})
	}
	running.Wait()
	c.Close()
	waitStats(t, p, "all connections ended", func(s Stats) bool { return s.Open == 0 && s.Connections == 5 })
}

func TestProxyUnixTarget(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	newRedis(t, &RedisOptions{Args: []string{"--unixsocket", socket}})
	p := newProxy(t, "unix:"+socket)
	c := dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")
	p.Reset()
	if err := c.end(t); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read after Reset: got %v, want connection reset", err)
	}
	dial(t, p.Addr()).mustDo(t, "PONG", "PING")
}

func TestProxyBadTarget(t *testing.T) {
	if p, err := NewProxy("no-port"); err == nil {
		p.Close()
		t.Error("NewProxy of a target without port: got nil, want an error")
	}
}

func TestProxyHoldToServer(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c := dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")

	p.Hold(ToServer)
	for i := range 5 {
		c.mustSend(t, "RPUSH", "list", strconv.Itoa(i))
		waitStats(t, p, "request held", func(s Stats) bool { return s.ToServer.Held == i+1 })
	}
	late := dial(t, p.Addr()) // a connection made meanwhile falls under the switch
	late.mustSend(t, "RPUSH", "other", "x")
	late.hearsNothing(t)
	c.hearsNothing(t)
	mustDo(t, r, int64(0), "EXISTS", "list", "other")

	p.Pass(ToServer)
	for i := range 5 {
		c.mustReceive(t, int64(i+1))
	}
	late.mustReceive(t, int64(1))
	if got, want := list(t, r, "list"), "[0 1 2 3 4]"; got != want {
		t.Errorf("order of held requests: got %s, want %s", got, want)
	}
}

func TestProxyHoldToClient(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c := dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")

	p.Hold(ToClient)
	for i := range 5 {
		c.mustSend(t, "RPUSH", "list", strconv.Itoa(i))
		waitStats(t, p, "reply held", func(s Stats) bool { return s.ToClient.Held == i+1 })
	}
	c.hearsNothing(t)
	if got, want := list(t, r, "list"), "[0 1 2 3 4]"; got != want { // requests pass: one way only
		t.Errorf("requests while replies are held: got %s, want %s", got, want)
	}
	p.Pass(ToClient)
	for i := range 5 {
		c.mustReceive(t, int64(i+1))
	}
}

func TestProxyHoldIsBounded(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	value := strings.Repeat("v", 32<<20)
	mustDo(t, r, "OK", "SET", "big", value)
	c := dial(t, p.Addr())
	p.Hold(ToClient)
	c.mustSend(t, "GET", "big")
	waitStats(t, p, "queue full", func(s Stats) bool { return s.ToClient.Held >= queueSize/chunkSize })
	c.hearsNothing(t)
	if s := p.Stats(); s.ToClient.Forwarded != 0 {
		t.Errorf("forwarded while held: got %+v, want 0 chunks", s.ToClient)
	}
	p.mu.Lock()
	for l := range p.links {
		if n := l.flows[1].queued; n < queueSize || n >= queueSize+chunkSize {
			t.Errorf("bytes waiting: got %d, want %d and less than a chunk more", n, queueSize)
		}
	}
	p.mu.Unlock()
	p.Pass(ToClient)
	c.mustReceive(t, value)
}

func TestProxyDropToServer(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c, quiet := dial(t, p.Addr()), dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")
	quiet.mustDo(t, "PONG", "PING")

	p.Drop(ToServer)
	late := dial(t, p.Addr())
	late.mustSend(t, "INCR", "late")
	c.mustSend(t, "INCR", "n")
	waitStats(t, p, "requests dropped", func(s Stats) bool { return s.ToServer.Dropped == 2 })
	c.hearsNothing(t)
	late.hearsNothing(t)
	mustDo(t, r, int64(0), "EXISTS", "n", "late")

	// Nothing comes after what was dropped: connections that have lost something end, others live on.
	p.Pass(ToServer)
	for _, lost := range []*respConn{c, late} {
		if err := lost.end(t); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read on a connection that has lost bytes: got %v, want connection reset", err)
		}
	}
	quiet.mustDo(t, int64(1), "INCR", "n")
}

func TestProxyDropToClient(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c := dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")

	p.Drop(ToClient)
	c.mustSend(t, "INCR", "n")
	waitStats(t, p, "reply dropped", func(s Stats) bool { return s.ToClient.Dropped == 1 })
	c.hearsNothing(t)
	mustDo(t, r, "1", "GET", "n") // one way only
	p.Drop(ToServer)
	p.Pass(ToClient)
	c.hearsNothing(t) // the end is not told across a partition
	p.Pass(ToServer)
	if err := c.end(t); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read on a connection that has lost bytes: got %v, want connection reset", err)
	}
	dial(t, p.Addr()).mustDo(t, int64(2), "INCR", "n")
}

func TestProxyDropTakesWhatIsHeld(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c := dial(t, p.Addr())
	p.Hold(Both)
	c.mustSend(t, "INCR", "n")
	waitStats(t, p, "request held", func(s Stats) bool { return s.ToServer.Held == 1 })
	p.Drop(Both)
	if s := p.Stats(); s.ToServer.Dropped != 1 {
		t.Errorf("Stats after Drop: got %+v, want 1 chunk dropped", s.ToServer)
	}
	p.Pass(Both)
	if err := c.end(t); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read on a connection that has lost bytes: got %v, want connection reset", err)
	}
	dial(t, p.Addr()).mustDo(t, int64(1), "INCR", "n")
}

// The end of a connection is not told across a partition, but afterwards.
func TestProxyHidesTheEnd(t *testing.T) {
	for name, cut := range map[string]func(*Proxy, Direction){"Hold": (*Proxy).Hold, "Drop": (*Proxy).Drop} {
		t.Run(name+"/OfTheServer", func(t *testing.T) {
			r := newRedis(t, nil)
			p := newProxy(t, r.Addr())
			c := dial(t, p.Addr())
			c.mustDo(t, "PONG", "PING")
			cut(p, ToClient)
			if err := r.Kill(); err != nil {
				t.Fatal(err)
			}
			late := dial(t, p.Addr()) // accepted, though there is no server
			waitStats(t, p, "dial failed", func(s Stats) bool { return s.DialsFailed == 1 })
			c.hearsNothing(t)
			late.hearsNothing(t)
			p.Pass(ToClient)
			if err := c.end(t); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("read after the partition: got %v, want EOF or connection reset", err)
			}
			if err := late.end(t); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("read from a server that is down: got %v, want connection reset", err)
			}
		})
		t.Run(name+"/OfTheClient", func(t *testing.T) {
			r := newRedis(t, nil)
			p := newProxy(t, r.Addr())
			c := dial(t, p.Addr())
			c.mustDo(t, "OK", "CLIENT", "SETNAME", "under-test")
			connected := func() bool {
				clients, err := r.Do(t.Context(), "CLIENT", "LIST")
				if err != nil {
					t.Fatal(err)
				}
				return strings.Contains(clients.(string), "name=under-test")
			}
			cut(p, ToServer)
			c.Close()
			time.Sleep(silence) // nothing is to happen in this time
			if !connected() {
				t.Fatal("the server has seen the end of the connection across the partition")
			}
			p.Pass(ToServer)
			eventually(t, func() error {
				if connected() {
					return errors.New("the server has not seen the end of the connection")
				}
				return nil
			})
			waitStats(t, p, "connection ended", func(s Stats) bool { return s.Open == 0 })
		})
	}
}

func TestProxyTellsTheEnd(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())

	c := dial(t, p.Addr())
	c.mustDo(t, "OK", "QUIT")
	if err := c.end(t); !errors.Is(err, io.EOF) {
		t.Errorf("read after QUIT: got %v, want EOF", err)
	}
	c.Close()

	// A client that has only ended its half still gets its reply.
	c = dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")
	p.Delay(ToClient, silence)
	c.mustSend(t, "INCR", "n")
	c.Conn.(*net.TCPConn).CloseWrite()
	c.mustReceive(t, int64(1))
	p.Pass(ToClient)
	if err := c.end(t); !errors.Is(err, io.EOF) {
		t.Errorf("read after the server has ended, too: got %v, want EOF", err)
	}
	c.Close()

	// A client's reset reaches the server.
	c = dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")
	hangUp(c.Conn, true)
	waitStats(t, p, "all ended", func(s Stats) bool { return s.Open == 0 })

	// And so does the server's death reach the client.
	c = dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")
	if err := r.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := c.end(t); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read after Kill: got %v, want EOF or connection reset", err)
	}
	c, err := dialRedis(t.Context(), p.Addr(), "")
	if err == nil {
		defer c.Close()
		err = c.end(t)
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("dial and read with a server that is down: got %v, want connection reset", err)
	}
	waitStats(t, p, "dial failed", func(s Stats) bool { return s.DialsFailed == 1 })
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	dial(t, p.Addr()).mustDo(t, "PONG", "PING")
}

// A server that has ended its half and then refuses more bytes ends the client, too.
func TestProxyTellsTheResetAfterTheEnd(t *testing.T) {
	leavesNothing(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	p := newProxy(t, listener.Addr().String())
	c := dial(t, p.Addr())
	server, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	server.Close()
	if err := c.end(t); !errors.Is(err, io.EOF) {
		t.Fatalf("read after the server's end: got %v, want EOF", err)
	}
	eventually(t, func() error {
		if err := c.send("PING"); err == nil {
			return errors.New("write to a server that is gone: got nil, want an error")
		}
		return nil
	})
	waitStats(t, p, "connection ended", func(s Stats) bool { return s.Open == 0 })
}

func TestProxyReset(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c, held := dial(t, p.Addr()), dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")
	held.mustDo(t, "PONG", "PING")
	p.Hold(ToServer)
	held.mustSend(t, "INCR", "n")
	waitStats(t, p, "request held", func(s Stats) bool { return s.ToServer.Held == 1 })

	p.Reset()
	for _, c := range []*respConn{c, held} {
		if err := c.end(t); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read after Reset: got %v, want connection reset", err)
		}
	}
	if s := p.Stats(); s.Resets != 2 || s.Open != 0 {
		t.Errorf("Stats after Reset: got %+v, want 2 resets and none open", s)
	}
	p.Pass(ToServer)
	dial(t, p.Addr()).mustDo(t, nil, "GET", "n") // what was held is gone; new connections work
}

func TestProxyRefuse(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c := dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")
	for range 2 {
		if err := p.Refuse(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial after Refuse: got %v, want connection refused", err)
	}
	c.mustDo(t, "PONG", "PING") // those that exist stay
	p.Reset()
	if err := c.end(t); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read after Reset: got %v, want connection reset", err)
	}
	for range 2 {
		if err := p.Accept(); err != nil {
			t.Fatal(err)
		}
	}
	dial(t, p.Addr()).mustDo(t, "PONG", "PING")
}

func TestProxyDelay(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c := dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")

	for _, test := range []struct {
		d   Direction
		min time.Duration
	}{{ToServer, 100 * time.Millisecond}, {ToClient, 100 * time.Millisecond}, {Both, 200 * time.Millisecond}} {
		p.Delay(test.d, 100*time.Millisecond)
		start := time.Now()
		c.mustDo(t, "PONG", "PING")
		if took := time.Since(start); took < test.min {
			t.Errorf("PING with 100 ms of delay, direction %d: got a reply after %v, want at least %v", test.d, took, test.min)
		}
		p.Pass(Both)
	}
	if s := p.Stats(); s.ToServer.Delayed != 2 || s.ToClient.Delayed != 2 {
		t.Errorf("Stats: got %+v, want 2 chunks delayed in each direction", s)
	}

	// Delays overlap: 20 requests, sent one by one, take one delay and not 20.
	p.Delay(ToServer, 500*time.Millisecond)
	start := time.Now()
	for i := range 20 {
		c.mustSend(t, "RPUSH", "list", strconv.Itoa(i))
		waitStats(t, p, "request delayed", func(s Stats) bool { return s.ToServer.Delayed == 2+i+1 })
	}
	for i := range 20 {
		c.mustReceive(t, int64(i+1))
	}
	if took := time.Since(start); took < 500*time.Millisecond || took > 5*time.Second {
		t.Errorf("20 requests with 500 ms of delay: got %v, want about 500 ms", took)
	}

	// Another position of the switch ends the delay.
	p.Delay(Both, time.Hour)
	c.mustSend(t, "RPUSH", "list", "20")
	waitStats(t, p, "request delayed", func(s Stats) bool { return s.ToServer.Delayed == 23 })
	c.hearsNothing(t)
	p.Pass(Both)
	c.mustReceive(t, int64(21))
	want := fmt.Sprint(strings.Fields("0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"))
	if got := list(t, r, "list"); got != want {
		t.Errorf("order of delayed requests: got %s, want %s", got, want)
	}
}

func hasActed(hit <-chan struct{}) bool {
	select {
	case <-hit:
		return true
	default:
		return false
	}
}

func TestProxyDropNextReply(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c := dial(t, p.Addr())
	c.mustDo(t, int64(1), "INCR", "n") // this reply comes before the call

	hit := p.DropNextReply(nil)
	c.mustSend(t, "INCR", "n")
	if err := c.end(t); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read after DropNextReply: got %v, want connection reset", err)
	}
	if !hasActed(hit) {
		t.Error("channel of DropNextReply: got open, want closed")
	}
	mustDo(t, r, "2", "GET", "n") // the write has happened
	if s := p.Stats(); s.Resets != 1 || s.ToClient.Dropped != 1 || s.ToServer.Dropped != 0 {
		t.Errorf("Stats: got %+v, want 1 reset and 1 reply dropped", s)
	}
	dial(t, p.Addr()).mustDo(t, int64(3), "INCR", "n") // once only
}

func TestProxyDropNextReplyKeepOpen(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c := dial(t, p.Addr())
	c.mustDo(t, int64(1), "INCR", "n")

	hits := []<-chan struct{}{p.DropNextReply(&DropOptions{KeepOpen: true}), p.DropNextReply(&DropOptions{KeepOpen: true})}
	for i, hit := range hits { // one reply per call
		c.mustSend(t, "INCR", "n")
		c.hearsNothing(t)
		if !hasActed(hit) {
			t.Errorf("channel of DropNextReply %d: got open, want closed", i)
		}
	}
	mustDo(t, r, "3", "GET", "n")
	c.mustDo(t, int64(4), "INCR", "n")

	// What the server sends unasked counts, too.
	c.mustDo(t, []any{"subscribe", "channel", int64(1)}, "SUBSCRIBE", "channel")
	hit := p.DropNextReply(&DropOptions{KeepOpen: true})
	mustDo(t, r, int64(1), "PUBLISH", "channel", "lost")
	<-hit
	mustDo(t, r, int64(1), "PUBLISH", "channel", "seen")
	c.mustReceive(t, []any{"message", "channel", "seen"})
}

func TestProxyDropNextReplyRequestWith(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c, other := dial(t, p.Addr()), dial(t, p.Addr())
	hit := p.DropNextReply(&DropOptions{RequestWith: "orders"})
	c.mustDo(t, "PONG", "PING") // not this one
	other.mustDo(t, int64(1), "INCR", "cars")
	if hasActed(hit) {
		t.Fatal("DropNextReply has acted on a request without the text")
	}

	// A request that does not reach the server does not count.
	p.Drop(ToServer)
	c.mustSend(t, "INCR", "orders")
	waitStats(t, p, "request dropped", func(s Stats) bool { return s.ToServer.Dropped == 1 })
	p.Pass(ToServer)
	c = dial(t, p.Addr())
	c.mustDo(t, "PONG", "PING")
	if hasActed(hit) {
		t.Fatal("DropNextReply has acted although the request did not reach the server")
	}

	// If the connection ends before the reply, the request may be repeated on another one.
	c.mustSend(t, "BLPOP", "orders", "0") // waits for ever
	waitStats(t, p, "request forwarded", func(s Stats) bool { return s.ToServer.Forwarded == 4 })
	c.Close()
	waitStats(t, p, "connection ended", func(s Stats) bool { return s.Open == 1 })
	other.mustDo(t, int64(2), "INCR", "cars")

	c = dial(t, p.Addr())
	c.mustSend(t, "INCR", "orders")
	if err := c.end(t); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read: got %v, want connection reset", err)
	}
	if !hasActed(hit) {
		t.Error("channel of DropNextReply: got open, want closed")
	}
	mustDo(t, r, "1", "GET", "orders")
	other.mustDo(t, int64(3), "INCR", "cars")
}

func TestProxyPassCancelsDropNextReply(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c := dial(t, p.Addr())
	hit := p.DropNextReply(nil)
	p.Pass(ToServer)
	p.Pass(Both)
	c.mustDo(t, "PONG", "PING")
	if hasActed(hit) {
		t.Error("channel of a cancelled DropNextReply: got closed, want open")
	}
}

func TestProxyOnPausedServer(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	if err := r.Pause(); err != nil {
		t.Fatal(err)
	}
	c := dial(t, p.Addr())
	c.mustSend(t, "PING")
	waitStats(t, p, "request forwarded", func(s Stats) bool { return s.ToServer.Forwarded == 1 })
	c.hearsNothing(t)
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	c.mustReceive(t, "PONG")
}

func TestProxyClose(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	c, quiet := dial(t, p.Addr()), dial(t, p.Addr())
	quiet.mustDo(t, "PONG", "PING")
	p.Delay(ToClient, time.Hour)
	p.Hold(ToServer)
	c.mustSend(t, "PING")
	waitStats(t, p, "request held", func(s Stats) bool { return s.ToServer.Held == 1 })
	for range 2 {
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []*respConn{c, quiet} {
		if err := c.end(t); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read after Close: got %v, want connection reset", err)
		}
	}
	if _, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial after Close: got %v, want connection refused", err)
	}
	for name, op := range map[string]func() error{"Refuse": p.Refuse, "Accept": p.Accept} {
		if err := op(); !errors.Is(err, ErrClosed) {
			t.Errorf("%s after Close: got %v, want ErrClosed", name, err)
		}
	}
	p.Pass(Both) // harmless
	p.Reset()
}

// Whatever the switches did meanwhile, what arrives is what was sent, and in the end all passes.
func TestProxyUnderChangingSwitches(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	// So much has to have happened; only then the test ends.
	enough := func(s Stats) bool {
		return s.ToServer.Forwarded >= 200 && s.ToClient.Forwarded >= 50 && s.ToClient.Dropped >= 20 &&
			s.ToServer.Held >= 20 && s.ToClient.Delayed >= 10 && s.Resets >= 20
	}
	var running sync.WaitGroup
	for i := range 8 {
		running.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				func() {
					try, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
					defer cancel()
					c, err := dialRedis(try, p.Addr(), "")
					if err != nil {
						return
					}
					defer c.Close()
					text := fmt.Sprintf("%d %d", i, n)
					got, err := c.do(try, "ECHO", text)
					if err == nil && got != text {
						t.Errorf("ECHO: got %v, want %q", got, text)
					}
				}()
			}
		})
	}
	for _, step := range []func(){
		func() { p.Hold(ToServer) },
		func() { p.Drop(ToClient) },
		func() { p.Delay(Both, time.Millisecond) },
		func() { p.Reset() },
		func() { p.DropNextReply(nil) },
		func() { p.Refuse() },
		func() { p.Accept() },
		func() { p.Stats() },
		func() { p.Pass(Both) },
	} {
		running.Go(func() {
			for ctx.Err() == nil {
				step()
				if enough(p.Stats()) {
					cancel()
				}
				time.Sleep(3 * time.Millisecond)
			}
		})
	}
	running.Wait()
	p.Pass(Both)
	if err := p.Accept(); err != nil {
		t.Fatal(err)
	}
	dial(t, p.Addr()).mustDo(t, "PONG", "PING")
	if s := p.Stats(); !enough(s) {
		t.Errorf("the test was too thin: %+v", s)
	}
}

func TestProxyKeepsBinaryBytes(t *testing.T) {
	r := newRedis(t, nil)
	p := newProxy(t, r.Addr())
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	value := string(bytes.Repeat(all, 1000))
	c := dial(t, p.Addr())
	c.mustDo(t, value, "ECHO", value)
}
