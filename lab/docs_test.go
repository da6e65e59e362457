package lab

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestBehaviour: docs/behaviour.md has what the lab of today would write: every scenario with every backend that it fits, and
// the pictures.
func TestBehaviour(t *testing.T) {
	t.Parallel()
	docs := filepath.Join("..", "docs")
	text, err := os.ReadFile(filepath.Join(docs, "behaviour.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, sc := range Scenarios() {
		_, section, _ := strings.Cut(string(text), "### "+sc.Name+" ("+sc.Law+")\n\n"+sc.Text+"\n")
		section, _, _ = strings.Cut(section, "### ")
		for _, b := range Backends() {
			if has := strings.Contains(section, "\n| "+b.Name+" |"); has != sc.Fits(b) {
				t.Errorf("behaviour.md: %s on %s: got a line %v, want %v; run make docs", sc.Name, b.Name, has, sc.Fits(b))
			}
		}
	}
	for _, p := range pictured {
		name := pictureOf(p.scenario, p.backend)
		if _, err := os.Stat(filepath.Join(docs, name)); err != nil || !strings.Contains(string(text), "]("+name+")") {
			t.Errorf("behaviour.md: the picture %s is missing (%v); run make docs", name, err)
		}
	}
	if strings.Contains(string(text), "Not as expected") {
		t.Error("behaviour.md: some runs were not as expected")
	}
}
