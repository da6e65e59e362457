//go:build linux || freebsd

package main

import "syscall"

// dieWithParent makes the kernel kill the command when we are gone, however we went.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
