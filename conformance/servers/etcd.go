package servers

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

// EtcdOptions says how to run etcd. The zero value of each field is its default.
type EtcdOptions struct {
	// Binary is the program: a path, or a name to be looked up in PATH. It must be etcd 3.5 or later.
	// Default: what [EtcdBinary] answers.
	Binary string

	// Args are further arguments in the form of the command line, such as "--quota-backend-bytes",
	// "1048576". They overrule the defaults of the server; names, directories and addresses they must not.
	Args []string

	// Network puts an [EtcdNetwork] between the members, for [EtcdCluster.Isolate].
	Network bool
}

// An Etcd is one member of an etcd cluster, perhaps its only one, that runs as a local process. It
// implements [Server].
//
// It speaks plain HTTP on 127.0.0.1 only. Start returns when the member answers, which does not mean that
// its cluster has a leader. StartEmpty of the only member makes another cluster, with an id of its own;
// one of several members refuses to start without its data, as etcd does.
type Etcd struct {
	*process
	peer  string // where it listens for others,
	via   string // and where they reach it
	joins bool   // a cluster that is there already; guarded by process.mu
}

var _ Server = (*Etcd)(nil)

// EtcdCluster is a cluster of several members on one machine.
type EtcdCluster struct {
	// Members are its members, in no particular order. Each can be paused, killed and started by itself.
	Members []*Etcd

	network *EtcdNetwork // nil if they reach each other directly
}

// StartEtcd runs a new, empty etcd of one member and returns when it serves; nil options are the
// defaults. The context bounds the start only, which takes at most 30 s beside a build of the program.
//
// Errors are those of [EtcdBinary]; an error of the server itself carries the end of its log. On failure
// no process and no file is left behind.
func StartEtcd(ctx context.Context, opts *EtcdOptions) (*Etcd, error) {
	c, err := StartEtcdCluster(ctx, 1, opts)
	if err != nil {
		return nil, err
	}
	return c.Members[0], nil
}

// StartEtcdCluster is [StartEtcd] for a cluster of several members.
func StartEtcdCluster(ctx context.Context, members int, opts *EtcdOptions) (*EtcdCluster, error) {
	if members < 1 {
		return nil, fmt.Errorf("servers: etcd: %d members: want at least 1", members)
	}
	var o EtcdOptions
	if opts != nil {
		o = *opts
	}
	var err error
	if o.Binary == "" {
		o.Binary, err = EtcdBinary(ctx)
	} else {
		o.Binary, err = exec.LookPath(o.Binary)
	}
	if err != nil {
		return nil, fmt.Errorf("servers: etcd: %w", err)
	}
	for attempt := 1; ; attempt++ {
		c, err := startEtcdCluster(ctx, members, o)
		if err == nil {
			return c, nil
		}
		// Reserved ports are kept from everybody on Linux; elsewhere another process may be faster.
		if attempt == portAttempts || !errors.Is(err, errPortTaken) {
			return nil, err
		}
	}
}

var errPortTaken = errors.New("a port was taken by somebody else")

func startEtcdCluster(ctx context.Context, members int, o EtcdOptions) (*EtcdCluster, error) {
	c := &EtcdCluster{}
	var peers, names []string // names as --initial-cluster wants them
	for range members {
		m, err := newEtcd()
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		c.Members = append(c.Members, m)
		peers = append(peers, m.peer)
	}
	if o.Network {
		var err error
		if c.network, err = NewEtcdNetwork(peers); err != nil {
			return nil, errors.Join(err, c.Close())
		}
		peers = c.network.Addrs()
	}
	for i, m := range c.Members {
		m.via = peers[i]
		names = append(names, m.name()+"=http://"+m.via)
	}
	token := rand.Text()
	var starts sync.WaitGroup
	errs := make([]error, members)
	for i, m := range c.Members {
		m.spec.command = func(_ context.Context, data string) (*exec.Cmd, error) {
			own := token
			if members == 1 {
				own = rand.Text() // read only if there is no data yet
			}
			client := "http://" + m.Addr()
			args := []string{
				"--name", m.name(), "--data-dir", filepath.Join(data, "etcd"),
				"--listen-client-urls", client, "--advertise-client-urls", client,
				"--listen-peer-urls", "http://" + m.peer, "--initial-advertise-peer-urls", "http://" + m.via,
				"--initial-cluster", strings.Join(names, ","), "--initial-cluster-token", own,
				"--log-level", "warn",
			}
			if m.joins {
				args = append(args, "--initial-cluster-state", "existing")
			}
			return exec.Command(o.Binary, append(args, o.Args...)...), nil
		}
		starts.Go(func() { errs[i] = m.Start(ctx) })
	}
	starts.Wait()
	err := errors.Join(errs...)
	if err == nil {
		err = c.awaitHealth(ctx)
	}
	if err != nil {
		closed := c.Close()
		for _, m := range c.Members {
			if isTaken(m.Addr()) || isTaken(m.peer) {
				err = fmt.Errorf("%w: %w", errPortTaken, err)
			}
		}
		return nil, errors.Join(err, closed)
	}
	return c, nil
}

// newEtcd makes a member that was not started. Its name is its address.
func newEtcd() (*Etcd, error) {
	addr, releaseClient, err := ReservePort()
	if err != nil {
		return nil, fmt.Errorf("servers: etcd: choose a port: %w", err)
	}
	peer, releasePeer, err := ReservePort()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("servers: etcd: choose a port: %w", err), releaseClient())
	}
	release := func() error { return errors.Join(releaseClient(), releasePeer()) }
	m := &Etcd{peer: peer}
	m.process, err = newProcess(spec{
		kind:    "etcd",
		addr:    addr,
		ready:   func(ctx context.Context, _ int) error { return m.ready(ctx) },
		release: release,
	})
	if err != nil {
		return nil, errors.Join(err, release())
	}
	return m, nil
}

func (e *Etcd) name() string { return e.Addr() }

// awaitHealth waits until the cluster has a leader and every member knows it.
func (c *EtcdCluster) awaitHealth(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for _, m := range c.Members {
		for {
			try, cancelTry := context.WithTimeout(ctx, tryTimeout)
			err := m.healthy(try)
			cancelTry()
			if err == nil {
				break
			}
			select {
			case <-ctx.Done():
				return m.errorf("start", fmt.Errorf("no leader: %w; log:\n%s", err, m.Log()))
			case <-time.After(tryInterval):
			}
		}
	}
	return nil
}

// healthy returns nil if the member takes part in a cluster that has a leader.
func (e *Etcd) healthy(ctx context.Context) error {
	_, err := etcdHTTP(ctx, e.Addr(), http.MethodGet, "/health?exclude=NOSPACE", "")
	return err
}

// ready returns nil if the member answers. Its name, which is its address, tells that it is this one: the
// port is kept for it.
func (e *Etcd) ready(ctx context.Context) error {
	members, self, err := e.members(ctx)
	if refused := (*refusal)(nil); errors.As(err, &refused) && refused.status == http.StatusBadRequest {
		return e.healthy(ctx) // authentication is on: it tells its name to nobody
	}
	if err != nil {
		return err
	}
	if members[self] != e.name() {
		return fmt.Errorf("another etcd answers at this address: %q", members[self])
	}
	return nil
}

// members asks the member for the names of all that it knows, by their ids, and for its own id.
func (e *Etcd) members(ctx context.Context) (names map[string]string, self string, err error) {
	text, err := e.Call(ctx, "/v3/cluster/member/list", `{"linearizable": false}`)
	if err != nil {
		return nil, "", err
	}
	var list struct {
		Header struct {
			Member string `json:"member_id"`
		}
		Members []struct{ ID, Name string }
	}
	if err := json.Unmarshal(text, &list); err != nil {
		return nil, "", err
	}
	names = make(map[string]string)
	for _, m := range list.Members {
		names[m.ID] = m.Name
	}
	return names, list.Header.Member, nil
}

// Replace kills a member of several, removes it from the cluster, and adds it again as another member without data, at
// the same address. The others must be able to decide without it.
func (c *EtcdCluster) Replace(ctx context.Context, m *Etcd) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := m.Kill(); err != nil {
		return err
	}
	others := slices.DeleteFunc(slices.Clone(c.Members), func(other *Etcd) bool { return other == m })
	for {
		// A change gets lost if the member was the leader, and is refused for a while after the one before it.
		done, err := others[0].exchange(ctx, m)
		if done {
			break
		}
		if ctx.Err() != nil {
			return m.errorf("replace", errors.Join(err, ctx.Err()))
		}
		time.Sleep(tryInterval)
	}
	m.mu.Lock()
	m.joins = true
	m.mu.Unlock()
	return m.StartEmpty(ctx)
}

// exchange tries to make the next change by which m gives its place among the members to one that has no name yet, and
// answers whether none is left to make.
func (e *Etcd) exchange(ctx context.Context, m *Etcd) (done bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	members, _, err := e.members(ctx)
	if err != nil {
		return false, err
	}
	added := false
	for id, name := range members {
		if name == m.name() {
			_, err := e.Call(ctx, "/v3/cluster/member/remove", fmt.Sprintf(`{"ID": %q}`, id))
			return false, err
		}
		added = added || name == ""
	}
	if added {
		return true, nil
	}
	_, err = e.Call(ctx, "/v3/cluster/member/add", fmt.Sprintf(`{"peerURLs": [%q]}`, "http://"+m.via))
	return false, err
}

// Isolate cuts a member off from the others, but not from clients, until [EtcdCluster.Heal]; see [EtcdNetwork.Isolate]. It needs
// the option Network.
func (c *EtcdCluster) Isolate(ctx context.Context, m *Etcd) error {
	if c.network == nil {
		return m.errorf("isolate", errors.New("the cluster was started without a network"))
	}
	return c.network.Isolate(ctx, slices.Index(c.Members, m), m.Addr())
}

// Heal ends what [EtcdCluster.Isolate] began.
func (c *EtcdCluster) Heal() {
	if c.network != nil {
		c.network.Heal()
	}
}

// Leader asks the members that run which one leads, and answers it, or nil while there is none.
func (c *EtcdCluster) Leader(ctx context.Context) *Etcd {
	for _, m := range c.Members {
		try, cancel := context.WithTimeout(ctx, tryTimeout)
		name, err := m.leader(try)
		cancel()
		if err != nil {
			continue
		}
		for _, leader := range c.Members {
			if leader.name() == name {
				return leader
			}
		}
	}
	return nil
}

// leader answers the name of the member that this one takes for the leader.
func (e *Etcd) leader(ctx context.Context) (string, error) {
	text, err := e.Call(ctx, "/v3/maintenance/status", "{}")
	if err != nil {
		return "", err
	}
	var status struct{ Leader string }
	if err := json.Unmarshal(text, &status); err != nil {
		return "", err
	}
	members, _, err := e.members(ctx)
	return members[status.Leader], err
}

// Call sends one request in the JSON form of etcd's protocol straight to the member, on a connection of its own, and returns
// the JSON that it answers: the path is such as "/v3/lease/leases", and binary fields are in base64. It takes the first
// MiB of the answer. An error has what the member said, if it said anything.
func (e *Etcd) Call(ctx context.Context, path, body string) ([]byte, error) {
	return EtcdCall(ctx, e.Addr(), path, body)
}

// EtcdCall is [Etcd.Call] for a member that was started in another way, at that address.
func EtcdCall(ctx context.Context, addr, path, body string) ([]byte, error) {
	return etcdHTTP(ctx, addr, http.MethodPost, path, body)
}

// etcdHTTP makes one request, on a connection of its own.
func etcdHTTP(ctx context.Context, addr, method, path, body string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+addr+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: (&net.Dialer{}).DialContext}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = &refusal{resp.StatusCode, fmt.Sprintf("%s: %s", resp.Status, bytes.TrimSpace(text))}
	}
	return text, err
}

// refusal is an answer that says no.
type refusal struct {
	status int
	text   string
}

func (r *refusal) Error() string { return r.text }

// Close closes all members.
func (c *EtcdCluster) Close() error {
	var errs []error
	for _, m := range c.Members {
		errs = append(errs, m.Close())
	}
	if c.network != nil {
		errs = append(errs, c.network.Close())
	}
	return errors.Join(errs...)
}

// CopyData copies the data of a member that was killed to the directory to, which must not exist.
func (e *Etcd) CopyData(to string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.checkStopped(); err != nil {
		return e.errorf("copy data", err)
	}
	return e.errorf("copy data", os.CopyFS(to, os.DirFS(e.dataDir())))
}

// StartCopy is Start with the data that [Etcd.CopyData] has put into the directory from: the server is back
// at the time of the copy, as after a disk was restored.
func (e *Etcd) StartCopy(ctx context.Context, from string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	err := e.checkStopped()
	if err == nil {
		err = os.RemoveAll(e.dataDir())
	}
	if err == nil {
		err = os.CopyFS(e.dataDir(), os.DirFS(from))
	}
	if err == nil {
		err = e.start(ctx, false)
	}
	return e.errorf("start copy", err)
}

// checkStopped returns nil if the child does not run. e.mu is held.
func (e *Etcd) checkStopped() error {
	switch {
	case e.closed:
		return ErrClosed
	case e.child != nil && !e.child.hasExited():
		return ErrRunning
	}
	return nil
}

// The module that the program is built from, when it is not installed: its go.mod and go.sum. They have
// other names here because a directory with a go.mod could not be embedded. To change the version, give
// them their own names in an empty directory, run go get -tool there, and copy them back.
var (
	//go:embed etcdserver/etcd.mod
	etcdMod []byte
	//go:embed etcdserver/etcd.sum
	etcdSum []byte
)

// etcdBuildTimeout bounds a build, downloads of modules included.
const etcdBuildTimeout = 20 * time.Minute

// EtcdBinary answers the path of an etcd program: "etcd" in PATH or, if there is none, one that was built
// from its Go module. The build needs the go command, takes minutes the first time, and is kept in
// the user's cache directory ([os.UserCacheDir]) under "fencelock". Two processes that need it at the same
// time build it once.
//
// The error matches exec.ErrNotFound if there is no go command either, and carries the end of what the
// build printed.
func EtcdBinary(ctx context.Context) (string, error) {
	if path, err := exec.LookPath("etcd"); err == nil {
		return filepath.Abs(path)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	version := sha256.New()
	for _, part := range [][]byte{etcdMod, etcdSum, []byte(runtime.Version())} {
		version.Write(part)
		version.Write([]byte{0})
	}
	dir := filepath.Join(cache, "fencelock", fmt.Sprintf("etcd-%x", version.Sum(nil)[:8]))
	binary := filepath.Join(dir, "etcd")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	unlock, err := lockFile(ctx, filepath.Join(dir, "lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(binary); err == nil {
		return binary, nil
	}
	if err := buildEtcd(ctx, dir, binary); err != nil {
		return "", fmt.Errorf("build etcd: %w", err)
	}
	return binary, nil
}

func buildEtcd(ctx context.Context, dir, binary string) error {
	goCommand, err := exec.LookPath("go")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, etcdBuildTimeout)
	defer cancel()
	src, err := os.MkdirTemp(dir, "build-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(src)
	for name, text := range map[string][]byte{"go.mod": etcdMod, "go.sum": etcdSum} {
		if err := os.WriteFile(filepath.Join(src, name), text, 0o644); err != nil {
			return err
		}
	}
	built := filepath.Join(src, "etcd")
	cmd := exec.CommandContext(ctx, goCommand, "build", "-trimpath", "-o", built, "go.etcd.io/etcd/server/v3")
	cmd.Dir = src
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=", "CGO_ENABLED=0")
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out[max(0, len(out)-logTail):])
	}
	// A rename, so that a program that is there is always a whole one.
	return os.Rename(built, binary)
}
