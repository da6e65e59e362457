//go:build darwin || dragonfly || freebsd || netbsd || openbsd

package main

import "syscall"

// adoptOrphans does nothing: init waits for orphans here.
func adoptOrphans() {}

// session answers the id of our session.
func session() int {
	sid, _ := syscall.Getsid(0) // which cannot fail for ourselves
	return sid
}
