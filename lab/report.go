package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Report is what several runs have shown.
type Report struct {
	Began   time.Time
	Took    time.Duration
	Machine string
	Results []*Result

	planned []*Backend
}

// A Plan says which runs to make.
type Plan struct {
	Backends  []*Backend
	Scenarios []*Scenario
	// Parallel is how many runs are made at a time; default 1. More of them disturb each other's times.
	Parallel int
	Options
	// Progress, if not nil, is told of each run that has ended, one at a time.
	Progress func(done, all int, r *Result)
}

// tries is how often a run is made at most. One in which every lane is void says nothing, so it is made again.
const tries = 3

// Do makes the runs: each scenario on each backend that it fits. A run that could not be made is an error, beside the
// report of the others; one in which no lane counts is made again, twice at most.
func (p *Plan) Do(ctx context.Context) (*Report, error) {
	type cell struct {
		b  *Backend
		sc *Scenario
	}
	var cells []cell
	for _, sc := range p.Scenarios {
		for _, b := range p.Backends {
			if sc.Fits(b) {
				cells = append(cells, cell{b, sc})
			}
		}
	}
	r := &Report{Began: time.Now(), Machine: fmt.Sprintf("%s/%s, %d CPUs", runtime.GOOS, runtime.GOARCH, runtime.NumCPU()), planned: p.Backends}
	if slices.ContainsFunc(p.Backends, func(b *Backend) bool { return b.contained != nil }) {
		r.Machine += ", servers in containers"
	}
	results := make([]*Result, len(cells))
	errs := make([]error, len(cells))
	var told sync.Mutex
	done := 0
	next := make(chan int)
	var all sync.WaitGroup
	for range max(p.Parallel, 1) {
		all.Go(func() {
			for i := range next {
				c := cells[i]
				result, err := Run(ctx, c.b, c.sc, &p.Options)
				for try := 1; try < tries && err == nil && result.Valid() == 0; try++ {
					result, err = Run(ctx, c.b, c.sc, &p.Options)
				}
				if err != nil {
					errs[i] = fmt.Errorf("%s on %s: %w", c.sc.Name, c.b.Name, err)
				}
				results[i] = result
				told.Lock()
				done++
				if p.Progress != nil && result != nil {
					p.Progress(done, len(cells), result)
				}
				told.Unlock()
			}
		})
	}
	for i := range cells {
		if ctx.Err() != nil {
			break
		}
		next <- i
	}
	close(next)
	all.Wait()
	r.Results = slices.DeleteFunc(results, func(r *Result) bool { return r == nil })
	r.Took = time.Since(r.Began)
	return r, errors.Join(append(errs, ctx.Err())...)
}

// Unexpected is what differs from what the scenarios lead to expect, one line for each finding.
func (r *Report) Unexpected() (lines []string) {
	for _, result := range r.Results {
		for _, u := range result.Unexpected {
			lines = append(lines, result.Scenario+" on "+result.Backend+": "+u)
		}
		if result.Valid() == 0 {
			lines = append(lines, result.Scenario+" on "+result.Backend+": every lane is void: "+result.void())
		}
	}
	return lines
}

// columns are what a row of the matrix says of a result.
var columns = []struct {
	title string
	of    func(r *Result) string
}{
	{"lanes", func(r *Result) string {
		if n := len(r.Lanes) - r.Valid(); n > 0 {
			return fmt.Sprintf("%d (%d void)", r.Valid(), n)
		}
		return fmt.Sprint(r.Valid())
	}},
	{"believed overlap", func(r *Result) string { return r.share(Overlap) }},
	{"stale write, no guard", func(r *Result) string { return r.share(StaleUnfenced) }},
	{"stale write, guard", func(r *Result) string { return r.share(StaleFenced) }},
	{"tokens in order", func(r *Result) string {
		if n := r.With(Disorder); n > 0 {
			return fmt.Sprintf("not in %d", n)
		}
		return "yes"
	}},
	{"loss told before expiry by", (*Result).leads},
	{"next holder after", (*Result).nexts},
}

func (r *Result) share(f Finding) string {
	if n := r.With(f); n > 0 {
		return fmt.Sprintf("in %d", n)
	}
	return "no"
}

func (r *Result) leads() string {
	var all []time.Duration
	for _, l := range r.Lanes {
		if l.Void == "" && l.Told {
			all = append(all, l.Lead)
		}
	}
	told := span(all, time.Millisecond)
	if len(all) > 0 && slices.Min(all) < 0 {
		told += fmt.Sprintf(" (a timer was %v late)", r.Late.Round(time.Millisecond))
	}
	return told
}

func (r *Result) nexts() string {
	var all []time.Duration
	for _, l := range r.Lanes {
		if l.Void == "" {
			all = append(all, l.Next)
		}
	}
	return span(all, 10*time.Millisecond)
}

// span is least and most.
func span(all []time.Duration, round time.Duration) string {
	if len(all) == 0 {
		return "-"
	}
	least, most := slices.Min(all).Round(round), slices.Max(all).Round(round)
	if least == most {
		return least.String()
	}
	return fmt.Sprintf("%v to %v", least, most)
}

// word is the shortest that can be said of a result.
func (r *Result) word() string {
	switch {
	case r.Valid() == 0:
		return "void"
	case len(r.Unexpected) > 0:
		return "UNEXPECTED"
	case r.With(Overlap) > 0:
		return "overlap"
	case r.With(StaleUnfenced) > 0:
		return "stale"
	}
	return "quiet"
}

// legend explains the words of the overview.
const legend = "quiet: nothing happened that a lock should prevent. stale: where no guard compares tokens, a late write was let through. " +
	"overlap: two believed that they held the lock, so only a guard keeps the order. -: this cannot happen to the backend, see below why. " +
	"A guard let no stale write through, except where it says UNEXPECTED. A loss that was told before expiry by less than nothing was told by a " +
	"timer that the machine, busy with all the processes, ran so late. The next holder is counted from the fault: a request that has no answer first times " +
	"out and is made again, and a waiter that a server has forgotten finds out at its next poll."

// backends are those of the plan; of a report that was read from a file, those that have a result.
func (r *Report) backends() []*Backend {
	if r.planned != nil {
		return r.planned
	}
	return slices.DeleteFunc(Backends(), func(b *Backend) bool {
		return !slices.ContainsFunc(r.Results, func(r *Result) bool { return r.Backend == b.Name })
	})
}

// notes explain what one scenario has shown: why it may be so where a lock did not prevent something, and why there is
// nothing of the other backends.
func (r *Report) notes(group []*Result) (lines []string) {
	sc := scenario(group[0].Scenario)
	for _, a := range sc.may {
		var shown, spared []string
		for _, result := range group {
			switch {
			case !a.of(result.Backend) || result.Valid() == 0:
			case a.finding == "" || result.With(a.finding) > 0:
				shown = append(shown, result.Backend)
			case a.finding == Overlap: // what a table of guarantees warns of
				spared = append(spared, result.Backend)
			}
		}
		if len(shown) > 0 {
			lines = append(lines, fmt.Sprintf("%s: %s", strings.TrimSpace(string(a.finding)+" on "+strings.Join(shown, ", ")), a.why))
		}
		if len(spared) > 0 {
			lines = append(lines, fmt.Sprintf("no %s on %s this time: %s", a.finding, strings.Join(spared, ", "), a.why))
		}
	}
	var reasons []string
	on := map[string][]string{}
	for _, b := range r.backends() {
		if why := sc.Not(b); why != "" {
			if on[why] == nil {
				reasons = append(reasons, why)
			}
			on[why] = append(on[why], b.Name)
		}
	}
	for _, why := range reasons {
		lines = append(lines, fmt.Sprintf("not on %s: %s", strings.Join(on[why], ", "), why))
	}
	return lines
}

// overview is the matrix at a glance: the backends, and a line for each scenario.
func (r *Report) overview() (lines [][]string) {
	backends := []string{"scenario"}
	for _, b := range r.backends() {
		backends = append(backends, b.Name)
	}
	lines = append(lines, backends)
	for _, group := range r.byScenario() {
		line := []string{group[0].Scenario}
		for _, b := range backends[1:] {
			word := "-"
			if i := slices.IndexFunc(group, func(r *Result) bool { return r.Backend == b }); i >= 0 {
				word = group[i].word()
			}
			line = append(line, word)
		}
		lines = append(lines, line)
	}
	return lines
}

// byScenario groups the results, in their order.
func (r *Report) byScenario() (groups [][]*Result) {
	for _, result := range r.Results {
		if n := len(groups); n > 0 && groups[n-1][0].Scenario == result.Scenario {
			groups[n-1] = append(groups[n-1], result)
		} else {
			groups = append(groups, []*Result{result})
		}
	}
	return groups
}

func scenario(name string) *Scenario {
	i := slices.IndexFunc(Scenarios(), func(s *Scenario) bool { return s.Name == name })
	return Scenarios()[i]
}

// table is what one scenario has shown: the titles, and a line for each backend.
func table(group []*Result) (lines [][]string) {
	titles := []string{"backend"}
	for _, c := range columns {
		titles = append(titles, c.title)
	}
	lines = append(lines, titles)
	for _, result := range group {
		line := []string{result.Backend}
		for _, c := range columns {
			line = append(line, c.of(result))
		}
		lines = append(lines, line)
	}
	return lines
}

// aligned writes lines with their columns below each other.
func aligned(b *strings.Builder, indent string, lines [][]string) {
	widths := make([]int, len(lines[0]))
	for _, line := range lines {
		for i, cell := range line {
			widths[i] = max(widths[i], len(cell))
		}
	}
	for _, line := range lines {
		text := indent
		for i, cell := range line {
			text += fmt.Sprintf("%-*s  ", widths[i], cell)
		}
		b.WriteString(strings.TrimRight(text, " ") + "\n")
	}
	b.WriteString("\n")
}

// WriteText writes the matrix for a terminal: first what each run has shown, then the whole at a glance.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	for _, group := range r.byScenario() {
		sc := scenario(group[0].Scenario)
		fmt.Fprintf(&b, "%s (%s): %s\n", sc.Name, sc.Law, sc.Text)
		aligned(&b, "  ", table(group))
		if notes := r.notes(group); len(notes) > 0 {
			b.WriteString("  " + strings.Join(notes, "\n  ") + "\n\n")
		}
	}
	aligned(&b, "", r.overview())
	fmt.Fprintln(&b, legend)
	_, err := io.WriteString(w, b.String())
	return err
}

// markdown writes lines as a table.
func markdown(b *strings.Builder, lines [][]string) {
	for i, line := range lines {
		fmt.Fprintf(b, "| %s |\n", strings.Join(line, " | "))
		if i == 0 {
			b.WriteString("|" + strings.Repeat("---|", len(line)) + "\n")
		}
	}
	b.WriteString("\n")
}

// WriteMarkdown writes the matrix as Markdown: first the whole at a glance, then what each run has shown.
func (r *Report) WriteMarkdown(w io.Writer) error {
	var b strings.Builder
	markdown(&b, r.overview())
	fmt.Fprintf(&b, "%s\n\n", legend)
	for _, group := range r.byScenario() {
		sc := scenario(group[0].Scenario)
		fmt.Fprintf(&b, "### %s (%s)\n\n%s\n\n", sc.Name, sc.Law, sc.Text)
		markdown(&b, table(group))
		if notes := r.notes(group); len(notes) > 0 {
			b.WriteString("- " + strings.Join(notes, "\n- ") + "\n\n")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteJSON writes all results, without the histories.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// shownLanes is how many lanes of a run the page has pictures of.
const shownLanes = 3

// Telling are the lanes that tell most about the run, up to n of them: those with most kinds of findings first, then
// those that count.
func (r *Result) Telling(n int) []*Lane {
	lanes := slices.Clone(r.Lanes)
	weight := func(l *Lane) int {
		w := 2 * len(l.Findings)
		if l.Void == "" {
			w++
		}
		return w
	}
	slices.SortStableFunc(lanes, func(a, b *Lane) int { return weight(b) - weight(a) })
	return lanes[:min(n, len(lanes))]
}

// WriteHTML writes a page that needs nothing else: the matrix, and for each run the timelines of the lanes that tell
// most.
func (r *Report) WriteHTML(w io.Writer) error {
	type row struct {
		Result *Result
		Cells  []string
		Class  string
		Lanes  []template.HTML
	}
	type group struct {
		Scenario *Scenario
		Rows     []row
		Notes    []string
	}
	page := struct {
		*Report
		Overview [][]string
		Legend   string
		Columns  []string
		Groups   []group
		Differs  []string
	}{Report: r, Overview: r.overview(), Legend: legend, Differs: r.Unexpected()}
	for _, results := range r.byScenario() {
		g := group{Scenario: scenario(results[0].Scenario), Notes: r.notes(results)}
		lines := table(results)
		page.Columns = lines[0]
		for i, result := range results {
			row := row{Result: result, Class: result.word(), Cells: lines[i+1][1:]}
			for _, l := range result.Telling(shownLanes) {
				var b strings.Builder
				if err := l.WriteTimeline(&b, result.Scenario+" on "+result.Backend+", "+l.Name); err != nil {
					return err
				}
				row.Lanes = append(row.Lanes, template.HTML(b.String())) // made here, and escaped there
			}
			g.Rows = append(g.Rows, row)
		}
		page.Groups = append(page.Groups, g)
	}
	return pageTemplate.Execute(w, page)
}

var pageTemplate = template.Must(template.New("page").Parse(`<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>fencelock: what each backend does when things go wrong</title>
<style>
:root { --bg: #fff; --ink: #1c2330; --dim: #5b6472; --line: #d7dce5; --bad: #c8372d; --warn: #9a6b00; --good: #1f7d50 }
@media (prefers-color-scheme: dark) { :root { --bg: #0f141c; --ink: #e8ecf3; --dim: #9aa4b5; --line: #2b3444; --bad: #f0716a; --warn: #e0b450; --good: #4cc38a } }
body { background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem; text-align: left; white-space: nowrap }
th { color: var(--dim); font-weight: 600; vertical-align: bottom; white-space: normal }
.UNEXPECTED, .void { color: var(--bad); font-weight: 700 }
.overlap { color: var(--bad) }
.stale { color: var(--warn) }
.quiet { color: var(--good) }
details svg { display: block; margin: .5rem 0; max-width: 100% }
.dim { color: var(--dim) }
a { color: inherit }
</style>
</head>
<body>
<h1>What each backend does when things go wrong</h1>
<p class="dim">{{.Began.Format "2006-01-02 15:04"}}, {{.Machine}}. In each lane a holder and a rival, both processes of their own, want one lock,
and write while they believe in it. Bars are belief, with the last digits of the token; the yellow band is the fault, grey is a process that is
stopped; dots are writes, red ones were stale and let through where no guard compares; crosses are writes that a guard refused.</p>
{{if .Differs}}<h2>Not as expected</h2><ul class="differs">{{range .Differs}}<li><pre>{{.}}</pre></li>{{end}}</ul>{{end}}
<div class="wide"><table id="overview">
{{range $line, $cells := .Overview}}<tr>{{range $i, $word := $cells}}{{if not $line}}<th>{{$word}}</th>{{else if $i}}<td class="{{$word}}">{{$word}}</td>{{else}}<td><a href="#{{$word}}">{{$word}}</a></td>{{end}}{{end}}</tr>
{{end}}</table></div>
<p class="dim">{{.Legend}}</p>
{{$columns := .Columns}}
{{range .Groups}}<section id="{{.Scenario.Name}}">
<h2>{{.Scenario.Name}} <span class="dim">{{.Scenario.Law}}</span></h2>
<p>{{.Scenario.Text}}</p>
<div class="wide"><table>
<tr>{{range $columns}}<th>{{.}}</th>{{end}}</tr>
{{range .Rows}}<tr><td class="{{.Class}}">{{.Result.Backend}}</td>{{range .Cells}}<td>{{.}}</td>{{end}}</tr>
{{end}}</table></div>
{{if .Notes}}<ul class="dim">{{range .Notes}}<li>{{.}}</li>{{end}}</ul>{{end}}
{{range .Rows}}<details><summary>{{.Result.Backend}}: timelines, seed {{.Result.Seed}}</summary>
{{range .Lanes}}{{.}}{{end}}</details>
{{end}}</section>
{{end}}</body>
</html>
`))
