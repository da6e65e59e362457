//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
)

var runCommand = &command{
	name:     "run",
	summary:  "run a command while holding a lock: not on this system, which lacks process groups and signals",
	trailing: true,
	setup: func(*flag.FlagSet) func(context.Context, *cli, []string) error {
		return func(context.Context, *cli, []string) error {
			return fmt.Errorf("run works on Linux, macOS and BSD only: %w", errors.ErrUnsupported)
		}
	},
}

// columns answers that no file is known to be a terminal.
func columns(*os.File) (int, bool) { return 0, false }
