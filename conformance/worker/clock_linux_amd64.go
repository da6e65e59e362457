package worker

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// A Go program asks no library for the time but the vDSO, code that the kernel maps into each process. So the wall clock
// is changed there: the function that reads clocks is overwritten in the process before that has run its first instruction.
// The page becomes the process's own by that. Go's time package calls no other function of the vDSO for the time.

// clockSymbol is the function.
const clockSymbol = "__vdso_clock_gettime"

// clockCode asks the kernel instead, and adds the seconds after the code if the clock is the wall clock.
var clockCode = [clockAhead + 8]byte{
	0xb8, 0xe4, 0, 0, 0, // mov eax, SYS_clock_gettime
	0x0f, 0x05, // syscall
	0x85, 0xff, // test edi, edi: CLOCK_REALTIME is 0
	0x75, 0x0a, // jne to the ret
	0x48, 0x8b, 0x0d, 6, 0, 0, 0, // mov rcx, [rip+6]: the seconds
	0x48, 0x01, 0x0e, // add [rsi], rcx
	0xc3, // ret
}

// clockAhead is where the seconds are.
const clockAhead = 24

// clock is the wall clock of a process.
type clock struct {
	memory *os.File // the process's; it belongs to no later process of the same number
	ahead  int64    // where the seconds are in it
}

// stopAtExec makes the kernel stop the process before its first instruction, for the thread that starts it.
func stopAtExec(cmd *exec.Cmd) error {
	cmd.SysProcAttr.Ptrace = true
	return nil
}

// newClock gives a process that has been started after stopAtExec, by this thread, a clock that can be set, and lets it go on.
func newClock(pid int) (*clock, error) {
	var status syscall.WaitStatus
	for {
		_, err := syscall.Wait4(pid, &status, 0, nil)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EINTR) {
			return nil, err
		}
	}
	if !status.Stopped() {
		return nil, fmt.Errorf("it has not stopped at its beginning: status %#x", status)
	}
	c, err := overwriteClock(pid)
	return c, errors.Join(err, syscall.PtraceDetach(pid))
}

func overwriteClock(pid int) (*clock, error) {
	from, to, err := vdso(pid)
	if err != nil {
		return nil, err
	}
	memory, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	at, err := clockFunction(io.NewSectionReader(memory, from, to-from))
	if err == nil {
		_, err = memory.WriteAt(clockCode[:], from+at)
	}
	if err != nil {
		return nil, errors.Join(err, memory.Close())
	}
	return &clock{memory: memory, ahead: from + at + clockAhead}, nil
}

// clockFunction is where the function is in a vDSO.
func clockFunction(vdso io.Reader) (int64, error) {
	image, err := io.ReadAll(vdso)
	if err != nil {
		return 0, err
	}
	file, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return 0, err
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return 0, err
	}
	for _, s := range symbols {
		if s.Name == clockSymbol && s.Size >= uint64(len(clockCode)) {
			return int64(s.Value), nil
		}
	}
	return 0, fmt.Errorf("the vDSO has no %s of %d bytes or more", clockSymbol, len(clockCode))
}

// vdso is where a process has it.
func vdso(pid int) (from, to int64, err error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(maps)) {
		if strings.HasSuffix(strings.TrimSpace(line), "[vdso]") {
			_, err := fmt.Sscanf(line, "%x-%x", &from, &to)
			return from, to, err
		}
	}
	return 0, 0, errors.New("the process has no vDSO")
}

func (c *clock) set(ahead time.Duration) error {
	_, err := c.memory.WriteAt(binary.LittleEndian.AppendUint64(nil, uint64(ahead/time.Second)), c.ahead)
	return err
}

func (c *clock) close() error { return c.memory.Close() }
