package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// pictured are the runs of which the documentation has a picture.
var pictured = []struct {
	scenario *Scenario
	backend  *Backend
	about    string
}{
	{HolderPaused, Redis, "The pause that no lock survives: the holder looked at its lease, was stopped, and wrote when it went on. " +
		"Where nobody compares tokens the late write is let through (red); the guard refuses it (cross)."},
	{HolderCutOff, Etcd, "A holder that reaches nobody is told before its lease ends, and the rival follows."},
	{Flushed, Redis, "A server that forgets gives the lock to the rival while the holder still believes. Its next renewal tells it."},
	{ClockAhead, Redlock, "The attack by a clock: one node's clock is stepped ahead, and the majorities of two clients overlap in it."},
	{NodeEmptied, Redlock, "The attack by amnesia: the node comes back empty, and is not counted until all leases have ended that it may have forgotten."},
	{StandbyPromoted, Postgres, "An asynchronous standby that never saw the lock is promoted."},
}

// pictureOf is the file of a picture.
func pictureOf(sc *Scenario, b *Backend) string {
	return "behaviour-" + sc.Name + "-" + b.Name + ".svg"
}

// WriteDocs writes behaviour.md and the pictures in it into a directory.
func (r *Report) WriteDocs(dir string) error {
	var b strings.Builder
	fmt.Fprintf(&b, `# What each backend does when things go wrong

Written by `+"`make docs`"+`, which runs `+"`fencelock compare`"+`: the same faults on real servers, on every backend. Run it on your machine:

`+"```"+`
go run ./cmd/fencelock compare --html report.html
`+"```"+`

In each lane a holder and a rival, both processes of their own (on memory goroutines of one), want one lock, and write while they believe that they hold it: to a resource
that compares fencing tokens, and to one that does not. All is recorded on one clock and judged afterwards. This run: %s, on %s, %v.
How to use the same scenarios in tests of your own code: package [lab](https://pkg.go.dev/github.com/fencelock/fencelock/lab).

`, r.Began.UTC().Format("2006-01-02"), r.Machine, r.Took.Round(time.Second))
	var pictures strings.Builder
	for _, p := range pictured {
		i := slices.IndexFunc(r.Results, func(r *Result) bool { return r.Scenario == p.scenario.Name && r.Backend == p.backend.Name })
		if i < 0 {
			continue
		}
		var svg strings.Builder
		title := p.scenario.Name + " on " + p.backend.Name
		if err := r.Results[i].Telling(1)[0].WriteTimeline(&svg, title); err != nil {
			return err
		}
		name := pictureOf(p.scenario, p.backend)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(svg.String()), 0o644); err != nil {
			return err
		}
		fmt.Fprintf(&pictures, "%s\n\n![%s](%s)\n\n", p.about, title, name)
	}
	if pictures.Len() > 0 {
		b.WriteString("Bars are belief, with the last digits of the token; the yellow band is the fault, grey is a process that is stopped; dots are " +
			"writes, red ones were stale and let through where no guard compares; crosses are writes that a guard refused.\n\n" + pictures.String())
	}
	if differs := r.Unexpected(); len(differs) > 0 {
		fmt.Fprintf(&b, "**Not as expected:**\n\n```\n%s\n```\n\n", strings.Join(differs, "\n"))
	}
	b.WriteString("## At a glance\n\n")
	if err := r.WriteMarkdown(&b); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "behaviour.md"), []byte(strings.TrimRight(b.String(), "\n")+"\n"), 0o644)
}
