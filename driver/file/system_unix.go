//go:build darwin || dragonfly || freebsd || netbsd || openbsd || illumos

package file

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/fencelock/fencelock/driver/internal/state"
)

// thisSystem has no boot id, so that leases live by the wall clock, over a reboot as well.
func thisSystem() (system, error) {
	return system{now: func() state.Now {
		now := time.Now()
		return state.Now{Lease: now.UnixNano(), Token: now.UnixMicro()}
	}}, nil
}

// socketPath is a path for the socket of that name in dir.
func socketPath(dir *os.File, name string) (string, error) {
	const most = 103 // macOS and BSD have 104 bytes with the NUL, illumos 108
	path := filepath.Join(dir.Name(), name)
	if len(path) > most {
		return "", fmt.Errorf("%s: the path is longer than the %d bytes a socket may have", path, most)
	}
	return path, nil
}

func syncData(f *os.File) error { return f.Sync() }
