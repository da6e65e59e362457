// Package guardtest is the suite that every guard passes, for people who write one.
//
// A guard plugs in with a [Harness], which makes resources and lets writers write to them. The suite then sees to
// it that no write is admitted after one with a higher token, whoever makes it and whatever happens in between.
package guardtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/guard"
)

// Harness is a guard under test.
type Harness struct {
	// Open makes a writer to the resource of that name, on a connection of its own if the guard has connections. The suite
	// never uses a name twice. The writer is closed by t.Cleanup.
	Open func(t testing.TB, resource string) Writer

	// Restart ends the server and starts it again with its data. Nil if there is none: the guard lives in the process.
	Restart func(t testing.TB)
}

// Writer writes to one resource.
type Writer interface {
	// Write makes value the resource's, if the token is admitted.
	Write(ctx context.Context, t guard.Token, value string) error
	// Raise admits the token and leaves the value.
	Raise(ctx context.Context, t guard.Token) error
	// Read answers the value, empty if there is none.
	Read(ctx context.Context) (string, error)
}

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	tests := []struct {
		name string
		test func(*testing.T, Harness)
	}{
		{"FirstWriteIsAdmitted", firstWrite},
		{"SameHolderWritesAgain", sameHolder},
		{"StaleWriterIsRefused", staleWriter},
		{"RaiseRefusesBeforeTheFirstWrite", raise},
		{"TokensAreExact", exact},
		{"WhatIsNoTokenIsInvalid", noToken},
		{"ResourcesAreApart", apart},
		{"ConcurrentWriters", concurrent},
		{"MarkSurvivesARestart", restart},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if test.name == "MarkSurvivesARestart" && h.Restart == nil {
				return // there is nothing that could be restarted
			}
			test.test(t, h)
		})
	}
}

// resource is a name in which much is odd.
func resource(t testing.TB) string { return "orders/7 \x00\xff{}%' " + t.Name() }

func admitted(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: got %v, want nil", what, err)
	}
}

func refused(t testing.TB, what string, err error) {
	t.Helper()
	if !errors.Is(err, guard.ErrStale) {
		t.Fatalf("%s: got %v, want ErrStale", what, err)
	}
}

func holds(t testing.TB, w Writer, want string) {
	t.Helper()
	if got, err := w.Read(t.Context()); err != nil || got != want {
		t.Fatalf("value: got %q, %v, want %q", got, err, want)
	}
}

func firstWrite(t *testing.T, h Harness) {
	w := h.Open(t, resource(t))
	holds(t, w, "")
	admitted(t, "first write", w.Write(t.Context(), 41, "a"))
	holds(t, w, "a")
}

func sameHolder(t *testing.T, h Harness) {
	w := h.Open(t, resource(t))
	for _, value := range []string{"a", "b", "c"} {
		admitted(t, "write with the same token", w.Write(t.Context(), 41, value))
		holds(t, w, value)
	}
	admitted(t, "raise with the same token", w.Raise(t.Context(), 41))
	admitted(t, "write after that", w.Write(t.Context(), 41, "d"))
	holds(t, w, "d")
}

func staleWriter(t *testing.T, h Harness) {
	name := resource(t)
	old, fresh := h.Open(t, name), h.Open(t, name)
	admitted(t, "write with token 41", old.Write(t.Context(), 41, "old"))
	admitted(t, "write with token 42", fresh.Write(t.Context(), 42, "fresh"))
	refused(t, "late write with token 41", old.Write(t.Context(), 41, "stale"))
	refused(t, "late raise with token 41", old.Raise(t.Context(), 41))
	holds(t, old, "fresh")
	admitted(t, "write with token 42 after that", fresh.Write(t.Context(), 42, "fresher"))
	holds(t, old, "fresher")
}

func raise(t *testing.T, h Harness) {
	name := resource(t)
	old, fresh := h.Open(t, name), h.Open(t, name)
	admitted(t, "raise to 42", fresh.Raise(t.Context(), 42))
	refused(t, "write with token 41 after a grant with 42", old.Write(t.Context(), 41, "stale"))
	holds(t, old, "")
	admitted(t, "write with token 42", fresh.Write(t.Context(), 42, "fresh"))
	admitted(t, "raise to 43", fresh.Raise(t.Context(), 43))
	holds(t, old, "fresh")
}

// exact compares tokens that are equal when they become floating point numbers or texts of another length.
func exact(t *testing.T, h Harness) {
	w := h.Open(t, resource(t))
	for _, low := range []guard.Token{9, 99, 1_764_000_000_000_000, 1_764_000_000_000_001, guard.MaxToken - 2, guard.MaxToken - 1} {
		admitted(t, fmt.Sprint("write with token ", low), w.Write(t.Context(), low, "low"))
		admitted(t, fmt.Sprint("write with token ", low+1), w.Write(t.Context(), low+1, "high"))
		refused(t, fmt.Sprint("write with token ", low, " after one with one more"), w.Write(t.Context(), low, "stale"))
		holds(t, w, "high")
	}
}

func noToken(t *testing.T, h Harness) {
	w := h.Open(t, resource(t))
	for _, token := range []guard.Token{0, guard.MaxToken + 1, 1<<64 - 1} {
		for what, err := range map[string]error{"write": w.Write(t.Context(), token, "x"), "raise": w.Raise(t.Context(), token)} {
			if !errors.Is(err, driver.ErrInvalid) {
				t.Fatalf("%s with token %d: got %v, want ErrInvalid", what, token, err)
			}
		}
	}
	holds(t, w, "")
	admitted(t, "write with token 1", w.Write(t.Context(), 1, "a"))
}

func apart(t *testing.T, h Harness) {
	one, other := h.Open(t, resource(t)), h.Open(t, resource(t)+"/other")
	admitted(t, "write with token 42", one.Write(t.Context(), 42, "one"))
	admitted(t, "write with token 41 to another resource", other.Write(t.Context(), 41, "other"))
	holds(t, one, "one")
	holds(t, other, "other")
}

func restart(t *testing.T, h Harness) {
	name := resource(t)
	w, raised := h.Open(t, name), h.Open(t, name+"/raised")
	admitted(t, "write with token 42", w.Write(t.Context(), 42, "fresh"))
	admitted(t, "raise to 42", raised.Raise(t.Context(), 42))
	h.Restart(t)
	w, raised = h.Open(t, name), h.Open(t, name+"/raised")
	refused(t, "write with token 41 after a restart", w.Write(t.Context(), 41, "stale"))
	refused(t, "write with token 41 after a raise and a restart", raised.Write(t.Context(), 41, "stale"))
	holds(t, w, "fresh")
	admitted(t, "write with token 42 after a restart", w.Write(t.Context(), 42, "fresher"))
	holds(t, w, "fresher")
}

// write is one attempt, with the time from just before it to just after its answer.
type write struct {
	token    guard.Token
	from, to time.Duration
	admitted bool
	value    string
}

// concurrent lets writers with rising and falling tokens write at the same time, and checks the history: nothing is admitted
// that began after a write with a higher token had ended, nothing is refused unless a higher token came in time, and
// the last value is that of the highest.
func concurrent(t *testing.T, h Harness) {
	const writers, rounds, tokens = 6, 20, 40
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	name := resource(t)
	began := time.Now()
	var mu sync.Mutex
	var history []write
	var all sync.WaitGroup
	for i := range writers {
		w := h.Open(t, name)
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		all.Go(func() {
			for n := range rounds {
				// Tokens rise slowly, and every other writer lags behind.
				token := guard.Token(1 + n*tokens/rounds + r.IntN(8) - min(n, 4)*(i%2))
				x := write{token: max(token, 1), value: fmt.Sprintf("%d of writer %d", n, i), from: time.Since(began)}
				err := w.Write(t.Context(), x.token, x.value)
				x.to, x.admitted = time.Since(began), err == nil
				if err != nil && !errors.Is(err, guard.ErrStale) {
					t.Errorf("write with token %d: got %v, want nil or ErrStale", x.token, err)
					return
				}
				mu.Lock()
				history = append(history, x)
				mu.Unlock()
			}
		})
	}
	all.Wait()
	check(t, history)
	reader := h.Open(t, name)
	highest := slices.MaxFunc(history, func(a, b write) int { return cmp.Compare(a.token, b.token) }).token
	got, err := reader.Read(t.Context())
	if err != nil || !slices.ContainsFunc(history, func(x write) bool { return x.token == highest && x.value == got && x.admitted }) {
		t.Errorf("value: got %q, %v, want one that was written with the highest token, %d", got, err, highest)
	}
}

// check judges a history.
func check(t testing.TB, history []write) {
	t.Helper()
	refusals := 0
	for _, x := range history {
		higher := false
		for _, y := range history {
			if !y.admitted || y.token <= x.token {
				continue
			}
			if x.admitted && y.to < x.from {
				t.Errorf("write with token %d: admitted, though it began %v after one with token %d had ended, want ErrStale", x.token, x.from-y.to, y.token)
			}
			higher = higher || y.from < x.to
		}
		if !x.admitted {
			refusals++
			if !higher {
				t.Errorf("write with token %d: got ErrStale, though no higher token had been admitted, want nil", x.token)
			}
		}
	}
	if refusals == 0 || refusals == len(history) {
		t.Errorf("refused %d of %d writes: the run is void, want some admitted and some refused", refusals, len(history))
	}
}
