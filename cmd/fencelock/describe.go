package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/fencelock/fencelock"
)

// quote makes a string from elsewhere fit for one column of a terminal: as it is if it is plain, else as a
// Go string literal, which strconv.Unquote turns back.
func quote(s string) string {
	q := strconv.Quote(s)
	if s == "" || s != q[1:len(q)-1] || strings.ContainsRune(s, ' ') || s == "-" {
		return q
	}
	return s
}

// align makes columns of what is separated by tabs.
func align(text string, gap int) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, gap, ' ', 0)
	_, _ = io.WriteString(w, text) // to a Builder, which does not fail
	_ = w.Flush()
	return b.String()
}

// short writes a duration with the precision a reader needs.
func short(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < 10*time.Second:
		return d.Truncate(100 * time.Millisecond).String()
	case d < 24*time.Hour:
		return d.Truncate(time.Second).String()
	}
	return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

// target is what run takes: a lock, or with a limit above zero one of so many permits.
type target struct {
	name  string
	limit int
}

func (t target) kind() fencelock.Kind {
	if t.limit > 0 {
		return fencelock.KindPermit
	}
	return fencelock.KindLock
}

func (t target) String() string {
	switch t.limit {
	case 0:
		return quote(t.name)
	case 1:
		return "the permit of " + quote(t.name)
	}
	return fmt.Sprintf("one of %d permits of %s", t.limit, quote(t.name))
}

// inspectTimeout bounds a look at who holds.
const inspectTimeout = 2 * time.Second

// holders says who holds the name.
func holders(ctx context.Context, client *fencelock.Client, kind fencelock.Kind, name string) string {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	held, err := client.Inspect(ctx, kind, name)
	if err != nil {
		return "held by another"
	}
	return describeHolders(held, time.Now())
}

// maxDescribed is how many holders of a semaphore are named.
const maxDescribed = 3

func describeHolders(held []fencelock.Holding, now time.Time) string {
	if len(held) == 0 {
		return "others stand before us"
	}
	sortHoldings(held)
	var all []string
	for i, h := range held {
		if i == maxDescribed && len(held) > maxDescribed+1 {
			all = append(all, fmt.Sprintf("and %d more", len(held)-i))
			break
		}
		all = append(all, describeHolder(h.Holder, now))
	}
	return "held by " + strings.Join(all, "; ")
}

func describeHolder(h fencelock.HolderInfo, now time.Time) string {
	var where []string
	if h.Host != "" {
		where = append(where, "host "+quote(h.Host))
	}
	if h.PID != 0 {
		where = append(where, "pid "+strconv.Itoa(h.PID))
	}
	s := "an unknown holder"
	if h.Label != "" {
		s = quote(h.Label)
	}
	if len(where) > 0 {
		s += " (" + strings.Join(where, ", ") + ")"
	}
	if !h.Since.IsZero() {
		s += " since " + h.Since.Local().Format(time.RFC3339) + ", for " + short(now.Sub(h.Since))
	}
	return s
}
