package file

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/state"
)

// boots is one driver's part in the namespace's memory from one boot to the next. The directory for that
// holds
//
//   - <boot id>.<n>, one for each driver that is open, which has it locked. It holds a mark: in that
//     boot the drivers that have had the file gave no token above it that is not itself on the disk. It
//     is overwritten in place, since that can be flushed without waiting for the file system's journal.
//   - <boot id>.ready, there when what the last boot left torn has been removed.
//
// The files of a boot serve again, so there are as many as there were drivers at one time. After the
// boot only the greatest mark is kept. On a system that tells no boot id all of this is left out, and
// every state is flushed.
type boots struct {
	dir  string
	boot string

	// base is the greatest mark of earlier boots: every token up to it may have been given.
	base driver.Token

	own   *fileLock    // of this driver's mark file
	slot  int          // of the file that has the present mark
	first driver.Token // what the file said when it was opened, which must not be lowered

	// mark is on the disk: in the file, or it is base.
	mark atomic.Uint64

	mu      sync.Mutex
	closed  bool
	raising *raising // under way
	done    sync.WaitGroup
}

// raising is a goroutine that raises the mark.
type raising struct {
	ended chan struct{}
	err   error
}

// ahead is how far a new mark is ahead of the clock, and so how long it serves (T4 allows 1 s).
const ahead = 900 * time.Millisecond

const readySuffix = "ready"

// foreignWait is for how long another boot's file may be locked by those who open the namespace at the
// same moment.
const foreignWait = 2 * time.Second

// openBoots reads the directory. If no driver has opened the namespace since the boot, it runs recover.
func openBoots(ctx context.Context, dir string, sys system, recover func() error) (*boots, error) {
	b := &boots{dir: dir, boot: sys.boot}
	if b.boot == "" {
		return b, nil
	}
	err := b.claim()
	if err == nil {
		err = b.readEarlier(ctx)
	}
	if err == nil {
		err = b.recoverOnce(recover)
	}
	if err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

// close leaves the mark file to the next driver.
func (b *boots) close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	b.done.Wait()
	if b.own != nil {
		b.own.unlock()
	}
}

func (b *boots) path(boot, suffix string) string { return filepath.Join(b.dir, boot+"."+suffix) }

// claim takes a mark file that no open driver has.
func (b *boots) claim() (err error) {
	for n := 0; b.own == nil; n++ {
		if b.own, err = tryLock(b.path(b.boot, strconv.Itoa(n))); err != nil {
			return err
		}
	}
	file := b.own.f
	info, err := file.Stat()
	if err != nil {
		return err
	}
	if info.Size() < marksLength {
		if _, err := file.WriteAt(make([]byte, marksLength), 0); err != nil {
			return err
		}
		if err := errors.Join(file.Sync(), syncDir(b.dir)); err != nil {
			return err
		}
	}
	b.first, b.slot, err = readMark(file)
	return err
}

// readEarlier finds base. It fails if a driver with another boot id has the namespace open: each would
// hold the other's leases for void.
func (b *boots) readEarlier(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, foreignWait)
	defer cancel()
	entries, err := os.ReadDir(b.dir)
	if err != nil {
		return err
	}
	var others []string
	keep := ""
	for _, entry := range entries {
		boot, suffix, _ := strings.Cut(entry.Name(), ".")
		path := b.path(boot, suffix)
		if boot == b.boot {
			continue
		}
		if suffix == readySuffix {
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			continue
		}
		lock, err := waitLock(ctx, path)
		if errors.Is(err, errBusy) {
			return fmt.Errorf("another machine, or a container with a boot id of its own, uses this directory: %w", err)
		}
		if err != nil {
			return err
		}
		mark, _, err := readMark(lock.f)
		lock.unlock()
		if err != nil {
			return err
		}
		others = append(others, path)
		if mark > b.base || keep == "" { // the first of equals, as for everybody
			b.base, keep = mark, path
		}
	}
	for _, path := range others {
		if path != keep {
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	b.mark.Store(uint64(b.base))
	return nil
}

func (b *boots) recoverOnce(recover func() error) error {
	ready := b.path(b.boot, readySuffix)
	if _, err := os.Stat(ready); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := recover(); err != nil {
		return err
	}
	return os.WriteFile(ready, nil, 0o600)
}

// A mark file has two slots in different blocks, written in turn, so that a power failure can tear only
// one that nobody relied on yet.
const (
	markFormat  = "%20d %08x\n"
	markLength  = 30
	slotLength  = 4096
	marksLength = 2 * slotLength
)

func formatMark(t driver.Token) []byte {
	return fmt.Appendf(nil, markFormat, t, sum(strconv.AppendUint(nil, uint64(t), 10)))
}

// readMark answers the greater mark of the two and its slot; 0 if there is none.
func readMark(f *os.File) (most driver.Token, slot int, err error) {
	file := make([]byte, marksLength)
	if n, err := f.ReadAt(file, 0); err != nil && !errors.Is(err, io.EOF) {
		return 0, 0, err
	} else if n < marksLength {
		return 0, 0, nil
	}
	for i := range 2 {
		text := file[i*slotLength:][:markLength]
		var t driver.Token
		var crc uint32
		if n, _ := fmt.Sscanf(string(text), markFormat, &t, &crc); n == 2 && bytes.Equal(text, formatMark(t)) && t > most {
			most, slot = t, i
		}
	}
	return most, slot, nil
}

// next is what the mark would be raised to now. After a boot with the clock set back, tokens are those
// that follow base, for as long as it takes.
func (b *boots) next(now state.Now) driver.Token {
	return max(driver.Token(now.Token), b.base) + driver.Token(ahead.Microseconds())
}

// cover says what it takes to give a token.
type cover int

const (
	covered cover = iota // nothing
	raise                // the mark must be raised first
	flush                // the state must be flushed with it: a floor made the token run ahead
)

func (b *boots) cover(now state.Now, t driver.Token) cover {
	mark, next := driver.Token(b.mark.Load()), b.next(now)
	switch {
	case b.boot == "":
		return flush
	case t > max(mark, next):
		return flush
	case t > mark:
		return raise
	case t > mark-driver.Token(ahead.Microseconds()/2) && next > mark:
		b.start(next) // before somebody has to wait for it
	}
	return covered
}

// raise waits until the mark is t at least, or one of the contexts ends. The caller has no lock, so
// that nobody else waits for the disk.
func (b *boots) raise(ctx, open context.Context, now state.Now, t driver.Token) error {
	for uint64(t) > b.mark.Load() {
		r := b.start(max(t, b.next(now))) // the clock may have been set back since
		if r == nil {
			return open.Err()
		}
		select {
		case <-r.ended:
			if r.err != nil {
				return r.err
			}
		case <-ctx.Done():
			return ctx.Err()
		case <-open.Done():
			return open.Err()
		}
	}
	return nil
}

// start begins to raise the mark, if that is not under way. It answers nil after close.
func (b *boots) start(next driver.Token) *raising {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.raising == nil && !b.closed {
		r := &raising{ended: make(chan struct{})}
		b.raising = r
		b.done.Go(func() {
			r.err = b.write(max(next, b.first))
			b.mu.Lock()
			defer b.mu.Unlock()
			b.raising = nil
			close(r.ended)
		})
	}
	return b.raising
}

// write writes the mark beside the present one, which is never lowered.
func (b *boots) write(next driver.Token) error {
	if uint64(next) <= b.mark.Load() {
		return nil
	}
	slot := 1 - b.slot
	if _, err := b.own.f.WriteAt(formatMark(next), int64(slot*slotLength)); err != nil {
		return err
	}
	if err := syncData(b.own.f); err != nil {
		return &fs.PathError{Op: "flush", Path: b.own.f.Name(), Err: err}
	}
	b.slot = slot
	b.mark.Store(uint64(next))
	return nil
}
