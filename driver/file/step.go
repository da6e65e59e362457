package file

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/state"
)

// change is a step on one name's state, and answers the grants it made.
type change func(now state.Now, s *state.Name) []state.Grant

// step runs f on the name's state as a server would, and announces the grants it made. f may run more
// than once; the last run counts.
func (d *Driver) step(ctx context.Context, n driver.Name, f change) error {
	// Read once: else it would run away from the mark while that is raised.
	clock := d.sys.now()
	for {
		err := d.stepInTurn(ctx, n, clock, f)
		var u *uncovered
		if !errors.As(err, &u) {
			return err
		}
		if err := d.boots.raise(ctx, d.open, d.sys.now(), u.token); err != nil {
			if ended := d.alive(ctx); ended != nil {
				return ended
			}
			return unavailable(err)
		}
	}
}

// uncovered is the error of a step that would have given a token above the mark. It has changed nothing.
type uncovered struct{ token driver.Token }

func (u *uncovered) Error() string { return "token " + u.token.String() + " is above the mark" }

// stepInTurn is step as far as that goes without raising the mark.
//
// It tries to lock and sleeps, where a blocking flock would keep a thread for as long as another process
// is stopped within a step, whatever the context says. The goroutines of this process stand in line
// for that, or those who sleep would be passed again and again.
func (d *Driver) stepInTurn(ctx context.Context, n driver.Name, clock state.Now, f change) error {
	if err := d.alive(ctx); err != nil {
		return err
	}
	turn := joinTurn(d.path(n))
	defer turn.leave()
	if !turn.wait(ctx, d.open) {
		return d.stalled(ctx, n)
	}
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		if busy, err := d.try(turn, n, clock, f); !busy {
			return err
		}
		if d.alive(ctx) != nil {
			turn.pass()
			return d.stalled(ctx, n)
		}
		sleep(ctx, d.open, pause)
	}
}

// stalled is the error of a step that did not begin until ctx ended or the driver was closed.
func (d *Driver) stalled(ctx context.Context, n driver.Name) error {
	return fmt.Errorf("%w: %s is locked by a step of somebody else", d.alive(ctx), d.path(n)+lockSuffix)
}

// batch runs f for each of many owners, those of one name in one step.
func (d *Driver) batch(ctx context.Context, owners int, name func(int) driver.Name,
	f func(int, state.Now, *state.Name) (driver.Answer, []state.Grant)) []driver.Result {

	results := make([]driver.Result, owners)
	of := make(map[driver.Name][]int)
	var names []driver.Name
	for i := range owners {
		n := name(i)
		if of[n] == nil {
			names = append(names, n)
		}
		of[n] = append(of[n], i)
	}
	var late sync.WaitGroup
	for _, n := range names {
		each := func(now state.Now, s *state.Name) (grants []state.Grant) {
			for _, i := range of[n] {
				answer, g := f(i, now, s)
				results[i].Answer = answer
				grants = append(grants, g...)
			}
			return grants
		}
		done := func(err error) {
			if err == nil {
				return
			}
			for _, i := range of[n] {
				results[i] = driver.Result{Err: err} // whatever the step had answered
			}
		}
		if made, err := d.stepNow(ctx, n, each); made {
			done(err)
		} else { // it must not hold up the others
			late.Go(func() { done(d.step(ctx, n, each)) })
		}
	}
	late.Wait()
	return results
}

// The first and the longest pause between two tries for a lock file that is taken.
const (
	firstPause   = 200 * time.Microsecond
	longestPause = 8 * time.Millisecond
)

// sleep waits for half the time to all of it, or until one of the contexts ends.
func sleep(ctx, open context.Context, most time.Duration) {
	t := time.NewTimer(most/2 + rand.N(most/2))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	case <-open.Done():
	}
}

func (d *Driver) path(n driver.Name) string { return filepath.Join(d.dir, fileName(n)) }

// stepNow makes the step, or fails, if nothing is to be waited for.
func (d *Driver) stepNow(ctx context.Context, n driver.Name, f change) (made bool, err error) {
	if err := d.alive(ctx); err != nil {
		return true, err
	}
	turn := joinTurn(d.path(n))
	defer turn.leave()
	if !turn.now() {
		return false, nil
	}
	busy, err := d.try(turn, n, d.sys.now(), f)
	if busy {
		turn.pass()
	}
	var u *uncovered
	return !busy && !errors.As(err, &u), err
}

// try makes the step, and then passes the turn, unless another process is in one on this name. Tokens
// follow the clock as given.
func (d *Driver) try(turn *turn, n driver.Name, clock state.Now, f change) (busy bool, err error) {
	lock, err := tryLock(turn.path + lockSuffix)
	if err != nil {
		turn.pass()
		return false, unavailable(err)
	}
	if lock == nil {
		return true, nil
	}
	grants, made, err := d.change(turn.path, n, clock, f)
	lock.unlock()
	turn.pass()
	if err != nil {
		return false, err
	}
	d.inbox.announce(n, grants)
	d.sweep.look(d, made)
	return false, nil
}

// change is the part of a step that runs under the lock. made says that the name had no file before.
func (d *Driver) change(path string, n driver.Name, clock state.Now, f change) (grants []state.Grant, made bool, err error) {
	r, err := openRecord(path, os.O_RDWR)
	if err != nil {
		return nil, false, err
	}
	// Not before the lock is had: what the step before this one wrote must not lie in the future.
	now := d.sys.now()
	exists := r != nil
	if exists {
		defer r.file.Close()
		if err := r.decode(path); err != nil {
			return nil, false, err
		}
	} else {
		r = newRecord(n, d.sys.boot, d.boots.base)
	}
	r.enter(d.sys.boot, d.boots.base)
	if d.inStep != nil {
		d.inStep()
	}
	grants = f(state.Now{Lease: now.Lease, Token: clock.Token}, &r.State)
	r.Used = now
	data, changed := r.encode()
	if !changed {
		if !exists {
			if err := removeRecord(path); err != nil {
				return nil, false, unavailable(err)
			}
		}
		return grants, false, nil
	}
	cover := d.boots.cover(now, r.State.Last)
	if cover == raise {
		return nil, false, &uncovered{r.State.Last}
	}
	if cover == flush || !exists {
		return grants, !exists, replaceRecord(path, data, cover == flush)
	}
	return grants, false, r.update(data)
}

// sweeper removes names that can be forgotten: a few looks after steps that wrote, so that the cost
// follows the traffic and a driver at rest does nothing.
type sweeper struct {
	rest time.Duration // between looks, unless names are made

	mu      sync.Mutex
	last    time.Time
	read    *os.File // the directory, while a round through it is under way
	entries []string
}

// looks is how many directory entries a step looks at that made a name, and any step once in lookRest. A name
// has two, so names are looked at faster than they are made.
const (
	looks    = 4
	lookRest = 50 * time.Millisecond
)

func (s *sweeper) look(d *Driver, made bool) {
	if !s.mu.TryLock() {
		return
	}
	defer s.mu.Unlock()
	if now := time.Now(); made || now.Sub(s.last) >= s.rest {
		s.last = now
	} else {
		return
	}
	for range looks {
		if base, _ := splitEntry(s.next(d)); base != "" {
			// Whatever stands in the way is for the next step on that name to report.
			_, _ = d.forget(base, false)
		}
	}
}

// next answers an entry of the directory, in an endless round; empty at the end of each.
func (s *sweeper) next(d *Driver) string {
	if len(s.entries) == 0 {
		if d.open.Err() != nil {
			return ""
		}
		if s.read == nil {
			s.read, _ = os.Open(d.dir)
		}
		if s.entries, _ = s.read.Readdirnames(128); len(s.entries) == 0 {
			s.read.Close()
			s.read = nil
			return ""
		}
	}
	entry := s.entries[0]
	s.entries = s.entries[1:]
	return entry
}

func (s *sweeper) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.read.Close()
	s.read, s.entries = nil, nil
}

// forget removes the files of one name if it can be forgotten or, with torn, if its state cannot be read.
func (d *Driver) forget(base string, torn bool) (busy bool, err error) {
	path := filepath.Join(d.dir, base)
	doomed := func() (bool, error) {
		r, err := openRecord(path, os.O_RDONLY)
		switch {
		case torn && errors.Is(err, errDamaged):
			return true, nil
		case err != nil:
			return false, err
		case r == nil:
			return true, nil // what is left of a step that was killed
		}
		defer r.file.Close()
		return r.forgettable(d.sys.now(), d.sys.boot), nil
	}
	if yes, err := doomed(); !yes {
		return false, err
	}
	lock, err := tryLock(path + lockSuffix)
	if err != nil {
		return false, unavailable(err)
	}
	if lock == nil {
		return true, nil
	}
	defer lock.unlock()
	yes, err := doomed()
	if yes {
		err = removeRecord(path)
	}
	return false, err
}

// recover removes what a power failure left torn. It runs before the first step after a boot, so that
// from then on an unreadable file is known to be somebody else's work.
func (d *Driver) recover(ctx context.Context) error {
	dir, err := os.ReadDir(d.dir)
	if err != nil {
		return err
	}
	for _, entry := range dir {
		base, suffix := splitEntry(entry.Name())
		if base == "" || suffix != "" {
			continue
		}
		for {
			busy, err := d.forget(base, true)
			if err != nil {
				return err
			}
			if !busy {
				break
			}
			if err := d.alive(ctx); err != nil {
				return err
			}
			sleep(ctx, d.open, longestPause)
		}
	}
	return nil
}
