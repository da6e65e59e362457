//go:build linux

package main

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the help texts and exit codes into docs/cli.md")

const reference = "../../docs/cli.md"

var (
	helpBlock    = regexp.MustCompile("(?m)^<!-- fencelock (help.*) -->\n(\n```text\n(?s:.*?)\n```\n)?")
	codeTable    = regexp.MustCompile(`(?m)^\| code \| meaning \|\n\|---\|---\|\n(\|.*\n)*`)
	consoleBlock = regexp.MustCompile("(?ms)^```console\n(.*?)^```\n")
)

// TestReference compares docs/cli.md with what the program says of itself, and runs its examples.
func TestReference(t *testing.T) {
	text, err := os.ReadFile(reference)
	if err != nil {
		t.Fatal(err)
	}
	shown := map[string]bool{}
	want := helpBlock.ReplaceAllStringFunc(string(text), func(block string) string {
		args := helpBlock.FindStringSubmatch(block)[1]
		shown[args] = true
		help, _ := newPlace(t).want(t, 0, strings.Fields(args)...)
		return "<!-- fencelock " + args + " -->\n\n```text\n" + help + "```\n"
	})
	table := "| code | meaning |\n|---|---|\n"
	for _, e := range exitCodes {
		table += "| " + e.code + " | " + e.meaning + " |\n"
	}
	tables := 0
	want = codeTable.ReplaceAllStringFunc(want, func(string) string {
		tables++
		return table
	})
	if tables != 1 {
		t.Errorf("%s: got %d tables of exit codes, want 1", reference, tables)
	}
	for _, cmd := range commands {
		if !shown["help "+cmd.name] {
			t.Errorf("%s: the help of %s is missing", reference, cmd.name)
		}
	}
	if want != string(text) {
		if *update {
			if err := os.WriteFile(reference, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		} else {
			t.Errorf("%s is stale; go test ./cmd/fencelock -run TestReference -update writes it", reference)
		}
	}
	for _, sig := range append(toGroup, toCommand...) {
		if name := signalNames[sig.String()]; !strings.Contains(want, "`"+name+"`") || name == "" {
			t.Errorf("%s: signal %v is not in the table", reference, sig)
		}
	}
	examples := consoleBlock.FindAllStringSubmatch(want, -1)
	if len(examples) == 0 {
		t.Errorf("%s: there are no examples", reference)
	}
	for _, e := range examples {
		testConsole(t, e[1])
	}
}

var signalNames = map[string]string{
	"interrupt": "SIGINT", "terminated": "SIGTERM", "hangup": "SIGHUP", "quit": "SIGQUIT",
	"user defined signal 1": "SIGUSR1", "user defined signal 2": "SIGUSR2",
}

// testConsole runs the lines that begin with "$ ", and compares what follows them.
func testConsole(t *testing.T, text string) {
	t.Helper()
	home := t.TempDir()
	for _, example := range strings.Split("\n"+text, "\n$ ")[1:] {
		line, want, _ := strings.Cut(example+"\n", "\n")
		cmd := exec.Command("sh", "-c", "exec 2>&1; "+line)
		cmd.Env = []string{"PATH=" + filepath.Dir(binary) + ":" + os.Getenv("PATH"), "HOME=" + home}
		_, got, _ := finish(t, cmd)
		if strings.TrimSpace(got) != strings.TrimSpace(want) {
			t.Errorf("$ %s: got\n%s\nwant\n%s", line, got, want)
		}
	}
}

// TestExitCodes keeps the constants and the table together.
func TestExitCodes(t *testing.T) {
	codes := map[string]bool{}
	for _, e := range exitCodes {
		codes[e.code] = true
	}
	for _, code := range []string{"0", "1-255", "126", "127", "128+n"} {
		if !codes[code] {
			t.Errorf("exit codes: %s is not in the table", code)
		}
	}
	for name, code := range map[string][2]int{
		"held": {exitHeld, 193}, "unavailable": {exitUnavailable, 194}, "lost": {exitLost, 195}, "usage": {exitUsage, 196},
		"failed": {exitFailed, 197}, "not safe": {exitNotSafe, 198}, "not executable": {exitNotExecutable, 126}, "not found": {exitNotFound, 127},
	} {
		if code[0] != code[1] {
			t.Errorf("exit code of %s: got %d, want %d, which the documentation promises", name, code[0], code[1])
		}
	}
	for _, code := range []string{"193", "194", "195", "196", "197", "198"} {
		if !codes[code] {
			t.Errorf("exit codes: %s is not in the table", code)
		}
	}
}

// TestHelp finds every flag, and examples whose flags exist, in the help of each command.
func TestHelp(t *testing.T) {
	p := newPlace(t)
	overview, _ := p.want(t, 0, "help")
	for _, cmd := range commands {
		help, _ := p.want(t, 0, "help", cmd.name)
		for _, flagged := range []string{"-h", "--help"} {
			if got, stderr := p.want(t, 0, cmd.name, flagged); got != help || stderr != "" {
				t.Errorf("%s %s: got %q, %q, want what help prints", cmd.name, flagged, got, stderr)
			}
		}
		if !strings.Contains(overview, "  "+cmd.name+" ") {
			t.Errorf("help: %s is missing", cmd.name)
		}
		fs, _ := cmd.flags()
		fs.VisitAll(func(f *flag.Flag) {
			if !strings.Contains(help, "\n  --"+f.Name+" ") {
				t.Errorf("help %s: --%s is missing", cmd.name, f.Name)
			}
		})
		examples := 0
		for line := range strings.SplitSeq(help, "\n") {
			if n := len([]rune(line)); n > 104 {
				t.Errorf("help %s: a line of %d characters: %s", cmd.name, n, line)
			}
			_, example, found := strings.Cut(line, "fencelock "+cmd.name)
			if !found || !strings.HasPrefix(line, "  ") {
				continue
			}
			examples++
			example, _, _ = strings.Cut(example, " | ")
			fs, _ := cmd.flags()
			if _, err := parse(fs, strings.Fields(example), cmd.trailing); err != nil {
				t.Errorf("help %s: the example %q is wrong: %v", cmd.name, line, err)
			}
		}
		if examples == 0 {
			t.Errorf("help %s: there is no example", cmd.name)
		}
	}
	for topic := range topics() {
		if text, _ := p.want(t, 0, "help", topic); !strings.Contains(overview, topic) || len(text) < 100 {
			t.Errorf("help %s: got %q, and help names it %v", topic, text, strings.Contains(overview, topic))
		}
	}
	version, _ := p.want(t, 0, "version")
	if dashed, _ := p.want(t, 0, "--version"); !strings.HasPrefix(version, "fencelock ") || dashed != version ||
		!strings.Contains(version, "\nschemes: ") || !strings.Contains(version, " file, ") || !strings.Contains(version, "\nurl: file:///") {
		t.Errorf("version: got %q, with two dashes %q", version, dashed)
	}
}
