package driver

import (
	"context"
	"strconv"
	"time"
)

// Token is a fencing token: a number that a protected resource compares to refuse a stale writer. It
// fits in 53 bits. Zero is no token.
type Token uint64

// String writes the token in decimal.
func (t Token) String() string { return strconv.FormatUint(uint64(t), 10) }

// Kind tells locks from permits. A lock and a semaphore of one name are two names.
type Kind uint8

// The kinds. Their numbers are stored by drivers and never change.
const (
	KindLock   Kind = 1
	KindPermit Kind = 2
)

// String answers "lock" or "semaphore".
func (k Kind) String() string {
	switch k {
	case KindLock:
		return "lock"
	case KindPermit:
		return "semaphore"
	}
	return "kind " + strconv.Itoa(int(k))
}

// Name is what is locked. The caller guarantees that Name is 1 to 512 bytes long; the bytes are
// arbitrary, NUL, braces, slashes and invalid UTF-8 included. The driver must keep different names
// apart, whatever escaping its backend needs.
type Name struct {
	Kind Kind
	Name string
}

// Owner names one acquisition. ID is random, new for every acquisition, 26 characters of A-Z and 2-7.
// It stands for neither a process nor a session nor a goroutine.
type Owner struct {
	Name Name
	ID   string
}

// Request asks for a lock or a permit.
type Request struct {
	Owner

	// TTL is how long the lease lives from the moment the server grants it. The caller guarantees
	// 10 ms to 24 h, not below Info.MinTTL.
	TTL time.Duration

	// Limit is the greatest number of holders, this one included; 1 for a lock.
	Limit int

	// Floor is a token that the granted one must exceed; zero demands nothing.
	Floor Token

	// Holder is stored with the lease and answered by [Lister]: at most 1 KiB of UTF-8 that the
	// driver does not read.
	Holder string

	// Wait says that the caller goes on waiting if this step does not grant. A driver with a [Queue]
	// must then enqueue the owner in the same step. One that has only a [Notifier] must for one Claim
	// tell the sink when the name becomes free. Other drivers ignore it.
	Wait bool

	// Claim is set if Wait is: how long the queue entry lives after the latest request that named it,
	// and how long a grant lives that a step of somebody else gave to it, until its first extension.
	Claim time.Duration
}

// State is what the server says about one owner.
type State uint8

// The states.
const (
	// Held: not granted and nothing stored: the name is held by others or promised to a waiter.
	Held State = iota + 1
	// Granted: the owner holds.
	Granted
	// Waiting: the owner stands in the queue.
	Waiting
	// Gone: the owner neither holds nor stands in the queue.
	Gone
)

// String answers the state's name.
func (s State) String() string {
	switch s {
	case Held:
		return "held"
	case Granted:
		return "granted"
	case Waiting:
		return "waiting"
	case Gone:
		return "gone"
	}
	return "state " + strconv.Itoa(int(s))
}

// Answer is the result of a step about one owner.
type Answer struct {
	State State

	// Token is set when State is Granted. It is the same however often an owner asks (T3).
	Token Token

	// TTL is set when State is Granted: the lease ends no earlier than this long after the server
	// executed the step. The driver must not overstate it; it may be more than was asked for (a
	// backend that counts in seconds, or an expiry that was later already).
	TTL time.Duration
}

// Result is an Answer in a batch. If Err is not nil the Answer says nothing, and Err is of the same
// classes as the error of a single step.
type Result struct {
	Answer
	Err error
}

// Extension asks to prolong one lease.
type Extension struct {
	Owner
	TTL time.Duration
}

// Locker is what every driver does.
//
// Errors of all methods, here and in the optional interfaces, are of two classes (L8). One that matches
// [ErrUnavailable] promises that the step did not happen and will not happen later: the server answered
// with a refusal, or it could not be dialled. Every other error means that the outcome is unknown; the
// caller then repeats the step or undoes it with Release. When in doubt, do not say ErrUnavailable.
// Contention is never an error.
//
// A method should return soon after ctx ends. The engine does not rely on that: it stops waiting at the
// end of ctx and still uses an answer that comes later to clean up. It never passes a nil ctx.
type Locker interface {
	// Lock makes one attempt to take the lock r.Name, whose kind is KindLock.
	//
	// In one atomic step the driver must: drop what has expired; if r.ID holds already, set its expiry
	// to the later of the present one and now + TTL and answer its token (L5, T3); if it stands in the
	// queue, keep its place and renew the entry; else serve the queue's live head first (W4), and
	// grant to r.ID only if the lock is then free and nobody waits. Not granted: if r.Wait and the
	// driver has a [Queue], append r.ID and answer Waiting, else store nothing and answer Held.
	// A grant mints a token greater than the name's last one and than r.Floor, not below the server's
	// clock in microseconds since 1970, and at most one second ahead of it unless last or floor
	// already is (T1, T2, T4), and stores it with the owner. Expiry is judged by the server's clock or
	// by a relative TTL, never by the client's wall clock (S2).
	//
	// An error leaves behind: nothing if it matches ErrUnavailable; else perhaps a lease of one TTL or
	// a queue entry of one Claim. Those must end by themselves (L7).
	Lock(ctx context.Context, r Request) (Answer, error)

	// Extend prolongs leases of both kinds, each on its own: Granted with the TTL counted from this
	// step, or Gone if the id does not hold now; then the driver must not bring it back (L3, L4). An
	// extension never shortens: expiry = max(present, now + TTL). It keeps the token (T3). It also
	// makes a claim that was granted to a waiter a full lease.
	//
	// The results are as many as the extensions and in their order. The caller guarantees at least
	// one extension, and at most one per owner. A driver sends them in as few requests as its backend
	// allows, and splits what would hold the server up.
	Extend(ctx context.Context, leases []Extension) []Result

	// Release ends whatever the owner has, of either kind (L7): if it holds, the lock is given to the
	// head of the queue or freed; if it waits, it leaves the queue, and whoever can be served now is.
	// It reports whether the owner held or waited; false means there was nothing, which is no error.
	// It never touches another owner (L4) and must work when the server refuses writes for lack of
	// memory, as far as the backend can.
	//
	// An error leaves behind: the lease or entry, until its expiry, or nothing.
	Release(ctx context.Context, o Owner) (bool, error)
}
