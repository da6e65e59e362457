package file

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/state"
)

// A name has up to three files: its state, the lock file that steps on it flock, and the next state
// while it is being written. Their names hold no dot but the one that begins the suffix.
const (
	lockSuffix = ".lock"
	nextSuffix = ".next"
)

var kindPrefix = map[driver.Kind]string{driver.KindLock: "lock", driver.KindPermit: "permit"}

// longest is the length of the longest escaped name that is kept readable. It leaves room for prefix
// and suffix under 143 bytes, the least limit of the file systems in use (eCryptfs).
const longest = 128

// fileName is the name of the state file. Different names have different ones, also where the file
// system does not tell upper from lower case.
func fileName(n driver.Name) string {
	prefix, escaped := kindPrefix[n.Kind], escape(n.Name)
	if len(escaped) <= longest {
		return prefix + "-" + escaped
	}
	hash := sha256.Sum256([]byte(n.Name))
	return prefix + "~" + hex.EncodeToString(hash[:])
}

func escape(name string) string {
	const digits = "0123456789abcdef"
	b := make([]byte, 0, 3*len(name))
	for _, c := range []byte(name) {
		if 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' || c == '_' {
			b = append(b, c)
		} else {
			b = append(b, '%', digits[c>>4], digits[c&15])
		}
	}
	return string(b)
}

// splitEntry takes a directory entry apart. The base is empty if it is none of a name's files.
func splitEntry(entry string) (base, suffix string) {
	base, suffix, dot := strings.Cut(entry, ".")
	if dot {
		suffix = "." + suffix
	}
	known := suffix == "" || suffix == lockSuffix || suffix == nextSuffix
	for _, prefix := range kindPrefix {
		if known && (strings.HasPrefix(base, prefix+"-") || strings.HasPrefix(base, prefix+"~")) {
			return base, suffix
		}
	}
	return "", ""
}

// record is the state of a name, as it is stored.
type record struct {
	about
	// State is as it was when the step ended; what has expired since is still in it.
	State state.Name

	// stored is State as the file has it, or as it is if there is no file.
	stored []byte
	at     region
	file   *os.File // open as long as the step lasts
}

// about is the first part of a record, which tells whether it can be forgotten.
type about struct {
	Kind driver.Kind
	Name string // in full, since the file's name may be a hash
	Boot string // leases and queue are void in any other one
	Used state.Now
	Last driver.Token // as in State
}

func (a *about) name() driver.Name { return driver.Name{Kind: a.Kind, Name: a.Name} }

// newRecord is the record of a name that has no file.
func newRecord(n driver.Name, boot string, base driver.Token) *record {
	r := &record{about: about{Kind: n.Kind, Name: n.Name, Boot: boot}, State: state.Name{Last: base}}
	r.stored = appendState(nil, &r.State)
	return r
}

// enter makes a record of an earlier boot one of this boot: nobody survived that held or waited, and
// every token up to base may have been given.
func (r *record) enter(boot string, base driver.Token) {
	if r.Boot != boot {
		r.Boot = boot
		r.State = state.Name{Last: max(r.State.Last, base)}
	}
}

// forgettable is T5. The 48 hours must have passed on the clock that nobody sets as well, where it
// can tell: a wall clock that jumps ahead for a while must not make tokens go back. No lease or queue
// entry lives so long without a step.
func (a *about) forgettable(now state.Now, boot string) bool {
	used := max(a.Used.Token, int64(a.Last))
	return now.Token-used >= state.Remember.Microseconds() &&
		(a.Boot != boot || now.Lease-a.Used.Lease >= int64(state.Remember))
}

// A state file is a header that says where in the rest of the file the record is, and checksums. A step
// writes the new record beside the present one and then the header, which is one copy within one page
// of memory: a process can be killed before or after it. So no step needs a new file: on ext4 the usual
// rename over the old one waits for the disk, flushed or not, and makes a step ten times as long. A file
// is made by rename, so it is never seen empty, and also replaced that way when it has to be on the
// disk.
const (
	magic        = "fencelock state\x01"
	headerLength = len(magic) + 4*4
)

// region is where in the file a record is.
type region struct{ start, length int }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sum(data []byte) uint32 { return crc32.Checksum(data, castagnoli) }

func header(at region, data []byte) []byte {
	h := append(make([]byte, 0, headerLength), magic...)
	h = binary.LittleEndian.AppendUint32(h, uint32(at.start))
	h = binary.LittleEndian.AppendUint32(h, uint32(at.length))
	h = binary.LittleEndian.AppendUint32(h, sum(data))
	return binary.LittleEndian.AppendUint32(h, sum(h))
}

// readHeader reports where the record is, and whether header and record are whole.
func readHeader(file []byte) (at region, ok bool) {
	if len(file) < headerLength {
		return at, false
	}
	at.start = int(binary.LittleEndian.Uint32(file[len(magic):]))
	at.length = int(binary.LittleEndian.Uint32(file[len(magic)+4:]))
	if at.start < headerLength || at.start > len(file) || at.length > len(file)-at.start {
		return at, false
	}
	return at, bytes.Equal(file[:headerLength], header(at, file[at.start:][:at.length]))
}

// errDamaged is the error of a state file that no driver can have left so.
var errDamaged = errors.New("the state file is damaged, by a foreign writer or by the disk, and may hide a live lease;" +
	" if surely nobody holds this lock, remove the file")

// readRecord reads a state file, and answers nil if there is none. Errors match driver.ErrUnavailable. To a
// caller that has not locked the name, errDamaged may only mean that a step is writing.
func readRecord(path string) (*record, error) {
	r, err := openRecord(path, os.O_RDONLY)
	if r == nil {
		return nil, err
	}
	defer r.file.Close()
	return r, r.decode(path)
}

// openRecord is readRecord without State, for which decode is to be called, and leaves the file open.
func openRecord(path string, flag int) (*record, error) {
	f, err := openFile(path, flag)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, unavailable(err)
	}
	r := &record{file: f}
	if err := r.read(path); err != nil {
		f.Close()
		return nil, err
	}
	return r, nil
}

func (r *record) read(path string) error {
	file, err := readAll(r.file)
	if err != nil {
		return unavailable(err)
	}
	at, ok := readHeader(file)
	if !ok {
		return damaged(path)
	}
	d := decoder{rest: file[at.start:][:at.length]}
	d.about(&r.about)
	if d.bad || fileName(r.name()) != filepath.Base(path) {
		return damaged(path)
	}
	r.at, r.stored = at, d.rest
	return nil
}

func (r *record) decode(path string) error {
	d := decoder{rest: r.stored}
	d.state(&r.State)
	if d.bad || len(d.rest) > 0 {
		return damaged(path)
	}
	return nil
}

// readAll reads a file that is usually small by one request.
func readAll(f *os.File) ([]byte, error) {
	data := make([]byte, 4096)
	for n := 0; ; data = append(data, make([]byte, len(data))...) {
		more, err := f.ReadAt(data[n:], int64(n))
		n += more
		if n < len(data) {
			if err == io.EOF {
				err = nil
			}
			return data[:n], err
		}
	}
}

func damaged(path string) error { return unavailable(fmt.Errorf("%s: %w", path, errDamaged)) }

// encode answers the record, and reports whether the state is another one than that stored.
func (r *record) encode() (data []byte, changed bool) {
	r.Last = r.State.Last
	data = appendAbout(nil, &r.about)
	start := len(data)
	data = appendState(data, &r.State)
	return data, !bytes.Equal(data[start:], r.stored)
}

// replaceRecord makes the state file or replaces it. With flush it is on the disk before it is seen. An
// error that matches driver.ErrUnavailable changed nothing, another one perhaps.
func replaceRecord(path string, data []byte, flush bool) error {
	next, err := os.OpenFile(path+nextSuffix, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return unavailable(err)
	}
	_, err = next.Write(append(header(region{headerLength, len(data)}, data), data...))
	if err == nil && flush {
		err = next.Sync()
	}
	if err := errors.Join(err, next.Close()); err != nil {
		return unavailable(err)
	}
	if err := os.Rename(path+nextSuffix, path); err != nil {
		return fmt.Errorf("file: %w", err)
	}
	if flush {
		if err := syncDir(filepath.Dir(path)); err != nil {
			return fmt.Errorf("file: %w", err)
		}
	}
	return nil
}

// update writes the record beside the present one and switches to it. Errors are as with replaceRecord.
func (r *record) update(data []byte) error {
	at := region{headerLength, len(data)}
	if at.start+at.length > r.at.start {
		at.start = r.at.start + r.at.length
	}
	if _, err := r.file.WriteAt(data, int64(at.start)); err != nil {
		return unavailable(err)
	}
	if _, err := r.file.WriteAt(header(at, data), 0); err != nil {
		return fmt.Errorf("file: %w", err)
	}
	return nil
}

// removeRecord removes all that there is of a name. The caller has the lock file locked; it goes last,
// because with it the right to touch the others goes.
func removeRecord(path string) error {
	for _, suffix := range []string{"", nextSuffix, lockSuffix} {
		if err := os.Remove(path + suffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
