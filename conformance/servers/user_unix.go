//go:build unix

package servers

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// A credential is the user as whom programs run that refuse root; nil for this process's own.
type credential struct{ uid, gid uint32 }

func unprivileged(name string) (*credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	if name == "" {
		name = "postgres"
	}
	u, err := user.Lookup(name)
	if err != nil {
		return nil, err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return nil, err
	}
	return &credential{uint32(uid), uint32(gid)}, nil
}

func (c *credential) String() string {
	if c == nil {
		return ""
	}
	return fmt.Sprint(" as ", c.uid)
}

// own gives the user a directory and the way to it through its parent.
func (c *credential) own(dir string) error {
	if c == nil {
		return nil
	}
	return errors.Join(os.Chmod(filepath.Dir(dir), 0o711), os.Chown(dir, int(c.uid), int(c.gid)))
}

// become makes the command run as the user.
func (c *credential) become(cmd *exec.Cmd) {
	if c != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: c.uid, Gid: c.gid}}
	}
}
