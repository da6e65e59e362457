package containers

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// PostgresOptions says what to run. The zero value of each field is its default.
type PostgresOptions struct {
	// Image is the image to run. It holds a PostgreSQL of version 13 or later in /usr/lib/postgresql/*/bin and the user
	// postgres; its entrypoint is none or the official one. Default postgres:17.
	Image string

	// Args are further arguments in the form of the command line, such as "-c", "max_connections=20". They must not set
	// port, data directory or addresses.
	Args []string
}

// The server refuses to run as root. asPostgres runs its $0 as somebody else, with its arguments.
const asPostgres = `set -e
mkdir -p data
if [ "$(id -u)" = 0 ]; then
	chown postgres data
	exec setpriv --reuid postgres --regid postgres --init-groups sh -c "$0" sh "$@"
fi
exec sh -c "$0" sh "$@"`

// servePostgres makes the data if there are none and serves them; its arguments are the server's.
const servePostgres = `set -e
bin=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)
if ! [ -e data/PG_VERSION ]; then
	"$bin/initdb" -D data -U postgres -A trust -E UTF8 --locale=C --wal-segsize=1 --no-sync
	echo 'host all all all trust' >>data/pg_hba.conf
fi
rm -f data/postmaster.pid # of a server that was killed
exec "$bin/postgres" -D data -h 0.0.0.0 -k '' -c fsync=off -c full_page_writes=off -c shared_buffers=32MB "$@"`

// StartPostgres runs a new, empty PostgreSQL server and returns when it accepts connections, otherwise like StartRedis. It lets
// everybody in as the superuser "postgres" of the database "postgres", without TLS, and does not sync to the disk, which
// makes no difference to a server that is killed.
func StartPostgres(ctx context.Context, opts *PostgresOptions) (*Container, error) {
	var o PostgresOptions
	if opts != nil {
		o = *opts
	}
	if o.Image == "" {
		o.Image = "postgres:17"
	}
	return start(ctx, spec{
		name:  "postgres",
		image: o.Image,
		command: func() []string {
			return append([]string{"sh", "-c", asPostgres, servePostgres}, o.Args...)
		},
		port:  "5432/tcp",
		ready: acceptsConnections,
	})
}

// acceptsConnections returns nil if the PostgreSQL at addr begins a session. It speaks the protocol itself so that this
// module needs no client: a startup message, and the answer's first byte, R, or E with a message.
func acceptsConnections(ctx context.Context, addr string) error {
	conn, hangUp, err := reach(ctx, addr)
	if err != nil {
		return err
	}
	defer hangUp()
	const version = 3 << 16
	message := binary.BigEndian.AppendUint32(make([]byte, 4), version)
	message = append(message, "user\x00postgres\x00database\x00postgres\x00\x00"...)
	binary.BigEndian.PutUint32(message, uint32(len(message)))
	if _, err := conn.Write(message); err != nil {
		return err
	}
	var answer [5]byte
	if _, err := io.ReadFull(conn, answer[:]); err != nil {
		return err
	}
	if answer[0] == 'R' {
		_, err = conn.Write([]byte{'X', 0, 0, 0, 4})
		return err
	}
	text, err := io.ReadAll(io.LimitReader(conn, int64(min(binary.BigEndian.Uint32(answer[1:]), 1<<10))))
	return errors.Join(fmt.Errorf("postgres: %q", text), err)
}
