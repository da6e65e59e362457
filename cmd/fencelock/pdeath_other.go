//go:build darwin || dragonfly || netbsd || openbsd

package main

import "syscall"

// dieWithParent does nothing: this system has no such signal.
func dieWithParent(*syscall.SysProcAttr) {}
