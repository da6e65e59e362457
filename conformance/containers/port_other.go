//go:build !linux

package containers

import (
	"net"
	"net/netip"
)

// A port is a TCP port of 127.0.0.1. Only Linux can keep it while the server is down.
type port struct{ addr netip.AddrPort }

// holdPort finds a port that is free now.
func holdPort() (*port, error) {
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(loopback, 0)))
	if err != nil {
		return nil, err
	}
	return &port{l.Addr().(*net.TCPAddr).AddrPort()}, l.Close()
}

func (p *port) release() error { return nil }
