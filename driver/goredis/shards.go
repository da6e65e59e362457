package goredis

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// shards are the sharded channels that are subscribed to on a Cluster. All those whose slots are on one node share a
// connection.
//
// A PubSub of a ClusterClient would not do: it sends every channel to the node of its first one, and when it
// connects again, to any.
type shards struct {
	cluster *redis.ClusterClient

	mu    sync.Mutex
	lines map[string]*line // by the node's address
}

// line is a connection to one node. It ends as a whole when anything is wrong with it; its listeners end with it, and
// come again.
type line struct {
	sub   *redis.PubSub
	ended chan struct{}
	send  sync.Mutex // held while the set of channels changes, here and on the server

	// Guarded by shards.mu.
	listeners map[string]*listener // by channel
	leaving   map[string]int       // how often a channel's end is to be confirmed
	over      bool                 // takes no more listeners
}

type listener struct {
	up      func()
	message func(string)
	dropped chan struct{} // closed when the node does not serve the channel any more
}

var errDropped = errors.New("redis: the subscription has ended")

// listen is what redislua.Client says of Listen.
func (s *shards) listen(ctx context.Context, channel string, up func(), message func(string)) error {
	node, err := s.cluster.MasterForKey(ctx, channel)
	if err == nil {
		l, me := s.line(node), &listener{up, message, make(chan struct{})}
		if err = s.join(l, channel, me); err == nil {
			select {
			case <-ctx.Done():
				err = ctx.Err()
			case <-me.dropped:
				err = errDropped
			case <-l.ended:
				err = errDropped
			}
			s.leave(l, channel, me)
		}
	}
	if ctx.Err() == nil {
		s.cluster.ReloadState(ctx) // the slot may have moved
	}
	return err
}

// line answers the connection to a node.
func (s *shards) line(node *redis.Client) *line {
	s.mu.Lock()
	defer s.mu.Unlock()
	addr := node.Options().Addr
	l := s.lines[addr]
	if l == nil {
		l = &line{sub: node.SSubscribe(context.Background()), ended: make(chan struct{}),
			listeners: make(map[string]*listener), leaving: make(map[string]int)}
		s.lines[addr] = l
		go s.read(l, addr)
	}
	return l
}

// read passes on what a line brings, until it ends.
func (s *shards) read(l *line, addr string) {
	_ = receive(context.Background(), l.sub, false, func(reply any) bool {
		switch m := reply.(type) {
		case *redis.Subscription:
			if m.Kind == "ssubscribe" {
				if to := s.listener(l, m.Channel); to != nil {
					to.up()
				}
				return true
			}
			return s.unsubscribed(l, m.Channel)
		case *redis.Message:
			if to := s.listener(l, m.Channel); to != nil {
				to.message(m.Payload)
			}
		}
		return true
	})
	s.mu.Lock()
	l.over = true
	if s.lines[addr] == l {
		delete(s.lines, addr)
	}
	s.mu.Unlock()
	l.sub.Close()
	close(l.ended)
}

func (s *shards) listener(l *line, channel string) *listener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return l.listeners[channel]
}

// unsubscribed notes that the node serves a channel no more, because it was asked not to, or gave its slot away. It
// answers whether the line goes on.
func (s *shards) unsubscribed(l *line, channel string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.leaving[channel] > 0 {
		l.leaving[channel]--
		if l.leaving[channel] == 0 {
			delete(l.leaving, channel)
		}
		return !l.over
	}
	if to := l.listeners[channel]; to != nil {
		delete(l.listeners, channel)
		close(to.dropped)
		l.over = len(l.listeners) == 0
	}
	return !l.over
}

// join subscribes to a channel. On an error the line ends.
func (s *shards) join(l *line, channel string, me *listener) error {
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
	// The connection is for others too, so the context of one does not bound it.
	err := l.sub.SSubscribe(context.Background(), channel)
	if err != nil {
		l.sub.Close()
	}
	return err
}

// leave unsubscribes from a channel. The last one to leave ends the line.
func (s *shards) leave(l *line, channel string, me *listener) {
	l.send.Lock()
	defer l.send.Unlock()
	s.mu.Lock()
	if l.over || l.listeners[channel] != me {
		s.mu.Unlock()
		return
	}
	delete(l.listeners, channel)
	l.leaving[channel]++
	l.over = len(l.listeners) == 0
	over := l.over
	s.mu.Unlock()
	_ = l.sub.SUnsubscribe(context.Background(), channel) // if that fails, the line ends
	if over {
		// go-redis logs an error when a connection is closed that it reads, so it gets an answer to read.
		defer time.AfterFunc(farewell, func() { l.sub.Close() }).Stop()
		<-l.ended
	}
}
