//go:build linux

package servers

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// newPostgres starts a server for one test.
func newPostgres(t *testing.T, opts *PostgresOptions) *Postgres {
	t.Helper()
	leavesNothing(t)
	p, err := StartPostgres(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// mustSQL runs statements and checks what they print.
func mustSQL(t *testing.T, p *Postgres, statements, want string) {
	t.Helper()
	got, err := p.SQL(t.Context(), "", statements)
	if err != nil || got != want {
		t.Fatalf("%s: got %q, %v, want %q", statements, got, err, want)
	}
}

func TestPostgresFaults(t *testing.T) {
	p := newPostgres(t, nil)
	mustSQL(t, p, "CREATE TABLE t (v text); INSERT INTO t VALUES ('a'), ('b|c'); SELECT v, 1 FROM t", "a|1\nb|c|1")
	if _, err := p.SQL(t.Context(), "", "SELECT 1/0"); err == nil || !strings.Contains(err.Error(), "division by zero") {
		t.Errorf("failing statement: got %v, want what the server says", err)
	}
	if _, err := p.SQL(t.Context(), "none", "SELECT 1"); err == nil {
		t.Error("statement in a database that does not exist: got nil, want an error")
	}

	// Pause stops the processes of connections too.
	mustSQL(t, p, "SELECT 1", "1")
	if err := p.Pause(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.SQL(within(t, 300*time.Millisecond), "", "SELECT 1"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("statement while paused: got %v, want deadline exceeded", err)
	}
	if err := p.Resume(); err != nil {
		t.Fatal(err)
	}
	mustSQL(t, p, "SELECT count(*) FROM t", "2")

	// What was committed survives a kill, and a restart recovers.
	addr, pid := p.Addr(), p.PID()
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if left := segments(t); strings.Contains(left, fmt.Sprintf(" %d ", pid)) {
		t.Errorf("shared memory after Kill: got %q, want none of process %d", left, pid)
	}
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustSQL(t, p, "SELECT count(*) FROM t", "2")
	if err := p.RestartImmediate(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustSQL(t, p, "SELECT count(*) FROM t", "2")
	if p.Addr() != addr || p.PID() == pid || p.PID() == 0 {
		t.Errorf("after restarts: got address %s, pid %d, want %s and another pid than %d", p.Addr(), p.PID(), addr, pid)
	}

	// One connection that waits is ended.
	ended := make(chan error, 1)
	ctx := within(t, 20*time.Second)
	go func() {
		_, err := p.SQL(ctx, "", "SELECT pg_sleep(20)")
		ended <- err
	}()
	eventually(t, func() error {
		if n, err := p.TerminateBackends(t.Context()); err != nil || n != 1 {
			return fmt.Errorf("TerminateBackends: got %d, %v, want 1", n, err)
		}
		return nil
	})
	if err := <-ended; err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("statement of a terminated connection: got %v, want an error of the connection", err)
	}

	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := p.StartEmpty(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustSQL(t, p, "SELECT to_regclass('t') IS NULL", "t")

	checkClosedPostgres(t, p)
}

// TestKillPostmaster: who serves a connection goes on with what it does, and the next start waits for that.
func TestKillPostmaster(t *testing.T) {
	p := newPostgres(t, nil)
	mustSQL(t, p, "CREATE TABLE t (v int)", "")
	active := func(statement string) {
		t.Helper()
		eventually(t, func() error {
			n, err := p.SQL(t.Context(), "", "SELECT count(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND state = 'active' AND query LIKE '%"+statement+"%'")
			if err == nil && n != "1" {
				err = fmt.Errorf("statements with %s: got %s, want 1", statement, n)
			}
			return err
		})
	}
	ctx, ended := within(t, 20*time.Second), make(chan error, 1)
	go p.SQL(ctx, "", "SELECT pg_advisory_lock(1); SELECT pg_sleep(20)") // waits, and so ends with the postmaster
	active("pg_sleep")
	go func() {
		_, err := p.SQL(ctx, "", "DO $$ BEGIN INSERT INTO t VALUES (1); WHILE NOT pg_try_advisory_lock(1) LOOP END LOOP; END $$")
		ended <- err
	}()
	active("WHILE NOT")
	if err := p.KillPostmaster(); err != nil {
		t.Fatal(err)
	}
	if pid := p.PID(); pid != 0 {
		t.Errorf("PID without a postmaster: got %d, want 0", pid)
	}
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("statement that does not wait: got %v, want nil", err)
	}
	mustSQL(t, p, "SELECT count(*) FROM t", "1")

	// Kill ends those too that never see it.
	go p.SQL(ctx, "", "DO $$ BEGIN LOOP END LOOP; END $$")
	active("BEGIN LOOP")
	if err := p.KillPostmaster(); err != nil {
		t.Fatal(err)
	}
	if pids, err := processesIn(p.dataDir()); err != nil || len(pids) == 0 {
		t.Errorf("processes without a postmaster: got %v, %v, want one that serves a connection", pids, err)
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if pids, err := processesIn(p.dataDir()); err != nil || len(pids) > 0 {
		t.Errorf("processes after Kill: got %v, %v, want none", pids, err)
	}
}

func segments(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("ipcs", "-m", "-p").Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func checkClosedPostgres(t *testing.T, p *Postgres) {
	t.Helper()
	dir := p.dir
	pid := fmt.Sprintf(" %d ", p.PID())
	if !strings.Contains(segments(t), pid) {
		t.Fatalf("shared memory of a running server: got %q, want a segment of process%s", segments(t), pid)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(segments(t), pid) {
		t.Errorf("shared memory after Close: got %q, want none of process%s", segments(t), pid)
	}
	if files, err := filepath.Glob(dir); err != nil || len(files) > 0 {
		t.Errorf("files after Close: got %v, %v, want none", files, err)
	}
	if err := p.Start(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("Start after Close: got %v, want ErrClosed", err)
	}
}

// TestPostgresLosesWhatWasNotFlushed shows that a kill is a crash of the server: a commit that did not
// wait for its log record is lost.
func TestPostgresLosesWhatWasNotFlushed(t *testing.T) {
	p := newPostgres(t, &PostgresOptions{Args: []string{"-c", "wal_writer_delay=10s"}})
	mustSQL(t, p, "CREATE TABLE t (v int); CHECKPOINT; INSERT INTO t VALUES (1)", "")
	mustSQL(t, p, "SET synchronous_commit = off; INSERT INTO t VALUES (2)", "")
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustSQL(t, p, "SELECT v FROM t", "1")
}

func TestPostgresStandby(t *testing.T) {
	p := newPostgres(t, nil)
	mustSQL(t, p, "CREATE TABLE t (v int); INSERT INTO t VALUES (1)", "")
	s := newPostgres(t, &PostgresOptions{StandbyOf: p})
	mustSQL(t, s, "SELECT pg_is_in_recovery()", "t")
	mustSQL(t, p, "INSERT INTO t VALUES (2)", "")
	eventually(t, func() error {
		if got, err := s.SQL(t.Context(), "", "SELECT count(*) FROM t"); err != nil || got != "2" {
			return fmt.Errorf("rows on the standby: got %q, %v, want 2", got, err)
		}
		return nil
	})
	if err := s.Detach(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustSQL(t, p, "INSERT INTO t VALUES (4)", "")
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	mustSQL(t, s, "SELECT pg_promote()", "t")
	mustSQL(t, s, "INSERT INTO t VALUES (3); SELECT count(*) FROM t", "3")
}

func TestStartPostgresFails(t *testing.T) {
	for name, test := range map[string]struct {
		opts PostgresOptions
		is   error
		text string
	}{
		"NoPrograms": {PostgresOptions{BinDir: "/nowhere"}, exec.ErrNotFound, "/nowhere"},
		"BadSetting": {PostgresOptions{Args: []string{"-c", "no_such_setting=1"}}, ErrNotRunning, "no_such_setting"},
	} {
		t.Run(name, func(t *testing.T) {
			leavesNothing(t)
			p, err := StartPostgres(t.Context(), &test.opts)
			if err == nil {
				p.Close()
			}
			if err == nil || !errors.Is(err, test.is) || !strings.Contains(err.Error(), test.text) {
				t.Errorf("StartPostgres: got %v, want %v and %q", err, test.is, test.text)
			}
		})
	}
}

func TestPgBouncer(t *testing.T) {
	p := newPostgres(t, nil)
	b, err := StartPgBouncer(t.Context(), p.Addr(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	through := func() {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), filepath.Join(p.bin, "psql"), "-XAtq", b.URL(), "-c", "SELECT inet_server_port()").Output()
		if want := p.Addr()[strings.LastIndex(p.Addr(), ":")+1:] + "\n"; err != nil || string(out) != want {
			t.Errorf("port of the server behind: got %q, %v, want %q", out, err, want)
		}
	}
	through()
	if err := b.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := b.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	through()
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}
