package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fencelock/fencelock"
)

var lsCommand = &command{
	name:    "ls",
	summary: "list the locks and permits that are held",
	about: `One line for each lease, sorted by name, kind and token. AGE is counted from the holder's wall clock,
LEFT is how long the lease lives if nobody renews it. Names, labels and hosts that are not plain text
are printed as quoted Go strings; "fencelock unlock --quoted" takes them back.

With --json the output is one array of objects with these fields, all always present:

  name           string; bytes that are no UTF-8 are replaced
  quoted         string; the exact name, as unlock --quoted takes it
  kind           "lock" or "semaphore"
  token          integer; the fencing token
  label          string; what the holder calls itself, may be empty
  host           string; the holder's host, may be empty
  pid            integer; the holder's process id, or 0
  since          string in RFC 3339, UTC, by the holder's clock; or null
  age_seconds    number, not negative; or null
  left_seconds   number

Examples:

  fencelock ls
  fencelock ls --json | jq -r '.[] | select(.left_seconds < 5) | .name'
  FENCELOCK_URL=redis://localhost:6379/0 fencelock ls
`,
	setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) error {
		backend := urlFlag(fs)
		asJSON := fs.Bool("json", false, "print JSON instead of a table")
		return func(ctx context.Context, c *cli, args []string) error {
			if len(args) > 0 {
				return usageError("ls takes no arguments")
			}
			held, err := c.list(ctx, *backend)
			if err != nil {
				return err
			}
			if *asJSON {
				return c.print(jsonOf(held, time.Now()))
			}
			if len(held) == 0 {
				c.console.say("nothing is held")
				return nil
			}
			return c.print(tableOf(held, time.Now()))
		}
	},
}

func (c *cli) list(ctx context.Context, backend string) ([]fencelock.Holding, error) {
	client, err := c.open(ctx, backend)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	held, err := client.List(ctx)
	sortHoldings(held)
	return held, err
}

func sortHoldings(held []fencelock.Holding) {
	slices.SortFunc(held, func(a, b fencelock.Holding) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Token, b.Token))
	})
}

func tableOf(held []fencelock.Holding, now time.Time) string {
	orDash := func(s string, known bool) string {
		if !known {
			return "-"
		}
		return s
	}
	var b strings.Builder
	b.WriteString("NAME\tKIND\tHOLDER\tHOST\tPID\tAGE\tLEFT\tTOKEN\n")
	for _, h := range held {
		who := h.Holder
		fmt.Fprintf(&b, "%s\t%v\t%s\t%s\t%s\t%s\t%s\t%v\n", quote(h.Name), h.Kind,
			orDash(quote(who.Label), who.Label != ""),
			orDash(quote(who.Host), who.Host != ""),
			orDash(strconv.Itoa(who.PID), who.PID != 0),
			orDash(short(now.Sub(who.Since)), !who.Since.IsZero()),
			short(h.Left), h.Token)
	}
	return align(b.String(), 2)
}

// entry is a holding in JSON. Its fields are documented in the help and do not change.
type entry struct {
	Name        string          `json:"name"`
	Quoted      string          `json:"quoted"`
	Kind        string          `json:"kind"`
	Token       fencelock.Token `json:"token"`
	Label       string          `json:"label"`
	Host        string          `json:"host"`
	PID         int             `json:"pid"`
	Since       *time.Time      `json:"since"`
	AgeSeconds  *float64        `json:"age_seconds"`
	LeftSeconds float64         `json:"left_seconds"`
}

// seconds is d in seconds, with three decimals.
func seconds(d time.Duration) float64 { return float64(d.Milliseconds()) / 1000 }

func jsonOf(held []fencelock.Holding, now time.Time) string { return encode(entriesOf(held, now)) }

func entriesOf(held []fencelock.Holding, now time.Time) []entry {
	entries := make([]entry, 0, len(held))
	for _, h := range held {
		e := entry{
			Name: h.Name, Quoted: strconv.Quote(h.Name), Kind: h.Kind.String(), Token: h.Token,
			Label: h.Holder.Label, Host: h.Holder.Host, PID: h.Holder.PID,
			LeftSeconds: seconds(h.Left),
		}
		if since := h.Holder.Since; !since.IsZero() {
			since = since.UTC()
			age := seconds(max(0, now.Sub(since)))
			e.Since, e.AgeSeconds = &since, &age
		}
		entries = append(entries, e)
	}
	return entries
}

// encode writes JSON for people.
func encode(v any) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		panic(err) // strings, numbers and times always encode
	}
	return b.String()
}
