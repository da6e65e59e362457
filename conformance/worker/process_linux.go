package worker

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
	"unsafe"
)

// dieWithParent makes the kernel kill the process when the thread that starts it ends. It also gets a group
// of its own, so that a Ctrl-C reaches the test and not the worker behind its back.
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
}

func signalStop(p *os.Process) error { return p.Signal(syscall.SIGSTOP) }

// stopMyself returns when the process goes on. The signal is sent to the thread that sends it, which then stops before
// it does anything else; a signal to the process may be taken by another thread, a moment later.
func stopMyself() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	_ = syscall.Tgkill(os.Getpid(), syscall.Gettid(), syscall.SIGSTOP)
}

// awaitStopped waits until the kernel reports that all threads of a child have stopped.
func awaitStopped(p *os.Process, exited <-chan struct{}) error {
	for deadline := time.Now().Add(signalTimeout); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		select {
		case <-exited:
			return ErrEnded
		default:
		}
		stopped, err := wasStopped(p.Pid)
		if stopped || err != nil {
			return err
		}
	}
	return fmt.Errorf("process %d still runs %v after it was told to stop", p.Pid, signalTimeout)
}

func resume(p *os.Process) error { return p.Signal(syscall.SIGCONT) }

// wasStopped asks waitid(2) whether the child has stopped since it was asked last; it does not reap it.
func wasStopped(pid int) (bool, error) {
	const (
		pPID     = 1
		wNoHang  = 1
		wStopped = 2
	)
	var info [16]uint64 // siginfo_t is 128 bytes; its first 4 are the signal's number, 0 if there is nothing
	_, _, errno := syscall.Syscall6(syscall.SYS_WAITID, pPID, uintptr(pid), uintptr(unsafe.Pointer(&info)), wNoHang|wStopped, 0, 0)
	switch errno {
	case 0:
		return *(*int32)(unsafe.Pointer(&info)) != 0, nil
	case syscall.EINTR:
		return false, nil
	case syscall.ECHILD:
		return false, ErrEnded
	}
	return false, errno
}
