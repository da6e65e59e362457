package file

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"sync"
)

// fileLock is an flock that is held. Two in one process exclude each other like those of two processes,
// since each has opened the file itself; the kernel drops it with the process.
type fileLock struct{ f *os.File }

// tryLock locks the file, which it makes if it is absent. It answers nil if that is impossible at the
// moment.
func tryLock(path string) (*fileLock, error) {
	f, err := openFile(path, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, err
	}
	locked, err := flock(f)
	if err != nil {
		f.Close()
		return nil, &fs.PathError{Op: "flock", Path: path, Err: err}
	}
	// Whoever had the lock before may have removed the file; then somebody else can lock a new one
	// of that name.
	if !locked || !still(f, path) {
		f.Close()
		return nil, nil
	}
	return &fileLock{f}, nil
}

// still reports whether f is the file that has this path now.
func still(f *os.File, path string) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(path)
	return err == nil && os.SameFile(mine, now)
}

// waitLock tries until ctx ends.
func waitLock(ctx context.Context, path string) (*fileLock, error) {
	for {
		lock, err := tryLock(path)
		if lock != nil || err != nil {
			return lock, err
		}
		if err := ctx.Err(); err != nil {
			return nil, &fs.PathError{Op: "flock", Path: path, Err: errors.Join(errBusy, err)}
		}
		sleep(ctx, ctx, longestPause)
	}
}

var errBusy = errors.New("locked by another process")

// unlock unlocks, not only closes: a child that the process is just starting has the file open, too,
// until it executes its program.
func (l *fileLock) unlock() {
	funlock(l.f)
	l.f.Close()
}

// turn is the line of this process's goroutines for the steps on one name, of all its drivers. It is
// first come, first served, and there while somebody is in it.
type turn struct {
	path  string
	taken chan struct{}
	users int // guarded by turns
}

var turns = struct {
	sync.Mutex
	of map[string]*turn
}{of: make(map[string]*turn)}

// joinTurn must be followed by leave.
func joinTurn(path string) *turn {
	turns.Lock()
	defer turns.Unlock()
	t := turns.of[path]
	if t == nil {
		t = &turn{path: path, taken: make(chan struct{}, 1)}
		turns.of[path] = t
	}
	t.users++
	return t
}

func (t *turn) leave() {
	turns.Lock()
	defer turns.Unlock()
	if t.users--; t.users == 0 {
		delete(turns.of, t.path)
	}
}

// wait reports whether it is one's turn now, which ends with pass; if not, a context has ended.
func (t *turn) wait(ctx, open context.Context) bool {
	select {
	case t.taken <- struct{}{}:
		return true
	case <-ctx.Done():
	case <-open.Done():
	}
	return false
}

// now is wait without waiting.
func (t *turn) now() bool {
	select {
	case t.taken <- struct{}{}:
		return true
	default:
		return false
	}
}

func (t *turn) pass() { <-t.taken }
