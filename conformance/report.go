package conformance

import (
	"encoding/json"
	"os"
	"sync"
	"testing"
)

// Report is what one run of the suite did.
type Report struct {
	Backend  string `json:"backend"`
	Provider string `json:"provider"`
	Test     string `json:"test"` // the Go test that called Run

	Ran     int     `json:"ran"`
	Passed  int     `json:"passed"`
	Failed  int     `json:"failed"`
	Seconds float64 `json:"seconds"`

	// Tests says of every test that ran whether it passed.
	Tests map[string]bool `json:"tests"`
	// Skipped holds the reason of every test that was skipped.
	Skipped map[string]string `json:"skipped"`
	// Void holds of every test that began anew why its first runs did not count.
	Void map[string][]string `json:"void,omitempty"`
}

// recorder collects a Report while tests run at the same time.
type recorder struct {
	mu sync.Mutex
	Report
}

func newReport(t *testing.T, h Harness) *recorder {
	t.Helper()
	d := h.New(t).Driver(t)
	defer d.Close()
	return &recorder{Report: Report{Backend: d.Info().Backend, Provider: h.Provider, Test: t.Name(),
		Tests: make(map[string]bool), Skipped: make(map[string]string), Void: make(map[string][]string)}}
}

// one runs a test or skips it, and counts it.
func (r *recorder) one(t *testing.T, name, missing string, run func() (void []string)) {
	if missing != "" {
		r.skip(name, missing)
		t.Skip(missing)
	}
	void := run()
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(void) > 0 {
		r.Void[name] = void
	}
	r.Ran++
	r.Tests[name] = !t.Failed()
	if t.Failed() {
		r.Failed++
	} else {
		r.Passed++
	}
}

func (r *recorder) skip(name, why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Skipped[name] = why
}

// write adds the report to the directory of results, if there is one.
func (r *recorder) write(t *testing.T) {
	t.Helper()
	dir := os.Getenv("FENCELOCK_RESULTS")
	if dir == "" {
		return
	}
	line, err := json.Marshal(r.Report)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.CreateTemp(dir, "conformance-*.json")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(append(line, '\n')); err != nil {
		t.Fatal(err)
	}
}
