package main

import (
	"context"
	"encoding/json"
	"errors"
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

// A server is a backend that runs as local processes. What is done to it by the methods of [servers.Server] is done to
// the first of them; close ends all.
type server struct {
	servers.Server
	sent
	url     string
	addrs   []string // of all processes
	pids    []func() int
	version string
	// requests counts what clients have asked: commands, raft proposals or statements.
	requests func(ctx context.Context) (float64, error)
	close    func() error
}

func startServer(ctx context.Context, backend string) (*server, error) {
	switch backend {
	case "redis":
		return startRedis(ctx, 1)
	case "redlock":
		return startRedis(ctx, 5)
	case "etcd":
		return startEtcd(ctx)
	case "postgres":
		return startPostgres(ctx)
	}
	return nil, fmt.Errorf("backend %q: want one of %s", backend, strings.Join(backends, ", "))
}

func startRedis(ctx context.Context, masters int) (_ *server, err error) {
	s := &server{close: func() error { return nil }}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	s.requests = func(context.Context) (float64, error) { return float64(s.commands.Load()), nil }
	for range masters {
		r, err := servers.StartRedis(ctx, nil)
		if err != nil {
			return nil, err
		}
		others := s.close
		s.close = func() error { return errors.Join(others(), r.Close()) }
		s.addrs, s.pids = append(s.addrs, r.Addr()), append(s.pids, r.PID)
		if s.Server == nil {
			s.Server, s.url = r, r.Addr()
			info, err := r.Do(ctx, "INFO", "server")
			if err != nil {
				return nil, err
			}
			for line := range strings.Lines(fmt.Sprint(info)) {
				if v, ok := strings.CutPrefix(line, "redis_version:"); ok {
					s.version = "Redis " + strings.TrimSpace(v)
				}
			}
		}
	}
	return s, nil
}

func startEtcd(ctx context.Context) (*server, error) {
	e, err := servers.StartEtcd(ctx, nil)
	if err != nil {
		return nil, err
	}
	s := &server{Server: e, url: e.Addr(), addrs: []string{e.Addr()}, pids: []func() int{e.PID}, close: e.Close}
	s.requests = func(ctx context.Context) (float64, error) {
		return metric(ctx, e.Addr(), "etcd_server_proposals_applied_total ")
	}
	text, err := get(ctx, "http://"+e.Addr()+"/version")
	var v struct {
		Server string `json:"etcdserver"`
	}
	if err == nil {
		err = json.Unmarshal(text, &v)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("version of etcd: %w", err), s.close())
	}
	s.version = "etcd " + v.Server
	return s, nil
}

func startPostgres(ctx context.Context) (_ *server, err error) {
	p, err := servers.StartPostgres(ctx, &servers.PostgresOptions{Args: []string{
		"-c", "shared_preload_libraries=pg_stat_statements", "-c", "max_connections=300"}})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	s := &server{Server: p, url: p.URL(), addrs: []string{p.Addr()}, pids: []func() int{p.PID}, close: p.Close}
	s.requests = func(ctx context.Context) (n float64, err error) {
		pool, err := pgxpool.New(ctx, s.url)
		if err != nil {
			return 0, err
		}
		defer pool.Close()
		err = pool.QueryRow(ctx, "SELECT coalesce(sum(calls), 0)::float8 FROM pg_stat_statements "+
			"WHERE toplevel AND query NOT LIKE '%pg_stat_statements%'").Scan(&n)
		return n, err
	}
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
	err = pool.QueryRow(ctx, "SELECT 'PostgreSQL ' || current_setting('server_version')").Scan(&s.version)
	return s, err
}

func get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

func metric(ctx context.Context, addr, name string) (float64, error) {
	text, err := get(ctx, "http://"+addr+"/metrics")
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

// machine describes what this runs on.
func machine() string {
	s := fmt.Sprintf("%s/%s, %d processors", runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return s // not on Linux
	}
	for line := range strings.Lines(string(text)) {
		if name, model, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return s + " (" + strings.TrimSpace(model) + ")"
		}
	}
	return s
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
	both := func(client, servers string) error {
		err := set(os.Getpid(), client)
		for _, pid := range s.pids {
			err = errors.Join(err, set(pid(), servers))
		}
		return err
	}
	all := fmt.Sprintf("0-%d", runtime.NumCPU()-1)
	threads := runtime.GOMAXPROCS(1) // as Go would have it on one processor, or its threads would take that from each other
	undo := func() {
		runtime.GOMAXPROCS(threads)
		_ = both(all, all)
	}
	if err := both("0", "1"); err != nil {
		undo()
		return nil, err
	}
	return undo, nil
}
