package fencelock_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func pages(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]string)
	for _, file := range append(files, "README.md") {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all[file] = string(b)
	}
	return all
}

// TestSnippetsAreExamples holds each Go snippet that names an example to the code of that example, which is
// compiled and run.
func TestSnippetsAreExamples(t *testing.T) {
	examples := make(map[string]string)
	for _, file := range []string{"example_test.go", "guard/example_test.go", "guard/redisguard/example_test.go", "driver/goredis/setnx_test.go",
		"lab/example_test.go"} {
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		set := token.NewFileSet()
		parsed, err := parser.ParseFile(set, file, src, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			if f, ok := d.(*ast.FuncDecl); ok {
				examples[f.Name.Name] = flat(string(src[set.Position(f.Pos()).Offset:set.Position(f.End()).Offset]))
			}
		}
	}
	snippet := regexp.MustCompile("<!-- example: (\\w+) -->\n```go\n((?s).*?)```")
	n := 0
	for page, text := range pages(t) {
		for _, m := range snippet.FindAllStringSubmatch(text, -1) {
			n++
			if !strings.Contains(examples[m[1]], flat(m[2])) {
				t.Errorf("%s: the snippet is not part of %s:\n%s", page, m[1], m[2])
			}
		}
	}
	if n < 5 {
		t.Errorf("snippets with an example: got %d, want at least those of the README", n)
	}
}

// flat drops indentation.
func flat(code string) string {
	var lines []string
	for line := range strings.Lines(code) {
		lines = append(lines, strings.TrimSpace(line))
	}
	return strings.TrimSpace(strings.Join(lines, "\n"))
}

func TestLinksLeadSomewhere(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#\s]+)[^)]*\)`)
	for page, text := range pages(t) {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				t.Errorf("%s: link to %s: %v", page, m[1], err)
			}
		}
	}
}
