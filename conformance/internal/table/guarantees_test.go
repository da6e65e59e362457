package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/conformance"
)

// complete is a report in which all that guarantees looks for has passed, but for what needs a server.
func complete() conformance.Report {
	r := conformance.Report{Backend: "memory", Provider: "local", Tests: map[string]bool{}, Skipped: map[string]string{}}
	for _, name := range []string{"Exclusion/A", "Concurrency/A", "Renewal/A", "Release/A", "Fencing/A", "Semaphore/A",
		"Semaphore/B", "Waiting/StepOrder", "Waiting/StepPushesTheGrant", "Cost/Uncontended", "Inspect/A",
		"Expiry/StepLivesForItsTTL"} {
		r.Tests[name] = true
	}
	r.Skipped["Loss/ServerPaused"] = "needs server: there is none"
	r.Skipped["Cost/ServerHandover"] = "needs requests: nothing is sent"
	return r
}

func TestGuarantees(t *testing.T) {
	rows := []string{"memory/local"}
	text, err := guarantees([]conformance.Report{complete()}, rows)
	if err != nil {
		t.Fatalf("guarantees: got %v, want nil", err)
	}
	for _, want := range []string{
		"|  | memory |\n", "| semaphores | yes (2) |\n", "| a server paused, killed, restarted | no: there is none |\n",
		"| a lease ends by | the monotonic clock of the process (`Expiry/StepLivesForItsTTL`) |\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("table: got\n%s\nwant it to contain %q", text, want)
		}
	}

	for what, spoil := range map[string]func(*conformance.Report){
		"Semaphore/B failed":                 func(r *conformance.Report) { r.Tests["Semaphore/B"] = false },
		"no test of the suite matches":       func(r *conformance.Report) { delete(r.Tests, "Inspect/A") },
		"rests on Expiry/StepLivesForItsTTL": func(r *conformance.Report) { delete(r.Tests, "Expiry/StepLivesForItsTTL"); r.Tests["Expiry/B"] = true },
		"other: nothing is stated":           func(r *conformance.Report) { r.Backend = "other" },
	} {
		r := complete()
		spoil(&r)
		if _, err := guarantees([]conformance.Report{r}, []string{row(r)}); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("guarantees of spoilt results: got %v, want an error with %q", err, what)
		}
	}
	if _, err := guarantees(nil, rows); err == nil {
		t.Errorf("guarantees without results: got nil, want an error")
	}
}

func TestDocument(t *testing.T) {
	page := filepath.Join(t.TempDir(), "page.md")
	read := func() string {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	before, after := "before\n"+generatedBegin, generatedEnd+"after\n"
	if err := os.WriteFile(page, []byte(before+"old\n"+after), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := document(page, "new\n", false); err == nil || !strings.Contains(err.Error(), "stale") || read() != before+"old\n"+after {
		t.Errorf("stale page: got %v, want an error and the page as it was", err)
	}
	if err := document(page, "new\n", true); err != nil || read() != before+"new\n"+after {
		t.Errorf("write: got %v and %q, want the new table", err, read())
	}
	if err := document(page, "new\n", false); err != nil {
		t.Errorf("page that is up to date: got %v, want nil", err)
	}
}
