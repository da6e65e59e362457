// Command fencelock holds a lock while a command runs, and shows and frees locks. It is for shell scripts,
// cron jobs and operators; docs/cli.md is its reference.
//
//	fencelock run --name nightly-backup -- ./backup.sh
//	fencelock ls
//	fencelock unlock --force nightly-backup
package main

import (
	"context"
	"os"

	// The backends that a URL can name.
	_ "github.com/fencelock/fencelock/driver/etcd"
	_ "github.com/fencelock/fencelock/driver/file"
	_ "github.com/fencelock/fencelock/driver/goredis"
	_ "github.com/fencelock/fencelock/driver/memory"
	_ "github.com/fencelock/fencelock/driver/migrate"
	_ "github.com/fencelock/fencelock/driver/postgres"
	_ "github.com/fencelock/fencelock/driver/redlock"
	_ "github.com/fencelock/fencelock/driver/rueidis"
	"github.com/fencelock/fencelock/lab"
)

func main() {
	lab.Main() // returns unless compare has started this process as one of its workers
	os.Exit(run(context.Background(), os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}
