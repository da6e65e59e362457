//go:build linux || darwin || dragonfly || freebsd || netbsd || openbsd || illumos

package file

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"syscall"
)

// openFile is os.OpenFile for files whose reads and writes cannot be waited for. It spares half a dozen
// requests to the system that find that out, which is most of what a step costs.
func openFile(path string, flag int) (*os.File, error) {
	for {
		fd, err := syscall.Open(path, flag|syscall.O_CLOEXEC, 0o600)
		if err == nil {
			return os.NewFile(uintptr(fd), path), nil
		}
		if err != syscall.EINTR {
			return nil, &fs.PathError{Op: "open", Path: path, Err: err}
		}
	}
}

// flock locks without waiting and reports whether it could.
func flock(f *os.File) (bool, error) {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

func funlock(f *os.File) { _ = syscall.Flock(int(f.Fd()), syscall.LOCK_UN) }

// sendOnce sends a datagram unless that would block.
func sendOnce(c *net.UnixConn, message []byte) {
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Write(func(fd uintptr) bool {
			_, _ = syscall.Write(int(fd), message)
			return true
		})
	}
}
