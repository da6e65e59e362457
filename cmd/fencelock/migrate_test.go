//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"syscall"
	"testing"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver/migrate"
)

// pair is a migration between two backends.
type pair struct {
	t        *testing.T
	from, to string
}

// client is the environment of a client in the phase. A crashed one is in the way for 3 s.
func (m pair) client(phase migrate.Phase) place {
	q := url.Values{"from": {m.from}, "to": {m.to}, "phase": {string(phase)}, "phase_ttl": {"3s"}}
	return atURL("migrate://?" + q.Encode())
}

// migrate runs fencelock migrate.
func (m pair) migrate(code int, args ...string) (stdout, stderr string) {
	m.t.Helper()
	return place{}.want(m.t, code, append([]string{"migrate", "--from", m.from, "--to", m.to}, args...)...)
}

func (m pair) status() migrationEntry {
	m.t.Helper()
	stdout, _ := m.migrate(0, "status", "--json")
	var s migrationEntry
	if err := json.Unmarshal([]byte(stdout), &s); err != nil {
		m.t.Fatalf("status --json: %v in %s", err, stdout)
	}
	return s
}

// phases are those of all clients.
func (s migrationEntry) phases() (all []migrate.Phase) {
	for _, c := range s.Clients {
		all = append(all, c.Phase)
	}
	return all
}

func TestMigrate(t *testing.T) {
	t.Parallel()
	t.Run("FileToFile", func(t *testing.T) {
		t.Parallel()
		testMigrate(t, "file://"+t.TempDir(), "file://"+t.TempDir(), "file", "file")
	})
	t.Run("RedisToEtcd", func(t *testing.T) {
		t.Parallel()
		r := startRedis(t, nil)
		e, err := servers.StartEtcd(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
		testMigrate(t, "redis://"+r.Addr(), "etcd://"+e.Addr(), "redis", "etcd")
	})
}

// testMigrate takes all steps forth and back, with a holder that moves from phase to phase.
func testMigrate(t *testing.T, from, to, old, young string) {
	m := pair{t, from, to}
	s := m.status()
	if s.Phase != migrate.From || len(s.Clients) != 0 || s.Old.Backend != old || s.New.Backend != young ||
		!s.Advance.Safe || s.Advance.Target != migrate.Both || s.Rollback.Target != "" || s.Rollback.Safe {
		t.Fatalf("status before the migration: got %+v", s)
	}
	m.migrate(exitUsage, "rollback")
	last := uint64(0)
	holder, _ := m.client(migrate.From).hold(t, "plain", "--name", "x", "--label", "the holder")
	for _, step := range []struct {
		move string
		to   migrate.Phase
	}{{"advance", migrate.Both}, {"advance", migrate.To}, {"rollback", migrate.Both}, {"rollback", migrate.From}} {
		stdout, _ := m.migrate(0, step.move)
		if stdout != string(step.to)+"\n" {
			t.Fatalf("%s: got %q, want %s", step.move, stdout, step.to)
		}
		before := m.status()
		if before.Phase != step.to || before.Old.Recorded == "" && before.New.Recorded == "" || len(before.Clients) != 1 {
			t.Fatalf("status after %s: got %+v, want phase %s and one client", step.move, before, step.to)
		}
		waiter := m.client(step.to).startChild(t, "plain", "--name", "x", "--label", "the holder")
		waiter.stderr.await(t, "waiting for x, held by \"the holder\" (")
		between := m.status()
		if got := fmt.Sprint(between.phases()); len(between.Clients) != 2 || !strings.Contains(got, string(step.to)) {
			t.Fatalf("status with clients of two phases: got phases %v", got)
		}
		holder.finishes(0)
		waiter.started()
		holder = waiter
		after := m.status()
		held := append(after.Old.Held, after.New.Held...)
		if len(held) == 0 || held[0].Name != "x" || held[0].Label != "the holder" {
			t.Fatalf("status while x is held in phase %s: got %+v", step.to, held)
		}
		greatest := last
		for _, h := range held {
			greatest = max(greatest, uint64(h.Token))
		}
		if greatest == last {
			t.Fatalf("token in phase %s: got at most %d, want more than %d (T1)", step.to, greatest, last)
		}
		last = greatest
	}
	text, _ := m.migrate(0, "status")
	for _, want := range []string{"phase from\n", "clients: 1 in from, 0 in both, 0 in to\n", "old backend, " + old + ": 1 held\n",
		"new backend, " + young + ": 0 held\n", "\nadvance to both: safe\nrollback: no phase further on\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("status: got\n%s\nwant it to contain %q", text, want)
		}
	}
	holder.finishes(0)
}

// TestMigrateWaits takes a step that is not safe: it is refused, waited for, interrupted, and done once the client that is in
// its way has ended.
func TestMigrateWaits(t *testing.T) {
	t.Parallel()
	m := pair{t, "file://" + t.TempDir(), "file://" + t.TempDir()}
	holder, _ := m.client(migrate.From).hold(t, "plain", "--name", "x")
	m.migrate(0, "advance")
	s := m.status()
	if s.Advance.Safe || !strings.Contains(s.Advance.Waits, "phase from, host ") || !s.Rollback.Safe {
		t.Fatalf("status with a client in from: got %+v, %+v, want advance not safe because of it", s.Advance, s.Rollback)
	}
	for _, args := range [][]string{{"--wait", "no"}, {"--wait", "300ms"}} {
		_, stderr := m.migrate(exitNotSafe, append(args, "advance")...)
		if !strings.Contains(stderr, "clients two phases away: phase from, host ") || !strings.Contains(stderr, "nothing changed") {
			t.Errorf("advance %v: got %q, want to be told what is in the way", args, stderr)
		}
		if s := m.status(); s.Phase != migrate.Both {
			t.Fatalf("phase after advance %v: got %s, want both", args, s.Phase)
		}
	}
	args := []string{"migrate", "advance", "--from", m.from, "--to", m.to}
	for _, test := range []struct {
		sig  syscall.Signal
		code int
	}{{syscall.SIGINT, 130}, {syscall.SIGTERM, 143}} {
		moving := place{}.start(t, args...)
		moving.stderr.await(t, "waiting for clients two phases away")
		if err := moving.cmd.Process.Signal(test.sig); err != nil {
			t.Fatal(err)
		}
		moving.ends(test.code)
		if s := m.status(); s.Phase != migrate.Both {
			t.Fatalf("phase after an advance that %v ended: got %s, want both", test.sig, s.Phase)
		}
	}
	moving := place{}.start(t, args...)
	moving.stderr.await(t, "waiting for clients two phases away")
	holder.finishes(0)
	moving.ends(0)
	_, stderr := m.client(migrate.From).want(t, exitUnavailable, "run", "--name", "x", "--", "true")
	if !strings.Contains(stderr, "two phases away") {
		t.Errorf("client in from after advance to to: got %q, want it refused", stderr)
	}
	m.client(migrate.To).want(t, 0, "run", "--name", "x", "--", "true")
}

// TestMigrateUsage makes the mistakes there are, with passwords in the URLs.
func TestMigrateUsage(t *testing.T) {
	t.Parallel()
	const secret = "battery-staple"
	file, bad := "file://"+t.TempDir(), "redis://user:"+secret+"@127.0.0.1:1/0"
	for _, test := range []struct {
		code int
		want string
		args []string
	}{
		{exitUsage, "status, advance and rollback", []string{"--from", file, "--to", file}},
		{exitUsage, "there is no forth", []string{"forth", "--from", file, "--to", file}},
		{exitUsage, "--from and --to", []string{"status", "--from", file}},
		{exitUsage, "--wait", []string{"advance", "--from", file, "--to", file, "--wait", "soon"}},
		{exitUsage, "--to: ", []string{"status", "--from", file, "--to", "nosuch://:" + secret + "@host"}},
		{exitUsage, "--from: ", []string{"status", "--from", bad + "?no-such-parameter=" + secret, "--to", file}},
		{exitUnavailable, "", []string{"status", "--from", bad, "--to", file}},
		{exitUnavailable, "", []string{"advance", "--from", file, "--to", bad}},
	} {
		stdout, stderr := place{}.want(t, test.code, append([]string{"migrate"}, test.args...)...)
		if !strings.Contains(stderr, test.want) || strings.Contains(stdout+stderr, secret) {
			t.Errorf("migrate %q: got %q %q, want it to say %q, and no password", test.args, stdout, stderr, test.want)
		}
	}
	stdout, _ := place{[]string{"FENCELOCK_FROM_URL=" + file, "FENCELOCK_TO_URL=file://" + t.TempDir()}}.want(t, 0, "migrate", "status")
	if !strings.HasPrefix(stdout, "phase from\n") {
		t.Errorf("status with URLs from the environment: got %q", stdout)
	}
}
