//go:build !(linux || darwin || dragonfly || freebsd || netbsd || openbsd || illumos)

package file

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
)

var errSystem = fmt.Errorf("%s has no flock: %w", runtime.GOOS, errors.ErrUnsupported)

// thisSystem fails, and with it New: what follows is never reached.
func thisSystem() (system, error) { return system{}, errSystem }

func openFile(string, int) (*os.File, error) { return nil, errSystem }

func flock(*os.File) (bool, error) { return false, errSystem }

func funlock(*os.File) {}

func sendOnce(*net.UnixConn, []byte) {}

func socketPath(*os.File, string) (string, error) { return "", errSystem }

func syncData(*os.File) error { return errSystem }
