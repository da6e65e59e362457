package redislua

import "strings"

// What package redlock needs of this one: to run scripts of its own on servers that it sees one by one.

// NewScript makes a script of its text.
func NewScript(text string) *Script { return script(text) }

// NewCall makes a call of the script. There must be an argument.
func NewCall(s *Script, keys, args []string) *Call {
	c := newCall(s)
	for _, k := range keys {
		c.Keys.add(k)
	}
	for _, a := range args {
		c.Args.add(a)
	}
	return c
}

// Forgotten reports that the server did not know the script, so that the call did nothing.
func (c *Call) Forgotten() bool { return strings.HasPrefix(c.Refusal, noScript) }

// Sure says of a call that failed that it did nothing and will do nothing.
func (c *Call) Sure() bool { return c.Sent == 0 || c.Sent == 1 && Refused(c.Refusal) }
