package file

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/state"
)

// push is the datagram that tells a client of grants to its waiters, made by one step on one name.
type push struct {
	Kind   driver.Kind
	Name   []byte
	Grants []pushed
}

type pushed struct {
	ID    string
	Token driver.Token
}

// One datagram tells of so many grants at most, and so fits into the reader's buffer.
const (
	mostPushed = 256
	pushBuffer = 64 << 10
)

// Limits of making the socket: how long it waits for others who make theirs, and how long until it is
// tried again after a failure.
const (
	listenTimeout = 5 * time.Second
	listenRetry   = time.Minute
)

// inbox is the socket where other processes tell of grants. It stands from the first request of a
// waiter until none has come for one claim; one goroutine reads it for as long.
type inbox struct {
	dir  string
	name string          // of the socket; waiters carry it
	ctx  context.Context // ends with the driver
	done sync.WaitGroup

	mu      sync.Mutex
	sink    func(driver.Event)
	until   time.Time
	running bool
	closed  bool
	conn    *net.UnixConn
}

// Notify implements driver.Notifier. If the socket cannot be made (on systems other than Linux its path
// may be too long), the sink gets an EventWarning, waiters poll, and it is tried again after a minute.
func (d *Driver) Notify(sink func(driver.Event)) {
	d.inbox.mu.Lock()
	defer d.inbox.mu.Unlock()
	d.inbox.sink = sink
}

// want says that a waiter has asked whose entry lives for claim, and answers the client's name for it,
// empty if nobody would listen. It does not wait for the socket: what is missed until that stands,
// EventRecheck makes good.
func (b *inbox) want(claim time.Duration) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sink == nil || b.closed {
		return ""
	}
	if until := time.Now().Add(claim); until.After(b.until) {
		b.until = until
	}
	if !b.running {
		b.running = true
		b.done.Go(b.run)
	}
	return b.name
}

// wanted reports whether the socket is, and if not closes it.
func (b *inbox) wanted() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed && time.Now().Before(b.until) {
		if b.conn != nil {
			_ = b.conn.SetReadDeadline(b.until)
		}
		return true
	}
	b.hangUp()
	b.running = false
	return false
}

// hangUp closes the socket and removes it from the directory. The caller holds mu.
func (b *inbox) hangUp() {
	if b.conn != nil {
		b.conn.Close()
		b.conn = nil
		_ = os.Remove(filepath.Join(b.dir, b.name))
	}
}

// close ends the inbox and waits for its goroutine.
func (b *inbox) close() {
	b.mu.Lock()
	b.closed = true
	if b.conn != nil {
		_ = b.conn.SetReadDeadline(time.Now())
	}
	b.mu.Unlock()
	b.done.Wait()
}

func (b *inbox) run() {
	buffer := make([]byte, pushBuffer)
	for b.wanted() {
		conn, err := b.listen()
		if err != nil {
			b.sink(driver.Event{Kind: driver.EventWarning,
				Err: fmt.Errorf("file: no socket for wake-ups, waiters poll: %w", err)})
			b.pause()
			continue
		}
		b.sink(driver.Event{Kind: driver.EventRecheck})
		for b.wanted() {
			n, err := conn.Read(buffer)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				continue
			}
			if err != nil {
				break // make it anew
			}
			var p push
			if json.Unmarshal(buffer[:n], &p) == nil {
				b.deliver(p)
			}
		}
	}
}

// pause waits before the next try to listen.
func (b *inbox) pause() {
	b.mu.Lock()
	wait := min(listenRetry, time.Until(b.until))
	b.mu.Unlock()
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
	case <-b.ctx.Done():
	}
}

// listen makes the socket, in place of one that broke.
func (b *inbox) listen() (*net.UnixConn, error) {
	ctx, cancel := context.WithTimeout(b.ctx, listenTimeout)
	defer cancel()
	lock, err := waitLock(ctx, b.lockPath())
	if err != nil {
		return nil, err
	}
	defer lock.unlock()
	b.removeStale()

	dir, err := os.Open(b.dir)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	path, err := socketPath(dir, b.name)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hangUp()
	b.conn, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: path})
	return b.conn, err
}

// lockPath is the file that is locked while a socket is made: one that has its directory entry
// already, and nobody behind it yet, must not pass for stale.
func (b *inbox) lockPath() string { return filepath.Join(b.dir, lockSuffix) }

// tidy removes stale sockets unless somebody else is about to.
func (b *inbox) tidy() {
	if lock, err := tryLock(b.lockPath()); err == nil && lock != nil {
		b.removeStale()
		lock.unlock()
	}
}

// removeStale removes the sockets of processes that died. The caller has the lock file locked.
func (b *inbox) removeStale() {
	entries, err := os.ReadDir(b.dir)
	if err != nil {
		return
	}
	for _, entry := range entries {
		if entry.Type()&fs.ModeSocket == 0 {
			continue
		}
		conn, err := b.dial(entry.Name())
		if err == nil {
			conn.Close()
		} else if errors.Is(err, syscall.ECONNREFUSED) {
			_ = os.Remove(filepath.Join(b.dir, entry.Name()))
		}
	}
}

func (b *inbox) dial(client string) (*net.UnixConn, error) {
	dir, err := os.Open(b.dir)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	path, err := socketPath(dir, client)
	if err != nil {
		return nil, err
	}
	return net.DialUnix("unixgram", nil, &net.UnixAddr{Net: "unixgram", Name: path})
}

// announce tells the clients of waiters what a step granted to them. Nobody waits for it and nothing
// depends on it.
func (b *inbox) announce(n driver.Name, grants []state.Grant) {
	for len(grants) > 0 {
		client := grants[0].Client
		var theirs []pushed
		grants = slices.DeleteFunc(grants, func(g state.Grant) bool {
			if g.Client == client {
				theirs = append(theirs, pushed{g.ID, g.Token})
			}
			return g.Client == client
		})
		for some := range slices.Chunk(theirs, mostPushed) {
			b.send(client, push{Kind: n.Kind, Name: []byte(n.Name), Grants: some})
		}
	}
}

func (b *inbox) send(client string, p push) {
	switch client {
	case "":
		return // it polls
	case b.name:
		b.deliver(p)
		return
	}
	message, err := json.Marshal(p)
	if err != nil {
		return
	}
	if conn, err := b.dial(client); err == nil {
		sendOnce(conn, message)
		conn.Close()
	}
}

func (b *inbox) deliver(p push) {
	b.mu.Lock()
	sink := b.sink
	b.mu.Unlock()
	if sink == nil {
		return
	}
	for _, g := range p.Grants {
		sink(driver.Event{Kind: driver.EventGranted, Token: g.Token,
			Owner: driver.Owner{Name: driver.Name{Kind: p.Kind, Name: string(p.Name)}, ID: g.ID}})
	}
}
