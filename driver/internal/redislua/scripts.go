package redislua

import (
	"crypto/sha1"
	_ "embed"
	"encoding/hex"
	"strings"

	"github.com/fencelock/fencelock/driver"
)

var (
	//go:embed acquire_lock_fast.lua
	acquireLockFast string
	//go:embed release_lock_fast.lua
	releaseLockFast string
	//go:embed prelude.lua
	prelude string
	//go:embed lock.lua
	lock string
	//go:embed permit.lua
	permit string
	//go:embed queue.lua
	queue string
	//go:embed take.lua
	take string
	//go:embed write.lua
	write string
	//go:embed acquire.lua
	acquire string
	//go:embed release.lua
	release string
	//go:embed extend.lua
	extend string
	//go:embed poll.lua
	poll string
	//go:embed force.lua
	force string
	//go:embed list.lua
	list string
	//go:embed token.lua
	token string
)

// Script is a Lua script that Redis knows by the hash of its text. It never begins with "#!lua": a
// script that declares itself is refused as a whole when memory is short, even to release a lock.
type Script struct {
	Text string
	SHA  string
	Hash any // SHA once more: to make an any of a string costs an allocation
}

func script(parts ...string) *Script {
	text := strings.Join(parts, "")
	sum := sha1.Sum([]byte(text))
	sha := hex.EncodeToString(sum[:])
	return &Script{Text: text, SHA: sha, Hash: sha}
}

// steps are the scripts of one kind of name.
type steps struct{ acquire, release, extend, poll, force, list *Script }

var (
	scripts = [...]*steps{
		driver.KindLock: {
			acquire: script(acquireLockFast, prelude, lock, queue, take, acquire),
			release: script(releaseLockFast, prelude, lock, queue, release),
			extend:  script(prelude, lock, extend),
			poll:    script(prelude, lock, queue, poll),
			force:   script(prelude, lock, queue, force),
			list:    script(prelude, lock, list),
		},
		driver.KindPermit: {
			acquire: script(prelude, permit, queue, take, acquire),
			release: script(prelude, permit, queue, release),
			extend:  script(prelude, permit, extend),
			poll:    script(prelude, permit, queue, poll),
			force:   script(prelude, permit, queue, force),
			list:    script(prelude, permit, list),
		},
	}
	fence = script(prelude, token)
)
