package dialurl

import (
	"errors"
	"net/url"
	"slices"
	"testing"

	"github.com/fencelock/fencelock/driver"
)

func TestHosts(t *testing.T) {
	for host, want := range map[string][]string{
		"a": {"a:1234"}, "a:1": {"a:1"}, "127.0.0.1": {"127.0.0.1:1234"}, "[::1]:5": {"[::1]:5"}, "[::1]": {"[::1]:1234"},
		"a,b:7,127.0.0.1": {"a:1234", "b:7", "127.0.0.1:1234"},
	} {
		if got, err := Hosts(&url.URL{Host: host}, "1234"); err != nil || !slices.Equal(got, want) {
			t.Errorf("Hosts of %q: got %q, %v, want %q", host, got, err, want)
		}
	}
	for _, host := range []string{"", "a,,b", "a,", ":1", "a:", "::1", "::1:5"} {
		if got, err := Hosts(&url.URL{Host: host}, "1234"); !errors.Is(err, driver.ErrInvalid) {
			t.Errorf("Hosts of %q: got %q, %v, want ErrInvalid", host, got, err)
		}
	}
}
