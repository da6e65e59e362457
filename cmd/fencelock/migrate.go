package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/migrate"
)

var migrateCommand = &command{
	name:     "migrate",
	synopsis: "status|advance|rollback",
	summary:  "show where a migration from one backend to another stands, and take its steps",
	about: `The clients of a migration use URLs such as migrate://?from=...&to=...&phase=both. Its phases are
from, both and to. Clients of neighbouring phases may run at the same time, those of from and to may
not: "advance" records the next phase, from then on refuses new clients two phases away from it, and
waits until none is left. Then the clients can be restarted in that phase, one after another.
"rollback" is the same in the other direction. If the wait ends without success nothing is changed,
and the exit code is 198.

"status" lists the clients and what is held where. HEARD is how long ago a client renewed its phase
lease, LEFT how long it counts as live if it does not again.

The URLs are those of the two backends themselves, with the parameters that the clients' have. Those
with a password belong into FENCELOCK_FROM_URL and FENCELOCK_TO_URL, which are read if the flags are
not there.

With --json the output of status is one object with these fields, all always present:

  phase             "from", "both" or "to"
  clients           array of objects: id, phase, host (strings), pid (integer), since (string in RFC
                    3339, UTC), heard_seconds, left_seconds (numbers)
  old, new          objects: backend (string), recorded (string: the phase recorded there, or empty),
                    held (array of objects as "fencelock ls --json" prints them)
  advance, rollback objects: target (string: the phase it leads to, or empty), safe (boolean), waits
                    (string: what it waits for, or empty)

That of advance and rollback is an object with the field phase, which they have reached.

Examples:

  fencelock migrate status --from redis://r:6379/0 --to etcd://e1,e2,e3
  fencelock migrate advance --from redis://r:6379/0 --to etcd://e1,e2,e3
  fencelock migrate rollback --wait no --from redis://r:6379/0 --to etcd://e1,e2,e3
  fencelock migrate status --json | jq -e .advance.safe
`,
	setup: func(fs *flag.FlagSet) func(context.Context, *cli, []string) error {
		var m migration
		fs.StringVar(&m.from, "from", "", "`URL`: of the old backend; see fencelock help url")
		fs.StringVar(&m.to, "to", "", "`URL`: of the new backend")
		fs.BoolVar(&m.json, "json", false, "print JSON")
		wait := fs.String("wait", "5m", "`DURATION`: how long advance and rollback wait for clients two phases away, such\nas 10s; or \"forever\", or \"no\"; the default is 5m")
		return func(ctx context.Context, c *cli, args []string) error {
			if len(args) != 1 {
				return usageError("migrate needs one of status, advance and rollback; see fencelock help migrate")
			}
			m.from, m.to = cmp.Or(m.from, c.getenv("FENCELOCK_FROM_URL")), cmp.Or(m.to, c.getenv("FENCELOCK_TO_URL"))
			if m.from == "" || m.to == "" {
				return usageError("migrate needs --from and --to; see fencelock help migrate")
			}
			var err error
			if m.wait, err = parseWait(*wait); err != nil || m.wait == 0 && *wait != "no" {
				return usageError("migrate: --wait %s must be a duration such as 10s, or forever, or no", quote(*wait))
			}
			switch args[0] {
			case "status":
				return m.status(ctx, c)
			case "advance":
				return m.move(ctx, c, migrate.Advance, func(s *migrate.Status) migrate.Step { return s.Advance })
			case "rollback":
				return m.move(ctx, c, migrate.Rollback, func(s *migrate.Status) migrate.Step { return s.Rollback })
			}
			return usageError("migrate: there is no %s; see fencelock help migrate", quote(args[0]))
		}
	},
}

// migration is the call of migrate.
type migration struct {
	from, to string
	json     bool
	wait     time.Duration // see parseWait
}

// open opens both backends.
func (m *migration) open(ctx context.Context) (from, to driver.Driver, closeBoth func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	if from, err = driver.Open(ctx, m.from); err != nil {
		return nil, nil, nil, failed(fmt.Errorf("--from: %w", err))
	}
	if to, err = driver.Open(ctx, m.to); err != nil {
		_ = from.Close() // nothing is held
		return nil, nil, nil, failed(fmt.Errorf("--to: %w", err))
	}
	return from, to, func() {
		_ = to.Close()
		_ = from.Close()
	}, nil
}

// failed makes an error of a driver, which need not match any of ours, one of a backend.
func failed(err error) error {
	if code, text := outcome(err); code == exitFailed && !errors.Is(err, errors.ErrUnsupported) {
		return exitf(exitUnavailable, "%s", text)
	}
	return err
}

// look opens both backends and reads how the migration stands.
func (m *migration) look(ctx context.Context) (s *migrate.Status, from, to driver.Driver, closeBoth func(), err error) {
	from, to, closeBoth, err = m.open(ctx)
	if err != nil {
		return nil, nil, nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	if s, err = migrate.ReadStatus(ctx, from, to); err != nil {
		closeBoth()
		return nil, nil, nil, nil, failed(err)
	}
	return s, from, to, closeBoth, nil
}

func (m *migration) status(ctx context.Context, c *cli) error {
	s, _, _, closeBoth, err := m.look(ctx)
	if err != nil {
		return err
	}
	defer closeBoth()
	if m.json {
		return c.print(migrationJSON(s, time.Now()))
	}
	return c.print(migrationText(s, time.Now()))
}

type mover func(ctx context.Context, from, to driver.Driver) (migrate.Phase, error)

// move takes a step. A signal ends the wait, and what was recorded is taken back.
func (m *migration) move(ctx context.Context, c *cli, move mover, step func(*migrate.Status) migrate.Step) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	ctx, interrupt := context.WithCancelCause(ctx)
	defer interrupt(nil)
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case sig := <-signals:
			interrupt(&exitError{code: exitSignal + int(sig.(syscall.Signal))})
		case <-done:
		}
	}()

	s, from, to, closeBoth, err := m.look(ctx)
	if err != nil {
		return err
	}
	defer closeBoth()
	next := step(s)
	if next.Target == "" {
		return usageError("migrate: the phase is %s, and there is none further on", s.Phase)
	}
	limit := m.wait
	if !next.Safe {
		if limit == 0 {
			return exitf(exitNotSafe, "phase %s: not safe yet, nothing changed: there are %s", next.Target, next.Waits)
		}
		c.console.say("waiting for %s", next.Waits)
	}
	if limit == 0 {
		limit = queryTimeout // for the backend's clock
	}
	waiting := ctx
	if limit > 0 {
		var cancel context.CancelFunc
		waiting, cancel = context.WithTimeout(ctx, limit)
		defer cancel()
	}
	phase, err := move(waiting, from, to)
	var interrupted *exitError
	switch {
	case err == nil:
	case errors.As(context.Cause(ctx), &interrupted):
		return interrupted
	case waiting.Err() != nil && errors.Is(err, waiting.Err()):
		return exitf(exitNotSafe, "nothing changed: %w", err)
	default:
		return failed(err)
	}
	if m.json {
		return c.print(encode(struct {
			Phase migrate.Phase `json:"phase"`
		}{phase}))
	}
	return c.print(string(phase) + "\n")
}

func migrationText(s *migrate.Status, now time.Time) string {
	var b strings.Builder
	fmt.Fprintf(&b, "phase %s\n", s.Phase)
	if len(s.Clients) > 0 {
		list := "PHASE\tHOST\tPID\tSINCE\tHEARD\tLEFT\n"
		for _, c := range s.Clients {
			list += fmt.Sprintf("%s\t%s\t%d\t%s\t%s\t%s\n", c.Phase, quote(c.Host), c.PID,
				c.Since.Local().Format(time.RFC3339), short(c.Heard), short(c.Left))
		}
		b.WriteString("\n" + align(list, 2))
	}
	count := map[migrate.Phase]int{}
	for _, c := range s.Clients {
		count[c.Phase]++
	}
	fmt.Fprintf(&b, "\nclients: %d in from, %d in both, %d in to\n", count[migrate.From], count[migrate.Both], count[migrate.To])
	for _, side := range []struct {
		which string
		on    migrate.Backend
	}{{"old", s.Old}, {"new", s.New}} {
		fmt.Fprintf(&b, "\n%s backend, %s: %d held\n", side.which, quote(side.on.Name), len(side.on.Held))
		if held := listedHoldings(side.on.Held); len(held) > 0 {
			b.WriteString("\n" + tableOf(held, now))
		}
	}
	b.WriteString("\n")
	for _, step := range []struct {
		name string
		migrate.Step
	}{{"advance", s.Advance}, {"rollback", s.Rollback}} {
		switch {
		case step.Target == "":
			fmt.Fprintf(&b, "%s: no phase further on\n", step.name)
		case step.Safe:
			fmt.Fprintf(&b, "%s to %s: safe\n", step.name, step.Target)
		default:
			fmt.Fprintf(&b, "%s to %s: not safe, there are %s\n", step.name, step.Target, step.Waits)
		}
	}
	return b.String()
}

// listedHoldings are what a driver lists, as a client would answer it, in order.
func listedHoldings(listed []driver.Holding) []fencelock.Holding {
	held := make([]fencelock.Holding, 0, len(listed))
	for _, h := range listed {
		out := fencelock.Holding{Kind: h.Name.Kind, Name: h.Name.Name, Token: h.Token, Left: h.Left}
		if json.Unmarshal([]byte(h.Holder), &out.Holder) != nil {
			out.Holder = fencelock.HolderInfo{Label: h.Holder}
		}
		held = append(held, out)
	}
	sortHoldings(held)
	return held
}

// The fields in JSON are documented in the help and do not change.
type (
	migrationEntry struct {
		Phase    migrate.Phase `json:"phase"`
		Clients  []clientEntry `json:"clients"`
		Old      backendEntry  `json:"old"`
		New      backendEntry  `json:"new"`
		Advance  stepEntry     `json:"advance"`
		Rollback stepEntry     `json:"rollback"`
	}
	clientEntry struct {
		ID           string        `json:"id"`
		Phase        migrate.Phase `json:"phase"`
		Host         string        `json:"host"`
		PID          int           `json:"pid"`
		Since        time.Time     `json:"since"`
		HeardSeconds float64       `json:"heard_seconds"`
		LeftSeconds  float64       `json:"left_seconds"`
	}
	backendEntry struct {
		Backend  string        `json:"backend"`
		Recorded migrate.Phase `json:"recorded"`
		Held     []entry       `json:"held"`
	}
	stepEntry struct {
		Target migrate.Phase `json:"target"`
		Safe   bool          `json:"safe"`
		Waits  string        `json:"waits"`
	}
)

func migrationJSON(s *migrate.Status, now time.Time) string {
	on := func(b migrate.Backend) backendEntry {
		return backendEntry{b.Name, b.Recorded, entriesOf(listedHoldings(b.Held), now)}
	}
	e := migrationEntry{
		Phase: s.Phase, Clients: make([]clientEntry, 0, len(s.Clients)), Old: on(s.Old), New: on(s.New),
		Advance: stepEntry(s.Advance), Rollback: stepEntry(s.Rollback),
	}
	for _, c := range s.Clients {
		e.Clients = append(e.Clients, clientEntry{c.ID, c.Phase, c.Host, c.PID, c.Since.UTC(), seconds(c.Heard), seconds(c.Left)})
	}
	return encode(e)
}
