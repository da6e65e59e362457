//go:build !linux

package worker

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
)

// dieWithParent does nothing: only Linux kills a process for its parent's sake. A worker that runs ends when
// its input does.
func dieWithParent(*exec.Cmd) {}

var errLinux = fmt.Errorf("only on Linux: %w", errors.ErrUnsupported)

func signalStop(*os.Process) error { return errLinux }

func stopMyself() {}

func awaitStopped(*os.Process, <-chan struct{}) error { return errLinux }

func resume(*os.Process) error { return nil }
