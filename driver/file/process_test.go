//go:build linux

package file

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/internal/state"
)

// The test binary runs itself for the other processes: what they do is one of these, by this variable.
const childVariable = "FENCELOCK_FILE_TEST_CHILD"

var children = map[string]func(childTask) error{
	"hammer": hammer,
	"victim": victim,
	"stop":   stopInStep,
	"waiter": waiter,
	"list":   list,
	"full":   fullDisk,
}

type childTask struct {
	Do     string
	Dir    string
	Seed   uint64
	Rounds int
	Name   string
	Steps  int // until it kills itself within a step; 0: it does not
}

func init() {
	childMain = func() {
		text := os.Getenv(childVariable)
		if text == "" {
			return
		}
		var task childTask
		err := json.Unmarshal([]byte(text), &task)
		if err == nil {
			err = children[task.Do](task)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// child is a process of the test binary. Its standard output is read line by line.
type child struct {
	*exec.Cmd
	out    *bufio.Reader
	errors strings.Builder
}

func start(t *testing.T, task childTask, wrapper ...string) *child {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := append(wrapper, exe)
	c := &child{Cmd: exec.Command(args[0], args[1:]...)}
	text, err := json.Marshal(task)
	if err != nil {
		t.Fatal(err)
	}
	c.Env = append(os.Environ(), childVariable+"="+string(text))
	c.Stderr = &c.errors
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.out = bufio.NewReader(out)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	return c
}

// childPatience bounds how long a test waits for a child.
const childPatience = time.Minute

// line waits for the child's next line.
func (c *child) line(t *testing.T) string {
	t.Helper()
	defer time.AfterFunc(childPatience, func() { _ = c.Process.Kill() }).Stop()
	line, err := c.out.ReadString('\n')
	if err != nil {
		_ = c.Wait()
		t.Fatalf("child: got %v, want a line; it said: %s", err, c.errors.String())
	}
	return strings.TrimSuffix(line, "\n")
}

// succeed waits for the end of the child.
func (c *child) succeed(t *testing.T) {
	t.Helper()
	defer time.AfterFunc(childPatience, func() { _ = c.Process.Kill() }).Stop()
	rest, _ := io.ReadAll(c.out)
	if err := c.Wait(); err != nil {
		t.Fatalf("child: got %v, want success; it said: %s%s", err, rest, c.errors.String())
	}
}

func (c *child) kill() {
	_ = c.Process.Kill()
	_ = c.Wait()
}

func openChild(c childTask) (*client, error) {
	d, err := New(c.Dir, nil)
	if err != nil {
		return nil, err
	}
	return newClient(d), nil
}

// ledger is a file that a lock guards: how often it was held, and the last token. Reading and writing
// it are two steps, so that a second holder would be noticed.
type ledger struct {
	Count int
	Last  driver.Token
}

func readLedger(path string) (l ledger, err error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return ledger{}, nil
	}
	if err == nil {
		_, err = fmt.Sscanf(string(data), "%d %d", &l.Count, &l.Last)
	}
	return l, err
}

// enter counts one holder in the ledger.
func enter(path string, token driver.Token, until time.Time) error {
	l, err := readLedger(path)
	if err != nil {
		return err
	}
	if token <= l.Last {
		return fmt.Errorf("token: got %d after %d, want a greater one (T1, T2)", token, l.Last)
	}
	data := fmt.Sprintf("%d %d\n", l.Count+1, token)
	if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
		return err
	}
	again, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if string(again) != data {
		return fmt.Errorf("ledger: got %q, want my own %q (L1)", again, data)
	}
	if time.Now().After(until) {
		return errors.New("void run: the lease ended before the section did")
	}
	return nil
}

const (
	hammerNames = 5
	hammerLimit = 3
)

// hammer locks names and takes permits.
func hammer(task childTask) error {
	c, err := openChild(task)
	if err != nil {
		return err
	}
	random := mathrand.New(mathrand.NewPCG(task.Seed, 0))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	log, err := os.OpenFile(filepath.Join(task.Dir, "permits"), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	for round := range task.Rounds {
		o := driver.Owner{ID: rand.Text(), Name: lockName(fmt.Sprint("name ", random.IntN(hammerNames)))}
		if round%3 == 2 {
			o.Name = driver.Name{Kind: driver.KindPermit, Name: "permits"}
			token, until, err := c.lock(ctx, driver.Request{Owner: o, TTL: 20 * time.Second, Limit: hammerLimit})
			if err != nil {
				return err
			}
			fmt.Fprintf(log, "in %s %d\n", o.ID, token)
			time.Sleep(time.Duration(random.IntN(1000)) * time.Microsecond)
			fmt.Fprintf(log, "out %s\n", o.ID)
			if time.Now().After(until) {
				return errors.New("void run: the permit ended before the section did")
			}
		} else {
			token, until, err := c.lock(ctx, try(o, 20*time.Second))
			if err != nil {
				return err
			}
			if err := enter(filepath.Join(task.Dir, "ledger of "+o.Name.Name), token, until); err != nil {
				return err
			}
		}
		if found, err := c.Release(ctx, o); !found || err != nil {
			return fmt.Errorf("Release: got %v, %v, want true, nil", found, err)
		}
	}
	return c.Close()
}

// TestManyProcesses has 50 processes on five names and a semaphore.
func TestManyProcesses(t *testing.T) {
	const processes, rounds = 50, 12
	dir, seed := t.TempDir(), mathrand.Uint64()
	t.Logf("seed %d", seed)
	var all []*child
	for i := range processes {
		all = append(all, start(t, childTask{Do: "hammer", Dir: dir, Seed: seed + uint64(i), Rounds: rounds}))
	}
	for _, c := range all {
		c.succeed(t)
	}
	total := 0
	for i := range hammerNames {
		l, err := readLedger(filepath.Join(dir, fmt.Sprint("ledger of name ", i)))
		if err != nil {
			t.Fatal(err)
		}
		total += l.Count
	}
	if want := processes * rounds * 2 / 3; total != want {
		t.Fatalf("entries in the ledgers: got %d, want %d (L1)", total, want)
	}

	inside, most := make(map[string]bool), 0
	tokens := make(map[string]bool)
	for line := range strings.Lines(string(read(t, filepath.Join(dir, "permits")))) {
		f := strings.Fields(line)
		if f[0] == "out" {
			delete(inside, f[1])
			continue
		}
		inside[f[1]] = true
		if most = max(most, len(inside)); most > hammerLimit {
			t.Fatalf("holders of a semaphore: got %d, want at most %d (S1)", most, hammerLimit)
		}
		if tokens[f[2]] {
			t.Fatalf("token %s of the semaphore: got it twice, want once (T2)", f[2])
		}
		tokens[f[2]] = true
	}
	if want := processes * rounds / 3; len(tokens) != want || most < 2 {
		t.Fatalf("permits: got %d, at most %d at once, want %d, more than one at once", len(tokens), most, want)
	}

	d := openReal(t, dir)
	if got := sockets(t, d); len(got) != 0 {
		t.Fatalf("sockets of processes that closed: got %v, want none (L7)", got)
	}
	if got := listed(t, d, driver.Name{}); len(got) != 0 {
		t.Fatalf("leases after all released: got %v, want none (L7)", got)
	}
	expectNoFiles(t, dir)
}

// expectNoFiles checks that names are forgotten when their time has come, whatever their past.
func expectNoFiles(t *testing.T, dir string) {
	t.Helper()
	sys, err := thisSystem()
	if err != nil {
		t.Fatal(err)
	}
	real := sys.now
	sys.now = func() state.Now {
		now := real()
		return state.Now{Lease: now.Lease + int64(state.Remember+time.Hour), Token: now.Token + (state.Remember + time.Hour).Microseconds()}
	}
	d := openOn(t, sys, dir)
	o := owner("last")
	for range 3 * len(nameFiles(t, d)) {
		mustLock(t, d, o, time.Minute)
		mustRelease(t, d, o)
	}
	if got := nameFiles(t, d); !slices.Equal(got, []string{"lock-last", "lock-last.lock"}) {
		t.Fatalf("files when all other names can be forgotten: got %v, want none of theirs (T5)", got)
	}
}

const (
	victimNames = 6
	victimTTL   = 200 * time.Millisecond
)

// victim uses locks until it is killed, or kills itself within a step, under the flock.
func victim(task childTask) error {
	c, err := openChild(task)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if task.Seed%2 == 0 {
		// The first token waits for a flush to the disk, which may take longer than the victim has to live. The
		// others may be killed in it.
		if _, err := c.NextToken(ctx, lockName("name 0"), 0); err != nil {
			return err
		}
	}
	if steps := task.Steps; steps > 0 {
		c.inStep = func() {
			if steps--; steps == 0 {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}
		}
	}
	random := mathrand.New(mathrand.NewPCG(task.Seed, 0))
	waited := false
	fmt.Println("ready")
	for {
		o := driver.Owner{ID: rand.Text(), Name: lockName(fmt.Sprint("name ", random.IntN(victimNames)))}
		r := try(o, victimTTL)
		r.Holder = strconv.Itoa(os.Getpid())
		if !waited && random.IntN(4) == 0 {
			// And leave the entry behind: one, or the names would be kept for those who have gone.
			r.Wait, r.Claim = true, victimTTL/2
		}
		a, err := c.Lock(ctx, r)
		if err != nil {
			return err
		}
		if a.State != driver.Granted {
			waited = waited || a.State == driver.Waiting
			continue
		}
		// Tokens rise by themselves; the ledger is not written within the lease, since a process that
		// is slow to be killed may outlive it.
		fmt.Println(o.Name.Name, a.Token)
		if random.IntN(8) == 0 {
			if _, err := c.NextToken(ctx, o.Name, 0); err != nil {
				return err
			}
		}
		if result := c.Extend(ctx, []driver.Extension{{Owner: o, TTL: victimTTL}})[0]; result.Err != nil {
			return result.Err
		}
		if _, err := c.Release(ctx, o); err != nil {
			return err
		}
	}
}

// TestKill kills processes anywhere in their work.
func TestKill(t *testing.T) {
	const kills, atOnce = 220, 4
	dir, seed := t.TempDir(), mathrand.Uint64()
	t.Logf("seed %d", seed)
	random := mathrand.New(mathrand.NewPCG(seed, 0))
	d := openReal(t, dir)

	last := make(map[string]driver.Token)
	tokens := make(map[string]string)
	left := 0 // leases and entries of the dead
	next := func() *child {
		task := childTask{Do: "victim", Dir: dir, Seed: random.Uint64()}
		if random.IntN(2) == 0 {
			task.Steps = 1 + random.IntN(30)
		}
		return start(t, task)
	}
	running := make([]*child, atOnce)
	for i := range running {
		running[i] = next()
	}
	for i := range kills {
		victim := running[i%atOnce]
		if line := victim.line(t); line != "ready" {
			t.Fatalf("victim: got %q, want ready", line)
		}
		running[i%atOnce] = next()
		if !strings.Contains(fmt.Sprint(victim.Env), `"Steps":0`) {
			// It kills itself.
		} else {
			pause := time.NewTimer(time.Duration(random.IntN(8000)) * time.Microsecond)
			<-pause.C
			if err := victim.Process.Signal(syscall.SIGKILL); err != nil {
				t.Fatalf("kill: got %v, want nil", err)
			}
		}
		rest, _ := io.ReadAll(victim.out)
		var exit *exec.ExitError
		if err := victim.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("victim: got %v, want it killed; it said: %s", err, victim.errors.String())
		}
		pid := strconv.Itoa(victim.Process.Pid)
		mine := make(map[string]driver.Token)
		for line := range strings.Lines(string(rest)) {
			f := strings.Fields(line)
			name, number := strings.Join(f[:len(f)-1], " "), f[len(f)-1]
			token, err := strconv.ParseUint(number, 10, 64)
			if err != nil {
				continue // cut by the kill
			}
			if driver.Token(token) <= mine[name] {
				t.Fatalf("tokens of %s in one process: got %d after %d, want a greater one (T1)", name, token, mine[name])
			}
			mine[name] = driver.Token(token)
			last[name] = max(last[name], driver.Token(token))
			if by, twice := tokens[name+number]; twice {
				t.Fatalf("token %s of %s: got it in processes %s and %s, want one (T2)", number, name, by, pid)
			}
			tokens[name+number] = pid
		}
		for _, h := range listed(t, d, driver.Name{}) { // the state is readable
			if h.Holder == pid {
				left++
			}
		}
	}
	for _, c := range running {
		c.kill()
	}
	if left < kills/20 {
		t.Fatalf("leases left by %d killed processes: got %d: void run, the kills hit nothing", kills, left)
	}
	t.Logf("%d processes killed, %d leases left, %d tokens seen", kills, left, len(tokens))

	for i := range victimNames {
		n := lockName(fmt.Sprint("name ", i))
		o := driver.Owner{Name: n, ID: rand.Text()}
		began := time.Now()
		var token driver.Token
		eventually(t, "Lock after the holder was killed (W3)", victimTTL+time.Second, func() bool {
			a, err := d.Lock(t.Context(), try(o, time.Minute))
			if err != nil {
				t.Fatalf("Lock after kills: got %v, want nil", err)
			}
			token = a.Token
			return a.State == driver.Granted
		})
		t.Logf("%v: had after %v", n, time.Since(began))
		if token <= last[n.Name] {
			t.Fatalf("token after kills: got %d, want more than %d (T1)", token, last[n.Name])
		}
		mustRelease(t, d, o)
	}
	d.Close()
	openReal(t, dir) // removes the sockets of the dead
	if got := sockets(t, d); len(got) != 0 {
		t.Fatalf("sockets of dead processes: got %v, want none", got)
	}
	expectNoFiles(t, dir)
}

// stopInStep stops itself within a step, under the flock.
func stopInStep(task childTask) error {
	c, err := openChild(task)
	if err != nil {
		return err
	}
	if _, err := c.NextToken(context.Background(), lockName("mark"), 0); err != nil { // so that one try will do
		return err
	}
	c.inStep = sync.OnceFunc(func() {
		// To this very thread, which then stops here and now; another one would let this one run on.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		_ = syscall.Tgkill(os.Getpid(), syscall.Gettid(), syscall.SIGSTOP)
	})
	_, err = c.Lock(context.Background(), try(owner(task.Name), time.Millisecond))
	return err
}

// TestStoppedInStep: a process that stands still within a step costs others nothing but their contexts.
func TestStoppedInStep(t *testing.T) {
	dir := t.TempDir()
	d := openReal(t, dir)
	other := owner("other")
	mustLock(t, d, other, time.Minute)
	stopped := start(t, childTask{Do: "stop", Dir: dir, Name: "stalled"})
	eventually(t, "the child stops", 20*time.Second, func() bool {
		_, stat, _ := strings.Cut(string(read(t, fmt.Sprintf("/proc/%d/stat", stopped.Process.Pid))), ") ")
		return strings.HasPrefix(stat, "T")
	})

	threads := pprof.Lookup("threadcreate").Count()
	const waiters, patience = 100, 300 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	began := time.Now()
	errs := make(chan error, waiters)
	for range waiters {
		go func() {
			_, err := d.Lock(ctx, try(owner("stalled"), time.Second))
			errs <- err
		}()
	}
	stalled := driver.Extension{Owner: owner("stalled"), TTL: time.Minute}
	results := d.Extend(ctx, []driver.Extension{stalled, {Owner: other, TTL: time.Minute}})
	if err := results[1].Err; err != nil || results[1].State != driver.Granted {
		t.Fatalf("Extend in a batch with a stalled name: got %v, %v, want granted", results[1].State, err)
	}
	mustUnavailable(t, "Extend of a stalled name", results[0].Err, "lock-stalled.lock")
	for range waiters {
		err := <-errs
		mustUnavailable(t, "Lock of a stalled name", err, "lock-stalled.lock")
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("Lock of a stalled name: got %v, want it to match the context's error", err)
		}
	}
	if took := time.Since(began); took < patience || took > patience+10*time.Second {
		t.Fatalf("Lock of a stalled name: took %v, want the context's %v", took, patience)
	}
	if got := pprof.Lookup("threadcreate").Count() - threads; got > 20 {
		t.Fatalf("threads made by %d waiters: got %d, want few", waiters, got)
	}
	if got := listed(t, d, driver.Name{}); len(got) != 1 {
		t.Fatalf("List while a step is stalled: got %v, want the other lease", got)
	}

	if err := stopped.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	// It has stopped for longer than its TTL: it was granted by the clock of when its step began.
	stopped.succeed(t)
	mustLock(t, d, owner("stalled"), time.Second)
}

// waiter waits without asking, and tells what it is told.
func waiter(task childTask) error {
	c, err := openChild(task)
	if err != nil {
		return err
	}
	o := owner(task.Name)
	told, _ := c.expect(o.ID)
	if a, err := c.Lock(context.Background(), wait(o, time.Minute, 30*time.Second)); err != nil || a.State != driver.Waiting {
		return fmt.Errorf("Lock: got %v, %v, want waiting", a.State, err)
	}
	<-c.recheck
	fmt.Println("waiting", o.ID)
	fmt.Println("granted", <-told)
	if task.Rounds > 0 {
		select {} // until it is killed
	}
	if found, err := c.Release(context.Background(), o); !found || err != nil {
		return fmt.Errorf("Release: got %v, %v, want true, nil", found, err)
	}
	return c.Close()
}

// TestPush: a grant reaches the waiter's process, though it does not ask, and first come is first
// served.
func TestPush(t *testing.T) {
	dir := t.TempDir()
	d := openReal(t, dir)
	o := owner("n")
	last := mustLock(t, d, o, time.Minute)
	const processes = 4
	var queue []*child
	var ids []string
	for range processes {
		c := start(t, childTask{Do: "waiter", Dir: dir, Name: "n"})
		ids = append(ids, strings.TrimPrefix(c.line(t), "waiting "))
		queue = append(queue, c)
	}
	mustState(t, d, try(owner("n"), time.Second), driver.Held, "W4")
	if got := sockets(t, d); len(got) != processes {
		t.Fatalf("sockets of %d waiting processes: got %v", processes, got)
	}
	mustRelease(t, d, o)
	for i, c := range queue {
		token, err := strconv.ParseUint(strings.TrimPrefix(c.line(t), "granted "), 10, 64)
		if err != nil || driver.Token(token) <= last {
			t.Fatalf("waiter %d (%s): told of token %d, %v, want more than %d (T1)", i, ids[i], token, err, last)
		}
		last = driver.Token(token)
		c.succeed(t)
	}
	if got := sockets(t, d); len(got) != 0 {
		t.Fatalf("sockets after Close: got %v, want none (L7)", got)
	}
	mustState(t, d, try(owner("n"), time.Second), driver.Granted, "L7: the last waiter released")
}

// TestSocketsOfTheDead: a killed waiter's socket goes, a living one's stays.
func TestSocketsOfTheDead(t *testing.T) {
	dir := t.TempDir()
	d := openReal(t, dir)
	o := owner("n")
	mustLock(t, d, o, time.Minute)
	dead := start(t, childTask{Do: "waiter", Dir: dir, Name: "n"})
	dead.line(t)
	living := start(t, childTask{Do: "waiter", Dir: dir, Name: "n"})
	living.line(t)
	dead.kill()
	if got := sockets(t, d); len(got) != 2 {
		t.Fatalf("sockets: got %v, want that of the dead and that of the living", got)
	}
	mustRelease(t, d, o) // grants to the dead one; the push goes nowhere
	openReal(t, dir)
	if got := sockets(t, d); len(got) != 1 {
		t.Fatalf("sockets after New: got %v, want that of the living", got)
	}
	if ended, err := d.ForceUnlock(t.Context(), o.Name); ended != 1 || err != nil {
		t.Fatalf("ForceUnlock: got %d, %v, want 1, nil", ended, err)
	}
	if line := living.line(t); !strings.HasPrefix(line, "granted ") {
		t.Fatalf("living waiter: got %q, want granted", line)
	}
	living.succeed(t)
}

// list prints how long the name's lease lives.
func list(task childTask) error {
	c, err := openChild(task)
	if err != nil {
		return err
	}
	return c.List(context.Background(), lockName(task.Name), func(h driver.Holding) bool {
		fmt.Println(h.Left.Milliseconds())
		return true
	})
}

// TestTimeNamespace: a process in another time namespace reads another CLOCK_BOOTTIME and agrees nevertheless.
func TestTimeNamespace(t *testing.T) {
	unshare, err := exec.LookPath("unshare")
	if err == nil {
		err = exec.Command(unshare, "--time", "--boottime", "1000", "true").Run()
	}
	if err != nil {
		t.Skipf("a time namespace needs unshare(1), root and Linux 5.6: %v", err)
	}
	dir := t.TempDir()
	d := openReal(t, dir)
	mustLock(t, d, owner("n"), time.Minute)
	for _, offset := range []string{"100000", "-100"} {
		c := start(t, childTask{Do: "list", Dir: dir, Name: "n"}, unshare, "--time", "--boottime", offset)
		left, err := strconv.Atoi(c.line(t))
		if err != nil || left > 60_000 || left < 30_000 {
			t.Fatalf("lease seen with CLOCK_BOOTTIME %s s off: got %d ms left, %v, want just under a minute (L1)", offset, left, err)
		}
		c.succeed(t)
	}
}

// fullDisk fills the file system and goes on. It runs in a mount namespace of its own.
func fullDisk(task childTask) error {
	if err := syscall.Mount("tmpfs", task.Dir, "tmpfs", 0, "size=256k"); err != nil {
		return err
	}
	c, err := openChild(task)
	if err != nil {
		return err
	}
	ctx := context.Background()
	held, waiting := owner("held"), owner("held")
	a, err := c.Lock(ctx, try(held, time.Minute))
	if err != nil || a.State != driver.Granted {
		return fmt.Errorf("Lock: got %v, %v, want granted", a.State, err)
	}
	fill, err := os.Create(filepath.Join(task.Dir, "fill"))
	if err != nil {
		return err
	}
	for err == nil {
		_, err = fill.Write(make([]byte, 4096))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("filling the disk: got %v, want ENOSPC", err)
	}

	if _, err := c.Lock(ctx, try(owner("new"), time.Minute)); !errors.Is(err, driver.ErrUnavailable) || !errors.Is(err, syscall.ENOSPC) {
		return fmt.Errorf("Lock of a new name on a full disk: got %v, want ErrUnavailable and ENOSPC (L8)", err)
	}
	// An entry that the file has no room for: the state stays as it was.
	r := wait(waiting, time.Minute, time.Minute)
	r.Holder = strings.Repeat("x", 8192)
	if _, err := c.Lock(ctx, r); !errors.Is(err, driver.ErrUnavailable) {
		return fmt.Errorf("Lock that needs room on a full disk: got %v, want ErrUnavailable (L8)", err)
	}
	if x := c.Extend(ctx, []driver.Extension{{Owner: held, TTL: time.Hour}})[0]; x.State != driver.Granted || x.Token != a.Token {
		return fmt.Errorf("Extend on a full disk: got %+v, want granted with token %d", x, a.Token)
	}
	if found, err := c.Release(ctx, held); !found || err != nil {
		return fmt.Errorf("Release on a full disk: got %v, %v, want true, nil", found, err)
	}
	if a, err := c.Lock(ctx, try(owner("held"), time.Minute)); err != nil || a.State != driver.Granted {
		return fmt.Errorf("Lock of a known name on a full disk: got %v, %v, want granted", a.State, err)
	}
	return c.Close()
}

// TestFullDisk: a full disk refuses new names and lets known ones go on.
func TestFullDisk(t *testing.T) {
	unshare, err := exec.LookPath("unshare")
	if err == nil {
		err = exec.Command(unshare, "--mount", "true").Run()
	}
	if err != nil {
		t.Skipf("a small file system needs unshare(1) and root: %v", err)
	}
	start(t, childTask{Do: "full", Dir: t.TempDir()}, unshare, "--mount").succeed(t)
}
