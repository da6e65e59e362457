package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock"
)

// cli is one call of the program.
type cli struct {
	env                   []string
	stdin, stdout, stderr *os.File
	console               *console
}

// command is a subcommand.
type command struct {
	name     string
	synopsis string // its arguments
	summary  string // one line
	about    string // what follows the flags in its help
	// trailing says that flags end at the first argument, because what follows is a command with flags of its
	// own.
	trailing bool
	// setup declares the flags and answers what to do with the arguments once they are parsed.
	setup func(*flag.FlagSet) func(ctx context.Context, c *cli, args []string) error
}

// commands are the subcommands in the order in which help shows them. It is filled by init because help
// itself reads it.
var commands []*command

func init() {
	commands = []*command{runCommand, lsCommand, unlockCommand, tokenCommand, migrateCommand, compareCommand, versionCommand, helpCommand}
}

func find(name string) *command {
	i := slices.IndexFunc(commands, func(c *command) bool { return c.name == name })
	if i < 0 {
		return nil
	}
	return commands[i]
}

// run is the program: it answers the exit code. args do not include the program's name; env is what the
// process and the command it runs see.
func run(ctx context.Context, args, env []string, stdin, stdout, stderr *os.File) int {
	c := &cli{env: env, stdin: stdin, stdout: stdout, stderr: stderr, console: newConsole(stderr)}
	err := c.dispatch(ctx, args)
	code, text := outcome(err)
	if text != "" {
		c.console.say("%s", text)
	}
	c.console.flush()
	return code
}

func (c *cli) dispatch(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return usageError("what to do is missing; see fencelock help")
	}
	name, args := args[0], args[1:]
	switch name {
	case "-h", "-help", "--help":
		name = "help"
	case "-version", "--version":
		name = "version"
	}
	cmd := find(name)
	if cmd == nil {
		return usageError("there is no %s; see fencelock help", quote(name))
	}
	fs, act := cmd.flags()
	args, err := parse(fs, args, cmd.trailing)
	if errors.Is(err, flag.ErrHelp) {
		return c.print(helpOf(cmd))
	}
	if err != nil {
		return usageError("%s: %w; see fencelock help %s", cmd.name, err, cmd.name)
	}
	return act(ctx, c, args)
}

func (cmd *command) flags() (*flag.FlagSet, func(context.Context, *cli, []string) error) {
	fs := flag.NewFlagSet(cmd.name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	return fs, cmd.setup(fs)
}

// parse reads the flags and answers the other arguments. Unless trailing, flags may also come after them, up
// to a "--".
func parse(fs *flag.FlagSet, args []string, trailing bool) (others []string, err error) {
	for {
		if err := fs.Parse(args); err != nil {
			return nil, err
		}
		rest := fs.Args()
		read := len(args) - len(rest)
		if trailing || len(rest) == 0 || read > 0 && args[read-1] == "--" {
			return append(others, rest...), nil
		}
		others, args = append(others, rest[0]), rest[1:]
	}
}

func (c *cli) print(s string) error {
	if _, err := io.WriteString(c.stdout, s); err != nil {
		return fmt.Errorf("write the output: %w", err)
	}
	return nil
}

func (c *cli) getenv(name string) string {
	for _, v := range slices.Backward(c.env) {
		if value, ok := strings.CutPrefix(v, name+"="); ok {
			return value
		}
	}
	return ""
}

// urlFlag declares --url.
func urlFlag(fs *flag.FlagSet) *string {
	return fs.String("url", "", "`URL`: of the backend; see fencelock help url")
}

// openTimeout bounds the opening of a backend, and queryTimeout a look into it.
const (
	openTimeout  = 10 * time.Second
	queryTimeout = 30 * time.Second
)

// open opens the backend that the flag --url, the environment or the default says.
func (c *cli) open(ctx context.Context, flagged string, opts ...fencelock.ClientOption) (*fencelock.Client, error) {
	backend, err := c.backendURL(flagged)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	return fencelock.Open(ctx, backend, opts...)
}

func (c *cli) backendURL(flagged string) (string, error) {
	if flagged != "" {
		return flagged, nil
	}
	if u := c.getenv("FENCELOCK_URL"); u != "" {
		return u, nil
	}
	// The cache, not the runtime directory: cron jobs have none of that, so that a job and the same command typed at
	// a terminal would not exclude each other, and it is removed at logout while jobs go on.
	dir := c.getenv("XDG_CACHE_HOME")
	if !filepath.IsAbs(dir) {
		home := c.getenv("HOME")
		if !filepath.IsAbs(home) {
			return "", usageError("no backend: there is neither --url nor FENCELOCK_URL, and no HOME for a default")
		}
		dir = filepath.Join(home, ".cache")
	}
	u := url.URL{Scheme: "file", Path: filepath.Join(dir, "fencelock", "locks")}
	return u.String(), nil
}
