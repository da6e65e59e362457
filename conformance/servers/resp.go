package servers

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"
)

// A RedisError is an error that a Redis server has answered, as opposed to one of the network.
type RedisError struct {
	// Prefix is the first word, which names the kind of error: "ERR", "NOSCRIPT", "OOM", ...
	Prefix string
	// Message is the whole text, prefix included.
	Message string
}

func (e *RedisError) Error() string { return "redis: " + e.Message }

const (
	maxRespBulk  = 512 << 20 // bytes; what Redis itself allows
	maxRespDepth = 128       // arrays within arrays
)

// A respConn is a connection to a Redis server that speaks RESP2, one request after the other. After
// an error other than a *RedisError it is of no more use.
type respConn struct {
	net.Conn
	r *bufio.Reader
}

// dialRedis connects and, if there is a password, authenticates.
func dialRedis(ctx context.Context, addr, password string) (*respConn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &respConn{Conn: conn, r: bufio.NewReader(conn)}
	if password != "" {
		if _, err := c.do(ctx, "AUTH", password); err != nil {
			c.Close()
			return nil, err
		}
	}
	return c, nil
}

// do sends one command and reads its reply: a string, an int64, nil, or a []any of these, which may
// hold *RedisError too.
func (c *respConn) do(ctx context.Context, args ...string) (any, error) {
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	reply, err := c.roundTrip(args)
	if err != nil && ctx.Err() != nil {
		return nil, fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	if err != nil {
		return nil, err
	}
	if err, ok := reply.(*RedisError); ok {
		return nil, err
	}
	return reply, nil
}

func (c *respConn) roundTrip(args []string) (any, error) {
	if err := c.send(args...); err != nil {
		return nil, err
	}
	return c.receive(0)
}

func (c *respConn) send(args ...string) error {
	if len(args) == 0 {
		return errors.New("redis: empty command")
	}
	request := fmt.Appendf(nil, "*%d\r\n", len(args))
	for _, arg := range args {
		request = fmt.Appendf(request, "$%d\r\n%s\r\n", len(arg), arg)
	}
	_, err := c.Write(request)
	return err
}

func (c *respConn) receive(depth int) (any, error) {
	line, err := c.r.ReadString('\n')
	if err != nil {
		return nil, err
	}
	line, ok := strings.CutSuffix(line, "\r\n")
	if !ok || line == "" {
		return nil, errors.New("redis: reply is not RESP2")
	}
	kind, rest := line[0], line[1:]
	switch kind {
	case '+':
		return rest, nil
	case '-':
		prefix, _, _ := strings.Cut(rest, " ")
		return &RedisError{Prefix: prefix, Message: rest}, nil
	}
	n, err := strconv.ParseInt(rest, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("redis: reply is not RESP2: %w", err)
	}
	switch {
	case kind == ':':
		return n, nil
	case n == -1 && (kind == '$' || kind == '*'):
		return nil, nil
	case kind == '$' && n >= 0 && n <= maxRespBulk:
		text := make([]byte, n+2)
		if _, err := io.ReadFull(c.r, text); err != nil {
			return nil, err
		}
		return string(text[:n]), nil
	case kind == '*' && n >= 0 && depth < maxRespDepth:
		items := []any{}
		for range n {
			item, err := c.receive(depth + 1)
			if err != nil {
				return nil, err
			}
			items = append(items, item)
		}
		return items, nil
	}
	return nil, fmt.Errorf("redis: reply is not RESP2: kind %q, size %d", kind, n)
}
