// Package driver is the contract between fencelock and a backend. It is for people who write a
// backend; users of locks need only the root package and one of the packages below this one.
//
// A driver is small: every method is one atomic step on the server. It does not wait for a lock, does
// not renew, does not retry and does not decide who believes what: the engine in the root package does
// that, once, for every backend. What a driver owes is written at each method under three words: the
// caller guarantees, the driver must, an error leaves behind. Law numbers are those of
// docs/contract.md; docs/writing-a-driver.md leads through it step by step, and
// [github.com/fencelock/fencelock/conformance] proves the result on a real server.
//
// # What is optional
//
// [Driver] is all that is demanded. Everything else is an interface of its own ([Semaphore],
// [FencingSource], [Queue], [Notifier], [Lister], [ForceUnlocker], [Writer]) and is claimed by implementing it.
// A method that would only answer "cannot" must not be there: the engine reports what is missing as an
// error matching [errors.ErrUnsupported].
//
// # Wrappers
//
// A driver that wraps another one has a method Unwrap() Driver. [As] follows it, so that a wrapper
// which adds one thing does not hide the others.
package driver

import "time"

// Driver is a connection to one backend, bound to one namespace. It belongs to one client, which
// closes it.
//
// All methods of a driver and of its optional interfaces may be called by any number of goroutines at
// once, also during Close.
type Driver interface {
	Locker

	// Info describes the backend. It never changes and costs no request.
	Info() Info

	// Close ends what the driver itself began: subscriptions, goroutines, and the connections it
	// opened. It never closes a connection pool that the user handed in, and releases no lock: the
	// client has done that before. Calls under way end soon, later ones fail with an error matching
	// [ErrUnavailable]. A second Close does nothing.
	Close() error
}

// Info says what a backend is and promises.
type Info struct {
	// Backend is the name used in errors, events and tables: "redis", "etcd", "postgres".
	Backend string

	// MinTTL is the shortest TTL that the backend can honour, zero when that is below 10 ms. The
	// engine refuses shorter ones instead of rounding them up in silence.
	MinTTL time.Duration

	// Deadlines says that every method returns by itself soon after its context's deadline. The engine then spares
	// a goroutine where only the time can end a request.
	Deadlines bool

	// Durable says that a token once answered is never forgotten by a crash of the server, so that
	// later tokens are greater whatever happens to one node.
	Durable bool

	// Replicated says that the loss of one node for ever loses neither a held lock nor a token.
	Replicated bool
}

// As finds the first driver in d's chain of wrappers that implements T, as errors.As does for errors.
func As[T any](d Driver) (T, bool) {
	for d != nil {
		if t, ok := d.(T); ok {
			return t, true
		}
		w, ok := d.(interface{ Unwrap() Driver })
		if !ok {
			break
		}
		d = w.Unwrap()
	}
	var none T
	return none, false
}
