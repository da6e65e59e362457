package fencelock

import (
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/fencelock/fencelock/driver"
)

// Bounds and defaults.
const (
	// DefaultTTL is the TTL of a lease when neither a call nor the client says otherwise.
	DefaultTTL = 30 * time.Second
	// MinTTL and MaxTTL bound a TTL. A backend may need more than MinTTL, and then refuses less.
	MinTTL = 10 * time.Millisecond
	MaxTTL = 24 * time.Hour
	// MaxName is the greatest length of a name in bytes.
	MaxName = 512
	// MaxLabel is the greatest length of a label in bytes.
	MaxLabel = 256

	defaultBackoffMin = 10 * time.Millisecond
	defaultBackoffMax = 500 * time.Millisecond

	// A request is waited for a third of the TTL, within these bounds.
	minRequestTimeout = 100 * time.Millisecond
	maxRequestTimeout = 5 * time.Second
)

// Option changes one call of Lock, TryLock, Acquire, TryAcquire, Do or LockAll.
type Option interface{ apply(*config) }

type config struct {
	ttl                    time.Duration
	noRenew                bool
	maxHold                time.Duration
	waitFor                time.Duration
	backoffMin, backoffMax time.Duration
	fair                   bool
	label                  string
	holder                 string
	write                  *driver.Write
	err                    error
}

type optionFunc func(*config)

func (f optionFunc) apply(c *config) { f(c) }

// TTL sets how long the lease lives after the latest successful request for it: 10 ms to 24 h. The
// default is the client's, which is 30 s unless [WithTTL] says otherwise.
func TTL(d time.Duration) Option {
	return optionFunc(func(c *config) {
		c.ttl = d
		c.check(checkTTL(d))
	})
}

func checkTTL(d time.Duration) error {
	if d < MinTTL || d > MaxTTL {
		return driver.Invalid("TTL", d, fmt.Sprintf("must be %v to %v", MinTTL, MaxTTL))
	}
	return nil
}

// checkTTL also asks what the backend needs.
func (c *Client) checkTTL(d time.Duration) error {
	if err := checkTTL(d); err != nil {
		return err
	}
	if d < c.info.MinTTL {
		return driver.Invalid("TTL", d, "this backend needs at least "+c.info.MinTTL.String())
	}
	return nil
}

// NoRenew turns automatic renewal off. The lease is lost at its deadline unless Extend moves that.
func NoRenew() Option { return optionFunc(func(c *config) { c.noRenew = true }) }

// MaxHold ends the lease (it counts as lost) this long after it was taken, however often it was extended:
// a bound for a holder that hangs. It must be positive; the default is no bound.
func MaxHold(d time.Duration) Option {
	return optionFunc(func(c *config) {
		c.maxHold = d
		if d <= 0 {
			c.check(driver.Invalid("MaxHold", d, "must be positive"))
		}
	})
}

// WaitFor bounds the wait like a context with this timeout, and ends it with the same error,
// [context.DeadlineExceeded]. It must be positive; the default is to wait as long as the context. It has no
// meaning for the Try methods.
func WaitFor(d time.Duration) Option {
	return optionFunc(func(c *config) {
		c.waitFor = d
		if d <= 0 {
			c.check(driver.Invalid("WaitFor", d, "must be positive; to wait not at all use the Try method"))
		}
	})
}

// Backoff sets the pauses between attempts where the driver does not queue: before attempt n a random
// time up to first * 2^n, at most most ("full jitter"). Defaults are 10 ms and 500 ms. 0 < first <= most <= 1 h.
// Where the driver queues, nobody tries again and it has no meaning.
func Backoff(first, most time.Duration) Option {
	return optionFunc(func(c *config) {
		c.backoffMin, c.backoffMax = first, most
		if first <= 0 || most < first || most > time.Hour {
			c.check(driver.Invalid("Backoff", fmt.Sprintf("%v, %v", first, most), "must be 0 < first <= most <= 1h"))
		}
	})
}

// Fair demands a driver that serves waiters in the order in which they came, and is an error matching
// [errors.ErrUnsupported] with another one.
func Fair() Option { return optionFunc(func(c *config) { c.fair = true }) }

// Label is stored with the lease beside host, pid and time, for whoever asks who holds a lock. At most
// 256 bytes of UTF-8. It is no secret.
func Label(s string) Option {
	return optionFunc(func(c *config) {
		c.label = s
		if len(s) > MaxLabel || !utf8.ValidString(s) {
			c.check(driver.Invalid("Label", s, fmt.Sprintf("must be at most %d bytes of UTF-8", MaxLabel)))
		}
	})
}

// Holder makes the lock re-entrant for all calls of one Client that give the same id: while one of them
// holds, another Lock or TryLock of the same name shares its lease - one token, one deadline, one loss -
// and the last Release releases. Options of a sharing call are ignored. After a loss the next Lock
// starts afresh, and the old handles stay lost. The id is local to the Client: on the server each lease
// has a random owner. It must not be empty. Not for semaphores.
func Holder(id string) Option {
	return optionFunc(func(c *config) {
		c.holder = id
		if id == "" {
			c.check(driver.Invalid("Holder", id, "must not be empty"))
		}
	})
}

// Write makes TryLock do a write of yours in the step that takes the lock: both happen or neither does, and there is one request.
// Package redisguard makes such an option for keys of Redis, which also raises their mark. A backend that cannot do so is an
// error matching [errors.ErrUnsupported]; TryLock is the only method that takes it, and it goes with no [Holder].
//
// Nothing is written if the lock is held or a request was not executed: [ErrHeld], [ErrInvalid], [ErrUnavailable]. A write that fails
// leaves no lock and is ErrUnavailable as well, with the server's error, and what a script did before it failed stays done. After
// any other error, as [ErrUncertain] or that of the context, it may have been written: only the lock is given back.
//
// There must be keys, and none may be empty.
func Write(w driver.Write) Option {
	return optionFunc(func(c *config) {
		c.write = &w
		if len(w.Keys) == 0 || slices.Contains(w.Keys, "") {
			c.check(driver.Invalid("Write with keys", w.Keys, "must have at least one, and none that is empty"))
		}
	})
}

func (c *config) check(err error) {
	if c.err == nil {
		c.err = err
	}
}

// ClientOption changes a whole Client.
type ClientOption interface{ applyClient(*clientConfig) }

type clientConfig struct {
	ttl            time.Duration
	requestTimeout time.Duration
	observer       Observer
	require        []Capability
	err            error
}

type clientOptionFunc func(*clientConfig)

func (f clientOptionFunc) applyClient(c *clientConfig) { f(c) }

func (c *clientConfig) check(err error) { c.err = errors.Join(c.err, err) }

// WithTTL sets the TTL of leases whose call gives none; the default is [DefaultTTL].
func WithTTL(d time.Duration) ClientOption {
	return clientOptionFunc(func(c *clientConfig) {
		c.ttl = d
		c.check(checkTTL(d))
	})
}

// WithRequestTimeout bounds how long one request to the backend is waited for: 1 ms to 1 min. The
// default is a third of the lease's TTL, at least 100 ms and at most 5 s. A request that is not answered in
// time has an unknown outcome and gives [ErrUncertain].
func WithRequestTimeout(d time.Duration) ClientOption {
	return clientOptionFunc(func(c *clientConfig) {
		c.requestTimeout = d
		if d < time.Millisecond || d > time.Minute {
			c.check(driver.Invalid("WithRequestTimeout", d, "must be 1ms to 1m"))
		}
	})
}

// WithObserver passes what happens to o. See [Observer].
func WithObserver(o Observer) ClientOption {
	return clientOptionFunc(func(c *clientConfig) { c.observer = o })
}

// Require makes New and Open fail with an error matching [errors.ErrUnsupported] if the backend lacks
// one of these.
func Require(all ...Capability) ClientOption {
	return clientOptionFunc(func(c *clientConfig) { c.require = append(c.require, all...) })
}
