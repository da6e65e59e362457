package servers

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// clockSource is a library that is preloaded into a server to change its wall clock. The file must not be
// named as C: the go command would take it for a part of this package.
//
//go:embed clock.c.txt
var clockSource []byte

// clockBuildTimeout bounds the compilation.
const clockBuildTimeout = time.Minute

// clockLibrary answers the path of the compiled library, which is kept in the user's cache directory as etcd is. The build
// needs gcc.
func clockLibrary(ctx context.Context) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(clockSource)
	dir := filepath.Join(cache, "fencelock", fmt.Sprintf("clock-%x", sum[:8]))
	library := filepath.Join(dir, "clock.so")
	if _, err := os.Stat(library); err == nil {
		return library, nil
	}
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	src, err := os.MkdirTemp(dir, "build-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(src)
	source, built := filepath.Join(src, "clock.c"), filepath.Join(src, "clock.so")
	if err := os.WriteFile(source, clockSource, 0o644); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, clockBuildTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, gcc, "-O2", "-Wall", "-fPIC", "-shared", "-o", built, source)
	cmd.WaitDelay = time.Second
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out[max(0, len(out)-logTail):])
	}
	// A rename, so that a library that is there is always a whole one; of two builds at a time one wins.
	return library, os.Rename(built, library)
}

// clock is the wall clock of one server, as a file that the library has mapped.
type clock struct{ file string }

func newClock(dir string) (*clock, error) {
	c := &clock{filepath.Join(dir, "clock")}
	return c, c.set(0)
}

// set writes into the file that is there, so that who has mapped it sees it.
func (c *clock) set(ahead time.Duration) error {
	f, err := os.OpenFile(c.file, os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(ahead)), 0)
	return errors.Join(err, f.Close())
}

var errNoClock = errors.New("started without the option Clock")

// SetClock makes the server's wall clock run that much ahead of the system's, or behind it if ahead is negative, from now
// on and also after a restart. The clock that counts from boot is not changed. It fails if [RedisOptions].Clock was not set.
func (r *Redis) SetClock(ahead time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		return r.errorf("set clock", ErrClosed)
	case r.clock == nil:
		return r.errorf("set clock", errNoClock)
	}
	return r.clock.set(ahead)
}
