// Package file keeps locks in a directory, for the processes of one machine: no server, no daemon.
//
// # Guarantees
//
// Exclusion, tokens, queue and semaphores are exact among all processes of the machine that open the same
// directory and namespace, and among several drivers in one process. Each name has a state file, and
// every step on it runs under an flock and takes effect by one write or rename that is never seen half
// done: a process that dies within a step, by kill -9 too, leaves the state before or after it, and
// the kernel drops its flock. What it held lives on for the rest of its TTL, as with every backend.
//
// On Linux leases live by CLOCK_BOOTTIME, which counts suspension and which nobody can set: a step of
// the wall clock neither ends nor prolongs a lease. Time namespaces are allowed for. A reboot ends all
// leases and queues, since no holder survives it; only tokens are remembered. On the other systems
// (macOS, BSD, illumos) leases live by the wall clock, which must not be stepped while one is held,
// and outlive a reboot until they expire; every step is then flushed to the disk. On systems without
// flock [New] fails with an error matching [errors.ErrUnsupported].
//
// A driver that grants to a waiter of another process tells it over a Unix datagram socket, which
// stands only while somebody waits. Where sockets cannot be had (see [Driver.Notify]) waiters find
// their grant by polling.
//
// # Options
//
// See [Options]. By URL: file:///var/lib/myapp/locks?namespace=x, where namespace is the only parameter.
// The path is absolute, because a relative one would mean other locks to a process started elsewhere.
// The directory is created with mode 0700 if it is absent. All processes run as one user. Put it where
// no cleaner sweeps: removing its files while a process uses them gives locks away.
//
// # Errors
//
// Whatever the operating system refuses matches [driver.ErrUnavailable], names the path and changed
// nothing. Only a failure of the last write, or of the flush after it, is an unknown outcome.
//
// A process that is stopped (SIGSTOP, a debugger) within a step keeps the flock of that name: steps of
// others on the name end with their contexts, matching ErrUnavailable, until it goes on or dies. Other
// names are not touched by that. A step takes about a tenth of a millisecond, so it takes ill luck.
//
// A state file that is damaged while the machine runs was written by somebody else and may hide a
// live lease: every step on the name fails matching ErrUnavailable until an operator removes it. One
// that a power failure left torn holds no lease that survived; the first driver after the boot removes
// it.
//
// On a full disk new names fail, matching ErrUnavailable. Extensions and releases mostly work, since
// they write where the file has room already; if not, the lease ends by its TTL.
//
// # Fencing
//
// Tokens never go back, power failures included, although few steps wait for the disk. A token is at
// most about the clock's microseconds, so each driver keeps a mark on the disk, up to 0.9 s ahead of the
// clock, that covers all names: the first token for a while waits until the mark is flushed, without a
// lock, and in steady traffic it is raised twice a second in the background. After a reboot every name
// goes on above the greatest mark. (It follows that after a boot with the clock set back, names run ahead
// of the clock that never did before.) A token beyond the mark, because a floor demanded it, is flushed
// with its own state. On a file system in memory, such as /run or /dev/shm, nothing waits, and after a
// reboot only the clock keeps tokens from going back.
//
// A name's files are removed when the name was unused for 48 h and its last token lies below the clock:
// drivers look at a few files now and then, so they do not grow in number without end.
//
// # What it does not do
//
// Work on a network file system (NFS, SMB, 9p, a directory shared with a virtual machine): there flock
// and rename do not promise what this needs. Where flock does reach the other machine, New refuses to
// open a directory that a driver with another boot id has open. This also finds containers that are
// given a boot id of their own (systemd-nspawn, LXD): they cannot share a directory with the host.
// Plain Docker and Kubernetes containers on one machine can.
//
// Protect from a user who may write to the directory. Survive the loss of the disk.
package file

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/state"
)

func init() { driver.Register("file", open) }

// Options are the settings of [New]. The zero value, and nil, are the defaults.
type Options struct {
	// Namespace keeps the locks of several applications in one directory apart. The default is
	// [driver.DefaultNamespace]; for the bounds see [driver.CheckNamespace].
	Namespace string
}

// Driver is one client's connection to a directory. It implements every optional interface of package
// driver.
type Driver struct {
	sys   system
	dir   string // of the namespace
	boots *boots
	sweep sweeper
	inbox inbox

	open    context.Context // ends with Close
	end     context.CancelFunc
	closing sync.Once

	// inStep, if set by a test, runs in the middle of each step, under the flock.
	inStep func()
}

// system is what the driver needs to know about the machine.
type system struct {
	// boot is another one after each boot; empty if the system does not tell, and then the clock goes
	// on over boots and every step is flushed.
	boot string
	now  func() state.Now
}

// openTimeout bounds New: how long it waits for others that are inside a step on the same files.
const openTimeout = 10 * time.Second

// New connects to the locks in dir, which is created with mode 0700 if it is absent; a relative path is
// taken from the present working directory. It fails with an error matching [driver.ErrInvalid],
// [driver.ErrUnavailable] (the text names the path) or, on a system without flock,
// [errors.ErrUnsupported]. Until Close the driver keeps one file open, a directory while it looks for
// names to forget, and a socket while somebody waits.
func New(dir string, o *Options) (*Driver, error) {
	ctx, cancel := context.WithTimeout(context.Background(), openTimeout)
	defer cancel()
	return newDriver(ctx, dir, o)
}

func open(ctx context.Context, u *url.URL) (driver.Driver, error) {
	params := driver.NewParams(u)
	o := &Options{Namespace: params.String("namespace", driver.DefaultNamespace)}
	if err := params.Err(); err != nil {
		return nil, err
	}
	if err := driver.CheckNamespace(o.Namespace); err != nil { // empty is no default here
		return nil, err
	}
	if u.Host != "" || u.User != nil || u.Opaque != "" || u.Fragment != "" || !filepath.IsAbs(u.Path) {
		return nil, driver.Invalid("url", u.Redacted(), "must be file:///absolute/directory, with three slashes")
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	d, err := newDriver(ctx, u.Path, o)
	if err != nil {
		return nil, err // not a nil *Driver in a driver.Driver
	}
	return d, nil
}

func newDriver(ctx context.Context, dir string, o *Options) (*Driver, error) {
	sys, err := thisSystem()
	if err != nil {
		return nil, unavailable(err)
	}
	return newDriverOn(ctx, sys, dir, o)
}

func newDriverOn(ctx context.Context, sys system, dir string, o *Options) (*Driver, error) {
	if o == nil {
		o = &Options{}
	}
	namespace := o.Namespace
	if namespace == "" {
		namespace = driver.DefaultNamespace
	}
	if err := driver.CheckNamespace(namespace); err != nil {
		return nil, err
	}
	if dir == "" {
		return nil, driver.Invalid("directory", dir, "must not be empty")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, unavailable(err)
	}
	d := &Driver{sys: sys, dir: filepath.Join(dir, escape(namespace))}
	d.sweep.rest = lookRest
	d.open, d.end = context.WithCancel(context.Background())
	d.inbox.dir, d.inbox.name, d.inbox.ctx = filepath.Join(d.dir, ".push"), rand.Text(), d.open
	bootDir := filepath.Join(d.dir, ".boot")
	for _, dir := range []string{d.dir, d.inbox.dir, bootDir} {
		if err := makeDir(dir); err != nil {
			return nil, unavailable(err)
		}
	}
	d.boots, err = openBoots(ctx, bootDir, sys, func() error { return d.recover(ctx) })
	if err != nil {
		return nil, unavailable(err)
	}
	d.inbox.tidy()
	return d, nil
}

// makeDir makes a directory that outlives a power failure, and its parents.
func makeDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrNotExist) {
		if err := makeDir(filepath.Dir(dir)); err != nil {
			return err
		}
		err = os.Mkdir(dir, 0o700)
	}
	if errors.Is(err, fs.ErrExist) {
		info, err := os.Stat(dir)
		if err == nil && !info.IsDir() {
			err = &fs.PathError{Op: "open", Path: dir, Err: errors.New("not a directory")}
		}
		return err
	}
	if err != nil {
		return err
	}
	return syncDir(filepath.Dir(dir))
}

func unavailable(err error) error { return driver.Unavailable(fmt.Errorf("file: %w", err)) }

var errClosed = driver.Unavailable(errors.New("file: the driver is closed"))

// Info implements driver.Driver.
func (d *Driver) Info() driver.Info { return driver.Info{Backend: "file", Durable: true} }

// Close implements driver.Driver. It removes the driver's socket.
func (d *Driver) Close() error {
	d.closing.Do(func() {
		d.end()
		d.inbox.close()
		d.sweep.close()
		d.boots.close()
	})
	return nil
}

// Lock implements driver.Locker.
func (d *Driver) Lock(ctx context.Context, r driver.Request) (a driver.Answer, err error) {
	client := ""
	if r.Wait {
		client = d.inbox.want(r.Claim)
	}
	err = d.step(ctx, r.Name, func(now state.Now, s *state.Name) (g []state.Grant) {
		a, g = s.Lock(now, r, client)
		return g
	})
	if err != nil {
		return driver.Answer{}, err
	}
	return a, nil
}

// Acquire implements driver.Semaphore.
func (d *Driver) Acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return d.Lock(ctx, r)
}

// Extend implements driver.Locker. All leases of one name share a step.
func (d *Driver) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	name := func(i int) driver.Name { return leases[i].Name }
	return d.batch(ctx, len(leases), name, func(i int, now state.Now, s *state.Name) (driver.Answer, []state.Grant) {
		return s.Extend(now, leases[i].ID, leases[i].TTL), nil
	})
}

// Release implements driver.Locker.
func (d *Driver) Release(ctx context.Context, o driver.Owner) (found bool, err error) {
	err = d.step(ctx, o.Name, func(now state.Now, s *state.Name) (g []state.Grant) {
		found, g = s.Release(now, o.ID)
		return g
	})
	return found && err == nil, err
}

// Poll implements driver.Queue. All waiters of one name share a step.
func (d *Driver) Poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	for _, w := range waiters {
		d.inbox.want(w.Claim)
	}
	name := func(i int) driver.Name { return waiters[i].Name }
	return d.batch(ctx, len(waiters), name, func(i int, now state.Now, s *state.Name) (driver.Answer, []state.Grant) {
		return s.Poll(now, waiters[i])
	})
}

// NextToken implements driver.FencingSource.
func (d *Driver) NextToken(ctx context.Context, n driver.Name, floor driver.Token) (t driver.Token, err error) {
	err = d.step(ctx, n, func(now state.Now, s *state.Name) []state.Grant {
		t = s.NextToken(now, floor)
		return nil
	})
	if err != nil {
		return 0, err
	}
	return t, nil
}

// Advance implements driver.FencingSource.
func (d *Driver) Advance(ctx context.Context, n driver.Name, floor driver.Token) error {
	return d.step(ctx, n, func(_ state.Now, s *state.Name) []state.Grant {
		s.Advance(floor)
		return nil
	})
}

// ForceUnlock implements driver.ForceUnlocker.
func (d *Driver) ForceUnlock(ctx context.Context, n driver.Name) (ended int, err error) {
	err = d.step(ctx, n, func(now state.Now, s *state.Name) (g []state.Grant) {
		ended, g = s.ForceUnlock(now)
		return g
	})
	if err != nil {
		return 0, err
	}
	return ended, nil
}

// List implements driver.Lister. It takes no lock. Damaged state files are passed over, and reported by
// the error when all others have been listed.
func (d *Driver) List(ctx context.Context, only driver.Name, yield func(driver.Holding) bool) error {
	if err := d.alive(ctx); err != nil {
		return err
	}
	if only.Name != "" {
		_, err := d.list(ctx, fileName(only), yield)
		return err
	}
	dir, err := os.Open(d.dir)
	if err != nil {
		return unavailable(err)
	}
	defer dir.Close()
	var damaged error
	for {
		entries, err := dir.Readdirnames(256)
		for _, entry := range entries {
			// The lock files, which no step replaces, so that none is met twice.
			base, suffix := splitEntry(entry)
			if base == "" || suffix != lockSuffix {
				continue
			}
			more, err := d.list(ctx, base, yield)
			if errors.Is(err, errDamaged) && damaged == nil {
				damaged = err
			} else if err != nil {
				return err
			}
			if !more {
				return damaged
			}
		}
		if len(entries) == 0 {
			if err != io.EOF {
				return unavailable(err)
			}
			return damaged
		}
	}
}

// list lists the leases of one state file, and reports whether yield wants more.
func (d *Driver) list(ctx context.Context, base string, yield func(driver.Holding) bool) (bool, error) {
	if err := d.alive(ctx); err != nil {
		return false, err
	}
	r, err := d.read(ctx, filepath.Join(d.dir, base))
	if err != nil || r == nil {
		return true, err
	}
	r.enter(d.sys.boot, 0)
	now := d.sys.now()
	for _, h := range r.State.Live(now) {
		if !yield(driver.Holding{Owner: driver.Owner{Name: r.name(), ID: h.ID}, Token: h.Token,
			Left: time.Duration(h.Expires - now.Lease), Holder: h.Info}) {
			return false, nil
		}
	}
	return true, nil
}

// read reads a state file without a lock, unless a step writes it all the while.
func (d *Driver) read(ctx context.Context, path string) (*record, error) {
	for {
		r, err := readRecord(path)
		if !errors.Is(err, errDamaged) {
			return r, err
		}
		lock, lockErr := tryLock(path + lockSuffix)
		if lockErr != nil {
			return nil, unavailable(lockErr)
		}
		if lock != nil {
			defer lock.unlock()
			return readRecord(path)
		}
		if err := d.alive(ctx); err != nil {
			return nil, err
		}
		sleep(ctx, d.open, firstPause)
	}
}

// alive answers an error if the context has ended or the driver is closed.
func (d *Driver) alive(ctx context.Context) error {
	if d.open.Err() != nil {
		return errClosed
	}
	if err := ctx.Err(); err != nil {
		return driver.Unavailable(err)
	}
	return nil
}
