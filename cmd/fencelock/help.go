package main

import (
	"context"
	"flag"
	"fmt"
	"strings"
)

var helpCommand = &command{
	name:     "help",
	synopsis: "[TOPIC]",
	summary:  "explain a command, or one of: url, exit-codes",
	about: `Examples:

  fencelock help
  fencelock help run
  fencelock help exit-codes
`,
	setup: func(*flag.FlagSet) func(context.Context, *cli, []string) error {
		return func(_ context.Context, c *cli, args []string) error {
			if len(args) == 0 {
				return c.print(overview())
			}
			if len(args) > 1 {
				return usageError("help: one topic at a time")
			}
			if text, ok := topics()[args[0]]; ok {
				return c.print(text)
			}
			cmd := find(args[0])
			if cmd == nil {
				return usageError("help: there is no %s; see fencelock help", quote(args[0]))
			}
			return c.print(helpOf(cmd))
		}
	},
}

func overview() string {
	var b strings.Builder
	b.WriteString("fencelock holds a lock while a command runs, and shows and frees locks.\n\nCommands:\n\n")
	list := ""
	for _, cmd := range commands {
		list += "  " + cmd.name + "\t" + cmd.summary + "\n"
	}
	b.WriteString(align(list, 3))
	b.WriteString(`
Examples:

  fencelock run --name nightly-backup -- ./backup.sh
  fencelock run --name nightly-backup --wait no -- ./backup.sh
  fencelock ls

Without --url and FENCELOCK_URL the locks are in a directory of yours and exclude your processes on
this machine. See fencelock help url.
`)
	return b.String()
}

// topics are the help texts that belong to no command.
func topics() map[string]string {
	return map[string]string{"url": urlHelp, "exit-codes": exitCodesHelp()}
}

const urlHelp = `The URL of the backend is that of --url, else of the environment variable FENCELOCK_URL, else a
directory: file://$XDG_CACHE_HOME/fencelock/locks, or file://$HOME/.cache/fencelock/locks if the
variable is not set. That one excludes the processes of one user on one machine, and needs nothing
installed; whoever clears the cache frees all its locks.

  file:///var/lib/locks            a directory on this machine
  redis://host:6379/0              a Redis or Valkey server; rediss:// with TLS
  redis+sentinel://h1,h2,h3/0?master=name
                                   the same behind Sentinel; rediss+sentinel://
  redis+cluster://h1,h2,h3         a Redis Cluster; rediss+cluster://
  rueidis://host:6379/0            the locks of redis://, by another client library;
                                   likewise rueidiss://, rueidis+sentinel://, rueidis+cluster://
  redlock://h1,h2,h3               a majority of independent Redis servers; redlocks:// with TLS
  etcd://host1,host2,host3         an etcd cluster; etcds:// with TLS
  postgres://host:5432/database    a PostgreSQL database
  migrate://?from=URL&to=URL&phase=PHASE
                                   two of these, while one moves from the first to the second; the
                                   URLs are escaped. See fencelock help migrate
  memory:                          nothing outside this process: for trying out

All who are to exclude each other must use the same URL. "fencelock version" prints the one in
effect.

What stands in --url can be read by every user of the machine in the list of processes. Put a URL
with a password into FENCELOCK_URL. The command that "fencelock run" starts inherits that variable.
fencelock never prints a password.
`

func exitCodesHelp() string {
	table := ""
	for _, e := range exitCodes {
		table += e.code + "\t" + e.meaning + "\n"
	}
	return align(table, 3) + `
The codes 193 to 198 are used by neither shells (1, 2, 126 to 192), sysexits.h (64 to 78), timeout
and env (124 to 127) nor systemd (200 and above). A command that itself ends with one of them cannot
be told apart from fencelock; the message on stderr can.
`
}

func helpOf(cmd *command) string {
	var b strings.Builder
	usage := "fencelock " + cmd.name
	fs, _ := cmd.flags()
	flags := 0
	fs.VisitAll(func(*flag.Flag) { flags++ })
	if flags > 0 {
		usage += " [flags]"
	}
	if cmd.synopsis != "" {
		usage += " " + cmd.synopsis
	}
	fmt.Fprintf(&b, "Usage: %s\n\n%s.\n", usage, strings.ToUpper(cmd.summary[:1])+cmd.summary[1:])
	if flags > 0 {
		b.WriteString("\nFlags:\n\n")
		list := ""
		fs.VisitAll(func(f *flag.Flag) {
			arg, text := flag.UnquoteUsage(f)
			text = strings.TrimPrefix(text, arg+": ")
			if arg != "" {
				arg = " " + arg
			}
			list += "  --" + f.Name + arg + "\t" + strings.ReplaceAll(text, "\n", "\n  \t") + "\n"
		})
		b.WriteString(align(list, 3))
	}
	if cmd.about != "" {
		b.WriteString("\n" + cmd.about)
	}
	return b.String()
}
