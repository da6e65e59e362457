package file

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"github.com/fencelock/fencelock/driver/internal/state"
)

func thisSystem() (system, error) {
	const path = "/proc/sys/kernel/random/boot_id"
	id, err := os.ReadFile(path)
	if err != nil {
		return system{}, err
	}
	boot := strings.TrimSpace(string(id))
	if boot == "" || strings.ContainsAny(boot, "./") {
		return system{}, fmt.Errorf("%s: got %.80q, want a boot id", path, boot)
	}
	offset, err := namespaceOffset("/proc/self")
	if err != nil {
		return system{}, err
	}
	if _, err := bootTime(); err != nil {
		return system{}, fmt.Errorf("clock_gettime(CLOCK_BOOTTIME): %w", err)
	}
	return system{boot: boot, now: func() state.Now {
		lease, _ := bootTime() // it has worked before
		return state.Now{Lease: lease - offset, Token: time.Now().UnixMicro()}
	}}, nil
}

// bootTime is CLOCK_BOOTTIME in nanoseconds.
func bootTime() (int64, error) {
	const clockBootTime = 7
	var ts syscall.Timespec
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clockBootTime, uintptr(unsafe.Pointer(&ts)), 0)
	if errno != 0 {
		return 0, errno
	}
	return ts.Nano(), nil
}

// namespaceOffset is by how much the process's CLOCK_BOOTTIME is ahead of the machine's: processes in
// different time namespaces may share a directory. The file tells the offsets of the namespace that
// children will be in, which is another one only between an unshare and the next exec.
func namespaceOffset(proc string) (int64, error) {
	path := filepath.Join(proc, "timens_offsets")
	text, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		return 0, nil // a kernel without time namespaces
	}
	if err != nil {
		return 0, err
	}
	own, err := os.Readlink(filepath.Join(proc, "ns/time"))
	if err != nil {
		return 0, err
	}
	children, err := os.Readlink(filepath.Join(proc, "ns/time_for_children"))
	if err != nil {
		return 0, err
	}
	if own != children {
		return 0, fmt.Errorf("%s: the process has left its time namespace for its children, but not for itself", proc)
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "boottime" {
			seconds, err1 := strconv.ParseInt(f[1], 10, 64)
			nanos, err2 := strconv.ParseInt(f[2], 10, 64)
			if err1 == nil && err2 == nil {
				return seconds*int64(time.Second) + nanos, nil
			}
		}
	}
	return 0, fmt.Errorf("%s: got %.80q, want a line \"boottime seconds nanoseconds\"", path, text)
}

// socketPath is a path for the socket of that name in dir. The limit of 108 bytes for the address of a
// socket does not bind it.
func socketPath(dir *os.File, name string) (string, error) {
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name), nil
}

// syncData flushes what was overwritten in the file, whose length has not changed.
func syncData(f *os.File) error { return syscall.Fdatasync(int(f.Fd())) }
