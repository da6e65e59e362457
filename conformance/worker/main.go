package worker

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/conformance/history"
	"github.com/fencelock/fencelock/driver"
)

// mainCalled is what makes it safe to start this program again: it will not run its tests a second time.
var mainCalled atomic.Bool

// Main makes the process a worker if [Start] has started it as one, and then it never returns; otherwise
// it does nothing. Call it before anything else, before flags are parsed and tests are run:
//
//	func TestMain(m *testing.M) {
//		worker.Main()
//		os.Exit(m.Run())
//	}
func Main() {
	mainCalled.Store(true)
	if len(os.Args) < 2 || os.Args[1] != marker {
		return
	}
	if err := serve(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// serve carries out the orders that it reads, until it is told to close or the input ends: then whoever has
// started this process is gone.
func serve(in io.Reader, out io.Writer) error {
	orders := json.NewDecoder(bufio.NewReader(in))
	var s setup
	if err := orders.Decode(&s); err != nil {
		return fmt.Errorf("read the setup: %w", err)
	}
	o := &output{w: out}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	client, steps, err := open(ctx, s, o)
	cancel()
	o.send(message{Reply: &reply{Error: newRemoteError(err)}})
	if err != nil {
		return nil
	}
	w := &server{
		out:    o,
		steps:  steps,
		client: Record(client, s.Process, history.NewRecorder(s.Process, o), s.Longer),
		others: make(map[string]*Recorded), leases: make(map[uint64]*Lease), cancels: make(map[uint64]context.CancelFunc),
	}
	for {
		var q order
		if err := orders.Decode(&q); err != nil {
			return fmt.Errorf("read an order: %w", err)
		}
		if q.Op == "close" {
			w.releaseAll()
			o.send(message{Reply: &reply{ID: q.ID, Error: newRemoteError(client.Close())}})
			return nil
		}
		w.begin(q)
	}
}

func open(ctx context.Context, s setup, o *output) (*fencelock.Client, *sync.RWMutex, error) {
	d, err := driver.Open(ctx, s.URL)
	if err != nil {
		return nil, nil, err
	}
	watched, steps := watch(d, o)
	var opts []fencelock.ClientOption
	if s.RequestTimeout > 0 {
		opts = append(opts, fencelock.WithRequestTimeout(s.RequestTimeout))
	}
	c, err := fencelock.New(watched, opts...)
	if err != nil {
		d.Close()
	}
	return c, steps, err
}

// server is a worker at work.
type server struct {
	out    *output
	steps  *sync.RWMutex // see watch
	client *Recorded

	mu      sync.Mutex
	others  map[string]*Recorded // see Work.As
	leases  map[uint64]*Lease    // by the order that took it
	cancels map[uint64]context.CancelFunc
	running sync.WaitGroup
}

// begin carries out an order in a goroutine of its own. A cancel and a stop get no reply.
func (w *server) begin(q order) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if q.Op == "cancel" {
		if cancel := w.cancels[q.Of]; cancel != nil {
			cancel()
		}
		return
	}
	if q.Op == "stop" {
		go func() {
			w.steps.Lock()
			defer w.steps.Unlock()
			stopMyself()
		}()
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.cancels[q.ID] = cancel
	lease := w.leases[q.Of]
	w.running.Go(func() {
		r := &reply{ID: q.ID}
		var err error
		r.Token, err = w.do(ctx, q, lease)
		r.Error = newRemoteError(err)
		w.mu.Lock()
		delete(w.cancels, q.ID)
		w.mu.Unlock()
		cancel()
		w.out.send(message{Reply: r})
	})
}

func (w *server) do(ctx context.Context, q order, lease *Lease) (fencelock.Token, error) {
	switch q.Op {
	case "take":
		l, err := w.client.Take(ctx, *q.Ask)
		if err != nil {
			return 0, err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		w.leases[q.ID] = l
		return l.Token(), nil
	case "token":
		return w.client.NextToken(ctx, q.Ask.Name)
	case "load":
		q.Load.Run(ctx, w.client)
		return 0, nil
	case "work":
		return 0, q.Work.Run(ctx, w.as(q.Work.As))
	}
	if lease == nil {
		return 0, fmt.Errorf("worker: %s of a lease that was not taken", q.Op)
	}
	switch q.Op {
	case "extend":
		return 0, lease.Extend(ctx, q.TTL)
	case "release":
		return 0, lease.Release(ctx)
	case "err":
		return 0, lease.Err()
	}
	return 0, fmt.Errorf("worker: unknown order %q", q.Op)
}

// as answers the client, recorded under another name if there is one.
func (w *server) as(process string) *Recorded {
	if process == "" {
		return w.client
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.others[process] == nil {
		w.others[process] = Record(w.client.client, process, history.NewRecorder(process, w.out), w.client.longer)
	}
	return w.others[process]
}

// releaseAll ends what is under way and gives all leases back.
func (w *server) releaseAll() {
	w.mu.Lock()
	for _, cancel := range w.cancels {
		cancel()
	}
	w.mu.Unlock()
	w.running.Wait()
	for _, l := range w.leases {
		if l.live() {
			l.Release(context.Background())
		}
	}
}
