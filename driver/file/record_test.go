package file

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// TestFileNames: two names never share a file, not even where case does not count, and every file
// belongs to a name.
func TestFileNames(t *testing.T) {
	seed := mathrand.Uint64()
	t.Logf("seed %d", seed)
	random := mathrand.New(mathrand.NewPCG(seed, 0))
	names := []string{"a", "A", "%41", "%61", "a.lock", "a.next", ".", "..", "/", "a/b", "a%2fb", "a%2Fb", "\x00", " ", "a ",
		"é", "e\u0301", "\u212a", "k", "K", "con", "-", "~", "\xff\xfe", strings.Repeat("a", longest), strings.Repeat("a", longest+1),
		strings.Repeat("A", longest/3), strings.Repeat("A", longest/3+1), strings.Repeat("a", 512), strings.Repeat("\x00", 512)}
	for _, alphabet := range []string{"aA", "ab%2f", "aé./\x00~-_LlOoCcKk", "0123456789abcdef"} {
		for range 400 {
			var b strings.Builder
			for range 1 + random.IntN(6) {
				b.WriteByte(alphabet[random.IntN(len(alphabet))])
			}
			names = append(names, b.String())
			if n := 1 + random.IntN(512); random.IntN(10) == 0 {
				long := strings.Repeat(b.String(), n)[:n]
				names = append(names, long, strings.ToUpper(long))
			}
		}
	}
	// A short name that looks like the hash of a long one.
	_, hash, _ := strings.Cut(fileName(lockName(strings.Repeat("x", 512))), "~")
	names = append(names, hash, "~"+hash)

	of := make(map[string]driver.Name)
	for _, name := range names {
		for _, kind := range []driver.Kind{driver.KindLock, driver.KindPermit} {
			n := driver.Name{Kind: kind, Name: name}
			file := fileName(n)
			if other, taken := of[strings.ToLower(file)]; taken && other != n {
				t.Fatalf("file of %q: got %s, which is that of %q", n, file, other)
			}
			of[strings.ToLower(file)] = n
			if len(file)+len(lockSuffix) > 143 || strings.ContainsAny(file, "./\x00") {
				t.Fatalf("file of %q: got %q, want at most 143 bytes with its suffix and no dot or slash", n, file)
			}
			for _, suffix := range []string{"", lockSuffix, nextSuffix} {
				if b, s := splitEntry(file + suffix); b != file || s != suffix {
					t.Fatalf("splitEntry(%q): got %q, %q, want it taken apart", file+suffix, b, s)
				}
			}
		}
	}
	for _, foreign := range []string{".boot", ".push", "README", "lock", "lock-a.txt", "lock-a.lock.lock", "lock-a.", ""} {
		if b, _ := splitEntry(foreign); b != "" {
			t.Fatalf("splitEntry(%q): got %q, want nothing of ours", foreign, b)
		}
	}
}

// TestNamesEndToEnd takes odd names through a driver and a listing.
func TestNamesEndToEnd(t *testing.T) {
	d := openReal(t, t.TempDir())
	want := make(map[driver.Owner]bool)
	for _, name := range []string{"a", "A", "a/b", "..", "\x00", "\xff", "{a}", strings.Repeat("n", 512), strings.Repeat("N", 512)} {
		for _, kind := range []driver.Kind{driver.KindLock, driver.KindPermit} {
			o := driver.Owner{Name: driver.Name{Kind: kind, Name: name}, ID: rand.Text()}
			mustLock(t, d, o, time.Minute)
			want[o] = true
		}
	}
	got := listed(t, d, driver.Name{})
	for o := range want {
		if _, ok := got[o]; !ok {
			t.Errorf("List: %q is missing", o.Name)
		}
	}
	if len(got) != len(want) {
		t.Errorf("List: got %d leases, want %d", len(got), len(want))
	}
}

// TestKilledWhileWriting stops an update after every byte that it writes: the record is the one before or
// the one after, unless the header, which is written in one piece, is cut; and then it does
// not pass for either.
func TestKilledWhileWriting(t *testing.T) {
	seed := mathrand.Uint64()
	t.Logf("seed %d", seed)
	random := mathrand.New(mathrand.NewPCG(seed, 0))
	path := filepath.Join(t.TempDir(), "lock-n")
	const longestRecord = 5000
	anything := func() []byte {
		data := make([]byte, 1+random.IntN(1+random.IntN(longestRecord)))
		for i := range data {
			data[i] = byte(random.Uint32())
		}
		return data
	}
	content := func(file []byte) ([]byte, region) {
		at, ok := readHeader(file)
		if !ok {
			return nil, at
		}
		return file[at.start : at.start+at.length], at
	}
	present := anything()
	if err := replaceRecord(path, present, false); err != nil {
		t.Fatal(err)
	}
	most := 0
	for i := range 80 {
		was := read(t, path)
		got, at := content(was)
		if !bytes.Equal(got, present) {
			t.Fatalf("update %d: read back: got %d bytes, want the %d written", i, len(got), len(present))
		}
		next := anything()
		f, err := openFile(path, os.O_RDWR)
		if err != nil {
			t.Fatal(err)
		}
		err = (&record{file: f, at: at}).update(next)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		is := read(t, path)
		most = max(most, len(is))
		to, ok := readHeader(is)
		if !ok {
			t.Fatalf("update %d: got a file that cannot be read", i)
		}
		if to.start < at.start+at.length && at.start < to.start+to.length {
			t.Fatalf("update %d: got region %v, want it beside the present %v", i, to, at)
		}

		// The data, then the header, in that order.
		cut := bytes.Clone(was)
		for n := range to.length {
			if at := to.start + n; at < len(cut) {
				cut[at] = is[at]
			} else {
				cut = append(cut, is[at])
			}
			if n%97 == 0 || n == to.length-1 {
				if got, _ := content(cut); !bytes.Equal(got, present) {
					t.Fatalf("update %d cut after %d bytes: got another record than before", i, n)
				}
			}
		}
		for n := range headerLength {
			cut[n] = is[n]
			if got, _ := content(cut); got != nil && !bytes.Equal(got, present) && !bytes.Equal(got, next) {
				t.Fatalf("update %d cut within the header: got neither the record before nor after, want one or none", i)
			}
		}
		if got, _ := content(cut); !bytes.Equal(got, next) {
			t.Fatalf("update %d: got another record, want the one after", i)
		}
		present = next
	}
	if most > headerLength+3*longestRecord {
		t.Fatalf("size of the state file: got %d, want it bounded by three records", most)
	}
}

// TestReadersDoNotLock: a listing while steps write sees every name's lease, and never damage.
func TestReadersDoNotLock(t *testing.T) {
	dir := t.TempDir()
	d, reader := openReal(t, dir), openReal(t, dir)
	keep, busy := owner("n"), owner("n")
	keep.Name.Kind, busy.Name.Kind = driver.KindPermit, driver.KindPermit
	request := func(o driver.Owner, holder string) driver.Request {
		return driver.Request{Owner: o, TTL: time.Minute, Limit: 2, Holder: holder}
	}
	if a, err := d.Acquire(t.Context(), request(keep, "keep")); err != nil || a.State != driver.Granted {
		t.Fatalf("Acquire: got %v, %v, want granted", a.State, err)
	}
	done := make(chan error, 1)
	go func() {
		done <- func() error {
			for i := range 300 {
				if _, err := d.Acquire(t.Context(), request(busy, strings.Repeat("x", i%1000))); err != nil {
					return err
				}
				if found, err := d.Release(t.Context(), busy); !found || err != nil {
					return fmt.Errorf("Release: got %v, %v, want true, nil", found, err)
				}
			}
			return nil
		}()
	}()
	for lists := 0; ; lists++ {
		if got := listed(t, reader, driver.Name{}); got[keep].Holder != "keep" || len(got) > 2 {
			t.Fatalf("List: got %v, want the lease that stays", got)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			if lists < 20 {
				t.Fatalf("listings: got %d: void run", lists)
			}
			return
		default:
		}
	}
}

// TestListMeetsStep: what looks like damage while a step writes is read again when the step has ended.
func TestListMeetsStep(t *testing.T) {
	d := openReal(t, t.TempDir())
	o := owner("n")
	mustLock(t, d, o, time.Minute)
	path := d.path(o.Name)
	good := read(t, path)
	lock, err := tryLock(path + lockSuffix)
	if err != nil || lock == nil {
		t.Fatalf("lock the name: got %v, %v, want a lock", lock, err)
	}
	if err := os.WriteFile(path, good[:len(good)/2], 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	err = d.List(ctx, driver.Name{}, func(driver.Holding) bool { return true })
	mustUnavailable(t, "List while a step writes", err, context.DeadlineExceeded.Error())
	if errors.Is(err, errDamaged) {
		t.Fatalf("List while a step writes: got %v, want no word of damage", err)
	}
	done := make(chan map[driver.Owner]driver.Holding, 1)
	go func() { done <- listed(t, d, driver.Name{}) }()
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	lock.unlock()
	if got := <-done; len(got) != 1 {
		t.Fatalf("List after the step: got %v, want one lease", got)
	}
}

// TestUnwritable: when a file cannot be written the step fails and has changed nothing. A directory
// stands in the way of the new file.
func TestUnwritable(t *testing.T) {
	d := openReal(t, t.TempDir())
	o := owner("n")
	if err := os.Mkdir(d.path(o.Name)+nextSuffix, 0o700); err != nil {
		t.Fatal(err)
	}
	a, err := d.Lock(t.Context(), try(o, time.Minute))
	mustUnavailable(t, "Lock", err, d.path(o.Name))
	if a != (driver.Answer{}) {
		t.Fatalf("Lock: got %v with an error, want no answer (L8)", a)
	}
	if token, err := d.NextToken(t.Context(), o.Name, 0); token != 0 || !errors.Is(err, driver.ErrUnavailable) {
		t.Fatalf("NextToken: got %d, %v, want 0, ErrUnavailable", token, err)
	}
	if err := os.Remove(d.path(o.Name) + nextSuffix); err != nil {
		t.Fatal(err)
	}
	mustLock(t, d, o, time.Minute)
}

// TestRemovedLockFile: a lock file may be removed by whoever has it locked, and still only one has it.
func TestRemovedLockFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock-n"+lockSuffix)
	var inside atomic.Int32
	errs := make(chan error, 4)
	for range cap(errs) {
		go func() {
			errs <- func() error {
				for had := 0; had < 500; {
					lock, err := tryLock(path)
					if err != nil {
						return err
					}
					if lock == nil {
						runtime.Gosched()
						continue
					}
					had++
					if n := inside.Add(1); n != 1 {
						return fmt.Errorf("holders of a lock file: got %d, want 1 (L1)", n)
					}
					runtime.Gosched()
					inside.Add(-1)
					if had%2 == 0 { // the last thing to do, since with the file the right is gone
						if err := os.Remove(path); err != nil {
							return err
						}
					}
					lock.unlock()
				}
				return nil
			}()
		}()
	}
	for range cap(errs) {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
}
