package driver

import (
	"errors"
	"testing"
)

// TestUnavailableOnce: it is often said by two that a backend is unavailable; the reader is told once.
func TestUnavailableOnce(t *testing.T) {
	cause := errors.New("connection refused")
	err := Unavailable(Unavailable(cause))
	if !errors.Is(err, ErrUnavailable) || !errors.Is(err, cause) {
		t.Errorf("got %v, want one that matches both", err)
	}
	if got, want := err.Error(), "backend unavailable: connection refused"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
