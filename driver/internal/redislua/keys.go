package redislua

import (
	"strings"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/internal/hashtag"
)

// Key layout. All keys of a name share a hash tag, so that a Cluster keeps them in one slot:
//
//	<namespace>:l:<tagged name>    the lock's holder       <namespace>:p:...   the semaphore's holders
//	                                                       <namespace>:pd:...  and their details
//	<namespace>:lf:<tagged name>   its last token          <namespace>:pf:...
//	<namespace>:lq:<tagged name>   its queue               <namespace>:pq:...
//
// The channel of a client is <namespace>:c:<client id>. On a Cluster it has one for each name that it waits for,
// <key of the holder>:<client id>, which is sharded and in the slot of the name's keys.
//
// A name with a hash tag of its own ("orders:{7}:pay") keeps it and is written as it is with a dot
// behind; any other stands in braces as a whole, its own braces and percent signs escaped. A key that
// ends in a brace is therefore of the second form, and no two names have a key in common.
type keyspace string // the namespace and a colon

var (
	escape   = strings.NewReplacer("%", "%25", "{", "%7B", "}", "%7D")
	unescape = strings.NewReplacer("%25", "%", "%7B", "{", "%7D", "}")
)

// tagged answers the name in the form that keys end in, as pieces.
func tagged(name string) (open, middle, end string) {
	if !strings.ContainsAny(name, "%{}") {
		return "{", name, "}"
	}
	if _, ok := hashtag.Of(name); ok {
		return "", name, "."
	}
	return "{", escape.Replace(name), "}"
}

func untagged(s string) (string, bool) {
	name, ok := strings.CutSuffix(s, ".")
	if !ok {
		name = unescape.Replace(strings.TrimSuffix(strings.TrimPrefix(s, "{"), "}"))
	}
	open, middle, end := tagged(name)
	return name, name != "" && open+middle+end == s
}

// parts are the second letters of a name's keys, in the order in which scripts take them; the first
// ones are those of the holders.
var parts = [...]struct {
	letter  string
	all     []string
	holders int
	redis   string // type of the first key
}{
	driver.KindLock:   {"l", []string{"", "f", "q"}, 1, "string"},
	driver.KindPermit: {"p", []string{"", "d", "f", "q"}, 2, "zset"},
}

var kinds = []driver.Kind{driver.KindLock, driver.KindPermit}

// keys adds all keys of the name.
func (s keyspace) keys(w *Words, n driver.Name) {
	s.some(w, n, parts[n.Kind].all)
}

// holders adds the keys that tell who holds the name.
func (s keyspace) holders(w *Words, n driver.Name) {
	p := &parts[n.Kind]
	s.some(w, n, p.all[:p.holders])
}

func (s keyspace) some(w *Words, n driver.Name, which []string) {
	letter := parts[n.Kind].letter
	open, middle, end := tagged(n.Name)
	for _, part := range which {
		w.add(string(s), letter, part, ":", open, middle, end)
	}
}

// name answers whose key of holders this is.
func (s keyspace) name(key string) (driver.Name, bool) {
	rest, ok := strings.CutPrefix(key, string(s))
	letter, rest, ok2 := strings.Cut(rest, ":")
	for _, kind := range kinds {
		if parts[kind].letter == letter && ok && ok2 {
			name, ok := untagged(rest)
			return driver.Name{Kind: kind, Name: name}, ok
		}
	}
	return driver.Name{}, false
}

// pattern matches the keys of holders of one kind, for SCAN.
func (s keyspace) pattern(k driver.Kind) string { return string(s) + parts[k].letter + ":*" }

// channel is how a client calls its channel towards a script: on a Cluster, by what follows the key of the holder.
func (s keyspace) channel(client string, cluster bool) string {
	if cluster {
		return ":" + client
	}
	return string(s) + "c:" + client
}

// channelOf answers what to subscribe to for grants of the name.
func (s keyspace) channelOf(n driver.Name, channel string) string {
	if !strings.HasPrefix(channel, ":") {
		return channel
	}
	p := &parts[n.Kind]
	open, middle, end := tagged(n.Name)
	return string(s) + p.letter + ":" + open + middle + end + channel
}
