package main

import (
	"strings"
	"testing"

	"github.com/fencelock/fencelock/conformance"
)

func TestWrite(t *testing.T) {
	reports := []conformance.Report{
		{Backend: "memory", Provider: "local", Ran: 10, Passed: 10, Skipped: map[string]string{"A/B": "no server", "A/C": "no server"}},
		{Backend: "redis", Provider: "process", Ran: 12, Passed: 11, Failed: 1, Void: map[string][]string{"A/D": {"the clock was set"}}},
		{Backend: "valkey", Provider: "container"},
	}
	var out strings.Builder
	problems := strings.Join(write(&out, reports, []string{"memory/local", "redis/process", "valkey/container", "etcd/process"}), "; ")
	if want := "redis/process: 1 tests failed; valkey/container: no tests ran; etcd/process: no tests ran"; problems != want {
		t.Errorf("problems: got %q, want %q", problems, want)
	}
	for _, want := range []string{"skipped on memory/local: 2, no server\n", "\nbegan anew on redis/process: A/D, the clock was set\n", "\n21 passed, 1 failed, 2 skipped\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("table: got\n%s\nwant it to contain %q", out.String(), want)
		}
	}
	if problems := write(&out, reports[:1], []string{"memory/local"}); len(problems) > 0 {
		t.Errorf("problems of a good table: got %q, want none", problems)
	}
}
