//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock"
)

// The progress line counts by seconds, and looks less often who holds.
const (
	progressPeriod = time.Second
	holdersPeriod  = 5 * time.Second
)

// waiting tells the user what run waits for, until stop.
type waiting struct {
	cancel context.CancelFunc
	done   sync.WaitGroup
}

func (c *cli) tellWaiting(ctx context.Context, client *fencelock.Client, t target, began time.Time) *waiting {
	ctx, cancel := context.WithCancel(ctx)
	w := &waiting{cancel: cancel}
	w.done.Go(func() {
		who := holders(ctx, client, t.kind(), t.name)
		if ctx.Err() != nil {
			return
		}
		if !c.console.isTerminal() {
			c.console.say("waiting for %v, %s", t, who)
			return
		}
		defer c.console.show("")
		tick := time.NewTicker(progressPeriod)
		defer tick.Stop()
		looked := time.Now()
		for {
			c.console.show(fmt.Sprintf("waiting %s for %v, %s", time.Since(began).Truncate(time.Second), t, who))
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if time.Since(looked) >= holdersPeriod {
				who, looked = holders(ctx, client, t.kind(), t.name), time.Now()
			}
		}
	})
	return w
}

// stop ends the telling and removes the progress line.
func (w *waiting) stop() {
	w.cancel()
	w.done.Wait()
}
