package driver

import (
	"context"
	"time"
)

// Holding is one lease as the server knows it.
type Holding struct {
	Owner
	Token Token

	// Left is how long the lease lives if nobody extends it.
	Left time.Duration

	// Holder is what Request.Holder said.
	Holder string
}

// Lister is implemented by drivers that can tell who holds what.
type Lister interface {
	// List calls yield for every live lease until yield returns false: those of one name if n.Name is
	// not empty, else all of the driver's namespace, of both kinds. Expired leases are not listed. It
	// is no snapshot: a lease that comes or goes meanwhile may or may not be seen; none is seen twice.
	// It must not block the server for others.
	List(ctx context.Context, n Name, yield func(Holding) bool) error
}

// ForceUnlocker is implemented by drivers that can take a lock away from its holder.
type ForceUnlocker interface {
	// ForceUnlock ends all leases of the name and reports how many there were; then it serves the
	// queue. The name's last token is kept, so later ones are greater and guards go on refusing the
	// old holder, who is not told before its next extension.
	ForceUnlock(ctx context.Context, n Name) (int, error)
}
