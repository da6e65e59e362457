package main

import (
	"context"
	"errors"
	"slices"
	"time"
)

// A subject is one way to lock on one backend.
type subject struct {
	name    string
	backend string
	// client is the library that it uses, where the backend has several: it is compared with the floor of the same one.
	client string
	// floor names the kinds of measures of which it is a floor.
	floor []string
	// also names the other kinds in which it takes part; nil for what is no floor is all that are for it.
	also []string
	// fenced says that it is fencelock: every lock has a token and is renewed.
	fenced bool
	// open connects one client, whose locks live for ttl.
	open func(ctx context.Context, s *server, ttl time.Duration) (locker, error)
}

func (s subject) takesPart(m measure) bool {
	if s.floor == nil && s.also == nil {
		return m.only(s)
	}
	return slices.Contains(s.floor, m.kind) || slices.Contains(s.also, m.kind)
}

// floorAmong answers the name of its floor: that of the same client if there is one, else the first.
func (s subject) floorAmong(all []subject, kind string) string {
	first := ""
	for _, f := range all {
		if !slices.Contains(f.floor, kind) {
			continue
		}
		if f.client == s.client {
			return f.name
		}
		if first == "" {
			first = f.name
		}
	}
	return first
}

// A locker is one client of a subject.
type locker struct {
	// lock waits for the lock of that name.
	lock  func(ctx context.Context, name string) (held, error)
	close func() error
}

// held is a lock that was taken.
type held struct {
	token  uint64
	unlock func(ctx context.Context) error
	// err tells whether the lock was lost; nil where the library cannot tell.
	err func() error
}

var errNotHeld = errors.New("the lock was not held any more")

// backends are all of them; a further one is added here, below and in startServer.
var backends = []string{"redis", "redlock", "etcd", "postgres"}

// subjects are those of a backend.
func subjects(backend string) []subject {
	var all []subject
	switch backend {
	case "redis":
		all = redisSubjects()
	case "redlock":
		all = redlockSubjects()
	case "etcd":
		all = etcdSubjects()
	case "postgres":
		all = postgresSubjects()
	}
	return all
}
