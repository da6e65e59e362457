package main

import (
	"context"
	"flag"
	"strconv"
	"time"

	"github.com/fencelock/fencelock"
)

var unlockCommand = &command{
	name:     "unlock",
	synopsis: "NAME",
	summary:  "take a lock, or all permits of a semaphore, away from whoever holds it",
	about: `The next waiter gets it at once. The old holder is told at its next renewal, within a third of its
TTL: until then both believe that they hold. So first make sure that the old holder is dead or
harmless. Fencing tokens go on rising, so whatever checks them refuses the old holder at once.

Without --force it changes nothing, and says who holds.

Examples:

  fencelock unlock --force nightly-backup
  fencelock unlock --force --semaphore api-calls
  fencelock unlock --force --quoted '"odd\x00name"'
`,
	setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) error {
		backend := urlFlag(fs)
		force := fs.Bool("force", false, "really do it")
		semaphore := fs.Bool("semaphore", false, "NAME is a semaphore: one that was taken with --limit")
		quoted := fs.Bool("quoted", false, "NAME is a quoted Go string, as ls prints names with odd characters")
		return func(ctx context.Context, c *cli, args []string) error {
			name, err := oneName("unlock", args)
			if err != nil {
				return err
			}
			if *quoted {
				if name, err = strconv.Unquote(name); err != nil {
					return usageError("unlock: NAME is no quoted Go string")
				}
			}
			kind := fencelock.KindLock
			if *semaphore {
				kind = fencelock.KindPermit
			}
			return c.unlock(ctx, *backend, kind, name, *force)
		}
	},
}

func oneName(cmd string, args []string) (string, error) {
	if len(args) != 1 {
		return "", usageError("%s needs one NAME; see fencelock help %s", cmd, cmd)
	}
	return args[0], nil
}

func (c *cli) unlock(ctx context.Context, backend string, kind fencelock.Kind, name string, force bool) error {
	client, err := c.open(ctx, backend)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	held, err := client.Inspect(ctx, kind, name)
	if err != nil {
		return err
	}
	what := kind.String() + " " + quote(name)
	if !force {
		if len(held) == 0 {
			return usageError("%s is not held; nothing done", what)
		}
		return usageError("%s is %s; nothing done: to take it away add --force", what, describeHolders(held, time.Now()))
	}
	ended, err := client.ForceUnlock(ctx, kind, name)
	if err != nil {
		return err
	}
	switch {
	case ended == 0:
		c.console.say("%s was not held", what)
	case len(held) == 0:
		c.console.say("%s taken away", what)
	default:
		c.console.say("%s taken away; it was %s", what, describeHolders(held, time.Now()))
	}
	return nil
}
