// Package conformance proves a backend: it runs one suite of tests on it that covers every law a driver
// and the engine above it must keep, on a real server and with real faults where there is one. It is for
// people who write a driver, and for those who want to know what a backend really does before they rely
// on it.
//
// A driver plugs in with one short test file:
//
//	func TestConformance(t *testing.T) {
//		conformance.Run(t, conformance.Harness{
//			Provider: "process",
//			New:      func(t testing.TB) *conformance.Backend { ... },
//			Skips:    map[conformance.Need]string{conformance.URL: "the server lives in this process"},
//		})
//	}
//
// # Tests
//
// Each test gets a fresh backend: a namespace or a server in which nothing was locked before. Its name, such as
// Exclusion/RivalIsRefused, is stable. What is true of a lock is also tested on a semaphore of one permit:
// Exclusion/RivalIsRefused/Permit. Many tests wait for a TTL to pass, so several run at a time, whatever
// -parallel says; those that measure run alone, afterwards. A failure reads: operation, got, want, law.
//
// # Skips
//
// A test states what it needs: an optional interface of the driver, or a power of the harness such as a
// proxy. What is missing must be declared, with a reason; a declaration without need fails as well. So a
// table of what was skipped and why is always true. What a kind of system cannot do, such as setting the clock of a process,
// the suite declares itself, see [Clocks].
package conformance

import (
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/conformance/worker"
	"github.com/fencelock/fencelock/driver"
)

// Harness tells the suite how to get at a backend.
type Harness struct {
	// Provider names what the server runs in, for the table of results: "local" without a server,
	// "process", "container".
	Provider string

	// New makes a backend in which nothing is locked, of its own for one test: another namespace of a
	// shared server will do. It fails the test if it cannot, and leaves clearing up to t.Cleanup. Tests
	// call it at the same time.
	New func(t testing.TB) *Backend

	// NewServer is New for tests that pause, kill and restart the server, or count what it does: it is
	// used by this test alone, and Backend.Server is set. Nil: there is no server that could fail.
	NewServer func(t testing.TB) *Backend

	// Skips says what is missing, and why.
	Skips map[Need]string

	// AtOnce is how many tests may run at a time, if that is fewer than the suite would: for servers that are far,
	// behind a proxy of the container engine for example. 0 is as many as the suite would.
	AtOnce int
}

// Backend is where the clients of one test meet. Only Driver is required.
type Backend struct {
	// Driver makes a driver with a connection of its own, as another process would have. The suite closes it.
	Driver func(t testing.TB) driver.Driver

	// Unit is the shortest TTL that the backend takes and the step in which it counts, if that is coarser
	// than a millisecond: the suite asks for whole multiples of it.
	Unit time.Duration

	// TokenAhead is how far ahead of the clock a token may be; at least a second is allowed (T4).
	TokenAhead time.Duration

	// URL opens the same locks from another process.
	URL string

	// Wired is Driver with its whole traffic going through a network that the test can disturb, for
	// this driver alone. The driver must not be slower in noticing than Driver's are.
	Wired func(t testing.TB) (driver.Driver, Wire)

	// Server is the server, if this test may do to it what it likes.
	Server servers.Server

	// Requests tells how many requests about locks the server has executed, a batch counting once, from all
	// clients. If there is a NewServer, it is only asked for on such a backend, so that it need not tell
	// tests apart.
	Requests func(t testing.TB) int

	// Leftovers lists what the server stores because of holders and waiters of the name: keys, rows, files,
	// entries. The memory of the last token does not count, nor does what has expired and the next step
	// drops. It does not go through a driver. Names are plain: letters, digits, slashes.
	Leftovers func(t testing.TB, n driver.Name) []string

	// Audit, if there is one, looks at the end of each test, when all clients are closed, for what must
	// never be on the server, such as a key that does not expire.
	Audit func(t testing.TB)
}

// Wire is the network between one driver and its servers. [*servers.Proxy] implements it; a driver of
// several servers may have one Wire for all.
type Wire interface {
	Pass(servers.Direction)
	Hold(servers.Direction)
	Drop(servers.Direction)
	Delay(servers.Direction, time.Duration)
	Reset()
	Refuse() error
	Accept() error
	DropNextReply(*servers.DropOptions) <-chan struct{}
}

// StepsOnly makes a wire that tells replies to steps from those to whatever else a client asks, such as who the server is:
// DropNextReply waits for a request with the text unless its options name another one.
func StepsOnly(w Wire, text string) Wire { return stepsOnly{w, text} }

type stepsOnly struct {
	Wire
	text string
}

func (w stepsOnly) DropNextReply(o *servers.DropOptions) <-chan struct{} {
	var all servers.DropOptions
	if o != nil {
		all = *o
	}
	if all.RequestWith == "" {
		all.RequestWith = w.text
	}
	return w.Wire.DropNextReply(&all)
}

// Need is what a test cannot do without.
type Need string

// The needs. The first are optional interfaces of package driver, the others powers of the harness.
const (
	Semaphores   Need = "semaphores"
	Tokens       Need = "tokens"
	Queueing     Need = "queueing"
	Pushes       Need = "pushes" // Queueing, and a Notifier that tells the grants
	Listing      Need = "listing"
	ForceUnlocks Need = "force-unlocks"

	URL       Need = "url"
	Wired     Need = "wire"
	Server    Need = "server"
	Requests  Need = "requests"
	Leftovers Need = "leftovers"

	// Clocks are wall clocks of workers that can be set. That is up to the system, so where it cannot be
	// the suite has declared it, and a harness need not.
	Clocks Need = "clocks"
)

// present answers which needs the harness and its driver can meet.
func (h Harness) present(t testing.TB) map[Need]bool {
	b := h.New(t)
	d := b.Driver(t)
	defer d.Close()
	return map[Need]bool{
		Semaphores:   has[driver.Semaphore](d),
		Tokens:       has[driver.FencingSource](d),
		Queueing:     has[driver.Queue](d),
		Pushes:       has[driver.Queue](d) && has[driver.Notifier](d),
		Listing:      has[driver.Lister](d),
		ForceUnlocks: has[driver.ForceUnlocker](d),
		URL:          b.URL != "",
		Wired:        b.Wired != nil,
		Server:       h.NewServer != nil,
		Requests:     b.Requests != nil,
		Leftovers:    b.Leftovers != nil,
		Clocks:       worker.ClockError() == nil,
	}
}

func has[I any](d driver.Driver) bool {
	_, ok := driver.As[I](d)
	return ok
}
