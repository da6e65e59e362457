package rueidis

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redis/rueidis"
)

// shards are the sharded channels that are subscribed to on a Cluster. All those whose slots are on one node share a
// connection.
type shards struct {
	client rueidis.Client

	mu    sync.Mutex
	lines map[string]*line // by the node's address
}

// line is a connection to one node. It ends when it breaks, with all its listeners, or with the last of them.
type line struct {
	ready chan struct{} // closed when there is a connection
	conn  rueidis.DedicatedClient
	idle  chan struct{} // closed by the last listener
	ended chan struct{}
	send  sync.Mutex // held while the set of channels changes, here and on the server

	// Guarded by shards.mu.
	listeners map[string]*listener // by channel
	over      bool                 // takes no more listeners
}

type listener struct {
	message func(string)
	dropped chan struct{} // closed when the node does not serve the channel any more
}

var errDropped = errors.New("redis: the subscription has ended")

// farewell is how long a subscription that ends waits for the server's answer.
const farewell = 300 * time.Millisecond

// listen is what redislua.Client says of Listen.
func (s *shards) listen(ctx context.Context, channel string, up func(), message func(string)) error {
	addr, node, err := s.home(ctx, channel)
	if err != nil {
		return err
	}
	l, me := s.line(addr, node), &listener{message, make(chan struct{})}
	select {
	case <-l.ready:
	case <-ctx.Done():
		s.leave(l, channel, me)
		return ctx.Err()
	}
	if err := s.join(ctx, l, channel, me); err != nil {
		s.leave(l, channel, me)
		return err
	}
	up()
	select {
	case <-ctx.Done():
		err = ctx.Err()
	case <-me.dropped:
		err = errDropped
	case <-l.ended:
		err = errDropped
	}
	s.leave(l, channel, me)
	return err
}

// home finds the node that has a channel's slot, by asking any of them for a key of that name.
func (s *shards) home(ctx context.Context, channel string) (addr string, node rueidis.Client, err error) {
	nodes := s.client.Nodes()
	err = rueidis.ErrNoSlot
	for addr, node = range nodes {
		err = do(ctx, node, "EXISTS", channel).Error()
		if refusal, ok := rueidis.IsRedisErr(err); ok {
			if moved, ok := refusal.IsMoved(); ok {
				if nodes[moved] == nil {
					continue // one that the client does not know yet
				}
				return moved, nodes[moved], nil
			}
		}
		if err == nil {
			return addr, node, nil
		}
	}
	return "", nil, err
}

// line answers the connection to a node.
func (s *shards) line(addr string, node rueidis.Client) *line {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.lines[addr]
	if l == nil {
		l = &line{ready: make(chan struct{}), idle: make(chan struct{}), ended: make(chan struct{}),
			listeners: make(map[string]*listener)}
		s.lines[addr] = l
		go s.run(l, addr, node)
	}
	return l
}

// run holds the connection until it breaks or nobody needs it.
func (s *shards) run(l *line, addr string, node rueidis.Client) {
	l.conn, _ = node.Dedicate() // connects
	broken := l.conn.SetPubSubHooks(rueidis.PubSubHooks{
		OnMessage: func(m rueidis.PubSubMessage) {
			if to := s.listener(l, m.Channel); to != nil {
				to.message(m.Message)
			}
		},
		OnSubscription: func(m rueidis.PubSubSubscription) {
			if m.Kind == "sunsubscribe" { // of one that still listens: the node gave the slot away
				s.drop(l, m.Channel)
			}
		},
	})
	close(l.ready)
	select {
	case <-broken:
	case <-l.idle:
	}
	s.mu.Lock()
	l.over = true
	if s.lines[addr] == l {
		delete(s.lines, addr)
	}
	s.mu.Unlock()
	l.conn.Close()
	close(l.ended)
}

func (s *shards) listener(l *line, channel string) *listener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return l.listeners[channel]
}

func (s *shards) drop(l *line, channel string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if to := l.listeners[channel]; to != nil {
		delete(l.listeners, channel)
		close(to.dropped)
	}
}

// join subscribes to a channel.
func (s *shards) join(ctx context.Context, l *line, channel string, me *listener) error {
	l.send.Lock()
	defer l.send.Unlock()
	s.mu.Lock()
	over := l.over
	if !over {
		l.listeners[channel] = me
	}
	s.mu.Unlock()
	if over {
		return errDropped
	}
	return l.conn.Do(ctx, l.conn.B().Ssubscribe().Channel(channel).Build()).Error()
}

// leave unsubscribes from a channel. The last one to leave ends the line.
func (s *shards) leave(l *line, channel string, me *listener) {
	l.send.Lock()
	defer l.send.Unlock()
	s.mu.Lock()
	mine := l.listeners[channel] == me
	if mine {
		delete(l.listeners, channel)
	}
	last := !l.over && len(l.listeners) == 0
	if last {
		l.over = true
		close(l.idle)
	}
	over := l.over
	s.mu.Unlock()
	if mine && !over {
		ctx, cancel := context.WithTimeout(context.Background(), farewell)
		defer cancel()
		_ = l.conn.Do(ctx, l.conn.B().Sunsubscribe().Channel(channel).Build()).Error() // if that fails, the line is broken
	}
}
