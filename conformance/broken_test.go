package conformance_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// The suite is tested with code that is broken on purpose: the driver for memory, the reference state below
// it and the engine above it, with one thing wrong at a time. Each must make a certain test of the suite fail.
//
// All the broken variants are built into one test binary, from copies of the sources with the edits below. An
// environment variable says which of them is in force.
const brokenVariable = "FENCELOCK_BROKEN"

// An edit replaces a piece of a source file that must be there exactly once. The new text asks by
// broken("...") whether the variant of that name is in force, and does the right thing if it is not.
type edit struct {
	file, old, new string
}

// A variant is the name of what is broken, and the tests of which each must notice it.
type variant struct {
	name   string
	caught []string
}

const (
	stateFile    = "driver/internal/state/state.go"
	memoryFile   = "driver/memory/memory.go"
	waitFile     = "wait.go"
	leaseFile    = "lease.go"
	scheduleFile = "schedule.go"
	clientFile   = "client.go"
)

// TestBroken fails for every variant that the suite lets pass.
func TestBroken(t *testing.T) {
	t.Parallel()
	names := make(map[string]bool)
	var tests []string
	for _, v := range variants {
		names[v.name] = true
		tests = append(tests, v.caught...)
		if len(v.caught) == 0 {
			t.Errorf("variant %q: got no test that must notice it, want one", v.name)
		}
	}
	used := make(map[string]bool)
	for _, e := range edits {
		for _, m := range regexp.MustCompile(`broken\("([^"]+)"\)`).FindAllStringSubmatch(e.new, -1) {
			used[m[1]] = true
			if !names[m[1]] {
				t.Errorf("edit of %s: got the variant %q, want one that is listed", e.file, m[1])
			}
		}
	}
	for name := range names {
		if !used[name] {
			t.Errorf("variant %q: got no edit, want one", name)
		}
	}
	binary := buildBroken(t)
	// Most of the tests wait, so that more can run at a time than -parallel allows.
	outcomes := make([]chan outcome, len(variants)+1)
	runs := append([]variant{{"", tests}}, variants...)
	slots := make(chan struct{}, 12)
	for i, v := range runs {
		outcomes[i] = make(chan outcome, 1)
		go func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			outcomes[i] <- runSuite(t.Context(), binary, "TestConformance", v.name, v.caught)
		}()
	}
	for i, v := range runs {
		t.Run(cmp.Or(v.name, "nothing"), func(t *testing.T) {
			o := <-outcomes[i]
			if o.err != nil {
				t.Fatalf("run of the suite: %v\n%s", o.err, o.output)
			}
			if v.name == "" && len(o.failed) > 0 {
				t.Errorf("suite on what is not broken: got failures of %q, want none\n%s", o.failed, o.output)
			}
			for _, want := range v.caught {
				if v.name != "" && !slices.Contains(o.failed, want) {
					t.Errorf("suite on what is broken by %q: got failures of %q, want one of %s\n%s", v.name, o.failed, want, o.output)
				}
			}
		})
	}
}

// buildBroken builds the conformance test of driver/memory with all edits.
func buildBroken(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	sources := make(map[string]string)
	for _, e := range edits {
		text, read := sources[e.file]
		if !read {
			b, err := os.ReadFile(filepath.Join(root, e.file))
			if err != nil {
				t.Fatal(err)
			}
			text = string(b)
		}
		if n := strings.Count(text, e.old); n != 1 {
			t.Fatalf("edit of %s is stale: got %d times what it replaces, want once:\n%s", e.file, n, e.old)
		}
		sources[e.file] = strings.Replace(text, e.old, e.new, 1)
	}
	overlay := struct{ Replace map[string]string }{make(map[string]string)}
	write := func(file, text string) {
		t.Helper()
		copied := filepath.Join(dir, strings.ReplaceAll(file, "/", "_"))
		if err := os.WriteFile(copied, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		overlay.Replace[filepath.Join(root, filepath.FromSlash(file))] = copied
	}
	for file, text := range sources {
		write(file, text)
		name, _, _ := strings.Cut(text[strings.Index(text, "\npackage ")+len("\npackage "):], "\n")
		write(filepath.ToSlash(filepath.Join(filepath.Dir(file), "broken.go")), fmt.Sprintf(`package %s

import "os"

var brokenName = os.Getenv(%q)

func broken(name string) bool { return name == brokenName }
`, name, brokenVariable))
	}
	config := filepath.Join(dir, "overlay.json")
	b, err := json.Marshal(overlay)
	if err == nil {
		err = os.WriteFile(config, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(dir, "broken.test")
	cmd := exec.CommandContext(t.Context(), "go", "test", "-c", "-overlay", config, "-o", binary, "./driver/memory")
	cmd.Dir = root
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build of the broken variants: got %v, want nil\n%s", err, output)
	}
	return binary
}

// outcome is what a run of the suite showed.
type outcome struct {
	failed []string // of the tests that were asked for
	output string
	err    error
}

// runSuite runs tests of the suite on a variant, in a test of that name.
func runSuite(ctx context.Context, binary, suite, variant string, tests []string) (o outcome) {
	var levels [3][]string
	for _, name := range tests {
		for i, part := range strings.Split(name, "/") {
			if !slices.Contains(levels[i], part) {
				levels[i] = append(levels[i], part)
			}
		}
	}
	pattern := "^" + suite + "$"
	for _, parts := range levels[:2] {
		pattern += "/^(" + strings.Join(parts, "|") + ")$"
	}
	args := []string{"-test.run", pattern, "-test.v", "-test.timeout", (2 * time.Minute).String()}
	if levels[2] == nil {
		args = append(args, "-test.skip", "///^Permit$")
	}
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Env = append(os.Environ(), brokenVariable+"="+variant, "FENCELOCK_RESULTS=") // a broken driver is no row of the results
	out, err := cmd.CombinedOutput()
	o.output = string(out)
	if _, exited := err.(*exec.ExitError); err != nil && !exited {
		o.err = err
		return o
	}
	for _, name := range tests {
		full := regexp.QuoteMeta(suite + "/" + name)
		switch {
		case regexp.MustCompile(`--- FAIL: ` + full + ` \(`).MatchString(o.output):
			o.failed = append(o.failed, name)
		case !regexp.MustCompile(`--- PASS: ` + full + ` \(`).MatchString(o.output):
			o.err = fmt.Errorf("got no result of %s, want one: %v", name, err)
			return o
		}
	}
	return o
}
