package driver

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

// Opener opens a driver for a URL whose scheme it was registered for. It must refuse parameters it does
// not know ([Params] does), must not put credentials into an error, and fails with an error matching
// [ErrInvalid] or [ErrUnavailable].
type Opener func(ctx context.Context, u *url.URL) (Driver, error)

var registry = struct {
	sync.RWMutex
	openers map[string]Opener
}{openers: make(map[string]Opener)}

// Register makes a URL scheme known to [Open]. Packages of drivers call it when they are imported. It
// panics if the scheme is taken.
func Register(scheme string, open Opener) {
	registry.Lock()
	defer registry.Unlock()
	if _, taken := registry.openers[scheme]; taken {
		panic("fencelock: driver scheme registered twice: " + scheme)
	}
	registry.openers[scheme] = open
}

// Schemes lists the registered URL schemes in order.
func Schemes() []string {
	registry.RLock()
	defer registry.RUnlock()
	return slices.Sorted(maps.Keys(registry.openers))
}

// Open opens the driver that is registered for the URL's scheme. An unknown scheme is an error matching
// [ErrInvalid] that lists the registered ones.
func Open(ctx context.Context, rawURL string) (Driver, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		// The error of url.Parse repeats the URL, which may hold a password.
		return nil, fmt.Errorf("%w: url: it does not parse (a scheme, such as redis://, and a port that is a number?)", ErrInvalid)
	}
	if u.Host != "" && u.User == nil && strings.Contains(u.EscapedPath(), "@") {
		return nil, fmt.Errorf("%w: url: there is an @ behind the host (a password with / ? # or @ in it must be escaped)", ErrInvalid)
	}
	registry.RLock()
	open := registry.openers[u.Scheme]
	registry.RUnlock()
	if open == nil {
		known := strings.Join(Schemes(), ", ")
		if known == "" {
			known = "none"
		}
		return nil, Invalid("url scheme", u.Scheme,
			"registered are "+known+" (a driver registers when its package is imported)")
	}
	return open(ctx, u)
}

// Params reads the query parameters of a driver's URL and remembers which were asked for, so that a
// misspelt one becomes an error instead of being ignored.
type Params struct {
	values url.Values
	known  []string
	err    error
}

// NewParams reads u's parameters.
func NewParams(u *url.URL) *Params {
	values, err := url.ParseQuery(u.RawQuery)
	p := &Params{values: values}
	if err != nil {
		p.err = fmt.Errorf("%w: url parameters: they do not parse", ErrInvalid)
	}
	return p
}

// String answers the parameter's value or, if it is absent, the default.
func (p *Params) String(name, def string) string {
	p.known = append(p.known, name)
	if v, ok := p.values[name]; ok {
		if len(v) > 1 {
			p.fail(Invalid("url parameter "+name, len(v), "may be given once only"))
		}
		return v[0]
	}
	return def
}

// Duration is String for values such as 500ms or 30s.
func (p *Params) Duration(name string, def time.Duration) time.Duration {
	s := p.String(name, "")
	if s == "" {
		return def
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		p.fail(Invalid("url parameter "+name, s, "must be a duration such as 500ms or 30s"))
	}
	return d
}

func (p *Params) fail(err error) {
	if p.err == nil {
		p.err = err
	}
}

// Err answers the first error, which includes parameters that nobody asked for. Call it last.
func (p *Params) Err() error {
	if p.err != nil {
		return p.err
	}
	for _, name := range slices.Sorted(maps.Keys(p.values)) {
		if !slices.Contains(p.known, name) {
			if len(p.known) == 0 {
				return Invalid("url parameter", name, "this scheme has none")
			}
			slices.Sort(p.known)
			return Invalid("url parameter", name, "known are "+strings.Join(p.known, ", "))
		}
	}
	return nil
}

// CheckNamespace refuses a namespace that could not stand in every backend's keys: 1 to 64 characters
// of a-z, A-Z, 0-9, dot, dash and underscore, not beginning with a dot.
func CheckNamespace(ns string) error {
	bad := len(ns) < 1 || len(ns) > 64 || ns[0] == '.'
	for _, c := range ns {
		bad = bad || !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_", c)
	}
	if bad {
		return Invalid("namespace", ns, "must be 1 to 64 of a-z A-Z 0-9 . - _ and not begin with a dot")
	}
	return nil
}

// DefaultNamespace is the namespace of a driver whose user names none.
const DefaultNamespace = "fencelock"
