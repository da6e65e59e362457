// Package redisguard refuses stale writers to keys of Redis (6.2 or later) or Valkey, through the client
// github.com/redis/go-redis/v9. The fencing tokens may come from any backend.
//
// The mark of a key, the highest token that was admitted for it, is kept in a key beside it, "fencelock-guard:{key}", which a
// Cluster keeps in the same slot. A script compares it and then runs the command or script of the caller, in one step and
// one round trip.
//
// The mark lives as long as nobody deletes it, so delete it with the key when no writer can be left. What Redis forgets, by a
// restart without appendfsync always, by a failover to a replica that lagged, or by eviction, is forgotten for the mark as
// well, but with the value that it guards in most cases: that is a resource's own matter, not the lock's.
//
// # Errors
//
// What is stale matches [guard.ErrStale]. Other errors are go-redis's own. If no answer came, the command may have been
// executed; to repeat it with the same token is as safe as to repeat the command is. When Redis is out of memory, a token
// that is higher than the mark is refused with the server's error, even for a command that frees memory.
package redisguard

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/internal/hashtag"
)

//go:embed guarded.lua
var guarded string

// Script is a Lua script that runs guarded. Make it once.
type Script struct {
	text   string
	script *redis.Script
}

// NewScript makes a script. src sees its keys and arguments as ever. It must not declare itself by a first line "#!lua".
// If it fails in its middle the token stays admitted, as what it wrote before stays written.
func NewScript(src string) *Script {
	// A function of its own, so that src may declare 200 local variables and return from anywhere.
	text := guarded + "return (function()\n" + src + "\nend)()"
	return &Script{text, redis.NewScript(text)}
}

var (
	command = NewScript("return redis.call(unpack(ARGV))")
	nothing = NewScript("return 1")
)

// Guard guards the keys of one server or Cluster. It is safe for concurrent use.
type Guard struct{ client redis.UniversalClient }

// New makes a guard that uses the client. It sends nothing.
func New(client redis.UniversalClient) *Guard { return &Guard{client} }

// MarkKey is the key of a key's mark. No two keys have one in common. It is in the key's slot unless the key has a closing brace
// that closes no hash tag: such a key cannot be guarded on a Cluster, which answers CROSSSLOT then.
func MarkKey(key string) string {
	if tag, ok := hashtag.Of(key); ok {
		return "fencelock-guard:{" + tag + "}:" + key + "."
	}
	return "fencelock-guard:{" + key + "}"
}

// Do executes a command about the key, such as SET with arguments value, "EX" and 60, if the token is admitted for
// it: the command's first argument is the key, args are the others. It must be one that is allowed in a script.
func (g *Guard) Do(ctx context.Context, t guard.Token, name, key string, args ...any) *redis.Cmd {
	return g.run(ctx, t, command, []string{key}, append([]any{name, key}, args...))
}

// Run runs a script if the token is admitted for the first of the keys. On a Cluster all keys must be in one slot.
func (g *Guard) Run(ctx context.Context, t guard.Token, s *Script, keys []string, args ...any) *redis.Cmd {
	return g.run(ctx, t, s, keys, args)
}

// Raise admits the token for the key without a command, so that lower ones are refused from now on. It is for
// guard.Fenced.
func (g *Guard) Raise(ctx context.Context, t guard.Token, key string) error {
	return g.run(ctx, t, nothing, []string{key}, nil).Err()
}

func (g *Guard) run(ctx context.Context, t guard.Token, s *Script, keys []string, args []any) *redis.Cmd {
	if err := check(t, keys); err != nil {
		cmd := redis.NewCmd(ctx)
		cmd.SetErr(err)
		return cmd
	}
	cmd := s.script.Run(ctx, g.client,
		append(keys[:len(keys):len(keys)], MarkKey(keys[0])),
		append(args[:len(args):len(args)], fmt.Sprintf("%016d", uint64(t)))...)
	if err := cmd.Err(); err != nil && stale(err.Error()) {
		cmd.SetErr(guard.Stale(keys[0]))
	}
	return cmd
}

// Write makes TryLock execute a command about the key, as [Guard.Do] does, in the step that takes the lock: one round trip, in
// which the lock is taken, the mark of the key is raised to the new token and the command is executed, or nothing of it. It is for
// clients over driver/goredis or driver/rueidis on the server that has the key; on a Cluster the key must be in the lock's slot, as
// "{orders/7}:state" is for the lock "orders/7", and is else refused with an error matching [driver.ErrInvalid]. What the
// command answers is dropped. Errors are those of [fencelock.Write], and match [guard.ErrStale] if a higher token than the new one
// was admitted, for example that of another lock.
func Write(name, key string, args ...string) fencelock.Option {
	return write(command, []string{key}, append([]string{name, key}, args...))
}

// WriteScript is [Write] for a script, as [Guard.Run] runs it: the mark is that of the first of the keys. If it fails in its middle
// the token stays admitted and what it wrote stays written, and the lock is not taken.
func WriteScript(s *Script, keys []string, args ...string) fencelock.Option {
	return write(s, keys, args)
}

func write(s *Script, keys, args []string) fencelock.Option {
	w := driver.Write{Script: s.text, Keys: keys, Args: args}
	if len(keys) > 0 { // without any, the option is refused
		w.Keys = append(keys[:len(keys):len(keys)], MarkKey(keys[0]))
		w.Failed = func(message string) error {
			if stale(message) {
				return guard.Stale(keys[0])
			}
			return errors.New(message)
		}
	}
	return fencelock.Write(w)
}

func stale(message string) bool { return strings.HasPrefix(message, "FENCELOCKSTALE ") }

func check(t guard.Token, keys []string) error {
	switch {
	case len(keys) == 0:
		return driver.Invalid("keys", len(keys), "must have at least one, which is guarded")
	case keys[0] == "":
		return driver.Invalid("key", "", "must not be empty")
	}
	return guard.CheckToken(t)
}
