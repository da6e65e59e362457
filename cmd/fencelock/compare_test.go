//go:build linux

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fencelock/fencelock/lab"
)

// TestCompare makes one run by the program: the workers are the program itself.
func TestCompare(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	dir := t.TempDir()
	page, results := filepath.Join(dir, "report.html"), filepath.Join(dir, "report.json")
	stdout, stderr := p.want(t, 0, "compare", "--backend", "file", "--scenario", "holder-killed", "--runs", "2", "--seed", "7",
		"--html", page, "--json", results, "--docs", dir)
	if !strings.Contains(stdout, "holder-killed (W3)") || !strings.Contains(stdout, "quiet") {
		t.Errorf("compare: got %q, want a matrix", stdout)
	}
	if !strings.Contains(stderr, "1 of 1: holder-killed on file: as expected") || !strings.Contains(stderr, "seed 7)") {
		t.Errorf("progress: got %q", stderr)
	}
	var report lab.Report
	text, err := os.ReadFile(results)
	if err == nil {
		err = json.Unmarshal(text, &report)
	}
	if err != nil || len(report.Results) != 1 || len(report.Results[0].Lanes) != 2 {
		t.Errorf("JSON: got %s and error %v, want one result of two lanes", text, err)
	}
	for _, file := range []string{page, filepath.Join(dir, "behaviour.md")} {
		if text, err := os.ReadFile(file); err != nil || !strings.Contains(string(text), "holder-killed") {
			t.Errorf("%s: got %d bytes and error %v, want the scenario in it", file, len(text), err)
		}
	}
}

func TestCompareList(t *testing.T) {
	t.Parallel()
	stdout, _ := newPlace(t).want(t, 0, "compare", "--list")
	for _, sc := range lab.Scenarios() {
		if !strings.Contains(stdout, sc.Name) {
			t.Errorf("compare --list: %s is missing", sc.Name)
		}
		for _, b := range lab.Backends() {
			if why := sc.Not(b); why != "" && !strings.Contains(stdout, "not on "+b.Name+": "+why) {
				t.Errorf("compare --list: %s: why not on %s is missing", sc.Name, b.Name)
			}
		}
	}
	_, stderr := newPlace(t).want(t, exitUsage, "compare", "--backend", "memory", "--scenario", "flushall")
	if !strings.Contains(stderr, "none of these scenarios") {
		t.Errorf("compare of what cannot happen: got %q, want that said", stderr)
	}
}
