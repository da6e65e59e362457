// Command table prints what runs of the conformance suite have written into a directory, one row for each
// backend and provider, and what was skipped and why.
//
//	table [-docs PAGE [-write]] DIR [BACKEND/PROVIDER ...]
//
// It exits with status 1 if a test failed, if one of the rows named is missing, if a row has no tests, or if what
// PAGE says of the backends of these rows is not what the tests have shown; -write brings the page up to date instead.
package main

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/fencelock/fencelock/conformance"
)

func main() {
	page := flag.String("docs", "", "a page with a table of guarantees")
	bring := flag.Bool("write", false, "bring the page up to date")
	flag.Parse()
	if flag.NArg() < 1 {
		fmt.Fprintln(os.Stderr, "usage: table [-docs PAGE [-write]] DIR [BACKEND/PROVIDER ...]")
		os.Exit(2)
	}
	dir, rows := flag.Arg(0), flag.Args()[1:]
	reports, err := read(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "table:", err)
		os.Exit(2)
	}
	problems := write(os.Stdout, reports, rows)
	if *page != "" {
		text, err := guarantees(reports, rows)
		if err == nil {
			err = document(*page, text, *bring)
		}
		if err != nil {
			problems = append(problems, err.Error())
		}
	}
	if len(problems) > 0 {
		for _, p := range problems {
			fmt.Fprintln(os.Stderr, "table:", p)
		}
		os.Exit(1)
	}
}

func read(dir string) (reports []conformance.Report, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "conformance-*.json"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var r conformance.Report
		if err := json.Unmarshal(b, &r); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		reports = append(reports, r)
	}
	slices.SortFunc(reports, func(a, b conformance.Report) int {
		return cmp.Or(cmp.Compare(row(a), row(b)), cmp.Compare(a.Test, b.Test))
	})
	return reports, nil
}

func row(r conformance.Report) string { return r.Backend + "/" + r.Provider }

// write prints the table and answers what is wrong with it.
func write(out io.Writer, reports []conformance.Report, want []string) (problems []string) {
	var passed, failed, skipped int
	seen := make(map[string]bool)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "backend\tprovider\tran\tpassed\tfailed\tdeclared skips\tseconds\t")
	for _, r := range reports {
		fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%d\t%.0f\t\n", r.Backend, r.Provider, r.Ran, r.Passed, r.Failed, len(r.Skipped), r.Seconds)
		passed, failed, skipped = passed+r.Passed, failed+r.Failed, skipped+len(r.Skipped)
		if r.Ran > 0 {
			seen[row(r)] = true
		}
		if r.Failed > 0 {
			problems = append(problems, fmt.Sprintf("%s: %d tests failed", row(r), r.Failed))
		}
	}
	w.Flush()
	for _, r := range reports {
		reasons := make(map[string]int)
		for _, reason := range r.Skipped {
			reasons[reason]++
		}
		for _, reason := range slices.Sorted(maps.Keys(reasons)) {
			fmt.Fprintf(out, "skipped on %s: %d, %s\n", row(r), reasons[reason], reason)
		}
	}
	for _, r := range reports {
		for _, test := range slices.Sorted(maps.Keys(r.Void)) {
			for _, why := range r.Void[test] {
				fmt.Fprintf(out, "began anew on %s: %s, %s\n", row(r), test, why)
			}
		}
	}
	for _, name := range want {
		if !seen[name] {
			problems = append(problems, fmt.Sprintf("%s: no tests ran", name))
		}
	}
	fmt.Fprintf(out, "\n%s\n%d passed, %d failed, %d skipped\n", strings.Repeat("-", 40), passed, failed, skipped)
	return problems
}
