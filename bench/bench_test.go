package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// tiny is enough to see that every subject works at every measure.
var tiny = sizes{Rounds: 1, Pairs: 5, Crowd: 50 * time.Millisecond, Handover: 100 * time.Millisecond, Waiters: []crowd{{4, 2}}, Drains: []drain{{4, 1}}, Held: []int{20},
	HeldFor: 100 * time.Millisecond, Stall: 100 * time.Millisecond}

// TestEveryMeasure runs all measures on all backends, which fail by themselves if a lock is not exclusive, is lost, or
// has no token. It looks at no speed.
func TestEveryMeasure(t *testing.T) {
	for _, backend := range backends {
		t.Run(backend, func(t *testing.T) {
			r, err := measureAll(t.Context(), t.Output(), tiny, []string{backend})
			if err != nil {
				t.Fatalf("measure: got %v, want nil", err)
			}
			seen := map[string]bool{}
			for _, x := range r.Results {
				if len(x.Rounds) != tiny.Rounds {
					t.Errorf("%s, %s: got %d rounds, want %d", x.Subject, x.Measure, len(x.Rounds), tiny.Rounds)
				}
				seen[x.Kind] = true
			}
			for _, m := range measures(tiny, backend) {
				if !seen[m.kind] {
					t.Errorf("measures: got %v, want also %q", seen, m.kind)
				}
			}
			if text := r.markdown(); !strings.Contains(text, "### Bars") {
				t.Errorf("report: got %q, want a table of bars", text)
			}
		})
	}
}

// TestPageIsWhatTheCodeWrites fails when the code writes other tables than docs/performance.md has of the same figures.
func TestPageIsWhatTheCodeWrites(t *testing.T) {
	page, err := os.ReadFile("../docs/performance.md")
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile("../docs/performance.json")
	if errors.Is(err, fs.ErrNotExist) {
		if !strings.Contains(string(page), begin+"\n"+end) {
			t.Error("docs/performance.md has tables without the figures that they were written from")
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	var r run
	if err := json.Unmarshal(data, &r); err != nil {
		t.Fatal(err)
	}
	want, err := inserted(string(page), r.markdown())
	if err != nil {
		t.Fatal(err)
	}
	if string(page) != want {
		t.Errorf("docs/performance.md differs from what the code writes of docs/performance.json; got:\n%s\nwant:\n%s", page, want)
	}
	svg, err := os.ReadFile("../docs/performance.svg")
	if err != nil {
		t.Fatal(err)
	}
	if string(svg) != r.svg() {
		t.Error("docs/performance.svg differs from what the code draws of docs/performance.json")
	}
}

// TestCommandsAreCounted cuts what clients send at every place there is.
func TestCommandsAreCounted(t *testing.T) {
	const text = "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\n*1\r\n\r\n*1\r\n$4\r\nPING\r\n*2\r\n$3\r\nGET\r\n$0\r\n\r\n"
	for cut := range len(text) {
		var n atomic.Int64
		c := countedConn{commands: &n}
		c.count([]byte(text[:cut]))
		c.count([]byte(text[cut:]))
		if got := n.Load(); got != 3 {
			t.Errorf("commands of %q and %q: got %d, want 3", text[:cut], text[cut:], got)
		}
	}
}

// TestRequestsOfAPair holds the count of commands against what is known: each of these subjects sends two.
func TestRequestsOfAPair(t *testing.T) {
	z := tiny
	z.Pairs = 100
	_, results, err := measureOne(t.Context(), t.Output(), z, "redis", measures(z, "redis")[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range results {
		if got, _ := x.median("requests"); got < 2 || got > 2.1 {
			t.Errorf("commands of a pair of %q: got %v, want 2", x.Subject, got)
		}
	}
}
