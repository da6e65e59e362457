package main

import (
	"fmt"
	"strings"
)

// A bar is what fencelock must reach.
type bar struct {
	subject string // begins with
	kind    string
	column  string
	ratio   bool // to the floor of the same round
	least   bool // else at most
	limit   float64
	// measure is the only one that the bar is for; "" is all of its kind.
	measure string
}

var bars = []bar{
	{subject: "fencelock goredis", kind: "pair", column: "p50 µs", ratio: true, limit: 1.15},
	{subject: "fencelock goredis", kind: "pair", column: "requests", limit: 2},
	{subject: "fencelock etcd", kind: "pair", column: "p50 µs", ratio: true, limit: 1.15},
	{subject: "fencelock etcd", kind: "pair", column: "requests", limit: 2},
	{subject: "fencelock postgres", kind: "pair", column: "p50 µs", ratio: true, limit: 1.15},
	{subject: "fencelock postgres", kind: "pair", column: "requests", limit: 2},
	{subject: "fencelock goredis", kind: "crowd", column: "pairs/s", ratio: true, least: true, limit: 2},
	{subject: "fencelock", kind: "handover", column: "requests", limit: 2.1},
	{subject: "fencelock goredis", kind: "handover", column: "p50 µs", ratio: true, limit: 1.3},
	{subject: "fencelock etcd", kind: "handover", column: "p50 µs", ratio: true, limit: 0.6},
	{subject: "fencelock postgres", kind: "handover", column: "p50 µs", ratio: true, limit: 2.5},
	{subject: "fencelock", kind: "handover", column: "Jain", least: true, limit: 0.99},
	{subject: "fencelock", kind: "handover", column: "longest/median wait", limit: 1.6},
	{subject: "fencelock", kind: "held", measure: "10000 leases", column: "heap B/lease", limit: 512},
	{subject: "fencelock", kind: "held", measure: "10000 leases", column: "goroutines/lease", limit: 0.01},
	{subject: "fencelock", kind: "held", measure: "10000 leases", column: "client CPU s", limit: 0.3},
	{subject: "fencelock", kind: "stall", column: "longest wait over stall ms", limit: 50},
}

// of answers the bar for a result, and what was measured.
func (b bar) of(r run, x result) (measured float64, holds, applies bool) {
	if b.kind != x.Kind || !strings.HasPrefix(x.Subject, b.subject) || b.measure != "" && b.measure != x.Measure {
		return 0, false, false
	}
	if b.ratio {
		floor, ok := r.floorOf(x)
		if !ok {
			return 0, false, false
		}
		measured, applies = x.ratio(b.column, floor)
	} else {
		measured, applies = x.median(b.column)
	}
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
	unit := ""
	if b.ratio {
		unit = " × floor"
	}
	return fmt.Sprintf("%s %s %s%s", b.column, sign, number(b.limit), unit)
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
