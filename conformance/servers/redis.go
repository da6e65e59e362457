package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// RedisOptions says how to run a Redis server. The zero value of each field is its default.
type RedisOptions struct {
	// Binary is the program: a path, or a name to be looked up in PATH. It must be Redis 7.0 or
	// later, or Valkey. Default "redis-server".
	Binary string

	// AppendFsync selects what a restart finds. The default "" keeps nothing on disk, so every
	// restart is empty. "always", "everysec" and "no" keep an append-only file with that policy; a
	// killed process loses nothing it has acknowledged under "always".
	AppendFsync string

	// Password, if not empty, is what clients must authenticate with. It can be seen in the
	// system's list of processes. It must not begin with "--".
	Password string

	// Clock makes [Redis.SetClock] work. It needs gcc at the first use on a machine, and Linux.
	Clock bool

	// Args are further arguments in the form of the command line, such as "--maxmemory", "8mb".
	// They overrule the settings above, which port, bind and dir must not.
	Args []string
}

// A Redis is a Redis or Valkey server that runs as a local process. It implements [Server].
//
// It listens on 127.0.0.1 only, saves no snapshots, and allows the command DEBUG. The words of
// [Server] mean here: Pause and Kill hit the children it has forked to save or rewrite, too.
type Redis struct {
	*process
	password string
	bus      string // port of the cluster's bus, if it is a node of one
	clock    *clock // nil without Clock
}

var _ Server = (*Redis)(nil)

// doTimeout bounds a Do whose context has no deadline.
const doTimeout = 10 * time.Second

// StartRedis runs a new, empty Redis server and returns when it answers; nil options are the
// defaults. The context bounds the start only, which takes at most 30 s.
//
// Errors match exec.ErrNotFound if there is no such program; an error of the server itself carries
// the end of its log. On failure no process and no file is left behind.
func StartRedis(ctx context.Context, opts *RedisOptions) (*Redis, error) {
	return startRedis(ctx, opts, ReservePort)
}

func startRedis(ctx context.Context, opts *RedisOptions, reserve func() (string, func() error, error)) (*Redis, error) {
	var o RedisOptions
	if opts != nil {
		o = *opts
	}
	if o.Binary == "" {
		o.Binary = "redis-server"
	}
	binary, err := exec.LookPath(o.Binary)
	if err != nil {
		return nil, fmt.Errorf("servers: redis: %w", err)
	}
	args := []string{"--bind", "127.0.0.1", "--daemonize", "no", "--save", "", "--enable-debug-command", "yes"}
	switch o.AppendFsync {
	case "":
		args = append(args, "--appendonly", "no")
	case "always", "everysec", "no":
		args = append(args, "--appendonly", "yes", "--appendfsync", o.AppendFsync)
	default:
		return nil, fmt.Errorf(`servers: redis: AppendFsync %q: want "", "always", "everysec" or "no"`, o.AppendFsync)
	}
	if strings.HasPrefix(o.Password, "--") {
		return nil, errors.New(`servers: redis: Password begins with "--"`)
	}
	if o.Password != "" {
		args = append(args, "--requirepass", o.Password)
	}
	args = append(args, o.Args...)

	library := ""
	if o.Clock {
		if library, err = clockLibrary(ctx); err != nil {
			return nil, fmt.Errorf("servers: redis: build a clock: %w", err)
		}
	}

	// Redis takes port 0 for "none", so the port is chosen before, and another process may be
	// faster in listening at it.
	for attempt := 1; ; attempt++ {
		addr, release, err := reserve()
		if err != nil {
			return nil, fmt.Errorf("servers: redis: choose a port: %w", err)
		}
		r, err := startRedisAt(ctx, addr, release, binary, args, o.Password, library)
		if err == nil {
			return r, nil
		}
		if attempt == portAttempts || !isTaken(addr) {
			return nil, err
		}
	}
}

func startRedisAt(ctx context.Context, addr string, release func() error, binary string, args []string, password, library string) (*Redis, error) {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, errors.Join(err, release())
	}
	return runRedis(ctx, addr, release, password, library, func(_ context.Context, data string) (*exec.Cmd, error) {
		return exec.Command(binary, append([]string{"--port", port, "--dir", data}, args...)...), nil
	})
}

// runRedis runs the command, which listens at addr, with a clock to set if library is that of clocks.
func runRedis(ctx context.Context, addr string, release func() error, password, library string,
	command func(ctx context.Context, data string) (*exec.Cmd, error)) (*Redis, error) {
	r := &Redis{password: password}
	p, err := newProcess(spec{
		kind: "redis",
		addr: addr,
		command: func(ctx context.Context, data string) (*exec.Cmd, error) {
			cmd, err := command(ctx, data)
			if err == nil && r.clock != nil {
				cmd.Env = append(cmd.Environ(), "LD_PRELOAD="+library, "FENCELOCK_CLOCK="+r.clock.file)
			}
			return cmd, err
		},
		ready:   func(ctx context.Context, pid int) error { return redisReady(ctx, addr, password, pid) },
		release: release,
	})
	if err != nil {
		return nil, errors.Join(err, release())
	}
	r.process = p
	if library != "" {
		if r.clock, err = newClock(p.dir); err != nil {
			return nil, errors.Join(err, p.Close())
		}
	}
	if err := p.Start(ctx); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return r, nil
}

// isTaken says whether somebody listens at addr.
func isTaken(addr string) bool {
	l, err := net.Listen("tcp", addr)
	if err == nil {
		l.Close()
	}
	return errors.Is(err, syscall.EADDRINUSE)
}

// redisReady returns nil if a server at addr, that has loaded its data, is the process pid.
func redisReady(ctx context.Context, addr, password string, pid int) error {
	c, err := dialRedis(ctx, addr, password)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.do(ctx, "PING"); err != nil { // -LOADING until all is loaded
		return err
	}
	info, err := c.do(ctx, "INFO", "server")
	if err != nil {
		return err
	}
	text, _ := info.(string)
	if !strings.Contains(text, fmt.Sprintf("\nprocess_id:%d\r\n", pid)) {
		return errors.New("another redis server answers at this address")
	}
	return nil
}

// Do sends one command on a connection of its own, straight to the server, and returns the reply: a
// string, an int64, nil, or a []any of these, in which an error is a *[RedisError]. It waits until
// ctx ends, 10 s if that has no deadline; a paused server answers nothing.
//
// An error that the server answers is returned as a *[RedisError]. Any other error matches that of
// ctx if that has ended, and leaves open whether the command was executed, unless it is a failure to
// dial, a *net.OpError with Op "dial".
//
// Since the connection ends with the command, commands that change the state of one, such as MULTI,
// SELECT or WAIT, have no effect on the next.
func (r *Redis) Do(ctx context.Context, args ...string) (any, error) {
	reply, err := r.do(ctx, args)
	if err != nil {
		return nil, fmt.Errorf("servers: redis %s: do: %w", r.Addr(), err)
	}
	return reply, nil
}

func (r *Redis) do(ctx context.Context, args []string) (any, error) {
	return redisDo(ctx, r.Addr(), r.password, args)
}

// RedisDo is [Redis.Do] for a server that was started in another way, at that address and without a password.
func RedisDo(ctx context.Context, addr string, args ...string) (any, error) {
	reply, err := redisDo(ctx, addr, "", args)
	if err != nil {
		return nil, fmt.Errorf("servers: redis %s: do: %w", addr, err)
	}
	return reply, nil
}

func redisDo(ctx context.Context, addr, password string, args []string) (any, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, doTimeout)
		defer cancel()
	}
	c, err := dialRedis(ctx, addr, password)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.do(ctx, args...)
}
