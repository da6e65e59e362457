package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver/postgres"
)

// A server is a backend that runs as a local process.
type server struct {
	servers.Server
	url     string
	version string
	pid     func() int
	// requests counts what clients have asked: commands, raft proposals or statements.
	requests func(ctx context.Context, sends []string) (float64, error)
}

func startServer(ctx context.Context, backend string) (*server, error) {
	switch backend {
	case "redis":
		r, err := servers.StartRedis(ctx, nil)
		if err != nil {
			return nil, err
		}
		s := &server{Server: r, url: r.Addr(), pid: r.PID}
		s.version = "Redis " + infoField(ctx, r, "server", "redis_version:")
		s.requests = func(ctx context.Context, sends []string) (float64, error) {
			info, err := r.Do(ctx, "INFO", "commandstats")
			if err != nil {
				return 0, err
			}
			sum := 0.0
			for line := range strings.Lines(fmt.Sprintf("%s", info)) {
				name, rest, _ := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
				for _, command := range sends {
					if name == command {
						calls, _, _ := strings.Cut(rest, ",")
						n, err := strconv.ParseFloat(calls, 64)
						if err != nil {
							return 0, err
						}
						sum += n
					}
				}
			}
			return sum, nil
		}
		return s, nil
	case "etcd":
		e, err := servers.StartEtcd(ctx, nil)
		if err != nil {
			return nil, err
		}
		s := &server{Server: e, url: e.Addr(), pid: e.PID}
		s.requests = func(ctx context.Context, _ []string) (float64, error) {
			return metric(ctx, e.Addr(), "etcd_server_proposals_applied_total ")
		}
		s.version = "etcd"
		return s, nil
	case "postgres":
		p, err := servers.StartPostgres(ctx, &servers.PostgresOptions{Args: []string{
			"-c", "shared_preload_libraries=pg_stat_statements", "-c", "max_connections=300"}})
		if err != nil {
			return nil, err
		}
		s := &server{Server: p, url: p.URL(), pid: p.PID}
		pool, err := pgxpool.New(ctx, s.url)
		if err != nil {
			return nil, err
		}
		defer pool.Close()
		for _, sql := range []string{
			"CREATE EXTENSION pg_stat_statements",
			"CREATE TABLE raw (name text PRIMARY KEY, owner text, expires timestamptz)",
		} {
			if _, err := pool.Exec(ctx, sql); err != nil {
				return nil, err
			}
		}
		if err := postgres.EnsureSchema(ctx, pool, nil); err != nil {
			return nil, err
		}
		if err := pool.QueryRow(ctx, "SELECT 'PostgreSQL ' || current_setting('server_version')").Scan(&s.version); err != nil {
			return nil, err
		}
		s.requests = func(ctx context.Context, _ []string) (n float64, err error) {
			pool, err := pgxpool.New(ctx, s.url)
			if err != nil {
				return 0, err
			}
			defer pool.Close()
			err = pool.QueryRow(ctx, "SELECT coalesce(sum(calls), 0)::float8 FROM pg_stat_statements WHERE toplevel").Scan(&n)
			return n, err
		}
		return s, nil
	}
	return nil, fmt.Errorf("unknown backend %q", backend)
}

func infoField(ctx context.Context, r *servers.Redis, section, field string) string {
	info, err := r.Do(ctx, "INFO", section)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(fmt.Sprintf("%s", info)) {
		if v, ok := strings.CutPrefix(line, field); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

func metric(ctx context.Context, addr, name string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, name); ok {
			return strconv.ParseFloat(strings.TrimSpace(v), 64)
		}
	}
	return 0, fmt.Errorf("etcd has no metric %q", name)
}

// pin puts this process on one processor and the server on another until the function it answers is called. Without it
// the latency of one goroutine has two modes, as the scheduler pleases. It does nothing where that is impossible.
func pin(s *server) (func(), error) {
	if path, _ := exec.LookPath("taskset"); path == "" || runtime.NumCPU() < 2 {
		return func() {}, nil
	}
	set := func(pid int, cpus string) error {
		if out, err := exec.Command("taskset", "-apc", cpus, strconv.Itoa(pid)).CombinedOutput(); err != nil {
			return fmt.Errorf("taskset: %w: %s", err, out)
		}
		return nil
	}
	all := fmt.Sprintf("0-%d", runtime.NumCPU()-1)
	undo := func() {
		_ = set(os.Getpid(), all)
		_ = set(s.pid(), all)
	}
	if err := set(os.Getpid(), "0"); err != nil {
		return nil, err
	}
	if err := set(s.pid(), "1"); err != nil {
		undo()
		return nil, err
	}
	return undo, nil
}
