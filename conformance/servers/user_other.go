//go:build !unix

package servers

import "os/exec"

// A credential is the user as whom programs run that refuse root; here always this process's own.
type credential struct{}

func unprivileged(string) (*credential, error) { return nil, nil }

func (c *credential) String() string { return "" }

func (c *credential) own(string) error { return nil }

func (c *credential) become(*exec.Cmd) {}
