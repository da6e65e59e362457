package driver_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/driver"
)

// TestUnescapedPassword: what stands behind the first slash of a password is taken for a path, and must not be told.
func TestUnescapedPassword(t *testing.T) {
	for _, url := range []string{"nosuch://app:12/s3cret@host:6379/0", "nosuch://:/s3cret@host", "nosuch://:s3cret/s3cret@host"} {
		_, err := driver.Open(t.Context(), url)
		if !errors.Is(err, driver.ErrInvalid) || strings.Contains(err.Error(), "s3cret") || !strings.Contains(err.Error(), "url") {
			t.Errorf("Open of a URL whose password is not escaped: got %v, want ErrInvalid without the password", err)
		}
	}
}
