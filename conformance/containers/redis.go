package containers

import (
	"bufio"
	"context"
	"fmt"
	"strings"
)

// Options says what to run. The zero value of each field is its default.
type Options struct {
	// Image is the image to run. It holds the server's program, Redis 7.0 or later or Valkey; its entrypoint is none
	// or the official one. Default redis:8 for StartRedis, valkey/valkey:8 for StartValkey.
	Image string

	// AppendFsync selects what a restart finds. The default "" keeps nothing on disk, so every restart is empty.
	// "always", "everysec" and "no" keep an append-only file with that policy; a killed server loses nothing it has
	// acknowledged under "always".
	AppendFsync string

	// Args are further arguments in the form of the command line, such as "--maxmemory", "8mb". They overrule the
	// settings above, which port, bind and dir must not.
	Args []string
}

// StartRedis runs a new, empty redis-server and returns when it answers; nil options are the defaults. The server has
// no password and no configuration file, saves no snapshots, and allows the command DEBUG.
//
// The context bounds the start only. An image that is not there is pulled; with that a start takes at most 5 min. An
// error of the server itself carries the end of its log. On failure no container is left behind.
func StartRedis(ctx context.Context, opts *Options) (*Container, error) {
	return startRedis(ctx, "redis-server", "redis:8", opts)
}

// StartValkey runs a new, empty valkey-server, otherwise like StartRedis.
func StartValkey(ctx context.Context, opts *Options) (*Container, error) {
	return startRedis(ctx, "valkey-server", "valkey/valkey:8", opts)
}

func startRedis(ctx context.Context, program, image string, opts *Options) (*Container, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.Image == "" {
		o.Image = image
	}
	// The program is named and gets all its settings here, so that every image runs the same.
	command := []string{
		program, "--port", "6379", "--bind", "0.0.0.0", "--protected-mode", "no", "--dir", dataDir,
		"--save", "", "--enable-debug-command", "yes",
	}
	switch o.AppendFsync {
	case "":
		command = append(command, "--appendonly", "no")
	case "always", "everysec", "no":
		command = append(command, "--appendonly", "yes", "--appendfsync", o.AppendFsync)
	default:
		return nil, fmt.Errorf(`containers: %s: AppendFsync %q: want "", "always", "everysec" or "no"`, program, o.AppendFsync)
	}
	return start(ctx, spec{
		name:    program,
		image:   o.Image,
		command: func() []string { return append(command, o.Args...) },
		port:    "6379/tcp",
		ready:   ping,
	})
}

// ping returns nil if the server at addr answers PING. An error reply is an answer too, for example the demand for a
// password; only a server that is still loading its data does not serve yet.
func ping(ctx context.Context, addr string) error {
	conn, hangUp, err := reach(ctx, addr)
	if err != nil {
		return err
	}
	defer hangUp()
	if _, err := fmt.Fprint(conn, "PING\r\n"); err != nil {
		return err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err == nil && strings.HasPrefix(line, "-LOADING") {
		err = fmt.Errorf("ping: %s", strings.TrimSpace(line))
	}
	return err
}
