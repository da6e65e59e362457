//go:build !linux

package servers

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
)

// dieWithParent does nothing: only Linux kills a process for its parent's sake. The process stays in
// the group of the test, so that a Ctrl-C reaches both.
func dieWithParent(*exec.Cmd) {}

// freeze needs /proc to see that a process has stopped.
func freeze(*os.Process) ([]int, error) {
	return nil, fmt.Errorf("only on Linux: %w", errors.ErrUnsupported)
}

func thaw(*os.Process, []int) error { return nil }

// killTree kills c and returns when it is gone. Processes it has started are left to themselves.
func killTree(c *child) error {
	if err := c.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return c.waitExited()
}

// processesIn needs /proc.
func processesIn(string) ([]int, error) { return nil, nil }

// ReservePort finds a port of 127.0.0.1 that is free now. Somebody may take it before the caller.
func ReservePort() (addr string, release func() error, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	return l.Addr().String(), func() error { return nil }, l.Close()
}
