package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"net"
	"strconv"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
)

// A sent counts the commands that the clients of Redis servers send, those of a connection's handshake included. The
// server's own counters would not do: they also count what scripts call.
type sent struct{ commands atomic.Int64 }

func (s *sent) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &countedConn{TCPConn: c.(*net.TCPConn), commands: &s.commands}, nil
}

// goRedis makes a client of go-redis whose commands are counted.
func (s *sent) goRedis(o redis.Options) *redis.Client {
	o.Dialer = s.dial
	return redis.NewClient(&o)
}

// rueidis are options of a client of rueidis whose commands are counted.
func (s *sent) rueidis(addr string) rueidis.ClientOption {
	return rueidis.ClientOption{InitAddress: []string{addr},
		DialCtxFn: func(ctx context.Context, addr string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
			return s.dial(ctx, "tcp", addr)
		}}
}

// A countedConn counts the commands that are written: an array of RESP is one, and its bulk strings are passed over.
type countedConn struct {
	*net.TCPConn
	commands *atomic.Int64
	line     []byte // of which the end has not been written yet
	skip     int    // bytes of a bulk string that are to come
}

func (c *countedConn) Write(p []byte) (int, error) {
	n, err := c.TCPConn.Write(p)
	c.count(p[:n])
	return n, err
}

func (c *countedConn) count(p []byte) {
	for len(p) > 0 {
		if c.skip > 0 {
			n := min(c.skip, len(p))
			c.skip, p = c.skip-n, p[n:]
			continue
		}
		end := bytes.IndexByte(p, '\n') + 1
		if end == 0 {
			c.line = append(c.line, p...)
			return
		}
		line := append(c.line, p[:end]...)
		c.line, p = line[:0], p[end:]
		switch line[0] {
		case '*':
			c.commands.Add(1)
		case '$':
			if n, err := strconv.Atoi(string(bytes.TrimSpace(line[1:]))); err == nil {
				c.skip = n + len("\r\n")
			}
		}
	}
}
