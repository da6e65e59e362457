// Package guard is for the side that a lock protects: it refuses stale writers. A lock alone cannot, because a
// holder that was paused writes late and does not know it; see docs/fencing.md.
//
// A guard keeps, for each resource, the highest fencing token that it has admitted: the mark. It admits a
// token that is not lower, together with the write, in one atomic step; what comes with a lower one is refused with
// [ErrStale] and changes nothing. The holder of the highest token may write as often as it likes.
//
// Here are the guard for resources inside one process, which is also the reference for all others and a double for
// tests, and [Fenced], which raises the mark as soon as a lock is taken. The guards of real resources are in packages of
// their own, so that each brings only its own client library:
//
//	pgguard     rows of PostgreSQL, in your own transactions, through pgx or database/sql
//	redisguard  keys of Redis, by a command or a script of yours
//	etcdguard   keys of etcd, in a transaction of yours
//	httpguard   an HTTP server that gets the token in a header, and its clients
//	grpcguard   a gRPC server that gets the token in the metadata, and its clients
//
// guardtest is the suite that they all pass, for guards of your own.
//
// Tokens of a semaphore whose limit is above 1 must not be guarded like this: its holders are many at a time, and
// the one with the lower token is not stale.
package guard

import (
	"errors"
	"fmt"
	"strconv"
	"sync"

	"github.com/fencelock/fencelock/driver"
)

// Token is a fencing token, the same as fencelock.Token.
type Token = driver.Token

// MaxToken is the highest token: 53 bits, so that it is exact in every language.
const MaxToken Token = 1<<53 - 1

// ErrStale says that the resource has admitted a higher token: somebody else has held the lock since. Nothing was
// written. It must not be repeated; whoever gets it has lost the lock.
var ErrStale = errors.New("stale fencing token")

// Stale makes an error about a resource that matches [ErrStale]. It is for guards.
func Stale(resource string) error {
	return fmt.Errorf("guard: %.80q: %w", resource, ErrStale)
}

// CheckToken refuses what is no token, with an error matching [driver.ErrInvalid]. It is for guards: zero would be admitted
// where nothing has been written yet.
func CheckToken(t Token) error {
	if t < 1 || t > MaxToken {
		return driver.Invalid("token", t, "must be that of a lease, 1 to 2^53 - 1")
	}
	return nil
}

// ParseToken reads a token that came as text, in decimal digits. Errors match [driver.ErrInvalid]. It is for guards.
func ParseToken(s string) (Token, error) {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, driver.Invalid("token", s, "must be a number of decimal digits")
	}
	return Token(n), CheckToken(Token(n))
}

// Guard guards resources inside one process. Its marks end with it, so it is for what ends with the process as well,
// and for tests. The zero value is ready; it must not be copied. It is safe for concurrent use, and resources do not
// wait for each other.
type Guard struct {
	mu        sync.Mutex
	resources map[string]*resource
	refused   []Refusal
}

type resource struct {
	writing sync.Mutex // held during a write
	highest Token      // guarded by both mutexes: read with either
}

// Refusal is what a guard has refused.
type Refusal struct {
	Resource string
	Token    Token
	Highest  Token // the mark it was compared with
}

// Do calls write if the token is not lower than the highest that was admitted for the resource, and answers its error.
// Nothing else about the resource is admitted meanwhile, so write must not call Do or Raise for the same one. The
// token stays admitted if write fails: then it has written, perhaps, a part.
//
// Errors: matching [ErrStale], and then write was not called; [driver.ErrInvalid] for what is no token; that of write.
func (g *Guard) Do(name string, t Token, write func() error) error {
	if err := CheckToken(t); err != nil {
		return err
	}
	r := g.resource(name)
	r.writing.Lock()
	defer r.writing.Unlock()
	if err := g.admit(name, r, t); err != nil {
		return err
	}
	return write()
}

// Raise admits the token without a write, so that lower ones are refused from now on. Errors as [Guard.Do].
func (g *Guard) Raise(name string, t Token) error {
	return g.Do(name, t, func() error { return nil })
}

// Highest is the highest token that was admitted for the resource, zero if none was.
func (g *Guard) Highest(name string) Token {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r := g.resources[name]; r != nil {
		return r.highest
	}
	return 0
}

// Refused is all that was refused so far, in order.
func (g *Guard) Refused() []Refusal {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]Refusal(nil), g.refused...)
}

func (g *Guard) resource(name string) *resource {
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.resources[name]
	if r == nil {
		if g.resources == nil {
			g.resources = make(map[string]*resource)
		}
		r = new(resource)
		g.resources[name] = r
	}
	return r
}

// admit compares and raises. r.writing is held.
func (g *Guard) admit(name string, r *resource, t Token) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if t < r.highest {
		g.refused = append(g.refused, Refusal{name, t, r.highest})
		return Stale(name)
	}
	r.highest = t
	return nil
}
