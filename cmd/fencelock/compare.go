package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/fencelock/fencelock/lab"
)

var compareCommand = &command{
	name:    "compare",
	summary: "see what each backend does when things go wrong",
	about: `Runs the same scenarios with real faults on servers that it starts itself, as local processes on
127.0.0.1, and prints for each backend: did two believe that they held the lock? Was a stale write let
through, with and without a guard that compares fencing tokens? Were the tokens in order? How long
before the end of the lease was a loss told? How long until the next one had the lock? See
docs/behaviour.md.

It needs the servers' programs: redis-server, etcd or Go to build it, and PostgreSQL. Linux only.
With --containers it needs a container engine instead and the command docker, which runs the servers
of redis, redlock, etcd and postgres; to stop one is docker pause there. FENCELOCK_REDIS_IMAGE,
FENCELOCK_ETCD_IMAGE and FENCELOCK_POSTGRES_IMAGE name other images than the official ones, as
conformance/containers/images.sh in the source prints them.

The exit code is 0 if everything was as expected of the backend, else 197.

Examples:

  fencelock compare --quick
  fencelock compare --backend redis,etcd --scenario holder-paused --html report.html
  fencelock compare --list
`,
	setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) error {
		backends := fs.String("backend", "", "`names`: of backends, with commas between; default all")
		scenarios := fs.String("scenario", "", "`names`: of scenarios, with commas between; default all")
		lanes := fs.Int("runs", 20, "`n`: pairs of holder and rival for each scenario and backend, side by side")
		quick := fs.Bool("quick", false, "3 pairs each, and seven scenarios unless --scenario says others")
		parallel := fs.Int("parallel", 2, "`n`: scenarios at a time")
		seed := fs.Uint64("seed", 0, "`n`: of the moments at which the faults come; 0 is a random one")
		asHTML := fs.String("html", "", "`file`: to write a page with the matrix and timelines to")
		asJSON := fs.String("json", "", "`file`: to write all results to")
		docs := fs.String("docs", "", "`directory`: to write behaviour.md and some of the timelines to")
		containers := fs.Bool("containers", false, "run the servers in containers")
		list := fs.Bool("list", false, "print the scenarios and backends, and run nothing")
		return func(ctx context.Context, c *cli, args []string) error {
			if len(args) > 0 {
				return usageError("compare takes no arguments")
			}
			plan := &lab.Plan{Parallel: *parallel}
			plan.Lanes, plan.Seed = *lanes, *seed
			if *quick {
				plan.Lanes = 3
				plan.Scenarios = []*lab.Scenario{lab.HolderPaused, lab.HolderHangs, lab.HolderKilled, lab.HolderCutOff, lab.ServerPaused, lab.ClockAhead,
					lab.NodeEmptiedNewcomer}
			}
			if *lanes < 1 || *parallel < 1 {
				return usageError("compare: --runs and --parallel must be at least 1")
			}
			var err error
			if plan.Backends, err = pick("backend", *backends, lab.Backends(), func(b *lab.Backend) string { return b.Name }); err != nil {
				return err
			}
			if *containers {
				plan.Backends = c.inContainers(plan.Backends)
			}
			if *list {
				return c.print(listOf(plan.Backends))
			}
			if *scenarios != "" || !*quick {
				plan.Scenarios, err = pick("scenario", *scenarios, lab.Scenarios(), func(s *lab.Scenario) string { return s.Name })
				if err != nil {
					return err
				}
			}
			if !slices.ContainsFunc(plan.Scenarios, func(s *lab.Scenario) bool { return slices.ContainsFunc(plan.Backends, s.Fits) }) {
				return usageError("compare: none of these scenarios can happen to these backends; fencelock compare --list says why")
			}
			plan.Progress = func(done, all int, r *lab.Result) {
				verdict := "as expected"
				if len(r.Unexpected) > 0 || r.Valid() == 0 {
					verdict = "NOT as expected"
				}
				c.console.say("%d of %d: %s on %s: %s (%d of %d lanes count, seed %d)", done, all, r.Scenario, r.Backend, verdict,
					r.Valid(), len(r.Lanes), r.Seed)
			}
			report, failed := plan.Do(ctx)
			for _, out := range []struct {
				path  string
				write func(io.Writer) error
			}{{*asHTML, report.WriteHTML}, {*asJSON, report.WriteJSON}} {
				if err := writeFile(out.path, out.write); err != nil {
					return err
				}
			}
			if *docs != "" && failed == nil {
				if err := report.WriteDocs(*docs); err != nil {
					return err
				}
			}
			if err := report.WriteText(c.stdout); err != nil {
				return fmt.Errorf("write the output: %w", err)
			}
			differs := report.Unexpected()
			c.console.say("%d scenarios on backends in %v", len(report.Results), report.Took.Round(time.Second))
			if failed != nil { // some runs could not be made; the others are reported all the same
				return exitf(exitFailed, "compare: %w", failed)
			}
			if len(differs) > 0 {
				return exitf(exitFailed, "compare: not as expected:\n%s", strings.Join(differs, "\n"))
			}
			return nil
		}
	},
}

// inContainers answers the backends that there are in containers, and says why of the others.
func (c *cli) inContainers(backends []*lab.Backend) (in []*lab.Backend) {
	images := &lab.Images{
		Redis: os.Getenv("FENCELOCK_REDIS_IMAGE"), Etcd: os.Getenv("FENCELOCK_ETCD_IMAGE"), Postgres: os.Getenv("FENCELOCK_POSTGRES_IMAGE"),
	}
	for _, b := range backends {
		if contained, why := b.InContainers(images); why == "" {
			in = append(in, contained)
		} else {
			c.console.say("not in containers: %s: %s", b.Name, why)
		}
	}
	return in
}

// pick answers those of all that are named, in their order; no names are all.
func pick[T any](what, names string, all []T, nameOf func(T) string) ([]T, error) {
	if names == "" {
		return all, nil
	}
	wanted := strings.Split(names, ",")
	picked := slices.DeleteFunc(slices.Clone(all), func(x T) bool { return !slices.Contains(wanted, nameOf(x)) })
	for _, name := range wanted {
		if !slices.ContainsFunc(all, func(x T) bool { return nameOf(x) == name }) {
			return nil, usageError("compare: there is no %s %s; see fencelock compare --list", what, quote(name))
		}
	}
	return picked, nil
}

func listOf(backends []*lab.Backend) string {
	var b strings.Builder
	b.WriteString("backends:\n")
	for _, backend := range backends {
		fmt.Fprintf(&b, "  %s\n", backend.Name)
	}
	b.WriteString("scenarios:\n")
	for _, s := range lab.Scenarios() {
		var on, not []string
		for _, backend := range backends {
			if why := s.Not(backend); why == "" {
				on = append(on, backend.Name)
			} else {
				not = append(not, fmt.Sprintf("      not on %s: %s\n", backend.Name, why))
			}
		}
		fmt.Fprintf(&b, "  %s (%s; on %s)\n      %s\n%s", s.Name, s.Law, strings.Join(on, ", "), s.Text, strings.Join(not, ""))
	}
	return b.String()
}

// writeFile writes a file as a whole; no path is no file.
func writeFile(path string, write func(io.Writer) error) error {
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := write(f); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
