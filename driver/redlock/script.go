package redlock

import (
	_ "embed"
	"fmt"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/redislua"
)

var (
	//go:embed prelude.lua
	preludeText string
	//go:embed lock.lua
	lockText string
	//go:embed permit.lua
	permitText string
	//go:embed acquire.lua
	acquireText string
	//go:embed acquire_lock_fast.lua
	acquireLockFast string
	//go:embed release_lock_fast.lua
	releaseLockFast string
	//go:embed fill.lua
	fillText string
	//go:embed extend.lua
	extendText string
	//go:embed release.lua
	releaseText string
	//go:embed force.lua
	forceText string
	//go:embed list.lua
	listText string
	//go:embed token.lua
	tokenText string
)

// step names a script.
type step uint8

const (
	hello step = iota // no script: only asks who the node is
	acquireStep
	fillStep
	extendStep
	releaseStep
	forceStep
	listStep
	tokenStep
	steps
)

var stepTexts = [steps]string{acquireStep: acquireText, fillStep: fillText, extendStep: extendText,
	releaseStep: releaseText, forceStep: forceText, listStep: listText, tokenStep: tokenText}

// fastTexts run before the others for locks.
var fastTexts = [steps]string{acquireStep: acquireLockFast, releaseStep: releaseLockFast}

// kinds are the kinds of names, with the letter of their keys, what scripts need to know of them, and how many keys
// tell who holds one; behind those come the keys of the fence and of the waiters.
var kinds = [...]struct {
	letter  string
	text    string
	holders []string
	redis   string // type of the first key
}{
	driver.KindLock:   {"rl", lockText, []string{""}, "string"},
	driver.KindPermit: {"rp", permitText, []string{"", "d"}, "zset"},
}

// scripts are all scripts for one run of a server. Its run id is in their texts, and a server that has restarted knows
// none of them: whoever asks by a script's hash asks this run or nobody. The texts are the same for all clients, so the
// server keeps one set of them.
type scripts [len(kinds)][steps]*redislua.Script

func newScripts(run string) *scripts {
	s := new(scripts)
	for kind, k := range kinds {
		if k.letter == "" {
			continue
		}
		begin := fmt.Sprintf("local RUN, EACH = '%s', %d\n", run, len(k.holders)+2)
		for i, text := range stepTexts {
			if text != "" {
				fast := ""
				if driver.Kind(kind) == driver.KindLock {
					fast = fastTexts[i]
				}
				s[kind][i] = redislua.NewScript(begin + fast + preludeText + k.text + text)
			}
		}
	}
	return s
}

// restarted is how a script says that it is not meant for this run of the server.
const restarted = "FENCELOCKRUN"

// noArgs is for steps without arguments: a call must have one.
var noArgs = []string{""}

// stored is what a node stores of a lease.
func stored(t driver.Token, id, holder string) string { return t.String() + " " + id + " " + holder }

// keys are those of a name: its holders, its fence, and its waiters.
func (d *Driver) keys(n driver.Name) []string {
	k := kinds[n.Kind]
	keys := make([]string, 0, 4)
	for _, part := range k.holders {
		keys = append(keys, d.space+k.letter+part+":"+n.Name)
	}
	return append(keys, d.fence(n), d.space+k.letter+"w:"+n.Name)
}

func (d *Driver) fence(n driver.Name) string { return d.space + kinds[n.Kind].letter + "f:" + n.Name }
