package servers

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// dieWithParent makes the kernel kill the process of cmd when the thread that starts it ends. It
// also puts the process into a group of its own, so that a Ctrl-C at the terminal reaches the test
// and not the server behind its back.
func dieWithParent(cmd *exec.Cmd) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	cmd.SysProcAttr.Setpgid = true
}

// stopPatience is how long freeze waits for the state "stopped"; then it is content if nothing can come before it.
const stopPatience = time.Second

// freeze stops root and all its descendants and returns when all their threads have stopped, or will before they run. Each
// process is asked for its children after it has stopped, when it cannot start any more. On an error
// it returns the processes that may have stopped.
//
// Descendants count because servers fork: Redis to save, Postgres for every connection, and there
// into sessions of their own, which is why a signal to a process group would miss them.
func freeze(root *os.Process) ([]int, error) {
	var tree []int
	// A generation at a time: where processors are wanted by many, each process takes a while to stop.
	for todo := []int{root.Pid}; len(todo) > 0; {
		var generation []int
		for _, pid := range todo {
			if err := signal(root, pid, syscall.SIGSTOP); err == nil {
				generation = append(generation, pid)
			} else if pid == root.Pid {
				if errors.Is(err, os.ErrProcessDone) {
					err = ErrNotRunning
				}
				return tree, err
			} // else it has ended meanwhile
		}
		tree = append(tree, generation...)
		sent := time.Now()
		for _, pid := range generation {
			state, err := awaitStop(pid, sent)
			if err != nil {
				return tree, err
			}
			if state == stateGone && pid == root.Pid {
				return tree, ErrNotRunning
			}
		}
		var err error
		if todo, err = childrenOf(generation...); err != nil {
			return tree, err
		}
	}
	return tree, nil
}

// awaitStop waits until a process that was sent SIGSTOP then has stopped, or does not run before it stops, or has ended.
func awaitStop(pid int, sent time.Time) (processState, error) {
	for {
		state, err := stateOf(pid)
		if err != nil || state != stateRunning {
			return state, err
		}
		if time.Since(sent) > stopPatience {
			stopping, err := isStopping(pid)
			if stopping || err != nil && !isGone(err) {
				return stateStopped, err
			}
		}
		if time.Since(sent) > signalTimeout {
			return state, fmt.Errorf("process %d still runs %v after SIGSTOP", pid, signalTimeout)
		}
		time.Sleep(pollInterval)
	}
}

// thaw lets the processes that freeze has stopped go on, the root last.
func thaw(root *os.Process, tree []int) error {
	var errs []error
	for i := len(tree) - 1; i >= 0; i-- {
		err := signal(root, tree[i], syscall.SIGCONT)
		if err != nil && tree[i] == root.Pid {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// killTree kills c and all its descendants and returns when they are gone.
func killTree(c *child) error {
	root := c.cmd.Process
	// Frozen first, so that the list of descendants is complete. If that fails what is known of it
	// is killed all the same.
	tree, _ := freeze(root)
	for i := len(tree) - 1; i >= 0; i-- {
		signal(root, tree[i], syscall.SIGKILL)
	}
	if err := root.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	if err := c.waitExited(); err != nil {
		return err
	}
	deadline := time.Now().Add(signalTimeout)
	for _, pid := range tree {
		if pid == root.Pid {
			continue
		}
		for {
			state, err := stateOf(pid)
			if err != nil {
				return err
			}
			if state == stateGone {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("process %d still there %v after SIGKILL", pid, signalTimeout)
			}
			time.Sleep(pollInterval)
		}
	}
	return nil
}

// signal sends sig to pid, which is root or one of its descendants. The root may have been waited
// for and its number given to another process; os.Process knows.
func signal(root *os.Process, pid int, sig syscall.Signal) error {
	if pid == root.Pid {
		return root.Signal(sig)
	}
	return syscall.Kill(pid, sig)
}

type processState int

const (
	stateRunning processState = iota // at least one thread runs or could
	stateStopped                     // all threads have stopped
	stateGone                        // ended; perhaps still a zombie
)

// stateOf looks at every thread: the file of the process itself speaks for its first thread only.
func stateOf(pid int) (processState, error) {
	dir := "/proc/" + strconv.Itoa(pid) + "/task/"
	tasks, err := os.ReadDir(dir)
	if isGone(err) {
		return stateGone, nil
	}
	if err != nil {
		return 0, err
	}
	result := stateGone
	for _, task := range tasks {
		letter, _, err := readStat(dir + task.Name() + "/stat")
		if isGone(err) {
			continue
		}
		if err != nil {
			return 0, err
		}
		switch letter {
		case 'Z', 'X':
		case 'T', 't':
			result = stateStopped
		default:
			return stateRunning, nil
		}
	}
	return result, nil
}

// isStopping reports whether a process that was sent SIGSTOP gets to none of its own code any more, though not all of its
// threads have stopped. That can last: a thread may sleep in the kernel where no signal wakes it, because of the disk or of
// a child, and one that is ready may wait long for a processor that is wanted by many.
func isStopping(pid int) (bool, error) {
	dir := "/proc/" + strconv.Itoa(pid) + "/"
	status, err := os.ReadFile(dir + "status")
	if err != nil {
		return false, err
	}
	// Nobody has taken the signal yet. Whoever runs next will do that first.
	if _, pending, ok := strings.Cut(string(status), "\nShdPnd:"); ok {
		pending, _, _ = strings.Cut(pending, "\n")
		set, err := strconv.ParseUint(strings.TrimSpace(pending), 16, 64)
		if err != nil {
			return false, fmt.Errorf("%sstatus: %w", dir, err)
		}
		if set&(1<<(syscall.SIGSTOP-1)) != 0 {
			return true, nil
		}
	}
	tasks, err := os.ReadDir(dir + "task")
	if err != nil {
		return false, err
	}
	for _, task := range tasks {
		letter, _, err := readStat(dir + "task/" + task.Name() + "/stat")
		if err != nil && !isGone(err) {
			return false, err
		}
		if err == nil && !strings.ContainsRune("TtZXD", rune(letter)) {
			return false, nil
		}
	}
	return true, nil
}

// childrenOf lists the processes whose parent is one of those.
func childrenOf(pids ...int) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var children []int
	for _, entry := range entries {
		child, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		_, parent, err := readStat("/proc/" + entry.Name() + "/stat")
		if isGone(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if slices.Contains(pids, parent) {
			children = append(children, child)
		}
	}
	return children, nil
}

// processesIn lists the processes whose working directory that is. It does not see those of other users, unless this process is root.
func processesIn(dir string) ([]int, error) {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, err
	}
	links, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, link := range links {
		if where, err := os.Readlink(link); err == nil && where == dir { // else it has ended, or is somebody else's
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(link)))
			if err != nil {
				return nil, err
			}
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// readStat returns state and parent from a /proc stat file: "pid (name) state parent ...", where
// the name may contain anything.
func readStat(file string) (state byte, parent int, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, 0, err
	}
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(fields) < 2 || len(fields[0]) != 1 {
		return 0, 0, fmt.Errorf("%s: unknown format", file)
	}
	parent, err = strconv.Atoi(string(fields[1]))
	return fields[0][0], parent, err
}

// isGone says whether a file under /proc could not be read because its process has ended.
func isGone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
}

// ReservePort chooses a free port of 127.0.0.1 and keeps it for the caller until release: a socket
// that is bound but does not listen hinders no server that sets SO_REUSEADDR, as all do, yet the
// kernel gives its port to nobody who asks for any. Dialling it is refused.
func ReservePort() (addr string, release func() error, err error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", nil, os.NewSyscallError("socket", err)
	}
	fail := func(call string, err error) (string, func() error, error) {
		syscall.Close(fd)
		return "", nil, os.NewSyscallError(call, err)
	}
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return fail("setsockopt", err)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return fail("bind", err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		return fail("getsockname", err)
	}
	port := name.(*syscall.SockaddrInet4).Port
	socket := os.NewFile(uintptr(fd), "reserved port") // a second Close harms nobody
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), socket.Close, nil
}
