package servers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"sync"
)

// An EtcdNetwork lies between the members of an etcd cluster, inside this process: in front of each member is a proxy that knows
// which member a request comes from. So one member can be cut off from all others, in both directions, while its clients
// reach it, which a [Proxy] in front of it cannot do: members talk over connections that both have opened.
//
// All methods are safe for concurrent use.
type EtcdNetwork struct {
	listeners []net.Listener
	servers   []*http.Server
	running   sync.WaitGroup

	mu     sync.Mutex
	member int           // who is cut off,
	id     string        // and its id, as members send it
	healed chan struct{} // nil while nobody is
	closed bool
}

// NewEtcdNetwork makes one for members that listen for each other at these addresses. They need not be there yet.
func NewEtcdNetwork(members []string) (*EtcdNetwork, error) {
	n := &EtcdNetwork{}
	for i, addr := range members {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, errors.Join(fmt.Errorf("servers: network of etcd: %w", err), n.Close())
		}
		silent := log.New(io.Discard, "", 0)
		path := &etcdPath{network: n, to: i, next: &http.Transport{DisableCompression: true}}
		proxy := &httputil.ReverseProxy{
			Rewrite: func(r *httputil.ProxyRequest) {
				r.Out.URL.Scheme, r.Out.URL.Host = "http", addr
			},
			Transport:     path,
			FlushInterval: -1, // a message waits for nothing
			ErrorHandler:  func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
			ErrorLog:      silent,
		}
		server := &http.Server{ErrorLog: silent, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { //nolint:gosec // no header is slow in here
			n.running.Add(1)
			defer n.running.Done()
			proxy.ServeHTTP(w, r)
		})}
		n.listeners, n.servers = append(n.listeners, l), append(n.servers, server)
		n.running.Go(func() {
			_ = server.Serve(l) // until Close
			path.next.CloseIdleConnections()
		})
	}
	return n, nil
}

// Addrs are the addresses by which members reach each other through the network, in their order.
func (n *EtcdNetwork) Addrs() (addrs []string) {
	for _, l := range n.listeners {
		addrs = append(addrs, l.Addr().String())
	}
	return addrs
}

// Isolate cuts a member off from all others until Heal: whatever one sends vanishes. addr is where the member serves clients, of
// which the network knows nothing; it is asked for its id.
func (n *EtcdNetwork) Isolate(ctx context.Context, member int, addr string) error {
	text, err := EtcdCall(ctx, addr, "/v3/maintenance/status", "{}")
	if err != nil {
		return fmt.Errorf("servers: network of etcd: isolate: %w", err)
	}
	var status struct {
		Header struct {
			Member uint64 `json:"member_id,string"`
		}
	}
	if err := json.Unmarshal(text, &status); err != nil {
		return fmt.Errorf("servers: network of etcd: isolate: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.closed:
		return ErrClosed
	case n.healed != nil:
		return errors.New("servers: network of etcd: isolate: a member is cut off already")
	}
	n.member, n.id, n.healed = member, strconv.FormatUint(status.Header.Member, 16), make(chan struct{})
	return nil
}

// Heal ends what Isolate began. A connection that has lost something is reset.
func (n *EtcdNetwork) Heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.healed != nil {
		close(n.healed)
		n.healed = nil
	}
}

// Close ends the network and all its connections.
func (n *EtcdNetwork) Close() error {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.Heal()
	var errs []error
	for _, s := range n.servers {
		errs = append(errs, s.Close())
	}
	n.running.Wait()
	return errors.Join(errs...)
}

var errIsolated = errors.New("a member is cut off")

// pass lets a message between members through, or holds it up until Heal or the end of ctx and fails then.
func (n *EtcdNetwork) pass(ctx context.Context, from string, to int) error {
	n.mu.Lock()
	healed := n.healed
	cut := healed != nil && (to == n.member || from == n.id)
	n.mu.Unlock()
	if !cut {
		return nil
	}
	select {
	case <-healed:
	case <-ctx.Done():
	}
	return errIsolated
}

// etcdPath is the way to one member.
type etcdPath struct {
	network *EtcdNetwork
	to      int
	next    *http.Transport
}

// RoundTrip implements [http.RoundTripper].
func (p *etcdPath) RoundTrip(r *http.Request) (*http.Response, error) {
	pass := func() error { return p.network.pass(r.Context(), r.Header.Get("X-Server-From"), p.to) }
	if err := pass(); err != nil {
		return nil, err
	}
	resp, err := p.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	resp.Body = &etcdStream{resp.Body, pass}
	return resp, nil
}

// etcdStream is what a member answers: the messages of hours, most of the time.
type etcdStream struct {
	io.ReadCloser
	pass func() error
}

func (s *etcdStream) Read(b []byte) (int, error) {
	n, err := s.ReadCloser.Read(b)
	if cut := s.pass(); cut != nil {
		return 0, cut
	}
	return n, err
}
