package main

import (
	"fmt"
	"os"
	"time"
)

// console writes messages to stderr in a goroutine of its own: a reader of stderr that is slow or stopped must
// not delay what has to be done about a lock. If more than 64 messages wait for it, further ones are dropped.
type console struct {
	w        *os.File
	messages chan message
	progress bool // a progress line is on the screen; used by the goroutine only
}

type message struct {
	text     string
	progress bool
	flushed  chan struct{} // if set, closed when all before it has been written
}

func newConsole(w *os.File) *console {
	c := &console{w: w, messages: make(chan message, 64)}
	go c.write()
	return c
}

// isTerminal reports whether a progress line makes sense.
func (c *console) isTerminal() bool {
	_, ok := columns(c.w)
	return ok
}

// say writes a line. It does not block.
func (c *console) say(format string, args ...any) {
	c.send(message{text: fmt.Sprintf(format, args...)})
}

// show replaces the progress line; empty removes it.
func (c *console) show(text string) { c.send(message{text: text, progress: true}) }

func (c *console) send(m message) {
	select {
	case c.messages <- m:
	default:
	}
}

// flush waits until all has been written, but not for ever.
func (c *console) flush() {
	patience := time.After(time.Second)
	m := message{flushed: make(chan struct{})}
	select {
	case c.messages <- m:
	case <-patience:
		return
	}
	select {
	case <-m.flushed:
	case <-patience:
	}
}

func (c *console) write() {
	for m := range c.messages {
		switch {
		case m.flushed != nil:
			close(m.flushed)
			continue
		case c.progress:
			c.print("\r\x1b[K")
		}
		c.progress = m.progress && m.text != ""
		switch {
		case c.progress:
			c.print(c.cut("fencelock: " + m.text))
		case !m.progress:
			c.print("fencelock: " + m.text + "\n")
		}
	}
}

// print writes to stderr; when that fails there is nobody to be told.
func (c *console) print(s string) { _, _ = c.w.WriteString(s) }

// cut makes a progress line fit the terminal: one that wraps cannot be taken back.
func (c *console) cut(s string) string {
	width, ok := columns(c.w)
	if !ok || width < 2 {
		width = 80
	}
	if r := []rune(s); len(r) >= width {
		s = string(r[:width-2]) + "…"
	}
	return s
}
