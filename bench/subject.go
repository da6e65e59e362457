package main

import (
	"context"
	"errors"
	"time"
)

// A subject is one way to lock on one backend.
type subject struct {
	name    string
	backend string
	// floor names the measures of which it is the floor, and in which alone it takes part. The others are compared with it.
	floor []string
	// fenced says that every lock has a token.
	fenced bool
	// renews says that locks are extended until they are given back.
	renews bool
	// sends are the Redis commands that it sends itself, not from inside of a script.
	sends []string
	// open connects one client, whose locks live for ttl.
	open func(ctx context.Context, s *server, ttl time.Duration) (locker, error)
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

// subjects are all of them; a backend's floors come first.
func subjects() []subject {
	var all []subject
	all = append(all, redisSubjects()...)
	all = append(all, etcdSubjects()...)
	all = append(all, postgresSubjects()...)
	return all // a further backend is added here
}
