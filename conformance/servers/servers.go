// Package servers runs real backend servers as local processes and lets a test do to them what
// happens to servers: pause, kill, restart with and without their data, and cut the network in
// between. It is for the conformance suite, for authors of drivers, and for tests of applications
// that want to see what their locks do under such faults.
//
// [StartRedis] runs a Redis or Valkey server, [StartRedisCluster] a Redis Cluster, [StartRedisSentinels] a Redis
// server with replicas under Sentinel, [StartPostgres] a PostgreSQL server, [StartEtcd] and
// [StartEtcdCluster] etcd with one or more members. [NewProxy] puts a TCP proxy in front of one, or of any
// other address, whose switches hold, drop, delay or reset the traffic in each direction.
//
// Everything stays on 127.0.0.1, on ports the system chose, in a temporary directory that Close
// removes. On Linux no server outlives the process that started it, however that one ends: the
// kernel kills it. Elsewhere a server that was not closed goes on running, and Pause answers
// [errors.ErrUnsupported]. What a process that was itself killed leaves behind is the temporary
// directory.
//
// The package imports neither testing nor any client library.
package servers

import (
	"context"
	"errors"
)

// A Server is one backend server under the control of a test.
//
// Each method brings the server into a state and returns when it is there; if it is there already
// the method does nothing and answers nil. Two calls never overlap: the second waits for the first.
// All methods are safe for concurrent use.
//
// After Close every method but Addr and Close answers [ErrClosed].
type Server interface {
	// Addr returns the host:port that clients dial. It never changes, not even by a restart.
	Addr() string

	// Pause stops the server where it is, as SIGSTOP does: the kernel still accepts connections and
	// bytes, nobody answers. It returns when every thread of the server has stopped.
	//
	// It fails with [ErrNotRunning] if the server does not run. After another failure the server
	// runs.
	Pause() error

	// Resume lets a paused server go on with what it was doing. It fails with [ErrNotRunning] if the
	// server does not run.
	Resume() error

	// Kill ends the server without a chance to clean up, as SIGKILL does, paused or not. It returns
	// when the process is gone, and with it what it kept in memory only. It is not a power cut: what
	// the server wrote to a file is in that file, synced or not.
	//
	// It fails with [ErrNotRunning] if the server ended by itself, since then something else than
	// this fault has hit; Start and StartEmpty work nevertheless.
	Kill() error

	// Start runs a server that was killed, or ended by itself, at the same address and with the
	// data it has on disk. It returns when the server answers requests in its own protocol. The
	// context bounds the start only; without a deadline, and at most, a start may take 30 s.
	//
	// It fails with [ErrRunning] if the server runs, paused or not. After any other failure the
	// server is killed.
	Start(ctx context.Context) error

	// StartEmpty is Start after all data was wiped: a server that has forgotten everything.
	StartEmpty(ctx context.Context) error

	// Close kills the server, paused or not, and removes its files. A second Close does nothing and
	// answers nil.
	Close() error
}

// Errors of a [Server], to be matched with errors.Is.
var (
	// ErrNotRunning says that the server's process does not run.
	ErrNotRunning = errors.New("server is not running")
	// ErrRunning says that the server's process runs already.
	ErrRunning = errors.New("server is running")
	// ErrClosed says that the server or proxy was closed.
	ErrClosed = errors.New("closed")
)
