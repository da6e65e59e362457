package file

import (
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// TestReboot: leases and queues end with the boot, tokens go on, whatever became of the clocks.
func TestReboot(t *testing.T) {
	dir, clock := t.TempDir(), newFakeClock()
	d := openOn(t, clock.in("first"), dir)
	holder, waiting := owner("n"), owner("n")
	last := mustLock(t, d, holder, time.Hour)
	mustState(t, d, wait(waiting, time.Hour, time.Hour), driver.Waiting, "W4")
	unused, err := d.NextToken(t.Context(), lockName("unused since"), 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, boot := range []string{"second", "third"} {
		d.Close()
		clock.lease.Store(int64(time.Second))                      // CLOCK_BOOTTIME begins anew
		clock.stepWall(-time.Duration(i+1) * 24 * 365 * time.Hour) // an empty battery
		d = openOn(t, clock.in(boot), dir)
		if got := listed(t, d, driver.Name{}); len(got) != 0 {
			t.Fatalf("leases after a boot: got %v, want none", got)
		}
		if r := d.Extend(t.Context(), []driver.Extension{{Owner: holder, TTL: time.Hour}})[0]; r.State != driver.Gone {
			t.Fatalf("Extend after a boot: got %+v, want gone", r)
		}
		if r := d.Poll(t.Context(), []driver.Poll{{Owner: waiting, TTL: time.Hour, Claim: time.Hour}})[0]; r.State != driver.Gone {
			t.Fatalf("Poll after a boot: got %+v, want gone", r)
		}
		holder, waiting = owner("n"), owner("n")
		token := mustLock(t, d, holder, time.Hour)
		if token <= last {
			t.Fatalf("token after a boot with the clock set back: got %d, want more than %d (T1)", token, last)
		}
		last = token
		mustState(t, d, wait(waiting, time.Hour, time.Hour), driver.Waiting, "W4")
	}
	token, err := d.NextToken(t.Context(), lockName("unused since"), 0)
	if err != nil || token <= unused {
		t.Fatalf("NextToken two boots later: got %d, %v, want more than %d (T1)", token, err, unused)
	}

	// Though tokens run ahead of the clock now, not each of them is flushed, which would make the file anew.
	n := lockName("n")
	before, err := os.Stat(d.path(n))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.NextToken(t.Context(), n, 0); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(d.path(n)); err != nil || !os.SameFile(before, after) {
		t.Fatalf("state file after one more token: got another one, %v, want it overwritten in place", err)
	}
}

// TestPowerFailure takes away, again and again, whatever was not flushed. What was is told by the marks,
// and by the state file being another one than before the step.
func TestPowerFailure(t *testing.T) {
	seed := mathrand.Uint64()
	t.Logf("seed %d", seed)
	random := mathrand.New(mathrand.NewPCG(seed, 0))
	dir, clock := t.TempDir(), newFakeClock()
	names := []driver.Name{lockName("a"), lockName("b"), lockName("c")}
	last := make(map[driver.Name]driver.Token)
	flushes, steps := 0, 0
	for boot := range 12 {
		d := openOn(t, clock.in(fmt.Sprint("boot-", boot)), dir)
		flushed := make(map[driver.Name][]byte) // the state files as they are on the disk
		for _, n := range names {
			if data, err := os.ReadFile(d.path(n)); err == nil {
				flushed[n] = data
			}
		}
		for range 40 {
			n := names[random.IntN(len(names))]
			floor := driver.Token(0)
			if random.IntN(25) == 0 { // after a clock that was set back, tokens follow the base
				floor = max(driver.Token(clock.token.Load()), d.boots.base) + driver.Token(random.Int64N(2e6))
			}
			before, _ := os.Stat(d.path(n))
			token, err := d.NextToken(t.Context(), n, floor)
			if err != nil || token <= max(last[n], floor) {
				t.Fatalf("NextToken of %v above %d: got %d, %v, want more than that and %d (T1)", n, floor, token, err, last[n])
			}
			if limit := driver.Token(clock.token.Load()+1e6) + 1; token > max(limit, last[n]+1, floor+1) && token > d.boots.base+1 {
				t.Fatalf("NextToken of %v: got %d, want at most 1 s ahead of the clock or one more than last or floor (T4)", n, token)
			}
			last[n] = token
			steps++
			after, err := os.Stat(d.path(n))
			if err != nil {
				t.Fatal(err)
			}
			if before == nil || !os.SameFile(before, after) {
				if before != nil {
					flushes++
				}
				flushed[n] = read(t, d.path(n))
			}
			if random.IntN(4) == 0 {
				clock.pass(time.Duration(random.Int64N(int64(time.Second))))
			}
		}
		d.Close()
		for _, n := range names {
			path := d.path(n)
			switch random.IntN(3) {
			case 0: // all was written in time
			case 1: // the last flush
				if flushed[n] != nil {
					if err := os.WriteFile(path, flushed[n], 0o600); err != nil {
						t.Fatal(err)
					}
				}
			case 2: // torn, if it was not flushed at the end
				now := read(t, path)
				if string(now) != string(flushed[n]) {
					if err := os.Truncate(path, random.Int64N(int64(len(now)))); err != nil {
						t.Fatal(err)
					}
				}
			}
			if random.IntN(2) == 0 {
				os.Remove(path + lockSuffix)
			}
		}
		if random.IntN(2) == 0 {
			clock.stepWall(-time.Duration(random.Int64N(int64(10 * time.Second))))
		}
		clock.lease.Store(0)
	}
	if flushes == 0 || flushes > steps*3/4 {
		t.Fatalf("flushed states: got %d of %d, want some, for tokens ahead of the clock, not most", flushes, steps)
	}
}

// storedMarks reads all mark files of a boot.
func storedMarks(t *testing.T, d *Driver, boot string) (marks []driver.Token) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(d.boots.dir, boot+".[0-9]*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range files {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		mark, _, err := readMark(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		marks = append(marks, mark)
	}
	return marks
}

// TestFewFlushes: one mark serves all names of a driver for half a second.
func TestFewFlushes(t *testing.T) {
	dir, clock := t.TempDir(), newFakeClock()
	d := openOn(t, clock.in("boot"), dir)
	marks := make(map[driver.Token]bool)
	for i := range 400 {
		token, err := d.NextToken(t.Context(), lockName(fmt.Sprint(i%7)), 0)
		if err != nil {
			t.Fatal(err)
		}
		mark := storedMarks(t, d, "boot")[0]
		if marks[mark] = true; mark < token {
			t.Fatalf("mark after token %d: got %d, want not less", token, mark)
		}
		clock.pass(5 * time.Millisecond)
	}
	if got := len(marks); got < 3 || got > 5 { // in 2 s of the clock
		t.Fatalf("marks made in 2 s: got %d, want 3 to 5", got)
	}
}

// TestMarkFiles: the files of drivers that are gone serve again, and keep what they said; after a boot the
// greatest is kept.
func TestMarkFiles(t *testing.T) {
	dir, clock := t.TempDir(), newFakeClock()
	const together = 3
	var most driver.Token
	for round := range 4 {
		var drivers []*Driver
		for i := range together {
			d := openOn(t, clock.in("one"), dir)
			drivers = append(drivers, d)
			for range 3 { // marks are raised each time, both slots used
				token, err := d.NextToken(t.Context(), lockName(fmt.Sprint(round, i)), 0)
				if err != nil {
					t.Fatal(err)
				}
				most = max(most, token)
				clock.pass(2 * time.Second)
			}
		}
		if got := storedMarks(t, drivers[0], "one"); len(got) != together || slices.Max(got) < most {
			t.Fatalf("marks of %d drivers: got %v, want one each, one at least %d", together, got, most)
		}
		for _, d := range drivers {
			d.Close()
		}
		clock.stepWall(-time.Hour) // tokens of new names are lower from now on
	}
	d := openOn(t, clock.in("two"), dir)
	if got := storedMarks(t, d, "one"); len(got) != 1 || got[0] < most || got[0] != d.boots.base {
		t.Fatalf("marks of the boot before: got %v, want the greatest, at least %d", got, most)
	}
	if token := mustLock(t, d, owner("new"), time.Second); token <= most {
		t.Fatalf("token after the boot: got %d, want more than %d (T1)", token, most)
	}
}

// TestTornMark: a power failure tears at most the slot that was being written.
func TestTornMark(t *testing.T) {
	dir, clock := t.TempDir(), newFakeClock()
	d := openOn(t, clock.in("one"), dir)
	path := d.boots.own.f.Name()
	for i := range 4 {
		before := d.boots.slot
		mustLock(t, d, owner(fmt.Sprint(i)), time.Hour)
		if d.boots.slot == before {
			t.Fatalf("slot of mark %d: got %d again, want the other one", i, before)
		}
		clock.pass(2 * time.Second)
	}
	mark, slot := driver.Token(d.boots.mark.Load()), d.boots.slot
	good := read(t, path)
	for cut := range markLength - 1 { // its last byte is that of the mark before
		torn := slices.Clone(good)
		next := formatMark(mark + 1e6)
		copy(torn[(1-slot)*slotLength:], next[:cut])
		if err := os.WriteFile(path, torn, 0o600); err != nil {
			t.Fatal(err)
		}
		got, at, err := readMark(d.boots.own.f)
		if err != nil || got != mark || at != slot {
			t.Fatalf("mark with the other slot torn after %d bytes: got %d in slot %d, %v, want %d in slot %d", cut, got, at, err, mark, slot)
		}
	}
	if err := os.Truncate(path, 100); err != nil { // made, and not flushed
		t.Fatal(err)
	}
	if got, _, err := readMark(d.boots.own.f); err != nil || got != 0 {
		t.Fatalf("mark of a file cut short: got %d, %v, want 0, nil", got, err)
	}
}

// TestOtherBootID: two drivers that do not agree on the boot would void each other's leases.
func TestOtherBootID(t *testing.T) {
	dir, clock := t.TempDir(), newFakeClock()
	d := openOn(t, clock.in("here"), dir)
	o := owner("n")
	mustLock(t, d, o, time.Hour)
	_, err := newDriverOn(t.Context(), clock.in("elsewhere"), dir, nil)
	mustUnavailable(t, "open under another boot id", err, "another machine")
	mustState(t, openOn(t, clock.in("here"), dir), try(owner("n"), time.Hour), driver.Held, "L1")
}
