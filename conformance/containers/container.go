package containers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/moby/moby/api/pkg/stdcopy"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"

	"github.com/fencelock/fencelock/conformance/servers"
)

const (
	createTimeout = 5 * time.Minute       // for the first start, which may pull the image
	startTimeout  = 30 * time.Second      // for any other, to the first answer
	tryTimeout    = time.Second           // for one try of the protocol while starting
	tryInterval   = 20 * time.Millisecond // between two tries
	engineTimeout = 60 * time.Second      // for any other work of the engine
)

// addrLabel is a label of every container of this package; its value is the address of the server.
const addrLabel = "fencelock.addr"

// dataDir is where a server keeps its data, its working directory. It is a volume, which lives and dies with the container:
// the container's own files may be many times slower, as where the engine keeps them by FUSE.
const dataDir = "/data"

// cpuShares is the weight of a container on a busy machine, beside the 1024 of each process outside. By default all
// processes of all containers together have the weight of one: a server would get less than any of its clients, and those
// give up and try again faster than it can answer. See cgroupParent.
const cpuShares = 8 * 1024

// A spec is what distinguishes one kind of server from another.
type spec struct {
	name    string // for messages
	image   string
	command func() []string // the program and its arguments, for a new container; it keeps its data in dataDir
	port    string          // at which it listens inside the container, on all addresses
	// ready makes one try to get an answer out of the server at addr.
	ready func(ctx context.Context, addr string) error
}

// A Container is a server in a container. See [servers.Server] for what its methods do.
type Container struct {
	spec   spec
	port   *port
	engine *testcontainers.DockerProvider

	mu     sync.Mutex                      // held during each operation, so that two never overlap
	ctr    *testcontainers.DockerContainer // nil if there is none: closed, or a StartEmpty failed
	killed bool                            // the server was ended by kill
	closed bool
}

var _ servers.Server = (*Container)(nil)

// start makes a Container and starts its server. On failure nothing is left behind.
func start(ctx context.Context, s spec) (*Container, error) {
	engine, err := testcontainers.NewDockerProvider(testcontainers.Generic2DockerOptions(quiet)...)
	if err != nil {
		return nil, fmt.Errorf("containers: %s: start: %w", s.name, err)
	}
	p, err := holdPort()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("containers: %s: start: %w", s.name, err), engine.Close())
	}
	c := &Container{spec: s, port: p, engine: engine}
	ctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	if err := c.create(ctx); err != nil {
		return nil, errors.Join(c.errorf("start", err), c.Close())
	}
	return c, nil
}

// quiet drops testcontainers' reports of progress; the errors say what matters.
var quiet = testcontainers.WithLogger(log.NewNoopLogger())

func (c *Container) errorf(op string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("containers: %s %s: %s: %w", c.spec.name, c.Addr(), op, err)
}

// Addr implements [servers.Server].
func (c *Container) Addr() string { return c.port.addr.String() }

// Pause implements [servers.Server]. The engine freezes all processes of the container.
func (c *Container) Pause() error {
	return c.fault("pause", func(ctx context.Context) error {
		state, err := c.running(ctx)
		if err != nil || state.Paused {
			return err
		}
		_, err = c.engine.Client().ContainerPause(ctx, c.ctr.ID, client.ContainerPauseOptions{})
		return err
	})
}

// Resume implements [servers.Server].
func (c *Container) Resume() error {
	return c.fault("resume", func(ctx context.Context) error {
		state, err := c.running(ctx)
		if err != nil || !state.Paused {
			return err
		}
		_, err = c.engine.Client().ContainerUnpause(ctx, c.ctr.ID, client.ContainerUnpauseOptions{})
		return err
	})
}

// Kill implements [servers.Server]. It returns when the connections are cut, too, and a dial is refused.
func (c *Container) Kill() error {
	return c.fault("kill", func(ctx context.Context) error {
		if c.killed && !c.closed {
			return nil
		}
		if _, err := c.running(ctx); err != nil {
			return err
		}
		return c.kill(ctx)
	})
}

// Start implements [servers.Server].
func (c *Container) Start(ctx context.Context) error {
	return c.restart(ctx, "start", func(ctx context.Context) error {
		if c.ctr == nil {
			return c.create(ctx)
		}
		if err := c.ctr.Start(ctx); err != nil {
			return err
		}
		return c.waitReady(ctx)
	})
}

// StartEmpty implements [servers.Server]. The server gets a new container at the same address.
func (c *Container) StartEmpty(ctx context.Context) error {
	return c.restart(ctx, "start empty", func(ctx context.Context) error {
		if err := c.remove(ctx); err != nil {
			return err
		}
		return c.create(ctx)
	})
}

// Close implements [servers.Server]. It removes the container with its data. If that fails Close may be tried again.
func (c *Container) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	if err := c.remove(ctx); err != nil {
		return c.errorf("close", err)
	}
	c.closed = true
	return c.errorf("close", errors.Join(c.port.release(), c.engine.Close()))
}

func (c *Container) fault(op string, f func(context.Context) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	return c.errorf(op, f(ctx))
}

func (c *Container) restart(ctx context.Context, op string, f func(context.Context) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	switch _, err := c.running(ctx); {
	case err == nil:
		return c.errorf(op, servers.ErrRunning)
	case !errors.Is(err, servers.ErrNotRunning):
		return c.errorf(op, err)
	}
	c.killed = false
	if err := f(ctx); err != nil {
		return c.errorf(op, errors.Join(err, c.killAfterFailure()))
	}
	return nil
}

// killAfterFailure kills what a failed start has left running. Its bound is its own, as the start's may be over.
func (c *Container) killAfterFailure() error {
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	switch _, err := c.running(ctx); {
	case err == nil:
		return c.kill(ctx)
	case !errors.Is(err, servers.ErrNotRunning):
		return err
	}
	c.killed = true
	return nil
}

// running returns the engine's view of the running server, or the error that says why there is none. c.mu is held.
func (c *Container) running(ctx context.Context) (*container.State, error) {
	switch {
	case c.closed:
		return nil, servers.ErrClosed
	case c.ctr == nil:
		return nil, servers.ErrNotRunning
	}
	state, err := c.ctr.State(ctx)
	switch {
	case err != nil:
		return nil, err
	case state.Running:
		return state, nil
	case c.killed:
		return nil, servers.ErrNotRunning
	}
	return nil, fmt.Errorf("%w: exit status %d; log:\n%s", servers.ErrNotRunning, state.ExitCode, c.log(ctx))
}

// kill ends the server and waits until it is gone. c.mu is held.
func (c *Container) kill(ctx context.Context) error {
	if _, err := c.engine.Client().ContainerKill(ctx, c.ctr.ID, client.ContainerKillOptions{Signal: "SIGKILL"}); err != nil {
		return err
	}
	gone := c.engine.Client().ContainerWait(ctx, c.ctr.ID, client.ContainerWaitOptions{Condition: container.WaitConditionNotRunning})
	select {
	case <-gone.Result:
		c.killed = true
		return nil
	case err := <-gone.Error:
		return err
	}
}

// create makes a new container and starts the server in it. On an error c.ctr is what was made. c.mu is held, or
// nobody else knows c.
func (c *Container) create(ctx context.Context) error {
	inside, err := network.ParsePort(c.spec.port)
	if err != nil {
		return err
	}
	parent, err := c.cgroupParent(ctx)
	if err != nil {
		return err
	}
	c.ctr, err = testcontainers.Run(ctx, c.spec.image, quiet,
		testcontainers.WithCmd(c.spec.command()...),
		testcontainers.WithLabels(map[string]string{addrLabel: c.Addr()}),
		testcontainers.WithExposedPorts(inside.String()),
		testcontainers.WithConfigModifier(func(config *container.Config) {
			config.WorkingDir = dataDir
			config.Volumes = map[string]struct{}{dataDir: {}}
		}),
		testcontainers.WithHostConfigModifier(func(config *container.HostConfig) {
			config.CPUShares, config.CgroupParent = cpuShares, parent
			config.PortBindings = network.PortMap{inside: {{
				HostIP:   c.port.addr.Addr(),
				HostPort: strconv.Itoa(int(c.port.addr.Port())),
			}}}
		}),
	)
	if err != nil {
		return err
	}
	return c.waitReady(ctx)
}

// cgroupParent answers the control group that the container is to be in, "" for the engine's choice. Where the engine makes
// the groups itself its choice is one for all containers, so that their own weights do not count against
// processes outside; systemd gives containers half of the machine if they need it.
func (c *Container) cgroupParent(ctx context.Context) (string, error) {
	engine, err := c.engine.Client().Info(ctx, client.InfoOptions{})
	if err != nil || engine.Info.CgroupDriver != "cgroupfs" {
		return "", err
	}
	return "/", nil
}

// remove kills the server and removes the container and its volumes. c.mu is held.
func (c *Container) remove(ctx context.Context) error {
	if c.ctr == nil {
		return nil
	}
	if err := c.ctr.Terminate(ctx, testcontainers.StopTimeout(0)); err != nil {
		return err
	}
	c.ctr = nil
	return nil
}

// waitReady returns nil as soon as the server answers, an error when it ends or ctx does. c.mu is held.
func (c *Container) waitReady(ctx context.Context) error {
	for {
		try, cancel := context.WithTimeout(ctx, tryTimeout)
		err := c.spec.ready(try, c.Addr())
		cancel()
		if err == nil {
			return nil
		}
		if _, err := c.running(ctx); errors.Is(err, servers.ErrNotRunning) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not ready: %w: %w; log:\n%s", ctx.Err(), err, c.log(context.WithoutCancel(ctx)))
		case <-time.After(tryInterval):
		}
	}
}

// log returns the last lines the server wrote.
func (c *Container) log(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	r, err := c.engine.Client().ContainerLogs(ctx, c.ctr.ID, client.ContainerLogsOptions{ShowStdout: true, ShowStderr: true, Tail: "20"})
	if err != nil {
		return err.Error()
	}
	defer r.Close()
	var b strings.Builder
	if _, err := stdcopy.StdCopy(&b, &b, io.LimitReader(r, 1<<16)); err != nil {
		return err.Error()
	}
	return b.String()
}

// loopback is where the engine publishes the ports.
var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// reach connects to a server in a container, for as long as ctx at most.
func reach(ctx context.Context, addr string) (conn net.Conn, hangUp func(), err error) {
	var d net.Dialer
	if conn, err = d.DialContext(ctx, "tcp", addr); err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	return conn, func() {
		stop()
		conn.Close()
	}, nil
}
