package main

import (
	"context"
	"flag"
)

var tokenCommand = &command{
	name:     "token",
	synopsis: "NAME",
	summary:  "print a new fencing token of a lock, without taking the lock",
	about: `The token is greater than those of all who took the lock before. It can fence off an old holder: show
it to the protected resource, which then refuses all earlier tokens.

Examples:

  fencelock token nightly-backup
`,
	setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) error {
		backend := urlFlag(fs)
		return func(ctx context.Context, c *cli, args []string) error {
			name, err := oneName("token", args)
			if err != nil {
				return err
			}
			client, err := c.open(ctx, *backend)
			if err != nil {
				return err
			}
			defer client.Close()
			t, err := client.NextToken(ctx, name)
			if err != nil {
				return err
			}
			return c.print(t.String() + "\n")
		}
	},
}
