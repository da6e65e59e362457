package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// PgBouncerOptions says how to run a PgBouncer. The zero value of each field is its default.
type PgBouncerOptions struct {
	// Binary is the program. Default: "pgbouncer" in PATH, else /usr/sbin/pgbouncer.
	Binary string

	// User is as in [PostgresOptions].
	User string

	// PoolMode is "transaction", the default, or "session" or "statement".
	PoolMode string

	// Settings are further lines of its configuration, such as "default_pool_size = 2".
	Settings []string
}

// A PgBouncer is a connection pooler in front of a PostgreSQL server that runs as a local process. It
// implements [Server]; it has no data. It lets everybody in as the superuser of the [Postgres].
type PgBouncer struct{ *process }

var _ Server = (*PgBouncer)(nil)

// StartPgBouncer runs a PgBouncer in front of the server at target, a host:port, and returns when it
// accepts connections; nil options are the defaults. The rest is as with [StartPostgres].
func StartPgBouncer(ctx context.Context, target string, opts *PgBouncerOptions) (*PgBouncer, error) {
	var o PgBouncerOptions
	if opts != nil {
		o = *opts
	}
	if o.Binary == "" {
		o.Binary = "pgbouncer"
		if _, err := exec.LookPath(o.Binary); err != nil {
			o.Binary = "/usr/sbin/pgbouncer"
		}
	}
	binary, err := exec.LookPath(o.Binary)
	if err != nil {
		return nil, fmt.Errorf("servers: pgbouncer: %w", err)
	}
	if o.PoolMode == "" {
		o.PoolMode = "transaction"
	}
	cred, err := unprivileged(o.User)
	if err != nil {
		return nil, fmt.Errorf("servers: pgbouncer: %w", err)
	}
	host, port, err := net.SplitHostPort(target)
	if err != nil {
		return nil, fmt.Errorf("servers: pgbouncer: target: %w", err)
	}
	for attempt := 1; ; attempt++ {
		addr, release, err := ReservePort()
		if err != nil {
			return nil, fmt.Errorf("servers: pgbouncer: choose a port: %w", err)
		}
		_, own, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, errors.Join(err, release())
		}
		config := fmt.Sprintf(`[databases]
* = host=%s port=%s user=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %s
unix_socket_dir =
auth_type = any
pool_mode = %s
max_client_conn = 500
%s
`, host, port, postgresUser, own, o.PoolMode, strings.Join(o.Settings, "\n"))
		p := new(PgBouncer)
		p.process, err = newProcess(spec{
			kind: "pgbouncer",
			addr: addr,
			command: func(_ context.Context, data string) (*exec.Cmd, error) {
				if err := cred.own(data); err != nil {
					return nil, err
				}
				file, pid := filepath.Join(data, "pgbouncer.ini"), filepath.Join(data, "pid")
				if err := os.WriteFile(file, []byte(config+"pidfile = "+pid+"\n"), 0o644); err != nil {
					return nil, err
				}
				if err := os.Remove(pid); err != nil && !errors.Is(err, os.ErrNotExist) {
					return nil, err
				}
				cmd := exec.Command(binary, file)
				cred.become(cmd)
				return cmd, nil
			},
			ready:   func(ctx context.Context, pid int) error { return pgBouncerReady(ctx, addr, p.dataDir(), pid) },
			release: release,
		})
		if err != nil {
			return nil, errors.Join(err, release())
		}
		err = p.Start(ctx)
		if err == nil {
			return p, nil
		}
		err = errors.Join(err, p.Close())
		if attempt == portAttempts || !isTaken(addr) {
			return nil, err
		}
	}
}

// pgBouncerReady returns nil if the process pid has told that it runs and somebody listens at addr.
func pgBouncerReady(ctx context.Context, addr, data string, pid int) error {
	text, err := os.ReadFile(filepath.Join(data, "pid"))
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(text)) != strconv.Itoa(pid) {
		return errors.New("pgbouncer has not told that it runs yet")
	}
	c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	return c.Close()
}

// URL returns the address for clients, as [Postgres.URL] does.
func (p *PgBouncer) URL() string {
	return "postgres://" + postgresUser + "@" + p.Addr() + "/" + postgresDatabase + "?sslmode=disable"
}
