package lab

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
)

// Images are those of the servers in containers. The zero value of each field is its default.
type Images struct {
	Redis    string // default redis:8
	Etcd     string // default quay.io/coreos/etcd:v3.5.21
	Postgres string // default postgres:17
}

// InContainers is the backend with its servers in containers, which the command docker runs, or why there is none. They share
// the network of this machine and listen on 127.0.0.1; the clients and what is put in between remain processes. To stop a
// server is docker pause there, and to kill it docker kill. Nil images are the defaults.
func (b *Backend) InContainers(images *Images) (in *Backend, why string) {
	var o Images
	if images != nil {
		o = *images
	}
	redis := redisInContainer(cmp.Or(o.Redis, "redis:8"))
	in = &Backend{Name: b.Name, TTL: b.TTL, noNetwork: b.noNetwork, contained: b}
	switch b {
	case Redis:
		in.start = func(ctx context.Context) (*system, error) { return oneRedis(ctx, redis) }
	case Redlock:
		in.start = func(ctx context.Context) (*system, error) { return fiveRedis(ctx, redis) }
	case Etcd:
		in.start = func(ctx context.Context) (*system, error) {
			return etcdInContainers(ctx, cmp.Or(o.Etcd, "quay.io/coreos/etcd:v3.5.21"))
		}
	case Postgres:
		in.start = func(ctx context.Context) (*system, error) {
			return postgresInContainer(ctx, cmp.Or(o.Postgres, "postgres:17"))
		}
	default:
		return nil, cmp.Or(b.noServers, "its servers are run as processes only")
	}
	return in, ""
}

// containerLabel is a label of all containers of the lab; its value is the lab's process id. One that was killed itself leaves
// them behind.
const containerLabel = "fencelock.lab"

const (
	engineTimeout = time.Minute     // for what the engine does
	pullTimeout   = 5 * time.Minute // for the start of a container, which may pull its image
)

// container is a server in a container. It does what a lab asks of a [servers.Server]; what the engine finds wrong about
// the order of calls is an error.
type container struct {
	addr    string
	release func() error // gives the port back
	image   string
	command []string
	ready   func(ctx context.Context) error
	mu      sync.Mutex
	id      string // empty if there is none
}

var _ servers.Server = (*container)(nil)

// newContainer prepares a server that listens on a port of its own.
func newContainer(image string, command func(port string) []string) (*container, error) {
	addr, release, err := servers.ReservePort()
	if err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	_, port, _ := net.SplitHostPort(addr)
	return &container{addr: addr, release: release, image: image, command: command(port)}, nil
}

// docker runs the command, and answers what it prints.
func docker(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "docker", args...)
	var failed bytes.Buffer
	cmd.Stderr = &failed
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("lab: docker %s: %w: %s", args[0], err, bytes.TrimSpace(failed.Bytes()))
	}
	return strings.TrimSpace(string(out)), nil
}

// do is docker for the container, within a time of its own.
func (c *container) do(args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	_, err := docker(ctx, append(args, c.id)...)
	return err
}

func (c *container) locked(f func() error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return f()
}

func (c *container) Addr() string { return c.addr }

func (c *container) Pause() error { return c.locked(func() error { return c.do("pause") }) }

func (c *container) Resume() error { return c.locked(func() error { return c.do("unpause") }) }

// Kill returns when the server is gone.
func (c *container) Kill() error {
	return c.locked(func() error { return first(c.do("kill"), c.do("wait")) })
}

func (c *container) Start(ctx context.Context) error {
	return c.locked(func() error { return first(c.do("start"), c.await(ctx)) })
}

func (c *container) StartEmpty(ctx context.Context) error {
	return c.locked(func() error { return first(c.remove(), c.run(ctx), c.await(ctx)) })
}

func (c *container) Close() error {
	return c.locked(func() error { return errors.Join(c.remove(), c.release()) })
}

// run makes the container. Its data are a volume, since a container's own files may be many times slower.
func (c *container) run(ctx context.Context) error {
	driver, err := docker(ctx, "info", "--format", "{{.CgroupDriver}}")
	if err != nil {
		return err
	}
	// By default all containers together have the weight of one process, and a server would get less than any of its clients.
	args := []string{"run", "--detach", "--network", "host", "--label", fmt.Sprintf("%s=%d", containerLabel, os.Getpid()), "--volume", "/data", "--workdir", "/data", "--cpu-shares", "8192"}
	if driver == "cgroupfs" {
		args = append(args, "--cgroup-parent", "/")
	}
	// To the end, even if nobody waits for it any more: a container whose id is unknown would stay.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pullTimeout)
	defer cancel()
	c.id, err = docker(ctx, slices.Concat(args, []string{c.image}, c.command)...)
	return err
}

// remove ends the server and removes its data.
func (c *container) remove() error {
	if c.id == "" {
		return nil
	}
	err := c.do("rm", "--force", "--volumes")
	c.id = ""
	return err
}

// await waits until the server answers.
func (c *container) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		try, cancel := context.WithTimeout(ctx, time.Second)
		err := c.ready(try)
		cancel()
		if err == nil {
			return nil
		}
		if sleep(ctx, 20*time.Millisecond) != nil {
			log, _ := docker(context.WithoutCancel(ctx), "logs", "--tail", "5", c.id)
			return fmt.Errorf("lab: a server in a container does not answer: %w; %s", err, log)
		}
	}
}

// begin runs new servers, and closes all if one fails.
func begin(ctx context.Context, all ...*container) error {
	errs := make([]error, len(all))
	var each sync.WaitGroup
	for i, c := range all {
		each.Go(func() { errs[i] = c.locked(func() error { return c.run(ctx) }) })
	}
	each.Wait()
	for _, c := range all {
		if err := errors.Join(errs...); err == nil {
			errs = append(errs, c.locked(func() error { return c.await(ctx) }))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return errors.Join(err, closeAll(all))
	}
	return nil
}

func closeAll[S servers.Server](all []S) (err error) {
	for _, s := range all {
		err = errors.Join(err, s.Close())
	}
	return err
}

// redisContainer takes commands.
type redisContainer struct{ *container }

func (r redisContainer) Do(ctx context.Context, args ...string) (any, error) {
	return servers.RedisDo(ctx, r.addr, args...)
}

func redisInContainer(image string) startOfRedis {
	return func(ctx context.Context, fsync string) (servers.Server, error) {
		c, err := newContainer(image, func(port string) []string {
			return []string{"redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", "/data", "--save", "", "--appendonly", "yes", "--appendfsync", fsync}
		})
		if err != nil {
			return nil, err
		}
		r := redisContainer{c}
		c.ready = func(ctx context.Context) error {
			_, err := r.Do(ctx, "PING")
			return err
		}
		return r, begin(ctx, c)
	}
}

// etcdContainer takes requests in JSON.
type etcdContainer struct{ *container }

func (e etcdContainer) Call(ctx context.Context, path, body string) ([]byte, error) {
	return servers.EtcdCall(ctx, e.addr, path, body)
}

// leads says whether it leads; while nobody does it fails.
func (e etcdContainer) leads(ctx context.Context) (bool, error) {
	text, err := e.Call(ctx, "/v3/maintenance/status", "{}")
	if err != nil {
		return false, err
	}
	var status struct {
		Header struct {
			Member string `json:"member_id"`
		}
		Leader string
	}
	if err := json.Unmarshal(text, &status); err != nil {
		return false, err
	}
	if status.Leader == "" || status.Leader == "0" {
		return false, errNoLeader
	}
	return status.Leader == status.Header.Member, nil
}

var errNoLeader = errors.New("lab: etcd has no leader")

func etcdInContainers(ctx context.Context, image string) (*system, error) {
	var peers, names []string // names as --initial-cluster wants them
	var releases []func() error
	release := func() (err error) {
		for _, f := range releases {
			err = errors.Join(err, f())
		}
		return err
	}
	for range 3 {
		peer, port, err := servers.ReservePort()
		if err != nil {
			return nil, errors.Join(err, release())
		}
		releases, peers = append(releases, port), append(peers, peer)
	}
	network, err := servers.NewEtcdNetwork(peers)
	if err != nil {
		return nil, errors.Join(err, release())
	}
	releases = append(releases, network.Close)
	via := network.Addrs()
	for i, addr := range via {
		names = append(names, "m"+strconv.Itoa(i)+"=http://"+addr)
	}
	s := &system{url: etcdURL}
	token := rand.Text()
	var all []*container
	for i, peer := range peers {
		c, err := newContainer(image, func(port string) []string {
			client := "http://127.0.0.1:" + port
			return []string{
				"etcd", "--name", "m" + strconv.Itoa(i), "--data-dir", "/data/etcd", "--listen-client-urls", client, "--advertise-client-urls", client,
				"--listen-peer-urls", "http://" + peer, "--initial-advertise-peer-urls", "http://" + via[i], "--initial-cluster", strings.Join(names, ","),
				"--initial-cluster-token", token, "--log-level", "warn",
			}
		})
		if err != nil {
			return nil, errors.Join(err, closeAll(all), release())
		}
		e := etcdContainer{c}
		c.ready = func(ctx context.Context) error {
			_, err := e.leads(ctx)
			return err
		}
		all = append(all, c)
		s.servers = append(s.servers, e)
	}
	if err := begin(ctx, all...); err != nil {
		return nil, errors.Join(err, release())
	}
	s.leader = func(ctx context.Context) (servers.Server, error) {
		for _, m := range s.servers {
			try, cancel := context.WithTimeout(ctx, time.Second)
			leads, err := m.(etcdContainer).leads(try)
			cancel()
			if err == nil && leads {
				return m, nil
			}
		}
		return nil, errNoLeader
	}
	s.isolate = func(ctx context.Context, server int) error {
		return network.Isolate(ctx, server, s.servers[server].Addr())
	}
	s.heal = network.Heal
	s.close = func() error { return errors.Join(closeAll(s.servers), release()) }
	return s, nil
}

// postgresContainer takes statements.
type postgresContainer struct{ *container }

// postgresProgram finds a program of the server.
const postgresProgram = "$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)/"

func (p postgresContainer) sql(ctx context.Context, statement string) (string, error) {
	_, port, _ := net.SplitHostPort(p.addr)
	return docker(ctx, "exec", p.id, "sh", "-c", `exec `+postgresProgram+`psql -X -q -A -t -w -h 127.0.0.1 -p "$0" -U postgres -c "$1"`, port, statement)
}

func (p postgresContainer) TerminateBackends(ctx context.Context) (int, error) {
	out, err := p.sql(ctx, `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()`)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(out)
}

// servePostgres makes the data if there are none and serves them, as somebody else than root.
const servePostgres = `set -e
if [ "$(id -u)" = 0 ]; then
	mkdir -p data
	chown postgres . data
	exec setpriv --reuid postgres --regid postgres --init-groups sh -c "$2" sh "$1" "$2"
fi
bin=` + postgresProgram + `
if ! [ -e data/PG_VERSION ]; then
	"${bin}initdb" -D data -U postgres -A trust -E UTF8 --locale=C --no-sync
fi
rm -f data/postmaster.pid # of a server that was killed
exec "${bin}postgres" -D data -h 127.0.0.1 -p "$1" -k '' -c max_connections=400`

func postgresInContainer(ctx context.Context, image string) (*system, error) {
	c, err := newContainer(image, func(port string) []string { return []string{"sh", "-c", servePostgres, "sh", port, servePostgres} })
	if err != nil {
		return nil, err
	}
	p := postgresContainer{c}
	c.ready = func(ctx context.Context) error {
		_, err := p.sql(ctx, "SELECT 1")
		return err
	}
	if err := begin(ctx, c); err != nil {
		return nil, err
	}
	s := single(p, func(addr string) string { return "postgres://postgres@" + addr + "/postgres?sslmode=disable" })
	s.request = postgresRequest
	return s, nil
}
