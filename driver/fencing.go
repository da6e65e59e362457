package driver

import "context"

// FencingSource is implemented by drivers that mint tokens outside of a lock as well.
type FencingSource interface {
	// NextToken mints the token that a grant of this name would get now, and answers it (T1, T2, T4).
	// It neither needs nor disturbs a holder. On an unknown outcome a token may have been spent,
	// which harms nobody.
	NextToken(ctx context.Context, n Name, floor Token) (Token, error)

	// Advance makes every later token of this name greater than floor. It never lowers anything, so
	// repeating it is harmless. Migration uses it to carry tokens from one backend to another.
	Advance(ctx context.Context, n Name, floor Token) error
}
