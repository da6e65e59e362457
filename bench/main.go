// Bench compares fencelock with raw commands and with other libraries, on real servers that run as local processes.
// It is for developers of fencelock and for those who want to repeat the figures of docs/performance.md.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"strings"
)

func main() {
	if err := command(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func command(ctx context.Context) error {
	short := flag.Bool("quick", false, "smaller sizes and three rounds")
	strict := flag.Bool("bars", false, "fail if a bar is missed")
	docs := flag.String("docs", "", "directory of performance.md, .json and .svg to write")
	profiles := flag.String("profile", "", "write profiles of each path into this directory instead")
	only := flag.String("backends", strings.Join(backends, ","), "backends to measure")
	flag.Parse()
	chosen := strings.Split(*only, ",")
	if *profiles != "" {
		return profileAll(ctx, *profiles, chosen)
	}
	z := full
	if *short {
		z = quick
	}
	r, err := measureAll(ctx, os.Stderr, z, chosen)
	if err != nil {
		return err
	}
	fmt.Print(r.markdown())
	if *docs != "" {
		if err := r.write(*docs); err != nil {
			return err
		}
	}
	if missed := r.missed(); *strict && len(missed) > 0 {
		return errors.New("bars missed:\n" + strings.Join(missed, "\n"))
	}
	return nil
}

func (r run) write(dir string) error {
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	page := filepath.Join(dir, "performance.md")
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	written, err := inserted(string(text), r.markdown())
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, "performance.json"), append(data, '\n'), 0o644),
		os.WriteFile(filepath.Join(dir, "performance.svg"), []byte(r.svg()), 0o644),
		os.WriteFile(page, []byte(written), 0o644))
}

// profileAll writes CPU and allocation profiles of pairs and of a handover by each of fencelock's drivers, and prints
// where the time and the allocations go.
func profileAll(ctx context.Context, dir string, chosen []string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	runtime.MemProfileRate = 4096
	for _, backend := range chosen {
		for _, m := range measures(sizes{Pairs: 5000, Handover: full.Handover, Waiters: []crowd{{64, 4}}}, backend) {
			if m.kind != "pair" && m.kind != "handover" {
				continue
			}
			for _, of := range subjects(backend) {
				if of.fenced && of.takesPart(m) {
					if err := profile(ctx, dir, m, of); err != nil {
						return err
					}
				}
			}
		}
	}
	return nil
}

func profile(ctx context.Context, dir string, m measure, of subject) (err error) {
	s, err := startServer(ctx, of.backend)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	base := filepath.Join(dir, strings.ReplaceAll(of.name, " ", "-")+"-"+m.kind)
	cpu, err := os.Create(base + ".cpu")
	if err != nil {
		return err
	}
	before, err := os.Create(base + ".allocs-before")
	if err != nil {
		return err
	}
	if err := pprof.Lookup("allocs").WriteTo(before, 0); err != nil {
		return err
	}
	if err := pprof.StartCPUProfile(cpu); err != nil {
		return err
	}
	_, ran := m.run(ctx, s, []subject{of}, m.ttl)
	pprof.StopCPUProfile()
	allocs, err := os.Create(base + ".allocs")
	if err != nil {
		return err
	}
	runtime.GC() // the profile is of what the latest collection knew
	err = errors.Join(ran, pprof.Lookup("allocs").WriteTo(allocs, 0), allocs.Close(), before.Close(), cpu.Close())
	if err != nil {
		return err
	}
	for _, args := range [][]string{
		{"-top", "-cum", "-nodecount=25", base + ".cpu"},
		{"-top", "-nodecount=15", "-sample_index=alloc_objects", "-base", base + ".allocs-before", base + ".allocs"},
	} {
		fmt.Printf("\n== %s, %s: %s\n", of.name, m.kind, strings.Join(args, " "))
		top := exec.CommandContext(ctx, "go", append([]string{"tool", "pprof"}, args...)...)
		top.Stdout, top.Stderr = os.Stdout, os.Stderr
		if err := top.Run(); err != nil {
			return err
		}
	}
	return nil
}
