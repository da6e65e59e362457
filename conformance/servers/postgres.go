package servers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// PostgresOptions says how to run a PostgreSQL server. The zero value of each field is its default.
type PostgresOptions struct {
	// BinDir is the directory with postgres, initdb, psql and pg_basebackup, of version 13 or later.
	// Default: where PATH finds postgres if initdb is there too, else the newest of
	// /usr/lib/postgresql/*/bin.
	BinDir string

	// User is the system's user that the server runs as if this process is root, whom PostgreSQL
	// refuses. Default "postgres". Somebody else than root runs servers as himself.
	User string

	// StandbyOf makes the server an asynchronous hot standby of that one, which must run when this one
	// is started empty. To promote it: SQL(ctx, "", "SELECT pg_promote()").
	StandbyOf *Postgres

	// Args are further arguments in the form of the command line, such as "-c", "max_connections=20".
	// They overrule the settings below, which port, data directory and addresses must not.
	Args []string
}

// A Postgres is a PostgreSQL server that runs as a local process. It implements [Server].
//
// It listens on 127.0.0.1 only, without TLS, and lets everybody in as the superuser "postgres". It does not
// sync to the disk, which makes no difference to a process that is killed: what was written is in the
// files. Whether a commit writes before it answers is left to synchronous_commit, so what that loses is
// lost here as well. The words of [Server] mean here: Pause and Kill hit the server processes of all
// connections too.
type Postgres struct {
	*process
	bin  string
	cred *credential
}

var _ Server = (*Postgres)(nil)

// StartPostgres runs a new, empty PostgreSQL server and returns when it accepts connections; nil options
// are the defaults. The context bounds the start only, which takes at most 30 s.
//
// Errors match exec.ErrNotFound if there is no PostgreSQL; an error of the server itself carries the end
// of its log. On failure no process and no file is left behind.
func StartPostgres(ctx context.Context, opts *PostgresOptions) (*Postgres, error) {
	var o PostgresOptions
	if opts != nil {
		o = *opts
	}
	bin, err := postgresBinDir(o.BinDir)
	if err != nil {
		return nil, fmt.Errorf("servers: postgres: %w", err)
	}
	cred, err := unprivileged(o.User)
	if err != nil {
		return nil, fmt.Errorf("servers: postgres: %w", err)
	}
	for attempt := 1; ; attempt++ {
		addr, release, err := ReservePort()
		if err != nil {
			return nil, fmt.Errorf("servers: postgres: choose a port: %w", err)
		}
		p, err := startPostgresAt(ctx, addr, release, bin, cred, o)
		if err == nil {
			return p, nil
		}
		if attempt == portAttempts || !isTaken(addr) {
			return nil, err
		}
	}
}

func startPostgresAt(ctx context.Context, addr string, release func() error, bin string, cred *credential, o PostgresOptions) (*Postgres, error) {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, errors.Join(err, release())
	}
	p := &Postgres{bin: bin, cred: cred}
	fromTemplate, err := clusters.use(bin, cred)
	if err != nil {
		return nil, errors.Join(err, release())
	}
	p.process, err = newProcess(spec{
		kind: "postgres",
		addr: addr,
		command: func(ctx context.Context, data string) (*exec.Cmd, error) {
			return p.command(ctx, data, port, o, fromTemplate)
		},
		ready:   func(_ context.Context, pid int) error { return postgresReady(p.dataDir(), pid) },
		release: func() error { return errors.Join(release(), clusters.leave()) },
	})
	if err != nil {
		return nil, errors.Join(err, release(), clusters.leave())
	}
	if err := p.Start(ctx); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// command makes the data directory if it is empty, and the command that serves it.
func (p *Postgres) command(ctx context.Context, data, port string, o PostgresOptions, fromTemplate func(context.Context, string) error) (*exec.Cmd, error) {
	if err := p.cred.own(data); err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Join(data, "PG_VERSION")); errors.Is(err, os.ErrNotExist) {
		if o.StandbyOf != nil {
			err = p.backup(ctx, o.StandbyOf, data)
		} else {
			err = fromTemplate(ctx, data)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := await(ctx, "the end of all who served connections", func() error { return idle(data) }); err != nil {
		return nil, err
	}
	// The process it names has ended, and its number may belong to somebody else by now.
	if err := os.Remove(filepath.Join(data, pidFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	args := []string{"-D", data, "-p", port, "-h", "127.0.0.1", "-k", "",
		"-c", "fsync=off", "-c", "full_page_writes=off", "-c", "shared_buffers=32MB", "-c", "max_connections=200",
		"-c", "dynamic_shared_memory_type=mmap"} // mmap: nothing is left in /dev/shm
	cmd := exec.Command(filepath.Join(p.bin, "postgres"), append(args, o.Args...)...)
	p.cred.become(cmd)
	return cmd, nil
}

// idle answers nil if no process works in the directory, as all those of a server do in that of its data.
func idle(dir string) error {
	pids, err := processesIn(dir)
	if err == nil && len(pids) > 0 {
		err = fmt.Errorf("processes %v work in %s", pids, dir)
	}
	return err
}

// backup makes the data directory of a standby.
func (p *Postgres) backup(ctx context.Context, primary *Postgres, data string) error {
	host, port, err := net.SplitHostPort(primary.Addr())
	if err != nil {
		return err
	}
	return p.cred.run(ctx, filepath.Join(p.bin, "pg_basebackup"), "-D", data, "-h", host, "-p", port,
		"-U", "postgres", "-w", "-R", "-X", "stream", "-c", "fast", "--no-sync")
}

// pidFile is what a running server writes about itself: on line 1 its process id, on line 7 key and id of
// its shared memory, on line 8 its state.
const pidFile = "postmaster.pid"

func postgresReady(data string, pid int) error {
	text, err := os.ReadFile(filepath.Join(data, pidFile))
	if err != nil {
		return err
	}
	lines := strings.Split(string(text), "\n")
	if len(lines) < 8 || lines[0] != strconv.Itoa(pid) {
		return errors.New("the server has not told its state yet")
	}
	if state := strings.TrimSpace(lines[7]); state != "ready" && state != "standby" {
		return fmt.Errorf("the server is %s", state)
	}
	return nil
}

// Database is the database, and User the superuser, that each server has.
const (
	postgresDatabase = "postgres"
	postgresUser     = "postgres"
)

// URL returns the address for clients: the database "postgres" as its superuser, without TLS.
func (p *Postgres) URL() string {
	return "postgres://" + postgresUser + "@" + p.Addr() + "/" + postgresDatabase + "?sslmode=disable"
}

// SQL runs statements in one database, "" for the one of URL, with psql, straight on the server, and
// returns what they print: a line for each row, its columns separated by "|". It stops at the first
// error. It waits until ctx ends, 10 s if that has no deadline; a paused server answers nothing.
func (p *Postgres) SQL(ctx context.Context, database, statements string) (string, error) {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, doTimeout)
		defer cancel()
	}
	host, port, err := net.SplitHostPort(p.Addr())
	if err != nil {
		return "", p.errorf("sql", err)
	}
	if database == "" {
		database = postgresDatabase
	}
	cmd := exec.CommandContext(ctx, filepath.Join(p.bin, "psql"), "-X", "-q", "-A", "-t", "-w", "-v", "ON_ERROR_STOP=1",
		"-h", host, "-p", port, "-U", postgresUser, "-d", database, "-f", "-")
	cmd.Stdin = strings.NewReader(statements)
	cmd.WaitDelay = time.Second
	var out, failed bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &failed
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return "", p.errorf("sql", fmt.Errorf("%w: %s", err, strings.TrimSpace(failed.String())))
	}
	return strings.TrimSuffix(out.String(), "\n"), nil
}

// TerminateBackends ends the connections of all clients, as an administrator does with
// pg_terminate_backend, and returns how many there were.
func (p *Postgres) TerminateBackends(ctx context.Context) (int, error) {
	out, err := p.SQL(ctx, "", `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
		WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()`)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(out)
}

// Detach cuts a standby off from its primary without anybody's being told: it stays as it is, and what is written from then
// on is lost if it is promoted.
func (p *Postgres) Detach(ctx context.Context) error {
	for _, statement := range []string{"ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()"} {
		if _, err := p.SQL(ctx, "", statement); err != nil {
			return err
		}
	}
	return await(ctx, "a standby that receives nothing", func() error {
		n, err := p.SQL(ctx, "", "SELECT count(*) FROM pg_stat_wal_receiver")
		if err == nil && n != "0" {
			err = errors.New("it is attached")
		}
		return err
	})
}

// RestartImmediate ends the server by the shutdown mode "immediate", which tells clients but saves nothing,
// and starts it again: it recovers from its log, as after a crash. ctx bounds the start.
func (p *Postgres) RestartImmediate(ctx context.Context) error {
	if err := p.end("restart", syscall.SIGQUIT); err != nil {
		return err
	}
	return p.Start(ctx)
}

// KillPostmaster ends the process that accepts connections, and none of those that serve them, as happens when the system is
// out of memory. It returns when that process is gone. The others go when they see it: at once if they wait for something,
// else when they have done what they do. Start waits for them, which it can on Linux only; Kill ends them.
func (p *Postgres) KillPostmaster() error { return p.end("kill postmaster", syscall.SIGKILL) }

// end sends a signal to the postmaster, and returns when that is gone.
func (p *Postgres) end(op string, sig syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.checkRunning(); err != nil {
		return p.errorf(op, err)
	}
	if err := p.child.cmd.Process.Signal(sig); err != nil {
		return p.errorf(op, err)
	}
	select {
	case <-p.child.exited:
	case <-time.After(signalTimeout):
		return p.errorf(op, fmt.Errorf("still there %v after the signal %v", signalTimeout, sig))
	}
	p.pid.Store(0)
	p.killed, p.frozen = true, nil
	return nil
}

// Kill implements [Server].
func (p *Postgres) Kill() error {
	err := p.process.Kill()
	if err != nil && !errors.Is(err, ErrNotRunning) {
		return err
	}
	if err := p.killLeft(); err != nil {
		return p.errorf("kill", err)
	}
	// A server that is killed leaves a segment of System V shared memory, which only its next start on the same
	// data would remove.
	file := filepath.Join(p.dataDir(), pidFile)
	text, _ := os.ReadFile(file)
	if lines := strings.Split(string(text), "\n"); len(lines) > 6 {
		if key := strings.Fields(lines[6]); len(key) == 2 && os.Remove(file) == nil {
			_ = exec.Command("ipcrm", "-m", key[1]).Run() // 56 bytes; it may be gone
		}
	}
	return err
}

// killLeft ends the processes that have outlived the postmaster.
func (p *Postgres) killLeft() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.child == nil || !p.child.hasExited() { // somebody has started it meanwhile
		return nil
	}
	pids, err := processesIn(p.dataDir())
	if err != nil || len(pids) == 0 {
		return err
	}
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have gone
	}
	ctx, cancel := context.WithTimeout(context.Background(), signalTimeout)
	defer cancel()
	return await(ctx, "the end of all processes", func() error { return idle(p.dataDir()) })
}

// Close implements [Server].
func (p *Postgres) Close() error {
	_ = p.Kill() // what it could not do, Close tells
	return p.process.Close()
}

// postgresBinDir finds the programs.
func postgresBinDir(dir string) (string, error) {
	var candidates []string
	if dir != "" {
		candidates = []string{dir}
	} else {
		if path, err := exec.LookPath("postgres"); err == nil {
			if path, err = filepath.EvalSymlinks(path); err == nil {
				candidates = append(candidates, filepath.Dir(path))
			}
		}
		installed, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
		slices.SortFunc(installed, func(a, b string) int { return postgresVersion(b) - postgresVersion(a) })
		candidates = append(candidates, installed...)
	}
	for _, dir := range candidates {
		if _, err := exec.LookPath(filepath.Join(dir, "postgres")); err != nil {
			continue
		}
		if _, err := exec.LookPath(filepath.Join(dir, "initdb")); err == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("postgres and initdb: %w in %q", exec.ErrNotFound, candidates)
}

func postgresVersion(dir string) int {
	v, _ := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
	return v
}

// clusters makes data directories. initdb is slow, so it is run once, into a template, and copied; the
// template goes with the last server that was made from it.
var clusters template

type template struct {
	mu    sync.Mutex
	users int
	dirs  map[string]string // by directory of programs and user
}

// use announces a server, and answers how to fill its data directory. leave must follow.
func (t *template) use(bin string, cred *credential) (fill func(ctx context.Context, data string) error, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.users++
	return func(ctx context.Context, data string) error {
		from, err := t.make(ctx, bin, cred)
		if err != nil {
			return err
		}
		return cred.run(ctx, "cp", "-a", from+"/.", data)
	}, nil
}

func (t *template) make(ctx context.Context, bin string, cred *credential) (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	key := fmt.Sprint(bin, cred)
	if dir, ok := t.dirs[key]; ok {
		return filepath.Join(dir, "data"), nil
	}
	dir, err := os.MkdirTemp("", "fencelock-server-initdb-")
	if err != nil {
		return "", err
	}
	data := filepath.Join(dir, "data")
	if err = os.Mkdir(data, 0o700); err == nil {
		if err = cred.own(data); err == nil {
			err = cred.run(ctx, filepath.Join(bin, "initdb"), "-D", data, "-U", postgresUser, "-A", "trust",
				"-E", "UTF8", "--locale=C", "--wal-segsize=1", "--no-sync")
		}
	}
	if err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	if t.dirs == nil {
		t.dirs = make(map[string]string)
	}
	t.dirs[key] = dir
	return data, nil
}

func (t *template) leave() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.users--
	if t.users > 0 {
		return nil
	}
	var errs []error
	for _, dir := range t.dirs {
		errs = append(errs, os.RemoveAll(dir))
	}
	t.dirs = nil
	return errors.Join(errs...)
}

// run runs a program as the user and puts what it wrote into the error.
func (c *credential) run(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	c.become(cmd)
	cmd.Dir = os.TempDir() // somewhere the user may be
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return fmt.Errorf("%s: %w: %s", filepath.Base(name), err, bytes.TrimSpace(out))
	}
	return nil
}
