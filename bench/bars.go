package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// A bar is what fencelock must reach.
type bar struct {
	subjects []string // nil is all that are fencelock
	kind     string
	measure  string // the only one that the bar is for; "" is all of its kind
	column   string
	to       relation
	least    bool // else at most
	limit    float64
}

// A relation is what a bar compares with its limit.
type relation int

const (
	itself relation = iota // what was measured
	ratio                  // the ratio to the floor of the same round
	excess                 // the difference to the floor of the same round
)

var (
	redisOnly  = []string{"fencelock goredis", "fencelock rueidis"}
	redlocks   = []string{"fencelock redlock"}
	etcdOnly   = []string{"fencelock etcd"}
	postgresDB = []string{"fencelock postgres"}
	oneServer  = slices.Concat(redisOnly, etcdOnly, postgresDB)
)

var bars = []bar{
	{subjects: oneServer, kind: "pair", column: "p50 µs", to: ratio, limit: 1.15},
	{subjects: oneServer, kind: "pair", column: "requests", limit: 2},
	{subjects: redlocks, kind: "pair", column: "p50 µs", to: ratio, limit: 0.85},
	{kind: "pair", column: "allocations", to: excess, limit: 8},
	{subjects: []string{"fencelock goredis, auto-pipelined"}, kind: "crowd", column: "pairs/s", to: ratio, least: true, limit: 2},
	{subjects: []string{"fencelock rueidis"}, kind: "crowd", column: "pairs/s", to: ratio, least: true, limit: 0.85},
	{subjects: redlocks, kind: "crowd", column: "pairs/s", to: ratio, least: true, limit: 1.2},
	{subjects: redlocks, kind: "minority", column: "throughput kept", least: true, limit: 0.8},
	{subjects: redlocks, kind: "minority", column: "errors", limit: 0},
	{subjects: redlocks, kind: "minority", column: "longest step ms", limit: 100},
	{subjects: oneServer, kind: "handover", column: "requests", limit: 2.1},
	{subjects: redlocks, kind: "handover", column: "requests", limit: 10.5},
	{subjects: redisOnly, kind: "handover", column: "p50 µs", to: ratio, limit: 1.3},
	{subjects: etcdOnly, kind: "handover", column: "p50 µs", to: ratio, limit: 0.6},
	{subjects: slices.Concat(postgresDB, redlocks), kind: "handover", column: "p50 µs", to: ratio, limit: 2.5},
	{kind: "handover", column: "Jain", least: true, limit: 0.99},
	{kind: "handover", column: "longest/median wait", limit: 1.6},
	{kind: "drain", column: "handovers/s", to: ratio, least: true, limit: 0.9},
	{kind: "held", measure: "10000 leases", column: "heap B/lease", limit: 512},
	{kind: "held", measure: "10000 leases", column: "goroutines/lease", limit: 0.01},
	{kind: "held", measure: "10000 leases", column: "client CPU s", limit: 0.3},
	{subjects: oneServer, kind: "held", measure: "10000 leases", column: "requests/interval", limit: 10000. / 200},
	{subjects: redlocks, kind: "held", measure: "10000 leases", column: "requests/interval", limit: 5 * 10000. / 200}, // each to all five
	{kind: "stall", column: "longest wait over stall ms", limit: 50},
}

// of answers the bar for a result, and what was measured.
func (b bar) of(r run, x result) (measured float64, holds, applies bool) {
	mine := slices.Contains(b.subjects, x.Subject) || b.subjects == nil && strings.HasPrefix(x.Subject, "fencelock")
	if !mine || b.kind != x.Kind || b.measure != "" && b.measure != x.Measure {
		return 0, false, false
	}
	floor, ok := r.floorOf(x)
	switch {
	case b.to == itself:
		measured, applies = x.median(b.column)
	case ok && b.to == ratio:
		measured, applies = x.ratio(b.column, floor)
	case ok && b.to == excess:
		measured, applies = x.excess(b.column, floor)
	}
	measured = math.Round(measured*100) / 100 // as printed
	if b.least {
		return measured, measured >= b.limit, applies
	}
	return measured, measured <= b.limit, applies
}

func (b bar) String() string {
	sign := "≤"
	if b.least {
		sign = "≥"
	}
	switch b.to {
	case ratio:
		return fmt.Sprintf("%s %s %s × floor", b.column, sign, number(b.limit))
	case excess:
		return fmt.Sprintf("%s %s floor + %s", b.column, sign, number(b.limit))
	default:
		return fmt.Sprintf("%s %s %s", b.column, sign, number(b.limit))
	}
}

// number prints three digits that count.
func number(x float64) string {
	switch {
	case x >= 100 || x <= -100:
		return fmt.Sprintf("%.0f", x)
	case x >= 10 || x <= -10:
		return fmt.Sprintf("%.1f", x)
	default:
		return fmt.Sprintf("%.2f", x)
	}
}
