package file

import (
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/state"
)

// The driver claims every optional interface (C1).
var (
	_ driver.Driver        = (*Driver)(nil)
	_ driver.Semaphore     = (*Driver)(nil)
	_ driver.FencingSource = (*Driver)(nil)
	_ driver.Queue         = (*Driver)(nil)
	_ driver.Notifier      = (*Driver)(nil)
	_ driver.Lister        = (*Driver)(nil)
	_ driver.ForceUnlocker = (*Driver)(nil)
)

// TestDifferential makes random steps through several drivers on one directory, closing and opening them
// on the way, and compares every answer with the reference state machine.
func TestDifferential(t *testing.T) {
	for _, boot := range []string{"boot", ""} { // with no boot id every step is flushed
		t.Run("boot id "+boot, func(t *testing.T) {
			steps := 700
			if boot == "" {
				steps = 200
			}
			seed := mathrand.Uint64()
			t.Logf("seed %d", seed)
			differential(t, mathrand.New(mathrand.NewPCG(seed, 0)), boot, steps)
		})
	}
}

func differential(t *testing.T, random *mathrand.Rand, boot string, steps int) {
	ctx, dir, clock := t.Context(), t.TempDir(), newFakeClock()
	sys := clock.in(boot)
	drivers := []*Driver{openOn(t, sys, dir), openOn(t, sys, dir), openOn(t, sys, dir)}
	model := make(map[driver.Name]*state.Name)
	names := []driver.Name{lockName("a"), lockName("b/B"), {Kind: driver.KindPermit, Name: "a"},
		{Kind: driver.KindPermit, Name: strings.Repeat("long\x00", 100)}}
	ids := []string{rand.Text(), rand.Text(), rand.Text(), rand.Text(), rand.Text(), rand.Text()}
	ttl := func() time.Duration { return time.Duration(1+random.IntN(20)) * time.Second }

	var did string
	check := func(got, want any) {
		t.Helper()
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("%s: got %v, want %v", did, got, want)
		}
	}
	for i := range steps {
		which := random.IntN(len(drivers))
		d := drivers[which]
		n := names[random.IntN(len(names))]
		o := driver.Owner{Name: n, ID: ids[random.IntN(len(ids))]}
		if model[n] == nil {
			model[n] = new(state.Name)
		}
		m, now := model[n], clock.now()
		floor := driver.Token(0)
		switch random.IntN(20) {
		case 0:
			floor = driver.Token(now.Token + random.Int64N(2e6)) // some ahead of the mark, too
		case 1:
			floor = driver.Token(now.Token - random.Int64N(2e6))
		}
		switch op := random.IntN(20); op {
		default:
			r := driver.Request{Owner: o, TTL: ttl(), Limit: 1, Floor: floor, Holder: fmt.Sprint("step ", i)}
			if n.Kind == driver.KindPermit {
				r.Limit = 1 + random.IntN(3)
			}
			if r.Wait = random.IntN(2) == 0; r.Wait {
				r.Claim = r.TTL / 2
			}
			did = fmt.Sprintf("step %d: lock %+v", i, r)
			want, _ := m.Lock(now, r, "")
			got, err := d.Lock(ctx, r)
			check(err, nil)
			check(got, want)
		case 8, 9:
			var batch []driver.Extension
			var want []driver.Result
			for _, n := range names {
				for _, id := range ids {
					if random.IntN(3) == 0 {
						e := driver.Extension{Owner: driver.Owner{Name: n, ID: id}, TTL: ttl()}
						if model[n] == nil {
							model[n] = new(state.Name)
						}
						batch = append(batch, e)
						want = append(want, driver.Result{Answer: model[n].Extend(now, id, e.TTL)})
					}
				}
			}
			did = fmt.Sprintf("step %d: extend %+v", i, batch)
			check(d.Extend(ctx, batch), want)
		case 10, 11, 12, 13:
			did = fmt.Sprintf("step %d: release %+v", i, o)
			want, _ := m.Release(now, o.ID)
			got, err := d.Release(ctx, o)
			check(err, nil)
			check(got, want)
		case 14, 15:
			p := driver.Poll{Owner: o, TTL: ttl(), Claim: ttl()}
			did = fmt.Sprintf("step %d: poll %+v", i, p)
			want, _ := m.Poll(now, p)
			check(d.Poll(ctx, []driver.Poll{p}), []driver.Result{{Answer: want}})
		case 16:
			did = fmt.Sprintf("step %d: next token of %v above %d", i, n, floor)
			want := m.NextToken(now, floor)
			got, err := d.NextToken(ctx, n, floor)
			check(err, nil)
			check(got, want)
		case 17:
			did = fmt.Sprintf("step %d: advance %v to %d", i, n, floor)
			m.Advance(floor)
			check(d.Advance(ctx, n, floor), nil)
		case 18:
			did = fmt.Sprintf("step %d: force unlock %v", i, n)
			want, _ := m.ForceUnlock(now)
			got, err := d.ForceUnlock(ctx, n)
			check(err, nil)
			check(got, want)
		case 19:
			did = fmt.Sprintf("step %d: list", i)
			got := listed(t, d, driver.Name{})
			for n, m := range model {
				for _, h := range m.Live(now) {
					o := driver.Owner{Name: n, ID: h.ID}
					check(got[o], driver.Holding{Owner: o, Token: h.Token,
						Left: time.Duration(h.Expires - now.Lease), Holder: h.Info})
					delete(got, o)
				}
			}
			check(len(got), 0)
		}
		switch random.IntN(40) {
		case 0, 1, 2, 3, 4, 5, 6, 7:
			clock.pass(time.Duration(random.Int64N(int64(3 * time.Second))))
		case 8:
			clock.stepWall(time.Duration(random.Int64N(int64(2*time.Hour))) - time.Hour)
		case 9:
			drivers[which].Close()
			drivers[which] = openOn(t, sys, dir)
		case 10:
			if random.IntN(10) == 0 {
				clock.pass(50 * time.Hour) // names are forgotten
			}
		}
	}
}

// TestWallClockStep shows that leases do not live by the clock that can be set.
func TestWallClockStep(t *testing.T) {
	dir, clock := t.TempDir(), newFakeClock()
	d := openOn(t, clock.in("boot"), dir)
	o, rival := owner("n"), owner("n")
	first := mustLock(t, d, o, 10*time.Second)

	clock.stepWall(365 * 24 * time.Hour)
	mustState(t, d, try(rival, time.Second), driver.Held, "S2: clock set ahead")
	other := mustLock(t, d, owner("other"), time.Second)
	clock.stepWall(-2 * 365 * 24 * time.Hour)
	mustState(t, d, try(rival, time.Second), driver.Held, "S2: clock set back")

	clock.pass(10*time.Second - 1)
	mustState(t, d, try(rival, time.Second), driver.Held, "S2: within the TTL")
	clock.pass(1)
	if second := mustState(t, d, try(rival, time.Second), driver.Granted, "S2: after the TTL").Token; second <= first {
		t.Fatalf("token after the clock was set back: got %d, want more than %d (T1)", second, first)
	}
	clock.pass(time.Second)
	if second := mustLock(t, d, owner("other"), time.Second); second <= other {
		t.Fatalf("token after the clock was set back: got %d, want more than %d (T1)", second, other)
	}
}

// TestForget is T5.
func TestForget(t *testing.T) {
	dir, clock := t.TempDir(), newFakeClock()
	d := openOn(t, clock.in("boot"), dir)
	const names = 50
	use := func(d *Driver, i int) {
		o := owner(fmt.Sprint("name ", i))
		mustLock(t, d, o, time.Second)
		mustRelease(t, d, o)
	}
	for i := range names {
		use(d, i)
	}
	ahead := lockName("ahead")
	floor := driver.Token(clock.token.Load() + time.Hour.Microseconds())
	if err := d.Advance(t.Context(), ahead, floor); err != nil {
		t.Fatal(err)
	}
	held := owner("held")
	mustLock(t, d, held, time.Second)

	// rounds makes enough steps for every file to be looked at.
	keep := owner("keep")
	rounds := func() {
		t.Helper()
		for range names {
			mustLock(t, d, keep, time.Hour)
			clock.pass(1)
			mustRelease(t, d, keep)
		}
	}
	files := 2 * (names + 3) // two each
	clock.pass(state.Remember - time.Second)
	rounds()
	if got := len(nameFiles(t, d)); got != files {
		t.Fatalf("files of unused names before 48 h: got %d, want %d (T5)", got, files)
	}
	clock.stepWall(48 * time.Hour)
	rounds()
	if got := len(nameFiles(t, d)); got != files {
		t.Fatalf("files after a step of the wall clock: got %d, want %d (T5)", got, files)
	}
	clock.stepWall(-48 * time.Hour)

	if r := d.Extend(t.Context(), []driver.Extension{{Owner: held, TTL: 24 * time.Hour}})[0]; r.State != driver.Gone {
		t.Fatalf("Extend after expiry: got %v, want gone (L3)", r.State)
	}
	mustLock(t, d, held, 3*time.Hour)
	clock.pass(2 * time.Second)
	rounds()
	want := []string{"lock-ahead", "lock-ahead.lock", "lock-held", "lock-held.lock", "lock-keep", "lock-keep.lock"}
	if got := nameFiles(t, d); !slices.Equal(got, want) {
		t.Fatalf("files after 48 h: got %v, want those of names in use or ahead of the clock: %v (T5)", got, want)
	}
	clock.pass(time.Hour)
	rounds()
	if got := len(nameFiles(t, d)); got != 4 {
		t.Fatalf("files 48 h after the clock passed the last token: got %v, want 4 (T5)", nameFiles(t, d))
	}
	token, err := d.NextToken(t.Context(), ahead, 0)
	if err != nil || token <= floor {
		t.Fatalf("NextToken of a forgotten name: got %d, %v, want more than %d (T1)", token, err, floor)
	}

	// A driver that stays with another name forgets this one, too, and leaves nothing.
	clock.pass(100 * time.Hour)
	for range 10 {
		if found, err := d.Release(t.Context(), keep); found || err != nil {
			t.Fatalf("Release of nothing: got %v, %v, want false, nil", found, err)
		}
		use(d, 0)
	}
	clock.pass(100 * time.Hour)
	other := openOn(t, clock.in("boot"), dir)
	for range 10 {
		use(other, 1)
	}
	if got := nameFiles(t, d); !slices.Equal(got, []string{"lock-name%201", "lock-name%201.lock"}) {
		t.Fatalf("files: got %v, want those of the name in use", got)
	}
}

// TestNothingStored: steps that leave nothing behind leave no file either.
func TestNothingStored(t *testing.T) {
	d := openReal(t, t.TempDir())
	ctx, o := t.Context(), owner("n")
	if found, err := d.Release(ctx, o); found || err != nil {
		t.Fatalf("Release: got %v, %v, want false, nil", found, err)
	}
	if r := d.Extend(ctx, []driver.Extension{{Owner: o, TTL: time.Second}})[0]; r.State != driver.Gone || r.Err != nil {
		t.Fatalf("Extend: got %+v, want gone", r)
	}
	if r := d.Poll(ctx, []driver.Poll{{Owner: o, TTL: time.Second, Claim: time.Second}})[0]; r.State != driver.Gone || r.Err != nil {
		t.Fatalf("Poll: got %+v, want gone", r)
	}
	if got := nameFiles(t, d); len(got) != 0 {
		t.Fatalf("files: got %v, want none (L7)", got)
	}
}

// TestDamaged: a state file that somebody else wrote never passes for a free lock.
func TestDamaged(t *testing.T) {
	seed := mathrand.Uint64()
	t.Logf("seed %d", seed)
	random := mathrand.New(mathrand.NewPCG(seed, 0))
	dir, clock := t.TempDir(), newFakeClock()
	d := openOn(t, clock.in("boot 1"), dir)
	o, other := owner("n"), owner("other")
	mustLock(t, d, o, time.Hour)
	mustLock(t, d, other, time.Hour)
	path := d.path(o.Name)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}

	damages := map[string][]byte{
		"empty":          {},
		"zeros":          make([]byte, len(good)),
		"foreign":        []byte("12345\n"),
		"cut":            good[:len(good)-1],
		"cut header":     good[:20],
		"another name's": read(t, d.path(other.Name)),
	}
	for range 200 {
		at := random.IntN(len(good))
		flipped := slices.Clone(good)
		flipped[at] ^= 1 << random.IntN(8)
		damages[fmt.Sprint("bit flipped at ", at)] = flipped
	}
	for what, data := range damages {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := d.Lock(t.Context(), try(owner("n"), time.Second))
		mustUnavailable(t, what+": Lock", err, path)
		if a.State == driver.Granted {
			t.Fatalf("%s: Lock: got %v with an error, want no answer (L8)", what, a)
		}
		_, err = d.Release(t.Context(), o)
		mustUnavailable(t, what+": Release", err, path)
		var seen []driver.Owner
		err = d.List(t.Context(), driver.Name{}, func(h driver.Holding) bool { seen = append(seen, h.Owner); return true })
		mustUnavailable(t, what+": List", err, path)
		if !slices.Equal(seen, []driver.Owner{other}) {
			t.Fatalf("%s: List: got %v, want the other name's lease", what, seen)
		}
		for range 2 { // enough looks for all files
			if r := d.Extend(t.Context(), []driver.Extension{{Owner: other, TTL: time.Hour}})[0]; r.State != driver.Granted {
				t.Fatalf("%s: Extend of another name: got %+v, want granted", what, r)
			}
		}
		if string(read(t, path)) != string(data) {
			t.Fatalf("%s: got the file replaced, want it left to the operator", what)
		}
	}
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	mustState(t, d, try(owner("n"), time.Second), driver.Held, "the file is whole again")

	// After a boot nothing can hide behind a torn file.
	for what, data := range damages {
		if what == "another name's" || len(data) == len(good) && what != "zeros" {
			continue // not what a power failure does
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		d.Close()
		d = openOn(t, clock.in("boot after "+strings.ReplaceAll(what, " ", "-")), dir)
		mustState(t, d, try(o, time.Hour), driver.Granted, what+" after a boot")
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestUnusableDirectory(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{file, filepath.Join(file, "below")} {
		_, err := New(dir, nil)
		mustUnavailable(t, "New on a file", err, file)
	}

	// The directory goes away under an open driver.
	d := openReal(t, filepath.Join(dir, "locks"))
	o := owner("n")
	mustLock(t, d, o, time.Minute)
	if err := os.Rename(d.dir, d.dir+".away"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(d.dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := d.Lock(t.Context(), try(owner("n"), time.Second))
	mustUnavailable(t, "Lock", err, d.dir)
	mustUnavailable(t, "Extend", d.Extend(t.Context(), []driver.Extension{{Owner: o, TTL: time.Second}})[0].Err, d.dir)
	_, err = d.Release(t.Context(), o)
	mustUnavailable(t, "Release", err, d.dir)
	mustUnavailable(t, "List", d.List(t.Context(), driver.Name{}, func(driver.Holding) bool { return true }), d.dir)
}

func TestOptionsAndURL(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "not", "yet", "there")
	for _, bad := range []string{
		"file:relative/dir", "file://tmp/locks", "file:", "file://", "file://user@/tmp/x",
		"file://" + dir + "?namespace=a/b", "file://" + dir + "?namespace=", "file://" + dir + "?ttl=5s", "file://" + dir + "#x",
	} {
		if d, err := driver.Open(t.Context(), bad); !errors.Is(err, driver.ErrInvalid) || d != nil {
			t.Errorf("Open(%s): got %v, %v, want nil, ErrInvalid", bad, d, err)
		}
	}
	if _, err := New("", nil); !errors.Is(err, driver.ErrInvalid) {
		t.Errorf("New of no directory: got %v, want ErrInvalid", err)
	}
	if _, err := New(dir, &Options{Namespace: ".x"}); !errors.Is(err, driver.ErrInvalid) {
		t.Errorf("New with namespace .x: got %v, want ErrInvalid", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("directory after refused options: got %v, want none", err)
	}

	one, err := driver.Open(t.Context(), "file://"+dir+"?namespace=One")
	if err != nil {
		t.Fatalf("Open: got %v, want nil", err)
	}
	defer one.Close()
	same, err := New(dir, &Options{Namespace: "One"})
	if err != nil {
		t.Fatalf("New: got %v, want nil", err)
	}
	defer same.Close()
	other, err := New(dir, &Options{Namespace: "one"})
	if err != nil {
		t.Fatalf("New: got %v, want nil", err)
	}
	defer other.Close()
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode of the new directory: got %v, %v, want 0700", info.Mode(), err)
	}
	if a, err := one.Lock(t.Context(), try(owner("n"), time.Minute)); err != nil || a.State != driver.Granted {
		t.Fatalf("Lock: got %v, %v, want granted", a.State, err)
	}
	mustState(t, same, try(owner("n"), time.Minute), driver.Held, "L1: same namespace")
	mustState(t, other, try(owner("n"), time.Minute), driver.Granted, "another namespace")
	if strings.EqualFold(filepath.Base(same.dir), filepath.Base(other.dir)) {
		t.Errorf("directories of namespaces One and one: got %s, %s, want them apart without regard to case", same.dir, other.dir)
	}

	// A relative directory is that of the moment New was called.
	t.Chdir(filepath.Dir(dir))
	relative, err := New("there", &Options{Namespace: "One"})
	if err != nil {
		t.Fatal(err)
	}
	defer relative.Close()
	t.Chdir("/")
	mustState(t, relative, try(owner("n"), time.Minute), driver.Held, "L1: the same directory by a relative path")
}

// TestOneProcess has many drivers in one process, with many goroutines, on one name.
func TestOneProcess(t *testing.T) {
	dir := t.TempDir()
	const drivers, goroutines, rounds = 3, 6, 10
	var inside, total int // guarded by the lock that is tested
	var last driver.Token
	errs := make(chan error, drivers*goroutines)
	for range drivers {
		c := newClient(openReal(t, dir))
		for range goroutines {
			go func() {
				errs <- func() error {
					for range rounds {
						o := owner("n")
						token, _, err := c.lock(t.Context(), try(o, 30*time.Second))
						if err != nil {
							return err
						}
						if inside++; inside != 1 {
							return fmt.Errorf("holders: got %d, want 1 (L1)", inside)
						}
						if token <= last {
							return fmt.Errorf("token: got %d after %d, want a greater one (T1)", token, last)
						}
						last = token
						total++
						inside--
						if found, err := c.Release(t.Context(), o); !found || err != nil {
							return fmt.Errorf("Release: got %v, %v, want true, nil", found, err)
						}
					}
					return nil
				}()
			}()
		}
	}
	for range drivers * goroutines {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	if want := drivers * goroutines * rounds; total != want {
		t.Fatalf("sections: got %d, want %d (L1)", total, want)
	}
}

// TestListStops: yield ends the listing, and only one name can be asked for.
func TestListStops(t *testing.T) {
	d := openReal(t, t.TempDir())
	for _, name := range []string{"a", "b", "c"} {
		mustLock(t, d, owner(name), time.Minute)
	}
	seen := 0
	if err := d.List(t.Context(), driver.Name{}, func(driver.Holding) bool { seen++; return false }); err != nil || seen != 1 {
		t.Fatalf("List that is stopped: got %d leases, %v, want 1, nil", seen, err)
	}
	if got := listed(t, d, lockName("b")); len(got) != 1 {
		t.Fatalf("List of one name: got %v, want one lease", got)
	}
	if got := listed(t, d, lockName("d")); len(got) != 0 {
		t.Fatalf("List of an unknown name: got %v, want none", got)
	}
}
