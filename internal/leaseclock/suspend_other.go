//go:build !linux

package leaseclock

// suspended is only known on Linux. On macOS Go's monotonic clock stands still as well: there belief
// may outlast a lease after a sleep, until the next extension is answered; tokens still protect.
func suspended() int64 { return 0 }
