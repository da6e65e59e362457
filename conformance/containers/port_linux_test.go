package containers

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
)

// A held port is given to nobody who lets the system choose, yet the engine can listen at it.
func TestHeldPort(t *testing.T) {
	p, err := holdPort()
	must(t, "hold a port", err)
	_, err = connectFrom(p.addr, p.addr)
	if errors.Is(err, syscall.ENOPROTOOPT) {
		t.Skip("only Linux 6.3 or later lets a test choose the ports to choose from")
	}
	if !errors.Is(err, syscall.EADDRNOTAVAIL) {
		t.Errorf("connect with only the held port to choose from: got %v, want %v", err, syscall.EADDRNOTAVAIL)
	}
	_, err = net.Dial("tcp", p.addr.String())
	mustFail(t, "dial of a held port", err, syscall.ECONNREFUSED)
	l, err := net.Listen("tcp", p.addr.String())
	must(t, "listen at a held port", err)
	must(t, "stop to listen", l.Close())

	must(t, "release", p.release())
	local, err := connectFrom(p.addr, p.addr)
	must(t, "connect with only the released port to choose from", err)
	if local != p.addr {
		t.Errorf("connect with only the released port to choose from: got %v, want the port connected to itself", local)
	}
}

// connectFrom connects to the address while the system may choose only the port of from as the local one, and returns
// the local address it chose.
func connectFrom(from, to netip.AddrPort) (netip.AddrPort, error) {
	const ipLocalPortRange = 51 // IP_LOCAL_PORT_RANGE, Linux 6.3
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer syscall.Close(fd)
	port := int(from.Port())
	if err := syscall.SetsockoptInt(fd, syscall.IPPROTO_IP, ipLocalPortRange, port<<16|port); err != nil {
		return netip.AddrPort{}, err
	}
	if err := syscall.Connect(fd, &syscall.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); err != nil {
		return netip.AddrPort{}, err
	}
	bound, err := syscall.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}, err
	}
	return netip.AddrPortFrom(to.Addr(), uint16(bound.(*syscall.SockaddrInet4).Port)), nil
}
