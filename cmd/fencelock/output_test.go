package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock"
)

// holdings are leases in no order, with all that is odd.
func holdings() (held []fencelock.Holding, now time.Time) {
	now = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	ago := func(d time.Duration) time.Time { return now.Add(-d).In(time.FixedZone("", 3600)) }
	return []fencelock.Holding{
		{Kind: fencelock.KindPermit, Name: "api", Token: 1772600000000002, Left: 12 * time.Second,
			Holder: fencelock.HolderInfo{Host: "web-2", PID: 7, Since: ago(49*time.Hour + time.Minute), Label: "import.sh"}},
		{Kind: fencelock.KindLock, Name: "nightly-backup", Token: 1772600000000009, Left: 29900 * time.Millisecond,
			Holder: fencelock.HolderInfo{Host: "web-1", PID: 4711, Since: ago(754321 * time.Millisecond), Label: "backup.sh"}},
		{Kind: fencelock.KindPermit, Name: "api", Token: 1772600000000001, Left: 1234567 * time.Microsecond,
			Holder: fencelock.HolderInfo{Host: "web-1", PID: 4712, Since: ago(-time.Second), Label: "the importer"}},
		{Kind: fencelock.KindLock, Name: "api", Token: 3, Left: time.Minute},
		{Kind: fencelock.KindLock, Name: "a\x00b\n\x1b[31m\xff\u202e", Token: 4, Left: 90 * time.Minute,
			Holder: fencelock.HolderInfo{Label: "<\"&\t>", Host: "-"}},
	}, now
}

func TestTable(t *testing.T) {
	held, now := holdings()
	sortHoldings(held)
	const want = `NAME                          KIND       HOLDER          HOST   PID   AGE     LEFT     TOKEN
"a\x00b\n\x1b[31m\xff\u202e"  lock       "<\"&\t>"       "-"    -     -       1h30m0s  4
api                           lock       -               -      -     -       1m0s     3
api                           semaphore  "the importer"  web-1  4712  0s      1.2s     1772600000000001
api                           semaphore  import.sh       web-2  7     2d1h    12s      1772600000000002
nightly-backup                lock       backup.sh       web-1  4711  12m34s  29s      1772600000000009
`
	if got := tableOf(held, now); got != want {
		t.Errorf("table: got\n%s\nwant\n%s", got, want)
	}
}

func TestJSON(t *testing.T) {
	held, now := holdings()
	sortHoldings(held)
	want, err := os.ReadFile(filepath.Join("testdata", "ls.json"))
	if err != nil {
		t.Fatal(err)
	}
	if got := jsonOf(held, now); got != string(want) {
		t.Errorf("ls --json: got\n%s\nwant\n%s", got, want)
	}
	if got := jsonOf(nil, now); got != "[]\n" {
		t.Errorf("ls --json of nothing: got %q, want an empty array", got)
	}
}

func TestQuote(t *testing.T) {
	for in, want := range map[string]string{
		"orders/7": "orders/7", "größe-日本": "größe-日本", "": `""`, "-": `"-"`, "a b": `"a b"`, `a"b`: `"a\"b"`,
		`a\b`: `"a\\b"`, "a\x00b": `"a\x00b"`, "\xff": `"\xff"`, "\u202e": `"\u202e"`, "\u0085": `"\u0085"`,
	} {
		if got := quote(in); got != want {
			t.Errorf("quote of %q: got %s, want %s", in, got, want)
		}
	}
}

func TestShort(t *testing.T) {
	for in, want := range map[time.Duration]string{
		-time.Second: "0s", 0: "0s", 99 * time.Millisecond: "0s", 1290 * time.Millisecond: "1.2s",
		10900 * time.Millisecond: "10s", 61 * time.Minute: "1h1m0s", 24 * time.Hour: "1d0h", 241 * time.Hour: "10d1h",
	} {
		if got := short(in); got != want {
			t.Errorf("short of %v: got %s, want %s", in, got, want)
		}
	}
}

func TestDescribeHolders(t *testing.T) {
	held, now := holdings()
	since := held[1].Holder.Since.Local().Format(time.RFC3339)
	for _, test := range []struct {
		held []fencelock.Holding
		want string
	}{
		{nil, "others stand before us"},
		{held[1:2], "held by backup.sh (host web-1, pid 4711) since " + since + ", for 12m34s"},
		{held[3:4], "held by an unknown holder"},
		{[]fencelock.Holding{{Token: 1}, {Token: 2}, {Token: 3}, {Token: 4}},
			"held by an unknown holder; an unknown holder; an unknown holder; an unknown holder"},
		{[]fencelock.Holding{{Token: 1}, {Token: 2}, {Token: 3}, {Token: 4}, {Token: 5}},
			"held by an unknown holder; an unknown holder; an unknown holder; and 2 more"},
	} {
		if got := describeHolders(test.held, now); got != test.want {
			t.Errorf("describe %+v: got %q, want %q", test.held, got, test.want)
		}
	}
}

func TestRedactedURL(t *testing.T) {
	for in, want := range map[string]string{
		"redis://user:s3cret@host:6379/0":         "redis://xxxxx@host:6379/0",
		"redis://:s3cret@host":                    "redis://xxxxx@host",
		"redis://host/0?password=s3cret":          "redis://host/0?xxxxx",
		"redis://us er:s3cret@host\x00":           "(does not parse)",
		"redis:user:s3cret@host":                  "redis:xxxxx",
		"file:///var/lib/locks#s3cret":            "file:///var/lib/locks",
		"postgres://u:s3cret@h1,u:s3cret@h2/base": "postgres://xxxxx@h2/base",
	} {
		if got := (&cli{}).redactedURL(in); got != want {
			t.Errorf("redacted %q: got %s, want %s", in, got, want)
		}
	}
}

func TestParse(t *testing.T) {
	for _, test := range []struct {
		cmd  *command
		args string
		want string
	}{
		{unlockCommand, "--force x", "x"},
		{unlockCommand, "x --force", "x"},
		{unlockCommand, "x --force y", "x y"},
		{unlockCommand, "--force -- --x --force", "--x --force"},
		{runCommand, "--name x -- echo --name", "echo --name"},
		{runCommand, "--name x echo -- --name", "echo -- --name"},
		{runCommand, "--name x -- -- y", "-- y"},
	} {
		fs, _ := test.cmd.flags()
		got, err := parse(fs, strings.Fields(test.args), test.cmd.trailing)
		if err != nil || strings.Join(got, " ") != test.want {
			t.Errorf("parse %s %s: got %q, %v, want %s", test.cmd.name, test.args, got, err, test.want)
		}
	}
}
