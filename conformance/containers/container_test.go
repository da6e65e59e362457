package containers

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"

	"github.com/fencelock/fencelock/conformance/servers"
)

// Every test runs on both programs, each from the image that its setting names; if it names none, from the default.
var programs = []struct {
	name  string
	image string
	start func(context.Context, *Options) (*Container, error)
}{
	{"Redis", os.Getenv("FENCELOCK_REDIS_IMAGE"), StartRedis},
	{"Valkey", os.Getenv("FENCELOCK_VALKEY_IMAGE"), StartValkey},
}

// onBoth runs the test on a new server of each program, and closes it.
func onBoth(t *testing.T, o Options, test func(t *testing.T, c *Container)) {
	for _, p := range programs {
		t.Run(p.name, func(t *testing.T) {
			o := o
			o.Image = p.image
			c, err := p.start(bounded(t), &o)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				must(t, "Close", c.Close())
				if n := count(t, addrLabel+"="+c.Addr()); n != 0 {
					t.Errorf("containers after Close: got %d, want 0", n)
				}
			})
			test(t, c)
		})
	}
}

// bounded returns a context that also serves clean-ups.
func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 3*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func must(t *testing.T, op string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: got %v, want nil", op, err)
	}
}

func mustFail(t *testing.T, op string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", op, err, want)
	}
}

const patience = 10 * time.Second // for a reply that must come

// A conn is a raw connection to a server.
type conn struct {
	net.Conn
	r *bufio.Reader
}

func dial(t *testing.T, c *Container) *conn {
	t.Helper()
	raw, err := net.DialTimeout("tcp", c.Addr(), patience)
	must(t, "dial", err)
	t.Cleanup(func() { raw.Close() })
	return &conn{raw, bufio.NewReader(raw)}
}

func (c *conn) send(t *testing.T, command string) {
	t.Helper()
	c.SetWriteDeadline(time.Now().Add(patience))
	_, err := fmt.Fprintf(c, "%s\r\n", command)
	must(t, "send "+command, err)
}

// receive reads one reply: a line with its type, or the content of a bulk string.
func (c *conn) receive(within time.Duration) (string, error) {
	c.SetReadDeadline(time.Now().Add(within))
	line, err := c.r.ReadString('\n')
	if err != nil {
		return line, err
	}
	var size int
	if _, err := fmt.Sscanf(line, "$%d\r\n", &size); err != nil || size < 0 {
		return strings.TrimSuffix(line, "\r\n"), nil
	}
	bulk := make([]byte, size+2)
	_, err = io.ReadFull(c.r, bulk)
	return string(bulk[:size]), err
}

func (c *conn) expect(t *testing.T, command, want string) {
	t.Helper()
	if got, err := c.receive(patience); got != want || err != nil {
		t.Fatalf("%s: got %q, %v, want %q", command, got, err, want)
	}
}

func (c *conn) expectSilence(t *testing.T, command string) {
	t.Helper()
	if got, err := c.receive(300 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%s: got %q, %v, want no reply", command, got, err)
	}
}

// do sends a command on a connection of its own and checks the reply.
func do(t *testing.T, c *Container, command, want string) {
	t.Helper()
	conn := dial(t, c)
	conn.send(t, command)
	conn.expect(t, command, want)
}

func TestStart(t *testing.T) {
	onBoth(t, Options{}, func(t *testing.T, c *Container) {
		do(t, c, "PING", "+PONG")
		mustFail(t, "Start of a running server", c.Start(bounded(t)), servers.ErrRunning)
		mustFail(t, "StartEmpty of a running server", c.StartEmpty(bounded(t)), servers.ErrRunning)
		do(t, c, "PING", "+PONG")
	})
}

func TestRunsTheNamedProgram(t *testing.T) {
	onBoth(t, Options{}, func(t *testing.T, c *Container) {
		conn := dial(t, c)
		conn.send(t, "INFO server")
		info, err := conn.receive(patience)
		must(t, "INFO server", err)
		_, version, valkey := strings.Cut(info, "valkey_version:")
		if !valkey {
			_, version, _ = strings.Cut(info, "redis_version:")
		}
		version, _, _ = strings.Cut(version, "\r\n")
		if want := c.spec.name == "valkey-server"; valkey != want || version == "" {
			t.Fatalf("INFO of %s: got Valkey %v, version %q, want Valkey %v", c.spec.name, valkey, version, want)
		}
		t.Logf("%s %s", c.spec.name, version)
	})
}

func TestPauseHangsAndResumeAnswers(t *testing.T) {
	onBoth(t, Options{}, func(t *testing.T, c *Container) {
		before := dial(t, c)
		before.send(t, "PING")
		before.expect(t, "PING", "+PONG")

		must(t, "Pause", c.Pause())
		must(t, "a second Pause", c.Pause())
		before.send(t, "ECHO before")
		before.expectSilence(t, "ECHO to a paused server")
		during := dial(t, c)
		during.send(t, "ECHO during")
		during.expectSilence(t, "ECHO to a paused server on a new connection")
		mustFail(t, "Start of a paused server", c.Start(bounded(t)), servers.ErrRunning)

		must(t, "Resume", c.Resume())
		must(t, "a second Resume", c.Resume())
		before.expect(t, "ECHO sent during the pause", "before")
		during.expect(t, "ECHO sent during the pause on a new connection", "during")
	})
}

func TestKillCutsAndRefuses(t *testing.T) {
	onBoth(t, Options{}, func(t *testing.T, c *Container) {
		conn := dial(t, c)
		conn.send(t, "PING")
		conn.expect(t, "PING", "+PONG")

		must(t, "Kill", c.Kill())
		_, err := net.DialTimeout("tcp", c.Addr(), patience)
		mustFail(t, "dial after Kill", err, syscall.ECONNREFUSED)
		if got, err := conn.receive(patience); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("read after Kill: got %q, %v, want a cut connection", got, err)
		}

		must(t, "a second Kill", c.Kill())
		mustFail(t, "Pause after Kill", c.Pause(), servers.ErrNotRunning)
		mustFail(t, "Resume after Kill", c.Resume(), servers.ErrNotRunning)
	})
}

func TestKillOfAPausedServer(t *testing.T) {
	onBoth(t, Options{AppendFsync: "always"}, func(t *testing.T, c *Container) {
		do(t, c, "SET key 1", "+OK")
		must(t, "Pause", c.Pause())
		must(t, "Kill", c.Kill())
		must(t, "Start", c.Start(bounded(t)))
		do(t, c, "GET key", "1")
	})
}

func TestStartKeepsData(t *testing.T) {
	onBoth(t, Options{AppendFsync: "always"}, func(t *testing.T, c *Container) {
		addr := c.Addr()
		for _, value := range []string{"1", "2"} {
			do(t, c, "SET key "+value, "+OK")
			must(t, "Kill", c.Kill())
			must(t, "Start", c.Start(bounded(t)))
			do(t, c, "GET key", value)
		}
		if c.Addr() != addr {
			t.Errorf("Addr after a restart: got %s, want %s", c.Addr(), addr)
		}
	})
}

func TestStartWithNothingOnDisk(t *testing.T) {
	t.Run("Default", func(t *testing.T) { testForgets(t, Options{}) })
	t.Run("ArgsOverrule", func(t *testing.T) {
		testForgets(t, Options{AppendFsync: "always", Args: []string{"--appendonly", "no"}})
	})
	// A server that is asked to end, instead of killed, would write a snapshot.
	t.Run("KillIsNoShutdown", func(t *testing.T) { testForgets(t, Options{Args: []string{"--save", "3600 1"}}) })
}

func testForgets(t *testing.T, o Options) {
	onBoth(t, o, func(t *testing.T, c *Container) {
		do(t, c, "SET key 1", "+OK")
		must(t, "Kill", c.Kill())
		must(t, "Start", c.Start(bounded(t)))
		do(t, c, "GET key", "$-1")
	})
}

func TestStartEmptyLosesData(t *testing.T) {
	onBoth(t, Options{AppendFsync: "always"}, func(t *testing.T, c *Container) {
		addr := c.Addr()
		do(t, c, "SET key 1", "+OK")
		must(t, "Kill", c.Kill())
		must(t, "StartEmpty", c.StartEmpty(bounded(t)))
		do(t, c, "GET key", "$-1")

		// The new one is as good as the first.
		do(t, c, "SET key 2", "+OK")
		must(t, "Kill after StartEmpty", c.Kill())
		must(t, "Start after StartEmpty", c.Start(bounded(t)))
		do(t, c, "GET key", "2")
		if c.Addr() != addr {
			t.Errorf("Addr after StartEmpty: got %s, want %s", c.Addr(), addr)
		}
		if n := count(t, addrLabel+"="+addr); n != 1 {
			t.Errorf("containers after StartEmpty: got %d, want 1", n)
		}
	})
}

func TestServerThatEndedByItself(t *testing.T) {
	onBoth(t, Options{AppendFsync: "always"}, func(t *testing.T, c *Container) {
		do(t, c, "SET key 1", "+OK")
		conn := dial(t, c)
		conn.send(t, "SHUTDOWN NOSAVE")
		if got, err := conn.receive(patience); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("SHUTDOWN: got %q, %v, want a cut connection", got, err)
		}
		for deadline := time.Now().Add(patience); ; {
			if err := c.Pause(); errors.Is(err, servers.ErrNotRunning) {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("Pause for %v after SHUTDOWN: want %v", patience, servers.ErrNotRunning)
			}
			c.Resume()
		}
		mustFail(t, "Kill after SHUTDOWN", c.Kill(), servers.ErrNotRunning)
		must(t, "Start after SHUTDOWN", c.Start(bounded(t)))
		do(t, c, "GET key", "1")
	})
}

func TestCloseLeavesNoContainer(t *testing.T) {
	for _, state := range []struct {
		name string
		into func(*Container) error
	}{
		{"Running", func(*Container) error { return nil }},
		{"Paused", (*Container).Pause},
		{"Killed", (*Container).Kill},
	} {
		t.Run(state.name, func(t *testing.T) {
			onBoth(t, Options{}, func(t *testing.T, c *Container) {
				label := addrLabel + "=" + c.Addr()
				if n := count(t, label); n != 1 {
					t.Fatalf("containers before Close: got %d, want 1", n)
				}
				volume := dataVolume(t, c)
				must(t, state.name, state.into(c))
				must(t, "Close", c.Close())
				if n := count(t, label); n != 0 {
					t.Errorf("containers after Close: got %d, want 0", n)
				}
				if there := hasVolume(t, volume); there {
					t.Errorf("volume of the data after Close: it is there, want it gone")
				}
				// The address is given up, too.
				l, err := net.Listen("tcp", c.Addr())
				must(t, "listen at the address of a closed server", err)
				l.Close()

				must(t, "a second Close", c.Close())
				mustFail(t, "Pause after Close", c.Pause(), servers.ErrClosed)
				mustFail(t, "Resume after Close", c.Resume(), servers.ErrClosed)
				mustFail(t, "Kill after Close", c.Kill(), servers.ErrClosed)
				mustFail(t, "Start after Close", c.Start(bounded(t)), servers.ErrClosed)
				mustFail(t, "StartEmpty after Close", c.StartEmpty(bounded(t)), servers.ErrClosed)
			})
		})
	}
}

// dataVolume answers the name of the volume of the server's data.
func dataVolume(t *testing.T, c *Container) string {
	t.Helper()
	is := inspect(t, c)
	for _, m := range is.Mounts {
		if m.Type == mount.TypeVolume && m.Destination == dataDir {
			return m.Name
		}
	}
	t.Fatalf("mounts: got %+v, want a volume at %s", is.Mounts, dataDir)
	return ""
}

func hasVolume(t *testing.T, name string) bool {
	t.Helper()
	engine, err := testcontainers.NewDockerClientWithOpts(bounded(t))
	must(t, "reach the engine", err)
	defer engine.Close()
	found, err := engine.VolumeList(bounded(t), client.VolumeListOptions{Filters: client.Filters{}.Add("name", name)})
	must(t, "list volumes", err)
	return len(found.Items) > 0
}

func inspect(t *testing.T, c *Container) *container.InspectResponse {
	t.Helper()
	is, err := c.ctr.Inspect(bounded(t))
	must(t, "inspect a container", err)
	return is
}

// TestWeight: a server does not share the processors' time of one process with all other containers.
func TestWeight(t *testing.T) {
	onBoth(t, Options{}, func(t *testing.T, c *Container) {
		engine, err := c.engine.Client().Info(bounded(t), client.InfoOptions{})
		must(t, "ask the engine", err)
		parent := ""
		if engine.Info.CgroupDriver == "cgroupfs" {
			parent = "/" // beside the groups of everybody else
		}
		is := inspect(t, c).HostConfig
		if is.CPUShares != cpuShares || is.CgroupParent != parent {
			t.Errorf("weight of a container: got %d in the control group %q, want %d in %q", is.CPUShares, is.CgroupParent, cpuShares, parent)
		}
	})
}

func TestFailedStartLeavesNoContainer(t *testing.T) {
	for _, p := range programs {
		t.Run(p.name, func(t *testing.T) {
			if c, err := p.start(bounded(t), &Options{Image: p.image, AppendFsync: "sometimes"}); err == nil {
				c.Close()
				t.Error("start with AppendFsync sometimes: got nil, want an error")
			}
			c, err := p.start(bounded(t), &Options{Image: p.image, Args: []string{"--no-such-setting", "1"}})
			if err == nil {
				c.Close()
				t.Fatal("start with an argument the server does not know: got nil, want an error")
			}
			if mustFail(t, "start", err, servers.ErrNotRunning); !strings.Contains(err.Error(), "no-such-setting") {
				t.Errorf("start: got %v, want the server's own words", err)
			}
			if n := count(t, addrLabel); n != 0 {
				t.Errorf("containers after a failed start: got %d, want 0", n)
			}
		})
	}
}

// count returns how many containers, running or not, of this test process carry the label.
func count(t *testing.T, label string) int {
	t.Helper()
	engine, err := testcontainers.NewDockerClientWithOpts(bounded(t))
	must(t, "reach the engine", err)
	defer engine.Close()
	found, err := engine.ContainerList(bounded(t), client.ContainerListOptions{
		All:     true,
		Filters: client.Filters{}.Add("label", label, "org.testcontainers.sessionId="+testcontainers.SessionID()),
	})
	must(t, "list containers", err)
	return len(found.Items)
}
