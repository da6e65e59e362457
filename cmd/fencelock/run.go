//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/fencelock/fencelock"
)

var runCommand = &command{
	name:     "run",
	synopsis: "--name NAME [--] COMMAND [ARGUMENT...]",
	summary:  "run a command while holding a lock, or one of a limited number of permits",
	about: `It takes the lock, runs the command, renews the lock until the command has ended, gives it back, and
ends with the command's status: see fencelock help exit-codes. Nothing is printed unless it has to
wait or something is wrong.

The command runs in a process group of its own, with FENCELOCK_NAME and FENCELOCK_TOKEN in its
environment. The token rises with every acquisition: pass it on with each write, so that the
resource can refuse a holder that was too late. The lock is held until the last process of the group
has ended, background ones too; a process that leaves the group, as daemons do, is not waited for.

SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGWINCH are passed on to the group, SIGUSR1 and SIGUSR2 to the
command alone. While there is no command yet, these signals (but SIGWINCH) end the wait. A job that
is suspended by Ctrl-Z does not renew: if it is continued too late, the lock is lost.

When the lock is lost, for example because the backend did not answer for one TTL, the group gets
SIGTERM at once, and SIGKILL after the grace. When fencelock itself is killed by SIGKILL, the kernel
kills the command too (Linux and FreeBSD; only the command itself, not what it has started, and not
if it changes user like sudo), and the lock becomes free when its TTL has passed.

Examples:

  fencelock run --name nightly-backup -- ./backup.sh
  fencelock run --name deploy --wait 10m --label "$USER" -- make deploy
  fencelock run --name nightly-backup --wait no -- ./backup.sh || test $? = 193
  fencelock run --name api-calls --limit 3 -- ./import.sh
  FENCELOCK_URL=redis://localhost:6379/0 fencelock run --name report -- ./report.sh
`,
	trailing: true,
	setup: func(flags *flag.FlagSet) func(context.Context, *cli, []string) error {
		r := &runner{url: urlFlag(flags), wait: waitForever}
		flags.StringVar(&r.name, "name", "", "`NAME`: of the lock; required")
		flags.DurationVar(&r.ttl, "ttl", fencelock.DefaultTTL,
			"`DURATION`: how long the lock outlives a fencelock that cannot give it back, such\nas 500ms or 1m; the default is 30s")
		flags.Func("wait", "`DURATION`: how long to wait if another holds, such as 10s; or \"forever\", the\ndefault; or \"no\"", r.parseWait)
		flags.Func("limit", "`N`: take one of N permits instead of the lock. All who use NAME should give\nthe same N. A lock and a semaphore of one NAME are two things", r.parseLimit)
		flags.StringVar(&r.label, "label", "", "`TEXT`: tells others who holds; the default is the command's name")
		flags.DurationVar(&r.grace, "grace", 5*time.Second,
			"`DURATION`: from SIGTERM to SIGKILL when the lock is lost; the default is 5s.\nOthers may hold the lock by then")
		return r.run
	},
}

const waitForever = -1

// runner is one call of run.
type runner struct {
	url   *string
	name  string
	ttl   time.Duration
	wait  time.Duration // zero: not at all; or waitForever
	limit int
	label string
	grace time.Duration
}

// parseWait reads a flag --wait.
func parseWait(s string) (time.Duration, error) {
	switch s {
	case "forever":
		return waitForever, nil
	case "no":
		return 0, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, errors.New("must be a duration such as 10s, or forever, or no")
	}
	return d, nil
}

func (r *runner) parseWait(s string) (err error) {
	r.wait, err = parseWait(s)
	return err
}

func (r *runner) parseLimit(s string) error {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		return errors.New("must be a number of at least 1")
	}
	r.limit = n
	return nil
}

// run holds the lock while the command args runs.
func (r *runner) run(ctx context.Context, c *cli, args []string) error {
	switch {
	case r.name == "":
		return usageError("run needs --name; see fencelock help run")
	case strings.ContainsRune(r.name, 0):
		return usageError("run: a name with a NUL cannot stand in the command's environment")
	case len(args) == 0:
		return usageError("run needs a command; see fencelock help run")
	case r.grace < 0:
		return usageError("run: the grace must not be negative")
	}
	path, err := lookPath(args[0])
	if err != nil {
		return err
	}
	if r.label == "" {
		r.label = labelFor(path)
	}

	signals := make(chan os.Signal, 32)
	notify(signals)
	defer signal.Stop(signals)
	p, err := r.hold(ctx, c, path, args, signals)
	if p != nil && p.interrupted {
		// A shell script around us goes on with its next command unless we, too, are seen to end by SIGINT. If the
		// command had the terminal, Ctrl-C has reached its process group only: let the whole of ours see it.
		c.console.flush()
		raiseInterrupt(p.interrupt)
	}
	return err
}

// labelFor makes a label of the command's name.
func labelFor(path string) string {
	label := strings.ToValidUTF8(filepath.Base(path), "?")
	for len(label) > fencelock.MaxLabel {
		r := []rune(label)
		label = string(r[:len(r)-1])
	}
	return label
}

func lookPath(command string) (string, error) {
	path, err := exec.LookPath(command)
	switch {
	case err == nil, errors.Is(err, exec.ErrDot): // whoever has "." in PATH wants that
		return path, nil
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist):
		return "", exitf(exitNotFound, "%s: command not found", quote(command))
	}
	return "", exitf(exitNotExecutable, "%s: %w", quote(command), errors.Unwrap(err))
}

// hold opens the backend, takes the lock, runs the command, and gives the lock back. It answers the command's
// process group if it was started.
func (r *runner) hold(ctx context.Context, c *cli, path string, args []string, signals chan os.Signal) (*supervisor, error) {
	type result struct {
		client *fencelock.Client
		lease  *fencelock.Lease
		err    error
	}
	results := make(chan result, 1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		client, err := c.open(ctx, *r.url, fencelock.WithTTL(r.ttl), fencelock.WithObserver(c.observer(r.ttl)))
		if err != nil {
			results <- result{err: err}
			return
		}
		lease, err := r.acquire(ctx, c, client)
		results <- result{client, lease, err}
	}()

	var got result
	var interrupt os.Signal
	select {
	case got = <-results:
		select {
		case interrupt = <-signals:
		default:
		}
	case interrupt = <-signals:
		cancel()
		got = <-results
	}
	if got.client != nil {
		defer got.client.Close()
	}
	if interrupt != nil {
		if got.lease != nil {
			if err := got.lease.Release(context.Background()); err != nil {
				c.console.say("%v", err)
			}
		}
		return nil, &exitError{code: exitSignal + int(interrupt.(syscall.Signal))}
	}
	if got.err != nil {
		return nil, got.err
	}
	return r.supervise(c, got.lease, path, args, signals)
}

// observer tells what the operator should know.
func (c *cli) observer(ttl time.Duration) fencelock.Observer {
	var told time.Time
	return func(e fencelock.Event) {
		switch {
		case e.Kind == fencelock.EventWarning:
			c.console.say("%v", e.Err)
		case e.Kind == fencelock.EventRenewFailed && time.Since(told) > ttl:
			told = time.Now()
			c.console.say("cannot renew %s, trying again: %v", quote(e.Name), e.Err)
		}
	}
}

// acquire takes the lock or permit; who holds it is told while it waits.
func (r *runner) acquire(ctx context.Context, c *cli, client *fencelock.Client) (*fencelock.Lease, error) {
	t := target{r.name, r.limit}
	try, wait := client.TryLock, client.Lock
	if r.limit > 0 {
		try = func(ctx context.Context, name string, o ...fencelock.Option) (*fencelock.Lease, error) {
			return client.TryAcquire(ctx, name, r.limit, o...)
		}
		wait = func(ctx context.Context, name string, o ...fencelock.Option) (*fencelock.Lease, error) {
			return client.Acquire(ctx, name, r.limit, o...)
		}
	}
	began := time.Now()
	opts := []fencelock.Option{fencelock.Label(r.label)}
	lease, err := try(ctx, r.name, opts...)
	if !errors.Is(err, fencelock.ErrHeld) {
		return lease, err
	}
	if r.wait == 0 {
		return nil, exitf(exitHeld, "%v: %s", t, holders(ctx, client, t.kind(), r.name))
	}
	if r.wait != waitForever {
		opts = append(opts, fencelock.WaitFor(r.wait))
	}
	tell := c.tellWaiting(ctx, client, t, began)
	lease, err = wait(ctx, r.name, opts...)
	tell.stop()
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		// That somebody holds it was an answer, whatever the last request brought.
		return nil, exitf(exitHeld, "%v: waited %s in vain, %s", t, short(time.Since(began)),
			holders(ctx, client, t.kind(), r.name))
	}
	return lease, err
}

// supervise runs the command under the lease and gives the lease back.
func (r *runner) supervise(c *cli, lease *fencelock.Lease, path string, args []string, signals chan os.Signal) (*supervisor, error) {
	env := slices.DeleteFunc(slices.Clone(c.env), func(v string) bool {
		return strings.HasPrefix(v, "FENCELOCK_NAME=") || strings.HasPrefix(v, "FENCELOCK_TOKEN=")
	})
	env = append(env, "FENCELOCK_NAME="+lease.Name(), "FENCELOCK_TOKEN="+lease.Token().String())

	what := target{r.name, r.limit}
	if lost := lease.Err(); lost != nil {
		return nil, exitf(exitLost, "%v: %w before the command could start", what, lost)
	}
	s, err := superviseCommand(c, what, lease, r.grace, signals, path, args, env)
	if err != nil {
		code := exitNotExecutable
		if errors.Is(err, fs.ErrNotExist) { // the interpreter that a script names
			code = exitNotFound
		}
		err = exitf(code, "%w", err)
		return nil, errors.Join(err, lease.Release(context.Background()))
	}
	s.wait()
	if lost := lease.Err(); lost != nil {
		if !s.lost { // it came when the command was ending
			c.console.say("%s", lossText(what, lease))
		}
		return s, &exitError{code: exitLost}
	}
	switch err := lease.Release(context.Background()); {
	case errors.Is(err, fencelock.ErrNotHeld):
		return s, exitf(exitLost, "%v: it was lost before the command had ended: %w", what, err)
	case err != nil:
		c.console.say("the command has ended, but the lock may remain for up to %v: %v", r.ttl, err)
	}
	return s, s.exit()
}

// lossText says that and when the lease was lost.
func lossText(t target, lease *fencelock.Lease) string {
	s := fmt.Sprintf("lost %v: %v", t, lease.Err())
	if d := lease.Deadline(); time.Now().After(d) {
		s += "; it was valid until " + d.Format("2006-01-02T15:04:05.000Z07:00")
	}
	return s
}
