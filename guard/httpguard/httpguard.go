// Package httpguard carries fencing tokens over HTTP: a client sends the token of its lease in the header Fencing-Token
// with every request, and a server refuses those that are stale, with status 409.
//
// A server that is one process can keep the marks in a [guard.Guard]. One that has several must compare where the state
// is, for example with guard/pgguard in the transaction of the write: then the [Handler] only hands on the token, by
// [FromContext], and [WriteError] answers for the guard.
package httpguard

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"

	"github.com/fencelock/fencelock/guard"
)

// Header is the name of the header. Its value is the token in decimal.
const Header = "Fencing-Token"

// StaleType is the type of the problem (RFC 9457) that is sent with status 409.
const StaleType = "urn:fencelock:problem:stale-token"

// Lease is what a request is sent under, such as a *fencelock.Lease.
type Lease interface {
	Token() guard.Token
	Err() error
}

// Transport sends requests under a lease. Make one for each lease; they share the connections of Base.
type Transport struct {
	Lease Lease
	Base  http.RoundTripper // default http.DefaultTransport
}

// RoundTrip implements http.RoundTripper. If the lease has ended nothing is sent, and the error is that of the lease.
// It does not look at the answer: see [Check].
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	token := t.Lease.Token()
	err := guard.CheckToken(token)
	if err == nil {
		err = t.Lease.Err()
	}
	if err != nil {
		if r.Body != nil {
			r.Body.Close()
		}
		return nil, fmt.Errorf("guard: request not sent: %w", err)
	}
	r = r.Clone(r.Context())
	r.Header.Set(Header, token.String())
	base := t.Base
	if base == nil {
		base = http.DefaultTransport
	}
	return base.RoundTrip(r)
}

// Check makes an error matching [guard.ErrStale] of a response by which a server refused the token. Any other response is
// nil. The body can be read as before.
func Check(r *http.Response) error {
	kind, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if r.StatusCode != http.StatusConflict || kind != problemType {
		return nil // some other conflict
	}
	begin, err := io.ReadAll(io.LimitReader(r.Body, maxProblem))
	r.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(begin), r.Body), r.Body}
	var p problem
	if err != nil || json.Unmarshal(begin, &p) != nil || p.Type != StaleType {
		return nil //nolint:nilerr // whatever it is, it does not say stale; who reads the body gets the error
	}
	resource := ""
	if r.Request != nil {
		resource = r.Request.URL.Path
	}
	return guard.Stale(resource)
}

// Handler lets requests with a token through. The methods GET, HEAD, OPTIONS and TRACE, which change nothing, need none and are
// not compared.
type Handler struct {
	Next http.Handler

	// Guard, if not nil, admits the requests: those for one resource one at a time, each for as long as Next takes.
	Guard *guard.Guard
	// Resource names what a request writes to, for Guard. Default is the path of the URL.
	Resource func(*http.Request) string
}

// ServeHTTP implements http.Handler. Without a token it answers status 428, with what is none 400, and if Guard refuses it
// 409, each with a problem of type application/problem+json.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		h.Next.ServeHTTP(w, r)
		return
	}
	token, err := parse(r.Header.Values(Header))
	if err != nil {
		WriteError(w, err)
		return
	}
	r = r.WithContext(context.WithValue(r.Context(), contextKey{}, token))
	if h.Guard == nil {
		h.Next.ServeHTTP(w, r)
		return
	}
	resource := r.URL.Path
	if h.Resource != nil {
		resource = h.Resource(r)
	}
	err = h.Guard.Do(resource, token, func() error {
		h.Next.ServeHTTP(w, r)
		return nil
	})
	if err != nil {
		WriteError(w, err)
	}
}

var (
	errNoToken  = errors.New("the request needs a header " + Header)
	errBadToken = errors.New("the header " + Header + " must be there once, with the number of a token")
)

func parse(values []string) (guard.Token, error) {
	if len(values) == 0 {
		return 0, errNoToken
	}
	t, err := guard.ParseToken(values[0])
	if err != nil || len(values) > 1 {
		return 0, errBadToken
	}
	return t, nil
}

type contextKey struct{}

// FromContext answers the token of a request that a [Handler] let through.
func FromContext(ctx context.Context) (guard.Token, bool) {
	t, ok := ctx.Value(contextKey{}).(guard.Token)
	return t, ok
}

const problemType = "application/problem+json"

// maxProblem is how much of a body is looked at, in bytes.
const maxProblem = 8 << 10

// problem is a problem of RFC 9457.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
}

// WriteError answers a request that a guard has refused: status 409 if err matches [guard.ErrStale]. It is for
// handlers that compare where the state is. Any other error is answered by 500, and its text is not sent.
func WriteError(w http.ResponseWriter, err error) {
	p := problem{"about:blank", http.StatusText(http.StatusInternalServerError), http.StatusInternalServerError}
	switch {
	case errors.Is(err, guard.ErrStale):
		p.Type, p.Title, p.Status = StaleType, "A later holder of the lock has been here. Do not repeat the request.", http.StatusConflict
	case errors.Is(err, errNoToken):
		p.Title, p.Status = err.Error(), http.StatusPreconditionRequired
	case errors.Is(err, errBadToken):
		p.Title, p.Status = err.Error(), http.StatusBadRequest
	}
	w.Header().Set("Content-Type", problemType)
	w.WriteHeader(p.Status)
	_ = json.NewEncoder(w).Encode(p) // whoever asked has gone
}
