//go:build linux

package servers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func TestRedisDo(t *testing.T) {
	r := newRedis(t, nil)
	mustDo(t, r, "PONG", "PING")
	mustDo(t, r, "OK", "SET", "k", "line 1\r\nline 2")
	mustDo(t, r, "line 1\r\nline 2", "GET", "k")
	mustDo(t, r, int64(-1), "PTTL", "k")
	mustDo(t, r, nil, "GET", "none")
	mustDo(t, r, "", "ECHO", "")
	mustDo(t, r, "OK", "CONFIG", "SET", "maxmemory-policy", "noeviction")
	mustDo(t, r, "OK", "DEBUG", "SET-ACTIVE-EXPIRE", "1")
	mustDo(t, r, "OK", "SCRIPT", "FLUSH")
	mustDo(t, r, "OK", "FLUSHALL")

	script := `return {1, 'two', false, {redis.error_reply('CODE text'), {}}, redis.status_reply('OK')}`
	got, err := r.Do(t.Context(), "EVAL", script, "0")
	want := []any{int64(1), "two", nil, []any{&RedisError{Prefix: "CODE", Message: "CODE text"}, []any{}}, "OK"}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("EVAL: got %#v, %v, want %#v", got, err, want)
	}

	_, err = r.Do(t.Context(), "EVALSHA", strings.Repeat("0", 40), "0")
	var answered *RedisError
	if !errors.As(err, &answered) || answered.Prefix != "NOSCRIPT" {
		t.Errorf("EVALSHA of an unknown script: got %v, want a RedisError NOSCRIPT", err)
	}
	if _, err := r.Do(t.Context()); err == nil {
		t.Error("empty command: got nil, want an error")
	}

	stats, err := r.Do(t.Context(), "INFO", "commandstats")
	if text, _ := stats.(string); err != nil || !strings.Contains(text, "cmdstat_ping:calls=") {
		t.Errorf("INFO commandstats: got %q, %v, want the count of PING", text, err)
	}
	if log := r.Log(); !strings.Contains(log, "Ready to accept connections") {
		t.Errorf("Log: got %q, want the server's ready message", log)
	}
}

func TestRedisPassword(t *testing.T) {
	r := newRedis(t, &RedisOptions{Password: `two "words"`})
	mustDo(t, r, "PONG", "PING")

	for password, want := range map[string]string{"": "NOAUTH", "wrong": "WRONGPASS"} {
		c, err := dialRedis(t.Context(), r.Addr(), password)
		if err == nil {
			_, err = c.do(t.Context(), "PING")
			c.Close()
		}
		var answered *RedisError
		if !errors.As(err, &answered) || answered.Prefix != want {
			t.Errorf("PING with password %q: got %v, want %s", password, err, want)
		}
	}
	if err := r.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustDo(t, r, "PONG", "PING")
}

func TestRedisPauseHangsRequests(t *testing.T) {
	r := newRedis(t, nil)
	for range 2 { // the second Pause finds what it wants and does nothing
		if err := r.Pause(); err != nil {
			t.Fatal(err)
		}
	}
	if state, err := stateOf(r.PID()); err != nil || state != stateStopped {
		t.Fatalf("state after Pause: got %v, %v, want stopped", state, err)
	}

	start := time.Now()
	_, err := r.Do(within(t, 200*time.Millisecond), "PING")
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("PING while paused: got %v after %v, want deadline exceeded", err, time.Since(start))
	}
	// A request sent meanwhile is answered later, not lost.
	c, err := dialRedis(t.Context(), r.Addr(), "")
	if err != nil {
		t.Fatalf("dial while paused: got %v, want nil", err)
	}
	defer c.Close()
	if err := c.send("PING"); err != nil {
		t.Fatal(err)
	}

	for range 2 {
		if err := r.Resume(); err != nil {
			t.Fatal(err)
		}
	}
	c.SetDeadline(time.Now().Add(10 * time.Second))
	if got, err := c.receive(0); err != nil || got != "PONG" {
		t.Errorf("reply to the request sent while paused: got %v, %v, want PONG", got, err)
	}
	mustDo(t, r, "PONG", "PING")
}

func TestRedisPauseAndKillHitForkedChildren(t *testing.T) {
	// 1 s per key makes the child that saves last.
	r := newRedis(t, &RedisOptions{Args: []string{"--rdb-key-save-delay", "1000000"}})
	for i := range 100 {
		mustDo(t, r, "OK", "SET", strconv.Itoa(i), "v")
	}
	mustDo(t, r, "Background saving started", "BGSAVE")
	children, err := childrenOf(r.PID())
	if err != nil || len(children) != 1 {
		t.Fatalf("children of a server that saves: got %v, %v, want one", children, err)
	}
	if err := r.Pause(); err != nil {
		t.Fatal(err)
	}
	if state, err := stateOf(children[0]); err != nil || state != stateStopped {
		t.Errorf("child after Pause: got %v, %v, want stopped", state, err)
	}
	if err := r.Resume(); err != nil {
		t.Fatal(err)
	}
	if state, err := stateOf(children[0]); err != nil || state != stateRunning {
		t.Errorf("child after Resume: got %v, %v, want running", state, err)
	}
	if err := r.Kill(); err != nil {
		t.Fatal(err)
	}
	if state, err := stateOf(children[0]); err != nil || state != stateGone {
		t.Errorf("child after Kill: got %v, %v, want gone", state, err)
	}
}

func TestRedisKillAndStart(t *testing.T) {
	for _, test := range []struct {
		fsync  string
		paused bool
		start  func(*Redis, context.Context) error
		want   any
	}{
		{"always", false, (*Redis).startAgain, "v"},
		{"always", true, (*Redis).startAgain, "v"},
		{"everysec", false, (*Redis).startAgain, "v"},
		{"always", false, (*Redis).startEmptyAgain, nil},
		{"", false, (*Redis).startAgain, nil},
	} {
		name := fmt.Sprintf("fsync=%s/paused=%v/want=%v", test.fsync, test.paused, test.want)
		t.Run(name, func(t *testing.T) {
			r := newRedis(t, &RedisOptions{AppendFsync: test.fsync})
			addr, pid := r.Addr(), r.PID()
			mustDo(t, r, "OK", "SET", "k", "v")
			if err := r.Start(t.Context()); !errors.Is(err, ErrRunning) {
				t.Errorf("Start while running: got %v, want ErrRunning", err)
			}
			if test.paused {
				if err := r.Pause(); err != nil {
					t.Fatal(err)
				}
				if err := r.StartEmpty(t.Context()); !errors.Is(err, ErrRunning) {
					t.Errorf("StartEmpty while paused: got %v, want ErrRunning", err)
				}
			}

			for range 2 {
				if err := r.Kill(); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); !os.IsNotExist(err) {
				t.Errorf("/proc/%d after Kill: got %v, want not exist", pid, err)
			}
			if got := r.PID(); got != 0 {
				t.Errorf("PID after Kill: got %d, want 0", got)
			}
			if _, err := r.Do(t.Context(), "PING"); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("PING after Kill: got %v, want connection refused", err)
			}
			for name, op := range map[string]func() error{"Pause": r.Pause, "Resume": r.Resume} {
				if err := op(); !errors.Is(err, ErrNotRunning) {
					t.Errorf("%s after Kill: got %v, want ErrNotRunning", name, err)
				}
			}

			if err := test.start(r, t.Context()); err != nil {
				t.Fatal(err)
			}
			if r.Addr() != addr {
				t.Errorf("Addr after restart: got %s, want %s", r.Addr(), addr)
			}
			if got := r.PID(); got == 0 || got == pid {
				t.Errorf("PID after restart: got %d, want another than %d", got, pid)
			}
			mustDo(t, r, test.want, "GET", "k")
			if err := r.Pause(); err != nil {
				t.Errorf("Pause after restart: %v", err)
			}
			if err := r.Resume(); err != nil {
				t.Errorf("Resume after restart: %v", err)
			}
			mustDo(t, r, test.want, "GET", "k")
		})
	}
}

func (r *Redis) startAgain(ctx context.Context) error      { return r.Start(ctx) }
func (r *Redis) startEmptyAgain(ctx context.Context) error { return r.StartEmpty(ctx) }

func TestRedisThatEndedByItself(t *testing.T) {
	r := newRedis(t, &RedisOptions{AppendFsync: "always"})
	mustDo(t, r, "OK", "SET", "k", "v")
	if _, err := r.Do(t.Context(), "SHUTDOWN"); err == nil {
		t.Fatal("SHUTDOWN: got a reply, want the end of the connection")
	}
	eventually(t, func() error {
		// Between its end and our hearing of that the status is missing.
		if err := r.Pause(); !errors.Is(err, ErrNotRunning) || !strings.Contains(err.Error(), "exit status 0") {
			return fmt.Errorf("Pause after SHUTDOWN: got %w, want ErrNotRunning and the exit status", err)
		}
		return nil
	})
	if err := r.Kill(); !errors.Is(err, ErrNotRunning) || !strings.Contains(err.Error(), "exit status 0") {
		t.Errorf("Kill after SHUTDOWN: got %v, want ErrNotRunning and the exit status", err)
	}
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustDo(t, r, "v", "GET", "k")

	// The same for a server that somebody else kills while it is paused.
	if err := r.Pause(); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(r.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if err := r.Resume(); !errors.Is(err, ErrNotRunning) {
			return fmt.Errorf("Resume after a foreign kill: got %v, want ErrNotRunning", err)
		}
		return nil
	})
	if err := r.StartEmpty(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustDo(t, r, nil, "GET", "k")
}

func TestRedisClose(t *testing.T) {
	for _, paused := range []bool{false, true} {
		t.Run(fmt.Sprintf("paused=%v", paused), func(t *testing.T) {
			r := newRedis(t, nil)
			pid := r.PID()
			if paused {
				if err := r.Pause(); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 {
				if err := r.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); !os.IsNotExist(err) {
				t.Errorf("/proc/%d after Close: got %v, want not exist", pid, err)
			}
			if _, err := os.Stat(r.dir); !os.IsNotExist(err) {
				t.Errorf("%s after Close: got %v, want not exist", r.dir, err)
			}
			if log := r.Log(); !strings.Contains(log, "Ready to accept connections") {
				t.Errorf("Log after Close: got %q, want the server's ready message", log)
			}
			start := func() error { return r.Start(t.Context()) }
			startEmpty := func() error { return r.StartEmpty(t.Context()) }
			for i, op := range []func() error{r.Pause, r.Resume, r.Kill, start, startEmpty} {
				if err := op(); !errors.Is(err, ErrClosed) {
					t.Errorf("operation %d after Close: got %v, want ErrClosed", i, err)
				}
			}
		})
	}
}

// emptyTempDir makes the test's temporary files go to a directory of its own.
func emptyTempDir(t *testing.T) string {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	return dir
}

func checkEmpty(t *testing.T, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) > 0 {
		t.Errorf("left behind: got %v, %v, want no file", files, err)
	}
}

func TestStartRedisFails(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, test := range map[string]struct {
		ctx  context.Context
		opts RedisOptions
		is   error
		text string
	}{
		"NoBinary":     {t.Context(), RedisOptions{Binary: "no-such-redis-server"}, exec.ErrNotFound, "no-such"},
		"BadConfig":    {t.Context(), RedisOptions{Args: []string{"--no-such-directive", "1"}}, ErrNotRunning, "Bad directive"},
		"BadFsync":     {t.Context(), RedisOptions{AppendFsync: "sometimes"}, nil, `"sometimes"`},
		"BadPassword":  {t.Context(), RedisOptions{Password: "--port"}, nil, "Password"},
		"EndedContext": {ended, RedisOptions{}, context.Canceled, ""},
		"NotRedis":     {t.Context(), RedisOptions{Binary: "true"}, ErrNotRunning, "exit status 0"},
	} {
		t.Run(name, func(t *testing.T) {
			leavesNothing(t)
			dir := emptyTempDir(t)
			r, err := StartRedis(test.ctx, &test.opts)
			if err == nil {
				r.Close()
				t.Fatal("StartRedis: got nil, want an error")
			}
			if test.is != nil && !errors.Is(err, test.is) {
				t.Errorf("StartRedis: got %v, want %v", err, test.is)
			}
			if !strings.Contains(err.Error(), test.text) {
				t.Errorf("StartRedis: got %v, want an error with %q", err, test.text)
			}
			checkEmpty(t, dir)
		})
	}
}

func TestRedisStartWaitsForLoading(t *testing.T) {
	// Each key takes 2 ms to load, and PING is answered -LOADING meanwhile.
	const keys = 300
	r := newRedis(t, &RedisOptions{AppendFsync: "always", Args: []string{
		"--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024", "--rdbcompression", "no"}})
	for i := range keys {
		mustDo(t, r, "OK", "SET", strconv.Itoa(i), strings.Repeat("v", 100))
	}
	mustDo(t, r, "Background append only file rewriting started", "BGREWRITEAOF")
	eventually(t, func() error {
		info, err := r.Do(t.Context(), "INFO", "persistence")
		if text, _ := info.(string); err != nil || !strings.Contains(text, "aof_rewrite_in_progress:0") {
			return fmt.Errorf("rewrite still in progress: %v", err)
		}
		return nil
	})
	if err := r.Kill(); err != nil {
		t.Fatal(err)
	}

	err := r.Start(within(t, 200*time.Millisecond))
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "LOADING") {
		t.Errorf("Start within less time than it takes to load: got %v, want deadline exceeded, LOADING", err)
	}
	if got := r.PID(); got != 0 {
		t.Errorf("PID after a failed Start: got %d, want 0", got)
	}
	if err := nothingLeft(1 << 20); err != nil {
		t.Errorf("after a failed Start: %v", err)
	}
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustDo(t, r, int64(keys), "DBSIZE")
}

func TestStartRedisTriesAnotherPort(t *testing.T) {
	other := newRedis(t, nil) // answers PING too, and must not be taken for ours
	dir := emptyTempDir(t)
	tries := 0
	taken := func() (string, func() error, error) {
		tries++
		return other.Addr(), func() error { return nil }, nil
	}

	r, err := startRedis(t.Context(), nil, taken)
	if err == nil {
		r.Close()
		t.Fatalf("every port taken: got a server at %s, want an error", r.Addr())
	}
	if tries != portAttempts {
		t.Errorf("every port taken: got %d tries, want %d", tries, portAttempts)
	}
	checkEmpty(t, dir)

	tries = 0
	r, err = startRedis(t.Context(), nil, func() (string, func() error, error) {
		if tries < 2 {
			return taken()
		}
		return ReservePort()
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if r.Addr() == other.Addr() {
		t.Errorf("Addr: got the port of another server, %s", r.Addr())
	}
	mustDo(t, r, "PONG", "PING")
}

func TestRedisConcurrentUse(t *testing.T) {
	r := newRedis(t, nil)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	var running sync.WaitGroup
	for worker := range uint64(4) {
		running.Go(func() {
			random := rand.New(rand.NewPCG(seed, worker))
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			for range 30 {
				var err error
				switch random.IntN(7) {
				case 0:
					err = r.Pause()
				case 1, 2:
					err = r.Resume()
				case 3:
					err = r.Kill()
				case 4:
					err = r.Start(ctx)
				case 5:
					err = r.StartEmpty(ctx)
				case 6:
					short, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
					r.Do(short, "PING") // whatever comes of it
					cancel()
					r.PID()
					r.Log()
				}
				if err != nil && !errors.Is(err, ErrRunning) && !errors.Is(err, ErrNotRunning) {
					t.Errorf("got %v, want nil, ErrRunning or ErrNotRunning", err)
				}
			}
		})
	}
	running.Wait()
	if err := r.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustDo(t, r, "PONG", "PING")
	for range 3 {
		running.Go(func() {
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	running.Wait()
}
