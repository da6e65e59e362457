//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package main

import (
	"os"
	"syscall"
	"unsafe"
)

// terminal is the controlling terminal. A nil one is that of a process without.
type terminal struct{ fd int }

func openTerminal() *terminal {
	fd, err := syscall.Open("/dev/tty", syscall.O_RDWR|syscall.O_CLOEXEC|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil
	}
	return &terminal{fd}
}

func (t *terminal) close() {
	if t != nil {
		_ = syscall.Close(t.fd)
	}
}

// owner answers the process group that has the terminal, or -1.
func (t *terminal) owner() int {
	if t == nil {
		return -1
	}
	return foregroundGroup(uintptr(t.fd))
}

// isOurs reports whether our own process group has the terminal.
func (t *terminal) isOurs() bool { return t.owner() == syscall.Getpgrp() }

// isAllOf reports whether all files are the controlling terminal.
func (t *terminal) isAllOf(files []*os.File) bool {
	for _, f := range files {
		if foregroundGroup(f.Fd()) < 0 { // of another terminal the kernel does not tell
			return false
		}
	}
	return t != nil
}

// give makes a process group of our session the one that has the terminal. SIGTTOU must be ignored.
func (t *terminal) give(group int) error {
	pgrp := int32(group)
	return ioctl(uintptr(t.fd), syscall.TIOCSPGRP, unsafe.Pointer(&pgrp))
}

func foregroundGroup(fd uintptr) int {
	var pgrp int32
	if ioctl(fd, syscall.TIOCGPGRP, unsafe.Pointer(&pgrp)) != nil {
		return -1
	}
	return int(pgrp)
}

// columns answers the width of a terminal, and whether the file is one.
func columns(f *os.File) (int, bool) {
	var size struct{ rows, columns, x, y uint16 }
	if ioctl(f.Fd(), syscall.TIOCGWINSZ, unsafe.Pointer(&size)) != nil {
		return 0, false
	}
	return int(size.columns), true
}

func ioctl(fd, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}
