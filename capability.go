package fencelock

import (
	"errors"
	"fmt"

	"github.com/fencelock/fencelock/driver"
)

// Capability is something that not every backend can do or promise.
type Capability string

// The capabilities.
const (
	Semaphores    Capability = "semaphores"     // Acquire and TryAcquire
	Tokens        Capability = "tokens"         // NextToken
	Queueing      Capability = "queueing"       // waiters are served in order; Fair
	Listing       Capability = "listing"        // List and Inspect
	ForceUnlocks  Capability = "force-unlocks"  // ForceUnlock
	DurableTokens Capability = "durable tokens" // a token is never forgotten by a crash of the server
	Replication   Capability = "replication"    // the loss of one node for ever loses no lock and no token
)

// Capabilities lists all capabilities in a fixed order.
func Capabilities() []Capability {
	return []Capability{Semaphores, Tokens, Queueing, Listing, ForceUnlocks, DurableTokens, Replication}
}

// Supports reports whether the client's backend has the capability.
func (c *Client) Supports(what Capability) bool { return supports(c.d, what) }

func supports(d driver.Driver, what Capability) bool {
	switch what {
	case Semaphores:
		return has[driver.Semaphore](d)
	case Tokens:
		return has[driver.FencingSource](d)
	case Queueing:
		return has[driver.Queue](d)
	case Listing:
		return has[driver.Lister](d)
	case ForceUnlocks:
		return has[driver.ForceUnlocker](d)
	case DurableTokens:
		return d.Info().Durable
	case Replication:
		return d.Info().Replicated
	}
	return false
}

func has[T any](d driver.Driver) bool {
	_, ok := driver.As[T](d)
	return ok
}

func require(d driver.Driver, all []Capability) error {
	for _, what := range all {
		if !supports(d, what) {
			return unsupported(d, string(what))
		}
	}
	return nil
}

func unsupported(d driver.Driver, what string) error {
	return fmt.Errorf("backend %q has no %s: %w", d.Info().Backend, what, errors.ErrUnsupported)
}
