package postgres

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// sweeper clears up what nobody asks for any more: a page of names after so many steps, in the background, so that the cost
// follows the traffic and a driver at rest does nothing. The life of a name has at least two steps, so rounds through
// all names are faster than their growth.
//
// The count begins anywhere, so that many drivers of few steps each, as a command's that runs under a lock, clear up as much as
// one of many. Hence a round does not begin with the first of all names, but near one that is in use.
type sweeper struct {
	mu      sync.Mutex
	steps   int
	running bool
	closed  bool
	begun   bool
	after   driver.Name // where the round goes on
	done    sync.WaitGroup
}

const (
	sweepEvery   = 128
	sweepPage    = 400
	sweepTimeout = 5 * time.Second
)

func (s *sweeper) init() { s.steps = rand.IntN(sweepEvery) }

// look counts a step about a name, and begins a page if it is time.
func (s *sweeper) look(d *Driver, n driver.Name) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.steps++
	if s.steps < sweepEvery || s.running || s.closed {
		return
	}
	s.steps, s.running = 0, true
	if !s.begun { // at names that begin like this one, whether they come before it or after
		s.begun = true
		s.after = driver.Name{Kind: n.Kind, Name: n.Name[:rand.IntN(len(n.Name)+1)]}
	}
	s.done.Go(func() {
		ctx, cancel := context.WithTimeout(d.open, sweepTimeout)
		defer cancel()
		from := s.after
		// Whatever stands in the way is for the next step to report.
		if err := d.sweepPage(ctx, sweepPage); err == nil && from.Name != "" && s.after.Name == "" {
			_ = d.sweepPage(ctx, sweepPage) // that was the end; a driver of few steps may not come to the beginning
		}
		s.mu.Lock()
		s.running = false
		s.mu.Unlock()
	})
}

// sweepPage looks at the next names of the round. No two run at the same time.
func (d *Driver) sweepPage(ctx context.Context, names int) error {
	after := d.sweep.after
	var kind *int16
	var name []byte
	err := d.row(ctx, "SELECT kind, name FROM "+d.schema+".sweep($1,$2::int2,$3,$4::int4,$5)", []any{&kind, &name},
		d.ns, int16(after.Kind), []byte(after.Name), int32(names), "!")
	if err != nil {
		return err
	}
	d.sweep.after = driver.Name{}
	if kind != nil {
		d.sweep.after = driver.Name{Kind: driver.Kind(*kind), Name: string(name)}
	}
	return nil
}

func (s *sweeper) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.done.Wait()
}
