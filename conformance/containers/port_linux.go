package containers

import (
	"net/netip"
	"os"
	"syscall"
)

// A port is a TCP port of 127.0.0.1 that is kept for one server while the server is down.
//
// Between a kill and the next start nobody listens on it, and the system could give it to another process or to an
// outgoing connection, even to one that dials this very port and is then connected to itself; the engine could not
// publish it any more. A socket that is bound but does not listen prevents that: a dial is refused as it should be,
// the system picks the port for nobody, and the engine can still take it, since both set SO_REUSEADDR and only one
// listens.
type port struct {
	addr netip.AddrPort
	fd   int
}

// holdPort takes a free port.
func holdPort() (*port, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	fail := func(call string, err error) (*port, error) {
		syscall.Close(fd)
		return nil, os.NewSyscallError(call, err)
	}
	if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
		return fail("setsockopt", err)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: loopback.As4()}); err != nil {
		return fail("bind", err)
	}
	bound, err := syscall.Getsockname(fd)
	if err != nil {
		return fail("getsockname", err)
	}
	return &port{netip.AddrPortFrom(loopback, uint16(bound.(*syscall.SockaddrInet4).Port)), fd}, nil
}

// release gives the port up.
func (p *port) release() error { return os.NewSyscallError("close", syscall.Close(p.fd)) }
