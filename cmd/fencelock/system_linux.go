package main

import "syscall"

// adoptOrphans makes us the parent of those descendants whose own parent ends, as init would be: who is init in a
// container may not wait for them, and then a group would never look empty.
func adoptOrphans() {
	const prSetChildSubreaper = 36 // linux/prctl.h
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0)
}

// session answers the id of our session.
func session() int {
	sid, _, _ := syscall.RawSyscall(syscall.SYS_GETSID, 0, 0, 0)
	return int(sid)
}
