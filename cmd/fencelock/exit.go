package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/fencelock/fencelock"
)

// Exit codes. Those of our own lie above 192, the greatest 128 + signal, and below 200, where systemd's begin;
// sysexits.h has 64 to 78, timeout and env 124 to 127, ssh 255.
const (
	exitNotExecutable = 126
	exitNotFound      = 127
	exitSignal        = 128 // + its number
	exitHeld          = 193
	exitUnavailable   = 194
	exitLost          = 195
	exitUsage         = 196
	exitFailed        = 197
	exitNotSafe       = 198
)

// exitCodes is the table of the help and the documentation.
var exitCodes = []struct{ code, meaning string }{
	{"0", "success; of run: the command's own status"},
	{"1-255", "of run: the command's own status, passed through"},
	{"126", "of run: the command could not be executed"},
	{"127", "of run: the command was not found"},
	{"128+n", "of run: the command was ended by signal n, or fencelock was while it waited"},
	{"193", "held by another: --wait no, or the wait is over; the command did not run"},
	{"194", "backend unavailable, or no answer in time"},
	{"195", "of run: the lock was lost while the command ran, or before it could start"},
	{"196", "wrong usage: flag, argument or URL"},
	{"197", "anything else: the backend cannot do this, the output cannot be written"},
	{"198", "of migrate: the step is not safe yet, or was not within --wait; nothing was changed"},
}

// exitError ends the program with a code. A nil err says that there is nothing to add on stderr.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit status %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

func exitf(code int, format string, args ...any) error {
	return &exitError{code, fmt.Errorf(format, args...)}
}

func usageError(format string, args ...any) error { return exitf(exitUsage, format, args...) }

// outcome answers exit code and message of a result.
func outcome(err error) (code int, text string) {
	if err == nil {
		return 0, ""
	}
	text = strings.TrimPrefix(err.Error(), "fencelock: ")
	var exit *exitError
	switch {
	case errors.As(err, &exit):
		if exit.err == nil {
			text = ""
		}
		return exit.code, text
	case errors.Is(err, fencelock.ErrInvalid):
		return exitUsage, text
	case errors.Is(err, errors.ErrUnsupported):
		return exitFailed, text
	case errors.Is(err, fencelock.ErrHeld):
		return exitHeld, text
	case errors.Is(err, fencelock.ErrUnavailable), errors.Is(err, fencelock.ErrUncertain),
		errors.Is(err, context.DeadlineExceeded):
		return exitUnavailable, text
	}
	return exitFailed, text
}
