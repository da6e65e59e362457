package fencelock

import (
	"context"

	"github.com/fencelock/fencelock/driver"
)

// Token is a fencing token. Every acquisition of a name gets one greater than those of all acquisitions
// that completed before it began, from whatever backend. Send it with every write; the protected
// resource remembers the highest it has seen and refuses lower ones. It fits in 53 bits.
type Token = driver.Token

// FencingSource mints tokens without a lock.
type FencingSource interface {
	// NextToken mints a token from the domain of the lock of that name: greater than the token of every
	// acquisition that completed before. It holds nothing and waits for nobody. Errors as [Locker].
	NextToken(ctx context.Context, name string) (Token, error)
}
