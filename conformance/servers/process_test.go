//go:build linux

package servers

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
)

// spinEnv makes the test binary keep so many threads busy for ever.
const spinEnv = "FENCELOCK_TEST_SPIN"

const spinners = 8

func spin() {
	runtime.GOMAXPROCS(spinners)
	var running sync.WaitGroup
	for range spinners {
		running.Go(func() {
			for { //nolint:staticcheck // it spins on purpose
			}
		})
	}
	running.Wait()
}

// A thread stops when it is scheduled next, so a process with more busy threads than there are
// processors stops well after the signal was sent.
func TestFreezeWaitsForEveryThread(t *testing.T) {
	leavesNothing(t)
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), spinEnv+"=1")
	c, err := startChild(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer killTree(c)
	threads := func() []string {
		dirs, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return dirs
	}
	eventually(t, func() error {
		if n := len(threads()); n <= spinners {
			return fmt.Errorf("threads: got %d, want more than %d", n, spinners)
		}
		return nil
	})
	for range 5 {
		tree, err := freeze(cmd.Process)
		if err != nil {
			t.Fatal(err)
		}
		for _, task := range threads() {
			if letter, _, err := readStat(task + "/stat"); err != nil || letter != 'T' {
				t.Fatalf("%s after freeze: got state %q, %v, want T, stopped", task, letter, err)
			}
		}
		if err := thaw(cmd.Process, tree); err != nil {
			t.Fatal(err)
		}
	}
	if err := killTree(c); err != nil {
		t.Fatal(err)
	}
	if !c.hasExited() {
		t.Error("after killTree: got a process that has not ended")
	}
}

// deafEnv makes the test binary start so many processes which wait in the kernel where no signal but a deadly one wakes
// them, or be such a process if it is 0.
const deafEnv = "FENCELOCK_TEST_DEAF"

const deaf = 12

func beDeaf(n string) {
	if n == "0" {
		waitForChild()
	}
	for range deaf {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), deafEnv+"=0")
		dieWithParent(cmd)
		if err := cmd.Start(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	io.Copy(io.Discard, os.Stdin)
}

// waitForChild waits as vfork does, until the child ends.
func waitForChild() {
	runtime.LockOSThread()
	pid, _, errno := syscall.RawSyscall(syscall.SYS_CLONE, syscall.CLONE_VFORK|uintptr(syscall.SIGCHLD), 0, 0)
	if errno == 0 && pid == 0 { // the child: nothing of Go's runtime is there
		syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_PDEATHSIG, uintptr(syscall.SIGKILL), 0)
		for {
			syscall.RawSyscall(syscall.SYS_PPOLL, 0, 0, 0)
		}
	}
	os.Exit(1)
}

// A thread that sleeps uninterruptibly does not stop, but it does nothing either. Many of them are not waited for one by
// one.
func TestFreezeOfUninterruptibleSleep(t *testing.T) {
	leavesNothing(t)
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), deafEnv+"="+strconv.Itoa(deaf))
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	c, err := startChild(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer killTree(c)
	var sleepers, children []int
	eventually(t, func() error {
		if sleepers, err = childrenOf(cmd.Process.Pid); err == nil {
			children, err = childrenOf(sleepers...)
		}
		if err != nil || len(children) != deaf {
			return fmt.Errorf("children of %d sleepers: got %v, %v, want one each", len(sleepers), children, err)
		}
		return nil
	})
	tree, err := freeze(cmd.Process)
	if err != nil || len(tree) != 1+2*deaf {
		t.Fatalf("freeze: got %v, %v, want the process, its children and theirs", tree, err)
	}
	for i, pid := range tree {
		want := stateStopped
		if i >= 1 && i <= deaf {
			want = stateRunning
		}
		if state, err := stateOf(pid); err != nil || state != want {
			t.Errorf("process %d of the tree: got state %v, %v, want %v", i, state, err, want)
		}
	}
	if err := thaw(cmd.Process, tree); err != nil {
		t.Fatal(err)
	}
	if stopping, err := isStopping(tree[1]); err != nil || stopping {
		t.Errorf("after thaw: got stopping %v, %v, want not", stopping, err)
	}
}

func TestReservedPortIsGivenToNobody(t *testing.T) {
	addr, release, err := ReservePort()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := net.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial a reserved port: got %v, want connection refused", err)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatalf("listen at a reserved port: got %v, want nil", err)
	}
	l.Close()
	if _, err := net.Dial("tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial a reserved port: got %v, want connection refused", err)
	}
	// Released, the port can be had without SO_REUSEADDR; before, it cannot.
	bind := func() error {
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer syscall.Close(fd)
		_, port, _ := net.SplitHostPort(addr)
		n, _ := strconv.Atoi(port)
		return syscall.Bind(fd, &syscall.SockaddrInet4{Port: n, Addr: [4]byte{127, 0, 0, 1}})
	}
	if err := bind(); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("bind of a reserved port: got %v, want address in use", err)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	if err := bind(); err != nil {
		t.Errorf("bind of a released port: got %v, want nil", err)
	}
}

// The kernel sends the parent-death signal at the end of the thread, so a server started from a
// goroutine that takes its thread with it must have been started by another thread.
func TestRedisOutlivesTheThreadThatStartedIt(t *testing.T) {
	leavesNothing(t)
	type result struct {
		r      *Redis
		err    error
		thread int
	}
	results := make(chan result)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		r, err := StartRedis(t.Context(), nil)
		results <- result{r, err, syscall.Gettid()}
	}()
	got := <-results
	if got.err != nil {
		t.Fatal(got.err)
	}
	defer got.r.Close()
	if got.thread == os.Getpid() {
		t.Fatal("the goroutine ran on the main thread, which never ends")
	}
	eventually(t, func() error {
		if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", got.thread)); err == nil {
			return fmt.Errorf("thread %d has not ended", got.thread)
		}
		return nil
	})
	mustDo(t, got.r, "PONG", "PING")
	// The child may be dying: only its own state tells for sure.
	if err := got.r.Pause(); err != nil {
		t.Errorf("Pause after the end of the thread: got %v, want nil", err)
	}
}

// orphanEnv makes the test binary start a server, tell its process id and wait to be killed.
const orphanEnv = "FENCELOCK_TEST_ORPHAN"

func makeOrphan() {
	r, err := StartRedis(context.Background(), nil)
	if err == nil && os.Getenv(orphanEnv) == "paused" {
		err = r.Pause()
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(r.PID(), r.dir)
	io.Copy(io.Discard, os.Stdin)
	os.Exit(1)
}

func TestRedisDiesWithItsParent(t *testing.T) {
	for _, state := range []string{"running", "paused"} {
		t.Run(state, func(t *testing.T) {
			leavesNothing(t)
			program, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(program)
			cmd.Env = append(os.Environ(), orphanEnv+"="+state, "TMPDIR="+t.TempDir())
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			defer stdin.Close()
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var pid int
			var dir string
			line, _ := bufio.NewReader(stdout).ReadString('\n')
			_, scanErr := fmt.Sscan(line, &pid, &dir)
			alive, stateErr := stateOf(pid)
			cmd.Process.Kill()
			cmd.Wait()
			if scanErr != nil {
				t.Fatalf("the parent said %q: %v", line, scanErr)
			}
			if stateErr != nil || alive == stateGone {
				t.Fatalf("server before the death of its parent: got %v, %v, want alive", alive, stateErr)
			}
			eventually(t, func() error {
				if state, err := stateOf(pid); err != nil || state != stateGone {
					return fmt.Errorf("server %d after the death of its parent: got state %v, %v, want gone", pid, state, err)
				}
				return nil
			})
		})
	}
}
