package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
)

// A result is what all rounds have shown of one subject in one measure.
type result struct {
	Backend string   `json:"backend"`
	Kind    string   `json:"kind"`
	Measure string   `json:"measure"`
	Subject string   `json:"subject"`
	Floor   string   `json:"floor"` // the subject that it is compared with; itself if it is a floor
	Rounds  []values `json:"rounds"`
}

// A run is everything that one run has shown.
type run struct {
	Machine  string   `json:"machine"`
	Versions []string `json:"versions"`
	Sizes    sizes    `json:"sizes"`
	Results  []result `json:"results"`
}

// measureAll lets the subjects take their turns at each measure, round after round. Each turn is on new clients; a
// backend's server lives for one measure.
func measureAll(ctx context.Context, progress io.Writer, z sizes, backends []string) (run, error) {
	out := run{Sizes: z, Machine: machine()}
	out.Versions = append(out.Versions, runtime.Version())
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			for _, part := range []string{"go-redis", "rueidis", "redsync", "redislock", "etcd/client/v3", "pgx/v5"} {
				if strings.Contains(m.Path, part) {
					out.Versions = append(out.Versions, m.Path+" "+m.Version)
				}
			}
		}
	}
	for _, backend := range backends {
		for i, m := range measures(z, backend) {
			version, results, err := measureOne(ctx, progress, z, backend, m)
			if err != nil {
				return out, err
			}
			if i == 0 && !slices.Contains(out.Versions, version) {
				out.Versions = append(out.Versions, version)
			}
			out.Results = append(out.Results, results...)
		}
	}
	return out, nil
}

func measureOne(ctx context.Context, progress io.Writer, z sizes, backend string, m measure) (version string, results []result, err error) {
	s, err := startServer(ctx, backend)
	if err != nil {
		return "", nil, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	all := subjects(backend)
	var turns []subject
	for _, of := range all {
		if of.takesPart(m) {
			turns = append(turns, of)
			results = append(results, result{Backend: backend, Kind: m.kind, Measure: m.name, Subject: of.name, Floor: of.floorAmong(all, m.kind)})
		}
	}
	for round := range z.Rounds {
		fmt.Fprintf(progress, "%s, %s, round %d\n", backend, m.name, round+1) //nolint:errcheck // progress only
		vs, err := m.run(ctx, s, turns, m.ttl)
		if err != nil {
			return "", nil, fmt.Errorf("%s, %s: %w", backend, m.name, err)
		}
		for i, v := range vs {
			results[i].Rounds = append(results[i].Rounds, v)
		}
	}
	return s.version, results, nil
}

// floorOf answers the floor of a result.
func (r run) floorOf(of result) (result, bool) {
	for _, f := range r.Results {
		if f.Subject == of.Floor && f.Backend == of.Backend && f.Measure == of.Measure {
			return f, true
		}
	}
	return result{}, false
}

func (r result) isFloor() bool { return r.Floor == r.Subject }

// median is of what the rounds have shown.
func (r result) median(column string) (float64, bool) {
	return median(r.Rounds, func(_ int, v values) (float64, bool) { x, ok := v[column]; return x, ok })
}

// ratio is the median of the ratios to the floor in the same round.
func (r result) ratio(column string, floor result) (float64, bool) {
	return median(r.Rounds, func(i int, v values) (float64, bool) {
		x, ok := v[column]
		return x / floor.Rounds[i][column], ok && floor.Rounds[i][column] > 0
	})
}

// excess is the median of the differences to the floor in the same round.
func (r result) excess(column string, floor result) (float64, bool) {
	return median(r.Rounds, func(i int, v values) (float64, bool) {
		x, ok := v[column]
		return x - floor.Rounds[i][column], ok
	})
}

func median(rounds []values, of func(int, values) (float64, bool)) (float64, bool) {
	var all []float64
	for i, v := range rounds {
		if x, ok := of(i, v); ok {
			all = append(all, x)
		}
	}
	if len(all) == 0 {
		return 0, false
	}
	slices.Sort(all)
	return all[len(all)/2], true
}
