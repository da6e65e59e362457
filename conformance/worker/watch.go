package worker

import (
	"context"
	"sync"

	"github.com/fencelock/fencelock/driver"
)

// watch makes the driver tell of each request that was not granted at once: then its owner stands in the
// queue, if the driver has one. Steps hold the lock that it answers for reading.
func watch(d driver.Driver, o *output) (driver.Driver, *sync.RWMutex) {
	w := &watcher{Driver: d, out: o, next: d}
	if s, ok := driver.As[driver.Semaphore](d); ok {
		w.next = &permitWatcher{w, w.next, s}
	}
	if f, ok := driver.As[driver.FencingSource](d); ok {
		w.next = &tokenWatcher{w, w.next, f}
	}
	if q, ok := driver.As[driver.Queue](d); ok {
		w.next = &queueWatcher{w, w.next, q}
	}
	return w, &w.steps
}

// watcher watches the steps of every driver. Those of the optional interfaces are watched by links of a chain
// that begins here and ends with the driver itself.
type watcher struct {
	driver.Driver
	out   *output
	steps sync.RWMutex
	next  driver.Driver
}

func (w *watcher) Unwrap() driver.Driver { return w.next }

func (w *watcher) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return w.ask(ctx, r, w.Driver.Lock)
}

func (w *watcher) ask(ctx context.Context, r driver.Request, step func(context.Context, driver.Request) (driver.Answer, error)) (driver.Answer, error) {
	w.steps.RLock()
	a, err := step(ctx, r)
	w.steps.RUnlock()
	if err == nil && a.State != driver.Granted {
		w.out.send(message{Waits: &subject{r.Name.Kind, r.Name.Name}})
	}
	return a, err
}

func (w *watcher) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	w.steps.RLock()
	defer w.steps.RUnlock()
	return w.Driver.Extend(ctx, leases)
}

func (w *watcher) Release(ctx context.Context, o driver.Owner) (bool, error) {
	w.steps.RLock()
	defer w.steps.RUnlock()
	return w.Driver.Release(ctx, o)
}

type permitWatcher struct {
	*watcher
	then      driver.Driver
	semaphore driver.Semaphore
}

func (w *permitWatcher) Unwrap() driver.Driver { return w.then }

func (w *permitWatcher) Acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return w.ask(ctx, r, w.semaphore.Acquire)
}

type tokenWatcher struct {
	*watcher
	then   driver.Driver
	source driver.FencingSource
}

func (w *tokenWatcher) Unwrap() driver.Driver { return w.then }

func (w *tokenWatcher) NextToken(ctx context.Context, n driver.Name, floor driver.Token) (driver.Token, error) {
	w.steps.RLock()
	defer w.steps.RUnlock()
	return w.source.NextToken(ctx, n, floor)
}

func (w *tokenWatcher) Advance(ctx context.Context, n driver.Name, floor driver.Token) error {
	w.steps.RLock()
	defer w.steps.RUnlock()
	return w.source.Advance(ctx, n, floor)
}

type queueWatcher struct {
	*watcher
	then  driver.Driver
	queue driver.Queue
}

func (w *queueWatcher) Unwrap() driver.Driver { return w.then }

func (w *queueWatcher) Poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	w.steps.RLock()
	defer w.steps.RUnlock()
	return w.queue.Poll(ctx, waiters)
}
