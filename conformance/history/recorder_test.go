package history

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestRecorder runs many goroutines over a mutex and checks what they recorded.
func TestRecorder(t *testing.T) {
	const clients, rounds = 16, 200
	rec := NewRecorder("", nil)
	var mu sync.Mutex
	var token uint64
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for range rounds {
				a := rec.Start(Request{Client: fmt.Sprint(c), Kind: Lock, Name: "a", TTL: time.Minute, Wait: true})
				sent := time.Now()
				mu.Lock()
				token++
				v := sent.Add(time.Minute - margin(time.Minute))
				a.Acquired(Grant{Token: token, Until: v, Sent: time.Now()})
				a.Observed(time.Now(), true, token, v)
				called := time.Now()
				v = called.Add(time.Minute - margin(time.Minute))
				a.Extended(Grant{Token: token, Until: v, Called: called, Sent: time.Now()})
				rec.Write("r", token, time.Time{}, true)
				runtime.Gosched() // others come while it is held
				a.ReleaseCalled()
				mu.Unlock()
				a.ReleaseReturned(OK)
			}
		})
	}
	wg.Wait()
	h := rec.History()
	if want := clients * rounds * 7; len(h) != want {
		t.Fatalf("recorded %d events, want %d", len(h), want)
	}
	for i := 1; i < len(h); i++ {
		if h[i].T < h[i-1].T {
			t.Fatalf("event %d is earlier than the one before it: %v, %v", i, h[i-1], h[i])
		}
	}
	if rep := Check(h, Rules{MinAcquired: clients * rounds, MinContended: 100}); rep.Verdict() != Pass {
		t.Errorf("a mutex: got %v", rep)
	}
	if rep := CheckModel(h, ModelRules{}); rep.Verdict != Pass {
		t.Errorf("a mutex: got %+v", rep)
	}
}

// TestRecorderCatchesNoLock is the same without the mutex: the recorder's stamps must show it.
func TestRecorderCatchesNoLock(t *testing.T) {
	rec := NewRecorder("", nil)
	inside := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() {
			a := rec.Start(Request{Kind: Lock, Name: "a"})
			a.Acquired(Grant{Token: uint64(i + 1)})
			select { // both are inside
			case inside <- struct{}{}:
			case <-inside:
			}
			a.ReleaseCalled()
			a.ReleaseReturned(OK)
		})
	}
	wg.Wait()
	h := rec.History()
	if rep := Check(h, Rules{}); rep.Counts[L1] != 1 {
		t.Errorf("no lock: got %v, want a violation of L1", rep)
	}
	if rep := CheckModel(h, ModelRules{}); rep.Verdict != Fail {
		t.Errorf("no lock: got %+v, want fail", rep)
	}
}

func everyEvent(rec *Recorder) {
	a := rec.Start(Request{Client: "c", Kind: Permit, Name: "a \"b\"\n", Limit: 3, TTL: time.Second, Wait: true})
	t := time.Now()
	a.Acquired(Grant{Token: 1<<53 + 1, Until: t.Add(time.Second), TTL: 2 * time.Second, Sent: t})
	a.Extended(Grant{Token: 1<<53 + 1, Until: t.Add(2 * time.Second), Called: t, Sent: t})
	a.Observed(t, true, 7, t)
	a.Observed(t, false, 0, time.Time{})
	a.Lost()
	a.ReleaseCalled()
	a.ReleaseReturned(NotHeld)
	rec.Start(Request{Kind: Lock, Name: "a"}).Refused()
	rec.Start(Request{Kind: Token, Name: "a"}).Failed(Uncertain)
	rec.Write("r", 7, t, true)
	rec.Write("r", 6, time.Time{}, false)
	rec.FaultBegin("cut")
	rec.FaultHit("cut")
	rec.FaultEnd("cut")
	rec.Stopped("p2")
	rec.Continued("p2")
	rec.Ended("p2")
}

func TestJSONLines(t *testing.T) {
	kept := NewRecorder("p1", nil)
	everyEvent(kept)
	want := kept.History()
	types := map[Type]bool{}
	for _, e := range want {
		types[e.Type] = true
	}
	if len(types) != 17 {
		t.Errorf("the recorder writes %d types of events, want all 17", len(types))
	}

	var file bytes.Buffer
	if err := want.Write(&file); err != nil {
		t.Fatal(err)
	}
	got, err := Read(&file)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("Read(Write(h)): got %v, %v, want %v", got, err, want)
	}

	var stream bytes.Buffer
	streamed := NewRecorder("p1", &stream)
	everyEvent(streamed)
	if h := streamed.History(); len(h) != 0 {
		t.Errorf("a streaming recorder kept %d events, want none", len(h))
	}
	text := stream.String()
	got, err = Read(&stream)
	if err != nil || len(got) != len(want) {
		t.Fatalf("streamed: got %d events, %v, want %d", len(got), err, len(want))
	}
	for i := range got {
		if got[i].Type != want[i].Type || got[i].Name != want[i].Name || got[i].Token != want[i].Token {
			t.Errorf("streamed event %d: got %v, want like %v", i, got[i], want[i])
		}
	}

	// Torn in the middle of its last line, as by SIGKILL.
	got, err = Read(strings.NewReader(text[:len(text)-5]))
	if err != nil || len(got) != len(want)-1 {
		t.Errorf("torn last line: got %d events, %v, want %d", len(got), err, len(want)-1)
	}
	got, err = Read(strings.NewReader(strings.Replace(text, "\n", "\nnonsense\n", 1)))
	if err == nil || !strings.Contains(err.Error(), "line 2") || len(got) != 1 {
		t.Errorf("nonsense in line 2: got %d events, %v, want 1 and an error that names the line", len(got), err)
	}
}

type fullDisk struct{ left int }

var errFull = errors.New("disk full")

func (w *fullDisk) Write(p []byte) (int, error) {
	if w.left--; w.left < 0 {
		return 0, errFull
	}
	return len(p), nil
}

func TestRecorderKeepsTheFirstError(t *testing.T) {
	rec := NewRecorder("p1", &fullDisk{left: 2})
	everyEvent(rec)
	if err := rec.Err(); !errors.Is(err, errFull) {
		t.Errorf("Err: got %v, want %v", err, errFull)
	}
}

func TestClock(t *testing.T) {
	if got := Clock(time.Time{}); got != 0 {
		t.Errorf("Clock of the zero time: got %d, want 0", got)
	}
	before := now()
	at := Clock(time.Now())
	after := now()
	if before > at || at > after {
		t.Errorf("Clock(time.Now()): got %d, want between %d and %d", at, before, after)
	}
	later := time.Now()
	if d := Clock(later.Add(time.Hour)) - Clock(later); d != int64(time.Hour) {
		t.Errorf("an hour on the clock: got %v", time.Duration(d))
	}
}

func TestRecorderInBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := NewRecorder("", nil)
		a := rec.Start(Request{Kind: Lock, Name: "a", TTL: time.Second})
		v := time.Now().Add(990 * time.Millisecond)
		a.Acquired(Grant{Token: 1, Until: v})
		time.Sleep(time.Until(v))
		a.Lost()
		h := rec.History()
		if d := h[2].T - h[0].T; d != int64(990*time.Millisecond) || h[1].V != h[2].T {
			t.Errorf("in a bubble: got %v, want the loss 990ms after the start, at V", h)
		}
		if rep := Check(h, Rules{}); rep.Verdict() != Pass || rep.MaxLossLate != 0 {
			t.Errorf("in a bubble: got %v, want pass", rep)
		}
	})
}

const childEnv = "FENCELOCK_HISTORY_CHILD"

// TestMain lets the test binary serve as the recording child process.
func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		child(name)
		return
	}
	os.Exit(m.Run())
}

// child takes and gives back a lock once for each line it reads, and answers with its events.
func child(name string) {
	rec := NewRecorder(name, os.Stdout)
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var token uint64
		fmt.Sscan(in.Text(), &token)
		a := rec.Start(Request{Client: name, Kind: Lock, Name: "a"})
		a.Acquired(Grant{Token: token, Until: time.Now().Add(time.Hour)})
		a.ReleaseCalled()
		a.ReleaseReturned(OK)
	}
}

type childProcess struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	h   bytes.Buffer
}

func startChild(t *testing.T, name string) *childProcess {
	t.Helper()
	c := &childProcess{cmd: exec.CommandContext(t.Context(), os.Args[0])}
	c.cmd.Env = append(os.Environ(), childEnv+"="+name)
	c.cmd.Stderr = os.Stderr
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return c
}

// cycle lets the child hold the lock once.
func (c *childProcess) cycle(t *testing.T, token int) {
	t.Helper()
	fmt.Fprintln(c.in, token)
	for range 4 {
		line, err := c.out.ReadBytes('\n')
		if err != nil {
			t.Fatalf("child: %v", err)
		}
		c.h.Write(line)
	}
}

// TestProcessesShareAClock passes a lock to and fro between two processes and this one. Their stamps must
// lie between those of this process, and together they are a legal history; one that takes it out of turn
// is caught.
func TestProcessesShareAClock(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the shared clock is CLOCK_MONOTONIC of Linux; elsewhere it is the wall clock, see Clock")
	}
	children := []*childProcess{startChild(t, "p1"), startChild(t, "p2")}
	const slack = int64(20 * time.Microsecond) // of the two bases
	rec := NewRecorder("parent", nil)
	type turn struct{ before, after int64 }
	var turns []turn
	token := 0
	for range 200 {
		for _, c := range children {
			token++
			before := now()
			c.cycle(t, token)
			turns = append(turns, turn{before, now()})
		}
	}
	token++
	mine := rec.Start(Request{Client: "parent", Kind: Lock, Name: "a"})
	mine.Acquired(Grant{Token: uint64(token)})
	legal := rec.History()
	token++
	children[0].cycle(t, token) // out of turn
	mine.ReleaseCalled()
	mine.ReleaseReturned(OK)

	var all []History
	for i, c := range children {
		c.in.Close()
		if err := c.cmd.Wait(); err != nil {
			t.Fatalf("child: %v", err)
		}
		h, err := Read(&c.h)
		if err != nil {
			t.Fatal(err)
		}
		for j, e := range h {
			if n := j/4*2 + i; n < len(turns) && (e.T < turns[n].before-slack || e.T > turns[n].after+slack) {
				t.Fatalf("%v of process %s, stamped at %d: want between %d and %d", e, e.Process, e.T, turns[n].before, turns[n].after)
			}
		}
		all = append(all, h)
	}
	fair := Merge(legal, all[0][:len(all[0])-4], all[1])
	if rep := Check(fair, Rules{MinAcquired: 401, Unfinished: true}); rep.Verdict() != Pass {
		t.Errorf("turns: got %v, want pass", rep)
	}
	if rep := Check(Merge(rec.History(), all[0], all[1]), Rules{}); rep.Counts[L1] != 1 {
		t.Errorf("out of turn: got %v, want one violation of L1", rep)
	}
}

// TestKilledProcess kills a child while it writes: what it wrote is read, the rest is excused.
func TestKilledProcess(t *testing.T) {
	c := startChild(t, "p1")
	rec := NewRecorder("parent", nil)
	go func() {
		for token := 1; ; token++ {
			if _, err := fmt.Fprintln(c.in, token); err != nil {
				return
			}
		}
	}()
	for range 500 {
		line, err := c.out.ReadBytes('\n')
		if err != nil {
			t.Fatalf("child: %v", err)
		}
		c.h.Write(line)
	}
	rec.Ended("p1")
	if err := c.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(&c.h, c.out); err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Wait(); err == nil {
		t.Error("child: ended by itself, want killed")
	}
	h, err := Read(&c.h)
	if err != nil || len(h) < 500 {
		t.Fatalf("Read after a kill: got %d events, %v, want at least 500", len(h), err)
	}
	if rep := Check(Merge(h, rec.History()), Rules{MinAcquired: 100}); rep.Verdict() != Pass {
		t.Errorf("a killed process: got %v, want pass", rep)
	}
}
