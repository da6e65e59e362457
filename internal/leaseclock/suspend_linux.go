package leaseclock

import (
	"syscall"
	"unsafe"
)

const (
	clockMonotonic = 1
	clockBoottime  = 7
)

// suspended answers for how long the machine has been suspended since it booted, in nanoseconds, or a
// little less: the difference of the two clocks of clock_gettime(2).
func suspended() int64 {
	boot, ok := gettime(clockBoottime)
	if !ok {
		return 0
	}
	mono, ok := gettime(clockMonotonic)
	if !ok {
		return 0
	}
	return boot - mono
}

func gettime(clock uintptr) (int64, bool) {
	var ts syscall.Timespec
	_, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clock, uintptr(unsafe.Pointer(&ts)), 0)
	return ts.Nano(), errno == 0
}
