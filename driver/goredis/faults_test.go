package goredis_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
)

// TestLostReply lets the client library repeat a request whose reply was lost.
func TestLostReply(t *testing.T) {
	s := startRedis(t)
	p, err := servers.NewProxy(s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	d := newDriver(t, newClient(t, &redis.Options{Addr: p.Addr(), MaxRetries: 3}))
	n := lockName("x")
	o := driver.Owner{Name: n, ID: newID()}
	mustLock(t, d, request(n, o.ID, time.Minute), driver.Granted)
	mustRelease(t, d, o) // the server knows the scripts now
	first := mustLock(t, d, request(n, o.ID, time.Minute), driver.Granted)
	done := p.DropNextReply(nil)
	if again := mustLock(t, d, request(n, o.ID, time.Minute), driver.Granted); again.Token != first.Token {
		t.Errorf("Lock repeated: got token %v, want %v (L5)", again.Token, first.Token)
	}
	<-done
	done = p.DropNextReply(nil)
	found, err := d.Release(t.Context(), o)
	<-done
	if found || err == nil || errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("Release of which the client lost a reply and sent it again: got %v, %v, want an unknown outcome (L5, L8)", found, err)
	}
	if found, err := d.Release(t.Context(), o); found || err != nil {
		t.Errorf("Release once more: got %v, %v, want false", found, err)
	}
}

// wrapping is a hook that wraps errors, as those for tracing do.
type wrapping struct{}

func (wrapping) DialHook(next redis.DialHook) redis.DialHook { return next }
func (wrapping) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if err != nil {
			err = fmt.Errorf("traced: %w", err)
			cmd.SetErr(err)
		}
		return err
	}
}
func (wrapping) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		for _, cmd := range cmds {
			if err := cmd.Err(); err != nil {
				cmd.SetErr(fmt.Errorf("traced: %w", err))
			}
		}
		return err
	}
}

// TestWrappedErrors runs the driver under a hook that wraps all errors, on either protocol.
func TestWrappedErrors(t *testing.T) {
	for _, protocol := range []int{2, 3} {
		s := startRedis(t)
		client := newClient(t, &redis.Options{Addr: s.Addr(), MaxRetries: -1, Protocol: protocol})
		client.AddHook(wrapping{})
		d := newDriver(t, client)
		for _, n := range []driver.Name{lockName("x"), permitName("x")} {
			for _, step := range stepsOn(t, d, n) {
				s.do(t, "SCRIPT", "FLUSH")
				if err := step.Do(d); err != nil {
					t.Errorf("RESP%d: %s after SCRIPT FLUSH with wrapped errors: got %v, want nil (F104)", protocol, step.What, err)
				}
			}
			both := []driver.Extension{
				{Owner: driver.Owner{Name: lockName("a"), ID: newID()}, TTL: time.Minute},
				{Owner: driver.Owner{Name: permitName("b"), ID: newID()}, TTL: time.Minute}}
			s.do(t, "SCRIPT", "FLUSH")
			for _, r := range d.Extend(t.Context(), both) {
				if r.Err != nil || r.State != driver.Gone {
					t.Errorf("RESP%d: Extend of nothing with wrapped errors: got %+v, want gone (F104)", protocol, r)
				}
			}
		}
		s.do(t, "CONFIG", "SET", "maxmemory", "1")
		if _, err := d.Lock(t.Context(), request(lockName("free"), newID(), time.Minute)); !errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("RESP%d: Lock without memory with wrapped errors: got %v, want ErrUnavailable (F104, L8)", protocol, err)
		}
	}
}

// TestProcess runs all steps through Options.Process: of an auto-pipelining client, where go-redis has such.
func TestProcess(t *testing.T) {
	bothKinds(t, func(t *testing.T, n driver.Name) {
		s := startRedis(t)
		rdb := s.client(t)
		process := rdb.Process
		if piped := pipelined(t, rdb); piped != nil {
			process = piped.Process
		}
		processed := 0
		d, err := goredis.New(rdb, &goredis.Options{Process: func(ctx context.Context, cmd redis.Cmder) error {
			processed++
			return process(ctx, cmd)
		}})
		if err != nil {
			t.Fatalf("New: got %v, want nil", err)
		}
		defer d.Close()
		if d.Info().Deadlines {
			t.Error("Info with Process: got Deadlines, want none: nothing is known about it")
		}
		batched := []string{"Extend", "Poll", "List"}
		for _, step := range stepsOn(t, d, n) {
			before := processed
			if err := step.Do(d); err != nil {
				t.Errorf("%s: got %v, want nil", step.What, err)
			}
			if got := processed > before; got == slices.Contains(batched, step.What) {
				t.Errorf("%s: went through Process: %v, want %v", step.What, got, !got)
			}
		}
		s.do(t, "CONFIG", "SET", "maxmemory", "1")
		if _, err := d.Lock(t.Context(), request(lockName("free"), newID(), time.Minute)); !errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("Lock without memory: got %v, want ErrUnavailable (L8)", err)
		}
	})
}
