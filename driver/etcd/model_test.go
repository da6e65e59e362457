package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelock/fencelock/driver"
)

// gatedKV lets a test decide which driver makes the next request, and whether its reply is lost.
type gatedKV struct {
	clientv3.KV
	ask chan<- *turn
}

// turn is a request that waits for its turn.
type turn struct {
	granted chan bool // true: the reply is lost
	done    chan struct{}
}

var errReplyLost = errors.New("the reply was lost")

func (g *gatedKV) through(request func() error) error {
	t := &turn{make(chan bool), make(chan struct{})}
	g.ask <- t
	lost := <-t.granted
	err := request()
	close(t.done)
	if err == nil && lost {
		err = errReplyLost
	}
	return err
}

func (g *gatedKV) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (resp *clientv3.GetResponse, err error) {
	err = g.through(func() (err error) {
		resp, err = g.KV.Get(ctx, key, opts...)
		return err
	})
	return resp, err
}

func (g *gatedKV) Txn(ctx context.Context) clientv3.Txn {
	return hookedKV{g.KV, func(commit commit) (resp *clientv3.TxnResponse, err error) {
		err = g.through(func() (err error) {
			resp, err = commit()
			return err
		})
		return resp, err
	}}.Txn(ctx)
}

// TestTokensInAnyOrder lets a few drivers queue, release, mint and advance on one name, one request at a time in random
// order, some replies being lost, and looks at the queue after each request: whoever comes to hold has a token that
// nobody had (T2) and that is greater than that of every earlier holder, of every token minted and of every floor
// promised before (T1).
func TestTokensInAnyOrder(t *testing.T) {
	seed := rand.Uint64()
	if s := os.Getenv("FENCELOCK_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	for _, kind := range []driver.Kind{driver.KindLock, driver.KindPermit} {
		t.Run(kind.String(), func(t *testing.T) {
			f := onServer(t, sharedServer(t))
			for i := range uint64(10) {
				m := &model{T: t, f: f, name: driver.Name{Kind: kind, Name: fmt.Sprint("a/", i)}, rnd: rand.New(rand.NewPCG(seed, i))}
				m.run()
				if t.Failed() {
					t.Fatalf("run %d with seed %d", i, seed)
				}
			}
		})
	}
}

type model struct {
	*testing.T
	f    *fixture
	name driver.Name
	rnd  *rand.Rand

	mu     sync.Mutex
	least  driver.Token            // greater than that every later grant must be
	seen   map[driver.Token]string // and who has it
	owners []driver.Owner
	held   map[string]driver.Token // tokens of those who hold or have held
}

const (
	modelDrivers = 4
	modelSteps   = 12 // of each driver
)

func (m *model) run() {
	m.seen, m.held = make(map[driver.Token]string), make(map[string]driver.Token)
	asks := make(chan *turn)
	idle := make(chan struct{})
	for i := range modelDrivers {
		d := newDriver(m, m.f.raw, m.f.namespace)
		if _, err := d.baseFor(m.Context(), m.name, 0); err != nil {
			m.Fatal(err)
		}
		d.kv = &gatedKV{d.kv, asks}
		rnd := rand.New(rand.NewPCG(m.rnd.Uint64(), uint64(i)))
		go func() {
			for range modelSteps {
				m.step(d, rnd)
			}
			idle <- struct{}{}
		}()
	}
	// A driver that is not idle has exactly one request that waits for its turn.
	var waiting []*turn
	for working := modelDrivers; ; {
		for len(waiting) < working {
			select {
			case t := <-asks:
				waiting = append(waiting, t)
			case <-idle:
				working--
			}
		}
		if working == 0 {
			return
		}
		i := m.rnd.IntN(len(waiting))
		t := waiting[i]
		waiting = append(waiting[:i], waiting[i+1:]...)
		m.mu.Lock()
		t.granted <- m.rnd.IntN(20) == 0
		<-t.done
		m.look()
		m.mu.Unlock()
	}
}

// step is one step of a driver.
func (m *model) step(d *Driver, rnd *rand.Rand) {
	ctx := m.Context()
	switch rnd.IntN(8) {
	case 0, 1, 2:
		r := waiting(request(m.name.Kind, m.name.Name, time.Minute))
		if m.name.Kind == driver.KindPermit {
			r.Limit = 1 + rnd.IntN(3)
		}
		m.mu.Lock()
		m.owners = append(m.owners, r.Owner)
		m.mu.Unlock()
		for {
			if _, err := d.Lock(ctx, r); err == nil {
				return
			}
		}
	case 3, 4:
		m.mu.Lock()
		var o driver.Owner
		if len(m.owners) > 0 {
			i := 0 // often the head
			if rnd.IntN(3) == 0 {
				i = rnd.IntN(len(m.owners))
			}
			o = m.owners[i]
			m.owners = append(m.owners[:i], m.owners[i+1:]...)
		}
		m.mu.Unlock()
		if o.ID != "" {
			_, _ = d.Release(ctx, o)
		}
	case 5, 6:
		token, err := d.NextToken(ctx, m.name, 0)
		m.mu.Lock()
		defer m.mu.Unlock()
		if err == nil {
			m.is("NextToken", token)
		}
	default:
		m.mu.Lock()
		floor := m.least + driver.Token(rnd.IntN(3_000_000))
		m.mu.Unlock()
		err := d.Advance(ctx, m.name, floor)
		m.mu.Lock()
		defer m.mu.Unlock()
		if err == nil {
			m.least = max(m.least, floor)
		}
	}
}

// is books a token that was given out. m.mu is held.
func (m *model) is(whose string, token driver.Token) {
	if other, taken := m.seen[token]; taken {
		m.Errorf("token of %s: got %v, as %s has, want another (T2)", whose, token, other)
	}
	m.seen[token] = whose
	m.least = max(m.least, token)
}

// look looks at the queue. m.mu is held.
func (m *model) look() {
	resp, err := m.f.raw.Get(context.WithoutCancel(m.Context()), m.f.namespace+"/"+m.name.Kind.String()+"/"+escape(m.name.Name)+"/", clientv3.WithPrefix(), oldestFirst)
	if err != nil {
		m.Errorf("look at the queue: %v", err)
		return
	}
	holding, last := true, driver.Token(0)
	for i, kv := range resp.Kvs {
		key := fmt.Sprint(string(kv.Key), "@", kv.CreateRevision)
		r, err := readRecord(kv)
		if err != nil {
			m.Error(err)
			return
		}
		token := r.token(kv)
		if token <= last {
			m.Errorf("token of place %d of the queue: got %v after %v, want more (T1)", i, token, last)
		}
		last = token
		if holding = holding && i < r.Limit; !holding {
			continue
		}
		if was, held := m.held[key]; held {
			if token != was {
				m.Errorf("token of a holder: got %v, want %v (T3)", token, was)
			}
			continue
		}
		m.held[key] = token
		if token <= m.least {
			m.Errorf("token of one who comes to hold: got %v, want more than %v (T1)", token, m.least)
		}
		m.is(key, token)
	}
}
