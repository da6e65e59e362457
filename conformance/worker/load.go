package worker

import (
	"context"
	"math/rand/v2"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/fencelock/fencelock/guard/httpguard"
)

// Load is what many goroutines do with a few names, all at once: waits, attempts, waits that are cancelled,
// tokens without a lock; short holds, extensions, leases that outlive their TTL by renewal and such that are
// overrun without it. What each goroutine does depends on the seed alone, when it does it on the machine.
type Load struct {
	Seed       uint64
	Goroutines int
	// Attempts is how many each goroutine makes at most.
	Attempts int
	// For is how long new attempts are begun. What was begun is brought to its end.
	For time.Duration

	Locks   []string
	Permits []Permits
	// Tokens says that the backend mints tokens without a lock.
	Tokens bool

	// TTL is that of an ordinary lease. Many holds take no time, the others up to Hold. A goroutine rests
	// up to Hold between attempts, and a wait that is cancelled ends within 4 times Hold.
	TTL  time.Duration
	Hold time.Duration
	// Unit is what TTLs are multiples of, extensions too; 0 = anything goes.
	Unit time.Duration
	// Short is the TTL of leases that reach it: half of them renewed and held for twice as long, half of
	// them not renewed. They are rarer the longer it is, since nobody else gets anything meanwhile. 0 = none.
	Short time.Duration
	// WaitFor bounds each wait.
	WaitFor time.Duration
	// Guard is the URL of a server with a guard as package httpguard has it: the holder of a lock writes under its token
	// to the path of the lock's name, once. Empty = no writes.
	Guard string
}

// Permits is a semaphore and the limits with which it is asked for.
type Permits struct {
	Name   string
	Limits []int
}

// Run does it, and returns when all its leases are released or lost. Once ctx ends no attempt is begun,
// waits are ended and holds cut short.
func (l Load) Run(ctx context.Context, c *Recorded) {
	end := time.Now().Add(l.For)
	var all sync.WaitGroup
	for i := range l.Goroutines {
		all.Go(func() {
			r := rand.New(rand.NewPCG(l.Seed, uint64(i)))
			for n := 0; n < l.Attempts && time.Now().Before(end) && ctx.Err() == nil; n++ {
				l.once(ctx, c, r)
				rest(ctx, upTo(r, l.Hold))
			}
		})
	}
	all.Wait()
}

// once is one attempt and what follows from it.
func (l Load) once(ctx context.Context, c *Recorded, r *rand.Rand) {
	ask := l.target(r)
	life := r.IntN(16)
	ask.TTL, ask.WaitFor = l.TTL, l.WaitFor
	const usual = 200 * time.Millisecond
	reaches := life < 2 && l.Short > 0 && r.Int64N(int64(max(l.Short, usual))) < int64(usual)
	if reaches {
		ask.TTL, ask.NoRenew = l.Short, life == 0
	}
	wait, cancel := context.WithCancel(ctx)
	defer cancel()
	switch how := r.IntN(16); {
	case how == 0 && l.Tokens && ask.Limit == 0:
		_, _ = c.NextToken(ctx, ask.Name)
		return
	case how < 6:
		ask.Try = true
	case how < 9:
		timer := time.AfterFunc(upTo(r, 4*l.Hold), cancel)
		defer timer.Stop()
	}
	lease, err := c.Take(wait, ask)
	if err != nil {
		return
	}
	if l.Guard != "" && ask.Limit == 0 {
		write(ctx, lease, l.Guard+"/"+url.PathEscape(ask.Name))
	}
	switch {
	case ask.NoRenew:
		select {
		case <-lease.Done():
		case <-ctx.Done():
		}
		lease.Err()
	case reaches:
		rest(ctx, 2*l.Short)
		lease.Err()
	case life < 6:
		rest(ctx, upTo(r, l.Hold))
	case life < 9:
		rest(ctx, upTo(r, l.Hold))
		ttl := l.TTL/2 + upTo(r, l.TTL)
		if l.Unit > 0 {
			ttl = (ttl + l.Unit - 1) / l.Unit * l.Unit
		}
		_ = lease.Extend(ctx, ttl)
		lease.Err()
	}
	lease.Release(ctx)
}

// write is for the server to judge, whatever becomes of it: a late holder is refused.
func write(ctx context.Context, lease *Lease, resource string) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPut, resource, nil)
	if err != nil {
		return
	}
	client := http.Client{Transport: &httpguard.Transport{Lease: lease.lease}}
	if a, err := client.Do(r); err == nil {
		a.Body.Close()
	}
}

func (l Load) target(r *rand.Rand) Ask {
	i := r.IntN(len(l.Locks) + len(l.Permits))
	if i < len(l.Locks) {
		return Ask{Name: l.Locks[i]}
	}
	p := l.Permits[i-len(l.Locks)]
	return Ask{Name: p.Name, Limit: p.Limits[r.IntN(len(p.Limits))]}
}

func upTo(r *rand.Rand, d time.Duration) time.Duration { return time.Duration(r.Int64N(int64(d) + 1)) }

func rest(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
