package guardtest_test

import (
	"context"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/guard/guardtest"
)

// variable says which variant of the guard the suite runs on.
const variable = "FENCELOCK_GUARD"

// store is a guard with a switch for each thing that can be wrong with one.
type store struct {
	mu     sync.Mutex
	broken string
	marks  map[string]guard.Token
	values map[string]string
}

type writer struct {
	*store
	name string
}

func (w writer) Write(_ context.Context, t guard.Token, value string) error {
	return w.admit(t, func() { w.values[w.name] = value })
}

func (w writer) Raise(_ context.Context, t guard.Token) error {
	if w.broken == "raise does nothing" {
		return guard.CheckToken(t)
	}
	return w.admit(t, func() {})
}

func (w writer) Read(context.Context) (string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.values[w.name], nil
}

func (w writer) admit(t guard.Token, write func()) error {
	if err := guard.CheckToken(t); err != nil && w.broken != "zero is a token" {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	name := w.name
	if w.broken == "one mark for all" {
		name = ""
	}
	mark := w.marks[name]
	stale := t < mark
	switch w.broken {
	case "nothing is compared":
		stale = false
	case "equal is stale":
		stale = mark != 0 && t <= mark
	case "tokens are short":
		stale = float32(t) < float32(mark)
	case "writes what is stale":
		write()
	case "compares first":
		w.mu.Unlock()
		time.Sleep(time.Millisecond)
		w.mu.Lock()
	case "refuses at times":
		stale = stale || len(w.values[w.name]) > 0 && t > 5 && t%3 == 0
	}
	if stale {
		return guard.Stale(w.name)
	}
	w.marks[name] = t
	if w.broken == "compares first" {
		w.marks[name] = max(mark, t)
	}
	write()
	return nil
}

// TestSuite runs the suite on a variant, or on a guard that is right.
func TestSuite(t *testing.T) {
	s := &store{broken: os.Getenv(variable), marks: make(map[string]guard.Token), values: make(map[string]string)}
	guardtest.Run(t, guardtest.Harness{
		Open: func(_ testing.TB, name string) guardtest.Writer { return writer{s, name} },
		Restart: func(testing.TB) {
			if s.broken == "forgets" {
				s.mu.Lock()
				defer s.mu.Unlock()
				clear(s.marks)
			}
		},
	})
}

// TestBroken fails for each broken guard that the suite lets pass, or lets fail elsewhere.
func TestBroken(t *testing.T) {
	failure := regexp.MustCompile(`(?m)^\s+--- FAIL: TestSuite/(\S+)`)
	for broken, want := range map[string]string{
		"nothing is compared":  "StaleWriterIsRefused",
		"writes what is stale": "StaleWriterIsRefused",
		"equal is stale":       "SameHolderWritesAgain",
		"raise does nothing":   "RaiseRefusesBeforeTheFirstWrite",
		"tokens are short":     "TokensAreExact",
		"zero is a token":      "WhatIsNoTokenIsInvalid",
		"one mark for all":     "ResourcesAreApart",
		"compares first":       "ConcurrentWriters",
		"refuses at times":     "ConcurrentWriters",
		"forgets":              "MarkSurvivesARestart",
	} {
		t.Run(strings.ReplaceAll(broken, " ", "-"), func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestSuite$", "-test.timeout", "60s")
			cmd.Env = append(os.Environ(), variable+"="+broken)
			out, err := cmd.CombinedOutput()
			var failed []string
			for _, m := range failure.FindAllStringSubmatch(string(out), -1) {
				failed = append(failed, m[1])
			}
			if err == nil || !slices.Contains(failed, want) {
				t.Errorf("suite on a guard where %s: got %v, failures of %q, want one of %s\n%s", broken, err, failed, want, out)
			}
		})
	}
}
