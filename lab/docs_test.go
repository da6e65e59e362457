package lab

import (
	"html"
	"os"
	"path/filepath"
	"slices"
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
			if why := sc.Not(b); !strings.Contains(section, why) {
				t.Errorf("behaviour.md: %s on %s: the reason is missing: %s; run make docs", sc.Name, b.Name, why)
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

// TestExplained: what a lock did not prevent is explained in every report, and so is what a scenario does not apply to.
func TestExplained(t *testing.T) {
	t.Parallel()
	result := func(b *Backend, found ...Finding) *Result {
		l := &Lane{Name: "lane-1", Findings: map[Finding]int{}}
		for _, f := range found {
			l.Findings[f] = 1
		}
		return &Result{Backend: b.Name, Scenario: ClockAhead.Name, Lanes: []*Lane{l}}
	}
	r := &Report{Results: []*Result{result(Redis, Overlap, StaleUnfenced), result(Redlock)}}
	other := result(Postgres)
	other.Scenario = HolderPaused.Name
	r.Results = append(r.Results, other)
	var text, markdown, page strings.Builder
	for _, err := range []error{r.WriteText(&text), r.WriteMarkdown(&markdown), r.WriteHTML(&page)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, out := range []string{text.String(), markdown.String(), html.UnescapeString(page.String())} {
		for _, want := range []string{
			"overlap on redis: " + ClockAhead.may[0].why, "no overlap on redlock this time: " + ClockAhead.may[1].why,
			"stale write without a guard on redis: " + staleOverlap.why, "not on postgres: " + clockOfRedis,
		} {
			if !strings.Contains(out, want) {
				t.Errorf("report: %q is missing in:\n%s", want, out)
			}
		}
	}
	for _, sc := range Scenarios() {
		for _, a := range sc.may {
			if a.why == "" {
				t.Errorf("%s: %s is allowed without a reason", sc.Name, a.finding)
			}
		}
	}
}

// TestInContainers: each backend is in containers or says why not, and so does each scenario of those that are.
func TestInContainers(t *testing.T) {
	t.Parallel()
	r := &Report{}
	for _, b := range Backends() {
		in, why := b.InContainers(nil)
		if (in == nil) == (why == "") || in != nil && in.Name != b.Name {
			t.Errorf("%s in containers: got %v and reason %q, want one of them", b.Name, in, why)
		}
		if in == nil {
			continue
		}
		r.planned = append(r.planned, in)
		for _, sc := range Scenarios() {
			if sc.Fits(in) && !sc.Fits(b) {
				t.Errorf("%s on %s: fits in containers only", sc.Name, b.Name)
			}
		}
	}
	if len(r.planned) != 4 || ClockAhead.Fits(r.planned[0]) || !Flushed.Fits(r.planned[0]) {
		t.Errorf("in containers: got %d backends, flushall on the first %v and its clock %v, want 4, true and false",
			len(r.planned), Flushed.Fits(r.planned[0]), ClockAhead.Fits(r.planned[0]))
	}
	notes := r.notes([]*Result{{Backend: Redis.Name, Scenario: ClockAhead.Name, Lanes: []*Lane{{}}}})
	if want := "not on redis, redlock: " + noLibrary; !slices.Contains(notes, want) {
		t.Errorf("notes of a report on containers: got %q, want %q in it", notes, want)
	}
}
