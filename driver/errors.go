package driver

import (
	"errors"
	"fmt"
)

// ErrUnavailable says that the backend refused the step or could not be reached: it surely did not
// happen. See [Locker] for what a driver promises with it.
var ErrUnavailable = errors.New("backend unavailable")

// ErrInvalid says that an argument, an option or a URL is wrong. The text names the field and the
// value, but never a password.
var ErrInvalid = errors.New("invalid argument")

// Unavailable wraps err so that it matches [ErrUnavailable] as well as all that err matches. One that does already is answered
// as it is.
func Unavailable(err error) error {
	if errors.Is(err, ErrUnavailable) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// Invalid makes an error that matches [ErrInvalid]: field is the name the user knows, value what was
// given, and want says what is allowed.
func Invalid(field string, value any, want string) error {
	if s, ok := value.(string); ok {
		value = fmt.Sprintf("%.80q", s)
	}
	return fmt.Errorf("%w: %s %v: %s", ErrInvalid, field, value, want)
}
