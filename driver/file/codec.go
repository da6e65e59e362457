package file

import (
	"encoding/binary"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/state"
)

// A record is its fields one after the other, numbers as varints, and strings and lists after their
// lengths. A step reads and writes all of it, so with many waiters this is what a step costs; JSON would
// cost ten times as much.

func appendAbout(b []byte, a *about) []byte {
	b = binary.AppendUvarint(b, uint64(a.Kind))
	b = appendString(b, a.Name)
	b = appendString(b, a.Boot)
	b = binary.AppendVarint(b, a.Used.Lease)
	b = binary.AppendVarint(b, a.Used.Token)
	return binary.AppendUvarint(b, uint64(a.Last))
}

func (d *decoder) about(a *about) {
	a.Kind = driver.Kind(d.uint())
	a.Name = d.string()
	a.Boot = d.string()
	a.Used.Lease = d.int()
	a.Used.Token = d.int()
	a.Last = driver.Token(d.uint())
}

func appendState(b []byte, s *state.Name) []byte {
	b = binary.AppendUvarint(b, uint64(s.Last))
	b = binary.AppendUvarint(b, uint64(len(s.Holders)))
	for _, h := range s.Holders {
		b = appendString(b, h.ID)
		b = binary.AppendUvarint(b, uint64(h.Token))
		b = binary.AppendVarint(b, h.Expires)
		b = appendString(b, h.Info)
	}
	b = binary.AppendUvarint(b, uint64(len(s.Queue)))
	for _, w := range s.Queue {
		b = appendString(b, w.ID)
		b = binary.AppendVarint(b, int64(w.Limit))
		b = binary.AppendUvarint(b, uint64(w.Floor))
		b = binary.AppendVarint(b, int64(w.Claim))
		b = binary.AppendVarint(b, w.Expires)
		b = appendString(b, w.Info)
		b = appendString(b, w.Client)
	}
	return b
}

func (d *decoder) state(s *state.Name) {
	s.Last = driver.Token(d.uint())
	for n := d.uint(); n > 0 && !d.bad; n-- {
		s.Holders = append(s.Holders, state.Holder{
			ID:      d.string(),
			Token:   driver.Token(d.uint()),
			Expires: d.int(),
			Info:    d.string(),
		})
	}
	for n := d.uint(); n > 0 && !d.bad; n-- {
		s.Queue = append(s.Queue, state.Waiter{
			ID:      d.string(),
			Limit:   int(d.int()),
			Floor:   driver.Token(d.uint()),
			Claim:   time.Duration(d.int()),
			Expires: d.int(),
			Info:    d.string(),
			Client:  d.string(),
		})
	}
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// decoder takes fields off the front of rest. Once something was missing it is bad, and answers zeros.
type decoder struct {
	rest []byte
	bad  bool
}

func (d *decoder) uint() uint64 {
	v, n := binary.Uvarint(d.rest)
	return take(d, v, n)
}

func (d *decoder) int() int64 {
	v, n := binary.Varint(d.rest)
	return take(d, v, n)
}

func take[T uint64 | int64](d *decoder, v T, n int) T {
	if n <= 0 || d.bad {
		d.bad, d.rest = true, nil
		return 0
	}
	d.rest = d.rest[n:]
	return v
}

func (d *decoder) string() string {
	n := d.uint()
	if n > uint64(len(d.rest)) {
		d.bad, d.rest = true, nil
		return ""
	}
	s := string(d.rest[:n])
	d.rest = d.rest[n:]
	return s
}
