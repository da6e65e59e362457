package redislua

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/internal/hashtag"
)

// writeFailed begins the error of a write that failed: no lock was taken.
const writeFailed = "FENCELOCKWRITE "

// LockAndWrite implements driver.Writer. The script is in Lua and of the kind that EVAL runs: it sees the keys as KEYS and the
// arguments as ARGV, of which the last is the token, in 16 digits. It has failed if it raises an error or answers one; what else
// it answers is dropped.
func (d *Driver) LockAndWrite(ctx context.Context, r driver.Request, w driver.Write) (driver.Answer, error) {
	// The user's function stands before everything else, so that it sees nothing of ours. Its keys and arguments hide the
	// script's.
	c := d.newCall(script("local asked = function(KEYS, ARGV)\n", w.Script, "\nend\n", prelude, lock, queue, write, acquire), r.Name)
	if err := d.together(c.Keys.At(0), w.Keys); err != nil {
		return driver.Answer{}, err
	}
	for _, k := range w.Keys {
		c.Keys.add(k)
	}
	c.Args.add(r.ID, " ", r.Holder)
	c.Args.duration(r.TTL)
	d.manner(&c.Args, r)
	c.Args.number(uint64(r.Floor))
	for _, a := range w.Args {
		c.Args.add(a)
	}
	d.confirm(c, r.TTL)
	d.eval(ctx, c)
	if message, ok := strings.CutPrefix(c.Refusal, writeFailed); ok {
		c.Err = errors.New("redis: the write failed: " + message)
		if w.Failed != nil {
			c.Err = w.Failed(message)
		}
	}
	if c.Err != nil {
		return driver.Answer{}, c.result()
	}
	a, err := answer(c.Reply, r.TTL)
	if a.State == driver.Granted && c.unconfirmed() != nil {
		// To give the lease back would not take the write back, so this is not sure to have done nothing.
		return driver.Answer{}, c.unconfirmed()
	}
	return a, err
}

// together refuses keys that a Cluster would not let one script write with the lock's.
func (d *Driver) together(own []byte, keys []string) error {
	if !d.client.SameSlot() {
		return nil
	}
	want, _ := hashtag.Of(string(own))
	for _, k := range keys {
		tag, ok := hashtag.Of(k)
		if !ok {
			tag = k
		}
		if tag != want {
			return driver.Invalid("key", k, fmt.Sprintf("must have the hash tag of the lock's keys, as in {%s}:state", want))
		}
	}
	return nil
}
