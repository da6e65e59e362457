package servers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"
)

// A Direction is one way through a [Proxy], or both.
type Direction int

// The directions.
const (
	ToServer Direction = 1 << iota // from the client to the server: requests
	ToClient                       // from the server to the client: replies
	Both     = ToServer | ToClient
)

// Stats counts what a [Proxy] has seen since it was made. A test that has injected a fault looks
// here to prove that the fault hit something. A chunk is what one read from a connection gave, at
// most 64 KiB; a small request or reply is nearly always one chunk.
type Stats struct {
	Connections int // connections of clients accepted
	Open        int // of these, connections not yet ended
	DialsFailed int // connections for which the server could not be reached
	Resets      int // connections ended by Reset, DropNextReply or the end of Drop

	ToServer, ToClient Traffic
}

// Traffic counts what went in one direction.
type Traffic struct {
	Arrived   int   // chunks received from the sender
	Forwarded int   // chunks passed on to the receiver
	Bytes     int64 // bytes in Forwarded
	Held      int   // chunks that arrived during Hold
	Delayed   int   // chunks that arrived during Delay
	Dropped   int   // chunks that vanished by Drop or DropNextReply
}

// A Proxy is a TCP proxy, inside this process, between clients and one server. At first it passes
// everything on. The switches below change that at any time, also for connections that exist.
//
// Each direction has one switch, set to Pass, Hold, Drop or Delay. The switch applies to the bytes
// that are sent after the call has returned; a Hold or Drop in one direction only is a one-way
// partition. A connection is accepted in every case, as a kernel does on behalf of a server that
// hangs, and so is one whose server cannot be reached: it is then reset, perhaps so soon that
// dialling fails. Only after Refuse dialling fails for sure. The end of a connection, orderly or by reset, goes through the proxy like the bytes before
// it, except that Drop holds it: it is told when the direction passes again.
//
// All methods are safe for concurrent use.
type Proxy struct {
	network, target string
	addr            string
	release         func() error // of the port

	listening sync.Mutex // held while the listener is opened or closed
	running   sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	listener net.Listener // nil after Refuse
	failed   error        // why the listener ended without being told to
	toServer control
	toClient control
	swallow  []*swallow // in the order of the calls
	links    map[*link]struct{}
	stats    Stats // but for Traffic, which control has
}

// A control is the switch of one direction.
type control struct {
	mode    mode
	delay   time.Duration
	traffic Traffic
}

type mode int

const (
	pass mode = iota
	hold
	drop
	delay
)

const (
	chunkSize = 64 << 10 // bytes per read
	queueSize = 4 << 20  // bytes of one direction of one connection that may wait in the proxy

	dialTimeout = 10 * time.Second
)

// NewProxy starts a proxy that listens on 127.0.0.1 and passes everything on to target: a host:port,
// or "unix:" and the path of a socket. It does not try to reach target before a client connects.
func NewProxy(target string) (*Proxy, error) {
	p := &Proxy{network: "tcp", target: target, links: make(map[*link]struct{})}
	if path, ok := strings.CutPrefix(target, "unix:"); ok {
		p.network, p.target = "unix", path
	} else if _, _, err := net.SplitHostPort(target); err != nil {
		return nil, fmt.Errorf("servers: proxy: target: %w", err)
	}
	for attempt := 1; ; attempt++ {
		addr, release, err := ReservePort()
		if err != nil {
			return nil, fmt.Errorf("servers: proxy: choose a port: %w", err)
		}
		p.addr, p.release = addr, release
		if err = p.Accept(); err == nil {
			return p, nil
		}
		release()
		if attempt == portAttempts {
			return nil, err
		}
	}
}

// Addr returns the host:port that clients dial. It never changes.
func (p *Proxy) Addr() string { return p.addr }

// Stats returns the present counts.
func (p *Proxy) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	s.Open = len(p.links)
	s.ToServer, s.ToClient = p.toServer.traffic, p.toClient.traffic
	return s
}

// Pass lets bytes through, those that were held or delayed first, in order. Pass of ToClient also
// cancels each DropNextReply that has not acted yet.
func (p *Proxy) Pass(d Direction) { p.set(d, pass, 0) }

// Hold keeps bytes back, in order, until Pass or Delay lets them through or Drop drops them. Once
// 4 MiB of a connection wait, the sender is not read from any more.
func (p *Proxy) Hold(d Direction) { p.set(d, hold, 0) }

// Drop makes bytes vanish, those that were held or delayed included. The connections stay open meanwhile. One that has
// lost bytes is reset when no direction drops any more: TCP delivers what comes after a gap to nobody, and a client that has
// several requests under way on a connection would take the answer to one for that to another.
func (p *Proxy) Drop(d Direction) { p.set(d, drop, 0) }

// Delay lets bytes through, in order, each the given time after it has arrived.
func (p *Proxy) Delay(d Direction, by time.Duration) { p.set(d, delay, by) }

func (p *Proxy) set(d Direction, m mode, by time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if d&ToServer != 0 {
		p.toServer.mode, p.toServer.delay = m, by
	}
	if d&ToClient != 0 {
		p.toClient.mode, p.toClient.delay = m, by
		if m == pass {
			p.swallow = nil
		}
	}
	for l := range p.links {
		for _, f := range l.flows {
			f.switched()
		}
		if (l.flows[0].lost || l.flows[1].lost) && p.toServer.mode != drop && p.toClient.mode != drop && !l.closed {
			p.stats.Resets++
			l.end(true)
		}
	}
}

// Reset ends all connections with a TCP reset (RST) and forgets the bytes that wait in them. New
// connections are accepted. It returns when the connections have ended.
func (p *Proxy) Reset() {
	p.mu.Lock()
	var ended []*link
	for l := range p.links {
		if !l.closed {
			p.stats.Resets++
			l.end(true)
		}
		ended = append(ended, l)
	}
	p.mu.Unlock()
	for _, l := range ended {
		<-l.ended
	}
}

// Refuse makes dialling fail with "connection refused" until Accept. Connections that exist stay.
func (p *Proxy) Refuse() error {
	p.listening.Lock()
	defer p.listening.Unlock()
	p.mu.Lock()
	l := p.listener
	p.listener = nil
	closed := p.closed
	p.mu.Unlock()
	switch {
	case closed:
		return p.errorf("refuse", ErrClosed)
	case l == nil:
		return nil
	}
	return p.errorf("refuse", l.Close())
}

// Accept ends Refuse. On systems other than Linux it fails if somebody else has taken the port
// meanwhile.
func (p *Proxy) Accept() error {
	p.listening.Lock()
	defer p.listening.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return p.errorf("accept", ErrClosed)
	case p.listener != nil:
		return nil
	}
	l, err := net.Listen("tcp", p.addr)
	if err != nil {
		return p.errorf("accept", err)
	}
	p.listener = l
	p.running.Go(func() { p.accept(l) })
	return nil
}

// DropOptions narrows down which bytes [Proxy.DropNextReply] drops, and what comes then. The zero
// value of each field is its default.
type DropOptions struct {
	// RequestWith waits for a request that contains this text, in one chunk, and drops the next
	// bytes from the server on the same connection. A client that does more than one thing, such as
	// renewing or preparing a statement, makes this necessary. Default "": the next bytes from the
	// server on any connection.
	RequestWith string

	// KeepOpen leaves the connection as it is. Default false: it is reset.
	KeepOpen bool
}

// DropNextReply makes the next chunk that the server sends after this call vanish and then ends its
// connection with a TCP reset: the server has done what it was asked, but the client cannot know.
// It acts once per call, whether the switch passes, holds, drops or delays. The returned channel is
// closed when it has acted.
func (p *Proxy) DropNextReply(opts *DropOptions) <-chan struct{} {
	s := &swallow{done: make(chan struct{})}
	if opts != nil {
		s.DropOptions = *opts
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.swallow = append(p.swallow, s)
	return s.done
}

// A swallow is one call of DropNextReply that has not acted yet.
type swallow struct {
	DropOptions
	link *link // the one with the request, nil before it came
	done chan struct{}
}

// requestPasses notes that the client's bytes are about to be sent to the server. p.mu is held.
func (p *Proxy) requestPasses(l *link, chunk []byte) {
	for _, s := range p.swallow {
		if s.link == nil && s.RequestWith != "" && bytes.Contains(chunk, []byte(s.RequestWith)) {
			s.link = l
			return
		}
	}
}

// takeSwallow returns the first pending call that the next bytes from the server on l fulfil, and
// removes it. p.mu is held.
func (p *Proxy) takeSwallow(l *link) *swallow {
	for i, s := range p.swallow {
		if s.RequestWith == "" || s.link == l {
			p.swallow = append(p.swallow[:i:i], p.swallow[i+1:]...)
			return s
		}
	}
	return nil
}

// Close ends the proxy: it refuses and resets all connections and returns when all its goroutines
// have ended. A second Close does nothing and answers nil.
//
// It fails if the proxy had stopped accepting connections by itself.
func (p *Proxy) Close() error {
	p.mu.Lock()
	closed := p.closed
	p.closed = true
	p.mu.Unlock()
	if closed {
		p.running.Wait()
		return nil
	}
	p.listening.Lock()
	defer p.listening.Unlock()
	p.mu.Lock()
	err := p.failed
	if p.listener != nil {
		err = errors.Join(err, p.listener.Close())
		p.listener = nil
	}
	for l := range p.links {
		l.end(true)
	}
	p.mu.Unlock()
	p.running.Wait()
	return p.errorf("close", errors.Join(err, p.release()))
}

func (p *Proxy) errorf(op string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("servers: proxy %s: %s: %w", p.addr, op, err)
}

// accept takes connections until listener is closed.
func (p *Proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		p.mu.Lock()
		if p.listener != listener { // closed by us
			p.mu.Unlock()
			if err == nil {
				hangUp(client, true)
			}
			return
		}
		if err != nil {
			p.failed = err
			p.listener = nil
			p.mu.Unlock()
			listener.Close()
			return
		}
		l := newLink(p, client)
		p.links[l] = struct{}{}
		p.stats.Connections++
		p.mu.Unlock()
		p.running.Go(l.run)
	}
}

// hangUp closes a connection, with a reset where the protocol has one.
func hangUp(c net.Conn, reset bool) {
	if t, ok := c.(*net.TCPConn); ok && reset {
		t.SetLinger(0)
	}
	c.Close()
}

// A link is a client's connection together with the one to the server that belongs to it.
type link struct {
	proxy  *Proxy
	client net.Conn
	ctx    context.Context // done when the link is closed
	cancel context.CancelFunc
	ended  chan struct{} // closed when all goroutines of the link have ended

	// Guarded by proxy.mu.
	closed bool
	server net.Conn // nil while it is dialled, and if that has failed
	flows  [2]*flow // to server, to client
}

func newLink(p *Proxy, client net.Conn) *link {
	l := &link{proxy: p, client: client, ended: make(chan struct{})}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	toServer := &flow{link: l, control: &p.toServer}
	toClient := &flow{link: l, control: &p.toClient}
	toServer.changed.L, toClient.changed.L = &p.mu, &p.mu
	toServer.back, toClient.back = toClient, toServer
	l.flows = [2]*flow{toServer, toClient}
	return l
}

// run serves the link until its end.
func (l *link) run() {
	p := l.proxy
	toServer, toClient := l.flows[0], l.flows[1]
	dialer := net.Dialer{Timeout: dialTimeout}
	server, err := dialer.DialContext(l.ctx, p.network, p.target)

	p.mu.Lock()
	switch {
	case l.closed:
		if err == nil {
			hangUp(server, true)
		}
	case err != nil:
		p.stats.DialsFailed++
		toClient.push(entry{end: endReset})
	default:
		l.server = server
	}
	p.mu.Unlock()

	var running sync.WaitGroup
	if err == nil {
		running.Go(func() { toServer.read(l.client) })
		running.Go(func() { toClient.read(server) })
		running.Go(func() { toServer.write(server) })
	}
	running.Go(func() { toClient.write(l.client) })
	running.Wait()

	p.mu.Lock()
	l.end(false)
	delete(p.links, l)
	for _, s := range p.swallow {
		if s.link == l {
			s.link = nil // let it wait for the request to be repeated
		}
	}
	p.mu.Unlock()
	close(l.ended)
}

// end closes both connections, which also ends the goroutines. Only the first call counts. proxy.mu
// is held.
func (l *link) end(reset bool) {
	if l.closed {
		return
	}
	l.closed = true
	l.cancel()
	hangUp(l.client, reset)
	if l.server != nil {
		hangUp(l.server, reset)
	}
	for _, f := range l.flows {
		f.changed.Broadcast()
	}
}

// A flow is one direction of a link: a queue between a goroutine that reads from the sender and one
// that writes to the receiver. All fields are guarded by proxy.mu.
type flow struct {
	link    *link
	control *control
	back    *flow // the other direction

	changed sync.Cond // of any of the fields here or of control
	queue   []entry
	queued  int  // bytes in queue
	broken  bool // the receiver takes no more: bytes are discarded
	lost    bool // bytes were dropped: what comes after them must not arrive
	done    bool // the end was delivered
}

// An entry is a chunk, or a way in which the sender has ended the connection. No chunk follows an
// end, but a reset may follow an end of file.
type entry struct {
	chunk []byte
	end   ending
	at    time.Time // of arrival
}

type ending int

const (
	goesOn ending = iota
	endOfFile
	endReset
)

// read puts what src sends into the queue, until it ends.
func (f *flow) read(src net.Conn) {
	p := f.link.proxy
	buffer := make([]byte, chunkSize)
	for {
		n, err := src.Read(buffer)
		p.mu.Lock()
		if n > 0 {
			f.arrive(bytes.Clone(buffer[:n]))
		}
		if err != nil {
			end := endReset
			if errors.Is(err, io.EOF) {
				end = endOfFile
			}
			f.push(entry{end: end, at: time.Now()})
			p.mu.Unlock()
			return
		}
		for f.queued >= queueSize && !f.link.closed {
			f.changed.Wait()
		}
		p.mu.Unlock()
	}
}

// arrive decides over a chunk as it comes in. proxy.mu is held.
func (f *flow) arrive(chunk []byte) {
	p, c := f.link.proxy, f.control
	c.traffic.Arrived++
	if c == &p.toClient {
		if s := p.takeSwallow(f.link); s != nil {
			c.traffic.Dropped++
			close(s.done) // before the client can see the reset
			if !s.KeepOpen && !f.link.closed {
				p.stats.Resets++
				f.link.end(true)
			}
			return
		}
	}
	switch {
	case c.mode == drop, f.lost:
		c.traffic.Dropped++
		f.lost = true
		return
	case c.mode == hold:
		c.traffic.Held++
	case c.mode == delay:
		c.traffic.Delayed++
	}
	if !f.broken {
		f.push(entry{chunk: chunk, at: time.Now()})
	}
}

// push appends to the queue. proxy.mu is held.
func (f *flow) push(e entry) {
	f.queue = append(f.queue, e)
	f.queued += len(e.chunk)
	f.changed.Broadcast()
}

// clear discards the chunks in the queue and returns how many. proxy.mu is held.
func (f *flow) clear() int {
	var rest []entry
	for _, e := range f.queue {
		if e.end != goesOn {
			rest = append(rest, e)
		}
	}
	n := len(f.queue) - len(rest)
	f.queue, f.queued = rest, 0
	f.changed.Broadcast()
	return n
}

// switched reacts to a new position of the switch. proxy.mu is held.
func (f *flow) switched() {
	if f.control.mode == drop {
		n := f.clear()
		f.control.traffic.Dropped += n
		f.lost = f.lost || n > 0
	}
	f.changed.Broadcast()
}

// write sends what is in the queue to dst, when the switch lets it, until the link is closed.
func (f *flow) write(dst net.Conn) {
	for {
		e, ok := f.next()
		if !ok {
			return
		}
		switch e.end {
		case goesOn:
			if _, err := dst.Write(e.chunk); err != nil {
				f.receiverGone()
			}
		case endOfFile:
			dst.(interface{ CloseWrite() error }).CloseWrite()
			f.delivered(endOfFile)
		case endReset:
			f.delivered(endReset)
		}
	}
}

// delivered closes the link if nothing can come any more now that the receiver was told the end.
func (f *flow) delivered(end ending) {
	f.link.proxy.mu.Lock()
	defer f.link.proxy.mu.Unlock()
	f.done = true
	if end == endReset || f.back.done {
		f.link.end(end == endReset)
	}
}

// next waits for the entry to be sent now, and removes it. It returns false when the link is closed.
func (f *flow) next() (entry, bool) {
	p, c := f.link.proxy, f.control
	p.mu.Lock()
	defer p.mu.Unlock()
	for !f.link.closed {
		if len(f.queue) == 0 || c.mode == hold || c.mode == drop {
			f.changed.Wait()
			continue
		}
		e := f.queue[0]
		if c.mode == delay {
			if wait := time.Until(e.at.Add(c.delay)); wait > 0 {
				alarm := time.AfterFunc(wait, func() {
					p.mu.Lock()
					defer p.mu.Unlock()
					f.changed.Broadcast()
				})
				f.changed.Wait()
				alarm.Stop()
				continue
			}
		}
		f.queue = f.queue[1:]
		f.queued -= len(e.chunk)
		f.changed.Broadcast()
		if e.end == goesOn {
			c.traffic.Forwarded++
			c.traffic.Bytes += int64(len(e.chunk))
			if c == &p.toServer {
				p.requestPasses(f.link, e.chunk)
			}
		}
		return e, true
	}
	return entry{}, false
}

// receiverGone notes that the receiver has reset the connection. The sender learns it the way of
// the other direction.
func (f *flow) receiverGone() {
	f.link.proxy.mu.Lock()
	defer f.link.proxy.mu.Unlock()
	f.broken = true
	f.clear()
	f.back.push(entry{end: endReset, at: time.Now()})
}
