package httpguard_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/memory"
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/guard/guardtest"
	"github.com/fencelock/fencelock/guard/httpguard"
)

// store is a server with values by path: PUT sets one, POST sets none.
type store struct {
	mu     sync.Mutex
	values map[string]string
	tokens []guard.Token
}

func (s *store) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	if t, ok := httpguard.FromContext(r.Context()); ok {
		s.tokens = append(s.tokens, t)
	}
	switch r.Method {
	case http.MethodPut:
		s.values[r.URL.Path] = string(body)
	case http.MethodGet:
		fmt.Fprint(w, s.values[r.URL.Path])
	}
}

func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

// held is a lease with a token.
type held guard.Token

func (h held) Token() guard.Token { return guard.Token(h) }
func (h held) Err() error         { return nil }

func send(t testing.TB, ctx context.Context, lease httpguard.Lease, method, url, body string) (*http.Response, error) {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	client := http.DefaultClient
	if lease != nil {
		client = &http.Client{Transport: &httpguard.Transport{Lease: lease}}
	}
	a, err := client.Do(r)
	if err == nil {
		t.Cleanup(func() { a.Body.Close() })
	}
	return a, err
}

type writer struct {
	t   testing.TB
	url string
}

func (w writer) ask(ctx context.Context, t guard.Token, method, value string) error {
	a, err := send(w.t, ctx, held(t), method, w.url, value)
	if err != nil {
		return err
	}
	if err := httpguard.Check(a); err != nil {
		return err
	}
	if a.StatusCode != http.StatusOK {
		return errors.New(a.Status)
	}
	return nil
}

func (w writer) Write(ctx context.Context, t guard.Token, value string) error {
	return w.ask(ctx, t, http.MethodPut, value)
}

func (w writer) Raise(ctx context.Context, t guard.Token) error {
	return w.ask(ctx, t, http.MethodPost, "")
}

func (w writer) Read(ctx context.Context) (string, error) {
	a, err := send(w.t, ctx, nil, http.MethodGet, w.url, "")
	if err != nil {
		return "", err
	}
	body, err := io.ReadAll(a.Body)
	return string(body), err
}

func TestGuard(t *testing.T) {
	base := serve(t, &httpguard.Handler{Next: &store{values: make(map[string]string)}, Guard: new(guard.Guard)})
	guardtest.Run(t, guardtest.Harness{Open: func(t testing.TB, resource string) guardtest.Writer {
		return writer{t, base + "/" + url.PathEscape(resource)}
	}})
}

// TestGuardBehind compares where the state is, behind a handler that has no guard.
func TestGuardBehind(t *testing.T) {
	var g guard.Guard
	s := &store{values: make(map[string]string)}
	base := serve(t, &httpguard.Handler{Next: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if token, ok := httpguard.FromContext(r.Context()); ok {
			if err := g.Do(r.URL.Path, token, func() error { s.ServeHTTP(w, r); return nil }); err != nil {
				httpguard.WriteError(w, err)
			}
			return
		}
		s.ServeHTTP(w, r)
	})})
	guardtest.Run(t, guardtest.Harness{Open: func(t testing.TB, resource string) guardtest.Writer {
		return writer{t, base + "/" + url.PathEscape(resource)}
	}})
}

// TestAnswers is what a client in any language sees.
func TestAnswers(t *testing.T) {
	var g guard.Guard
	if err := g.Raise("/a", 42); err != nil {
		t.Fatal(err)
	}
	s := &store{values: make(map[string]string)}
	base := serve(t, &httpguard.Handler{Next: s, Guard: &g})
	for name, test := range map[string]struct {
		method string
		header []string
		status int
		kind   string
	}{
		"Stale":       {http.MethodPut, []string{"41"}, 409, httpguard.StaleType},
		"Missing":     {http.MethodPut, nil, 428, "about:blank"},
		"Empty":       {http.MethodPut, []string{""}, 400, "about:blank"},
		"Text":        {http.MethodPut, []string{"4x"}, 400, "about:blank"},
		"Sign":        {http.MethodPut, []string{"+42"}, 400, "about:blank"},
		"Zero":        {http.MethodPut, []string{"0"}, 400, "about:blank"},
		"TooGreat":    {http.MethodPut, []string{"9007199254740992"}, 400, "about:blank"},
		"Overflow":    {http.MethodPut, []string{"99999999999999999999"}, 400, "about:blank"},
		"Twice":       {http.MethodPut, []string{"42", "43"}, 400, "about:blank"},
		"Admitted":    {http.MethodPut, []string{"42"}, 200, ""},
		"Read":        {http.MethodGet, nil, 200, ""},
		"ReadOfStale": {http.MethodGet, []string{"41"}, 200, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := http.NewRequestWithContext(t.Context(), test.method, base+"/a", strings.NewReader("x"))
			if err != nil {
				t.Fatal(err)
			}
			r.Header[httpguard.Header] = test.header
			a, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			defer a.Body.Close()
			var problem struct {
				Type, Title string
				Status      int
			}
			stale := httpguard.Check(a)
			body, _ := io.ReadAll(a.Body)
			json.Unmarshal(body, &problem)
			if a.StatusCode != test.status || problem.Type != test.kind {
				t.Fatalf("answer: got %d, %s, want %d with type %q", a.StatusCode, body, test.status, test.kind)
			}
			if test.kind != "" && (problem.Status != test.status || problem.Title == "" || !strings.HasPrefix(a.Header.Get("Content-Type"), "application/problem+json")) {
				t.Fatalf("problem: got %q, %s, want application/problem+json with status and title", a.Header.Get("Content-Type"), body)
			}
			if errors.Is(stale, guard.ErrStale) != (test.status == 409) {
				t.Fatalf("Check: got %v, want ErrStale for status 409 only", stale)
			}
		})
	}
	if fmt.Sprint(s.tokens) != "[42]" {
		t.Fatalf("tokens that the handler saw: got %v, want 42", s.tokens)
	}
}

// TestOtherConflict of the application's own is no stale token.
func TestOtherConflict(t *testing.T) {
	base := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusConflict)
	}))
	a, err := send(t, t.Context(), held(42), http.MethodPut, base, "")
	if err != nil || httpguard.Check(a) != nil {
		t.Fatalf("Check: got %v, %v, want nil", httpguard.Check(a), err)
	}
}

// TestUnknownErrorTellsNothing: it may hold what is nobody's business.
func TestUnknownErrorTellsNothing(t *testing.T) {
	for _, err := range []error{errors.New("password"), driver.Invalid("password", 1, "must not be told")} {
		w := httptest.NewRecorder()
		httpguard.WriteError(w, err)
		if w.Code != 500 || strings.Contains(w.Body.String(), "password") {
			t.Fatalf("WriteError of %v: got %d, %s, want 500 without the text", err, w.Code, w.Body)
		}
	}
}

// TestNothingIsSentAfterTheLease ends.
func TestNothingIsSentAfterTheLease(t *testing.T) {
	c, err := fencelock.New(memory.New(memory.NewStore()))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	l, err := c.TryLock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	s := &store{values: make(map[string]string)}
	base := serve(t, &httpguard.Handler{Next: s})
	if a, err := send(t, t.Context(), l, http.MethodPut, base, "x"); err != nil || a.StatusCode != 200 {
		t.Fatalf("request under the lease: got %v, %v, want 200", a, err)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a, err := send(t, t.Context(), l, http.MethodPut, base, "x"); !errors.Is(err, fencelock.ErrReleased) {
		t.Fatalf("request after Release: got %v, %v, want ErrReleased", a, err)
	}
	if a, err := send(t, t.Context(), held(0), http.MethodPut, base, "x"); !errors.Is(err, driver.ErrInvalid) {
		t.Fatalf("request without a token: got %v, %v, want ErrInvalid", a, err)
	}
	if len(s.tokens) != 1 || s.tokens[0] != l.Token() {
		t.Fatalf("tokens that the server saw: got %v, want that of the lease once", s.tokens)
	}
}
