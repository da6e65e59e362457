package etcd

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/fencelock/fencelock/driver"
)

// The keys, below the namespace:
//
//	base                      what create revisions are added to
//	floor/<kind>/<name>       the same for one name, if that is ahead of the clock
//	mint                      written to get a revision for a token without a lock
//	lock/<name>/<slot>        an entry of a lock's queue; the first one holds
//	semaphore/<name>/<slot>   an entry of a semaphore's queue
//
// A name is escaped, so that it contains no slash and none is the prefix of another with its slash.
//
// A slot is a number of one driver's own, which it uses again when the key is surely gone: until a compaction, etcd walks
// over every key that ever was when it looks at a queue. So a key does not tell its owner, but the entry's value does,
// and whatever changes an entry compares the key's create revision.

func (d *Driver) baseKey() string { return d.prefix + "base" }
func (d *Driver) mintKey() string { return d.prefix + "mint" }

// kindPrefix begins the entries of all names of a kind.
func (d *Driver) kindPrefix(k driver.Kind) string { return d.prefix + k.String() + "/" }

// queueKey begins the entries of a name.
func (d *Driver) queueKey(n driver.Name) string {
	return d.kindPrefix(n.Kind) + escape(n.Name) + "/"
}

// slots are the numbers of one name's entries that a driver has given out, or may give out again.
type slots struct {
	next int
	free []int
}

// takeSlot answers a number that is not in use, and its key. d.mu is held, as in the next.
func (d *Driver) takeSlot(n driver.Name) (slot int, key string) {
	s := d.slots[n]
	if s == nil {
		s = &slots{}
		d.slots[n] = s
	}
	if last := len(s.free) - 1; last >= 0 {
		slot, s.free = s.free[last], s.free[:last]
	} else {
		slot = s.next
		s.next++
	}
	return slot, d.queueKey(n) + d.instance + "-" + strconv.Itoa(slot)
}

// freeSlot gives a number back. The last one given back is the next one taken.
func (d *Driver) freeSlot(n driver.Name, slot int) {
	s := d.slots[n]
	if s.free = append(s.free, slot); len(s.free) == s.next {
		delete(d.slots, n)
	}
}

// escape writes a name in letters, digits and -._~; every other byte becomes %XX.
func escape(name string) string {
	var b strings.Builder
	for i := range len(name) {
		if c := name[i]; c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("-._~", c) >= 0 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// unescape is the inverse of escape.
func unescape(s string) (string, bool) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			b.WriteByte(s[i])
			continue
		}
		var c byte
		if len(s) < i+3 {
			return "", false
		}
		if _, err := fmt.Sscanf(s[i+1:i+3], "%02X", &c); err != nil {
			return "", false
		}
		b.WriteByte(c)
		i += 2
	}
	return b.String(), true
}

// name reads an entry's key.
func (d *Driver) name(key string) (driver.Name, bool) {
	for _, kind := range []driver.Kind{driver.KindLock, driver.KindPermit} {
		if rest, ok := strings.CutPrefix(key, d.kindPrefix(kind)); ok {
			escaped, _, ok := strings.Cut(rest, "/")
			name, good := unescape(escaped)
			return driver.Name{Kind: kind, Name: name}, ok && good
		}
	}
	return driver.Name{}, false
}

// record is the value of an entry.
type record struct {
	ID string `json:"id"` // of the owner

	// Base plus the key's create revision is the token, unless Token is set.
	Base  int64        `json:"base"`
	Token driver.Token `json:"token,omitempty"`

	Limit  int    `json:"limit"`
	Holder string `json:"holder,omitempty"`
}

func (r record) text() string {
	text, err := json.Marshal(r)
	if err != nil {
		panic("etcd: a record does not marshal: " + err.Error())
	}
	return string(text)
}

// readRecord reads an entry's value.
func readRecord(kv *mvccpb.KeyValue) (record, error) {
	var r record
	if err := json.Unmarshal(kv.Value, &r); err != nil || r.Limit < 1 {
		// Its place counts, whoever wrote it, so the step cannot go on.
		return record{}, driver.Unavailable(fmt.Errorf("etcd: the value of %.200q was written by somebody else", kv.Key))
	}
	return r, nil
}

// token is the token of an entry.
func (r record) token(kv *mvccpb.KeyValue) driver.Token {
	if r.Token > 0 {
		return r.Token
	}
	return driver.Token(r.Base + kv.CreateRevision)
}
