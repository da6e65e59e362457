package conformance

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const root = ".."

// TestFaultsHaveTests: every test that docs/faults.md names exists, and every fault stands there once.
func TestFaultsHaveTests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "faults.md"))
	if err != nil {
		t.Fatal(err)
	}
	known := names()
	named := regexp.MustCompile("`([^`]+)`")
	seen := make(map[string]bool)
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, "|")
		if len(cells) != 6 || !strings.HasPrefix(strings.TrimSpace(cells[1]), "F") {
			continue
		}
		id, tests := strings.TrimSpace(cells[1]), cells[3]
		if seen[id] {
			t.Errorf("%s: stands twice", id)
		}
		seen[id] = true
		found := named.FindAllStringSubmatch(tests, -1)
		if len(found) == 0 && !strings.Contains(tests, "not yet") {
			t.Errorf("%s: got no test, want one, or why not yet", id)
		}
		for _, f := range found {
			if dir, test, ok := strings.Cut(f[1], ".Test"); ok {
				if !hasTest(t, filepath.Join(root, dir), "Test"+test) {
					t.Errorf("%s: names %s, which does not exist", id, f[1])
				}
			} else if !slices.Contains(known, f[1]) {
				t.Errorf("%s: names %s, which is no test of the suite", id, f[1])
			}
		}
	}
	if len(seen) < 100 {
		t.Errorf("faults: found %d in the table, want all of more than 100", len(seen))
	}
}

// TestChoosingNamesTests: every test that docs/choosing.md rests on exists.
func TestChoosingNamesTests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs", "choosing.md"))
	if err != nil {
		t.Fatal(err)
	}
	known := names()
	found := regexp.MustCompile("`(driver/[a-z]+|[A-Z][A-Za-z]+)(\\.Test|/)([A-Z][A-Za-z0-9]+)`").FindAllStringSubmatch(string(text), -1)
	for _, f := range found {
		if dir, own, test := f[1], f[2] == ".Test", f[3]; own && !hasTest(t, filepath.Join(root, dir), "Test"+test) || !own && !slices.Contains(known, dir+"/"+test) {
			t.Errorf("docs/choosing.md rests on %s, which does not exist", f[0])
		}
	}
	if len(found) < 5 {
		t.Errorf("tests that docs/choosing.md rests on: got %d, want at least one for each backend", len(found))
	}
}

// names lists all tests of the suite, with their groups and variants.
func names() []string {
	var all []string
	for _, g := range suite() {
		for _, c := range g.tests {
			all = append(all, g.name+"/"+c.name)
			if c.permit {
				all = append(all, g.name+"/"+c.name+"/Permit")
			}
		}
	}
	return all
}

func hasTest(t *testing.T, dir, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			if d, ok := d.(*ast.FuncDecl); ok && d.Recv == nil && d.Name.Name == name {
				return true
			}
		}
	}
	return false
}

// TestNamesAreStable: a test has one name, in the form that others refer to.
func TestNamesAreStable(t *testing.T) {
	form := regexp.MustCompile(`^[A-Z][A-Za-z]+/[A-Z][A-Za-z0-9]+(/Permit)?$`)
	seen := make(map[string]bool)
	for _, name := range names() {
		if seen[name] {
			t.Errorf("test %s: there are two", name)
		}
		seen[name] = true
		if !form.MatchString(name) {
			t.Errorf("test %s: want a name of the form Group/Name", name)
		}
	}
}

// TestEveryDriverIsPluggedIn: a driver that does not run the suite is not known to keep any law.
func TestEveryDriverIsPluggedIn(t *testing.T) {
	drivers := packages(t, "driver", func(dir string) bool { return !strings.Contains(dir, "internal") })
	if len(drivers) < 3 {
		t.Fatalf("drivers: found %q, want at least three", drivers)
	}
	for _, dir := range drivers {
		if dir == filepath.Join(root, "driver") {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, "conformance_test.go")); err != nil {
			t.Errorf("%s: got no conformance_test.go, want one that calls conformance.Run: every driver proves what it claims (C1)", dir)
		}
	}
}

// TestEveryGuardIsPluggedIn: a guard that does not run the suite for guards is not known to refuse anything.
func TestEveryGuardIsPluggedIn(t *testing.T) {
	guards := packages(t, "guard", func(dir string) bool { return true })
	if len(guards) < 5 {
		t.Fatalf("guards: found %q, want at least five", guards)
	}
	for _, dir := range guards {
		if !hasTest(t, dir, "TestGuard") && filepath.Base(dir) != "guardtest" {
			t.Errorf("%s: got no TestGuard, want one that calls guardtest.Run", dir)
		}
	}
}

// packages lists the directories at and below dir that hold Go code.
func packages(t *testing.T, dir string, want func(dir string) bool) (dirs []string) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(root, dir), func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() && (e.Name() == "testdata" || strings.HasPrefix(e.Name(), ".") && e.Name() != "..") {
			return filepath.SkipDir
		}
		if e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		if d := filepath.Dir(path); want(d) && !slices.Contains(dirs, d) {
			dirs = append(dirs, d)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}

// TestCoreImportsStandardLibraryOnly: whoever uses locks in one backend must not have to build, audit and
// upgrade the client libraries of all the others. They are imported by the packages of the drivers.
func TestCoreImportsStandardLibraryOnly(t *testing.T) {
	const module = "github.com/fencelock/fencelock"
	checked := 0
	for _, dir := range []string{"", "driver", "driver/memory", "driver/file", "driver/internal/state", "internal/leaseclock", "guard", "guard/httpguard"} {
		files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			checked++
			f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
			if err != nil {
				t.Fatal(err)
			}
			for _, i := range f.Imports {
				path, _ := strconv.Unquote(i.Path.Value)
				first, _, _ := strings.Cut(path, "/")
				own := path == module || strings.HasPrefix(path, module+"/")
				if strings.Contains(first, ".") && !own {
					t.Errorf("%s: imports %s, want the standard library only: users of one backend must not depend on the libraries of others", file, path)
				}
				if own && strings.HasPrefix(path, module+"/conformance") {
					t.Errorf("%s: imports %s, want no test code in the library", file, path)
				}
			}
		}
	}
	if checked < 20 {
		t.Fatalf("files checked: got %d, want more than 20", checked)
	}
}
