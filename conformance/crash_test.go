package conformance_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/memory"
)

// uncommitted is the variant of the durable server below that answers tokens before they are on its disk, as a
// database does whose sequences, or whose commits, are not flushed.
const uncommitted = "tokens are answered before they are committed"

// TestDurable is not run as such, but by TestBrokenServer in a process of its own.
func TestDurable(t *testing.T) {
	variant, run := os.LookupEnv(brokenVariable)
	if !run {
		t.Skip("TestBrokenServer runs it, in processes of its own")
	}
	backend := func(testing.TB) *conformance.Backend {
		s := &durable{store: memory.NewStore(), uncommitted: variant == uncommitted, tokens: make(map[driver.Name]tokens)}
		return &conformance.Backend{Server: s, Driver: func(testing.TB) driver.Driver { return s.connect() }}
	}
	conformance.Run(t, conformance.Harness{
		Provider:  "local",
		New:       backend,
		NewServer: backend,
		Skips: map[conformance.Need]string{
			conformance.Queueing:     "not tested here",
			conformance.Pushes:       "not tested here",
			conformance.Semaphores:   "not tested here",
			conformance.Tokens:       "not tested here",
			conformance.Listing:      "not tested here",
			conformance.ForceUnlocks: "not tested here",
			conformance.URL:          "the server lives in this process",
			conformance.Wired:        "nothing is sent",
			conformance.Requests:     "nothing is sent",
			conformance.Leftovers:    "not tested here",
		},
	})
}

func TestBrokenServer(t *testing.T) {
	t.Parallel()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const test = "Fencing/ServerCrashed"
	for _, variant := range []string{"", uncommitted} {
		o := runSuite(t.Context(), exe, "TestDurable", variant, []string{test})
		if o.err != nil || slices.Contains(o.failed, test) != (variant != "") {
			t.Errorf("suite on the variant %q of a durable server: got failures of %q, %v\n%s", variant, o.failed, o.err, o.output)
		}
	}
}

// durable is a server in this process that keeps everything over a crash, but for what is uncommitted.
type durable struct {
	store       *memory.Store
	uncommitted bool

	mu     sync.Mutex
	down   bool
	tokens map[driver.Name]tokens
}

type tokens struct{ last, onDisk driver.Token }

var errDown = driver.Unavailable(errors.New("connection refused"))

func (s *durable) connect() driver.Driver { return &durableDriver{memory.New(s.store), s} }

func (s *durable) refused() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.down
}

// mint is the next token of a sequence, which is written to disk every eight tokens.
func (s *durable) mint(n driver.Name, floor driver.Token) driver.Token {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tokens[n]
	t.last = max(t.last, floor) + 1
	if !s.uncommitted || t.last%8 == 0 {
		t.onDisk = t.last
	}
	s.tokens[n] = t
	return t.last
}

func (s *durable) Kill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = true
	for n, t := range s.tokens {
		s.tokens[n] = tokens{t.onDisk, t.onDisk}
	}
	return nil
}

func (s *durable) Start(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = false
	return nil
}

func (s *durable) Addr() string                     { return "" }
func (s *durable) Pause() error                     { return errors.ErrUnsupported }
func (s *durable) Resume() error                    { return errors.ErrUnsupported }
func (s *durable) StartEmpty(context.Context) error { return errors.ErrUnsupported }
func (s *durable) Close() error                     { return nil }

var _ servers.Server = (*durable)(nil)

type durableDriver struct {
	driver.Driver
	s *durable
}

func (d *durableDriver) Info() driver.Info { return driver.Info{Backend: "durable", Durable: true} }

func (d *durableDriver) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	if d.s.refused() {
		return driver.Answer{}, errDown
	}
	floor := r.Floor
	r.Floor = 0 // the store would remember it
	a, err := d.Driver.Lock(ctx, r)
	if a.State == driver.Granted {
		a.Token = d.s.mint(r.Name, max(floor, a.Token))
	}
	return a, err
}

func (d *durableDriver) Release(ctx context.Context, o driver.Owner) (bool, error) {
	if d.s.refused() {
		return false, errDown
	}
	return d.Driver.Release(ctx, o)
}
