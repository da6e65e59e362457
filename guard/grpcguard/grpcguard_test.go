package grpcguard_test

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/memory"
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/guard/grpcguard"
	"github.com/fencelock/fencelock/guard/guardtest"
)

// store is a service with values by the metadata "resource": Put sets one, Raise sets none, Get answers one, and Watch is a
// stream that sets one and answers it.
type store struct {
	mu     sync.Mutex
	values map[string]string
	tokens []guard.Token
}

func resourceOf(ctx context.Context) string {
	return strings.Join(metadata.ValueFromIncomingContext(ctx, "resource-bin"), "")
}

func (s *store) call(ctx context.Context, method, value string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t, ok := grpcguard.FromContext(ctx); ok {
		s.tokens = append(s.tokens, t)
	}
	if method == "Put" {
		s.values[resourceOf(ctx)] = value
	}
	return s.values[resourceOf(ctx)]
}

func service(call func(ctx context.Context, method, value string) (string, error)) *grpc.ServiceDesc {
	d := &grpc.ServiceDesc{ServiceName: "store", HandlerType: (*any)(nil)}
	for _, method := range []string{"Put", "Raise", "Get"} {
		d.Methods = append(d.Methods, grpc.MethodDesc{MethodName: method, Handler: func(srv any, ctx context.Context, dec func(any) error, intercept grpc.UnaryServerInterceptor) (any, error) {
			in := new(wrapperspb.StringValue)
			if err := dec(in); err != nil {
				return nil, err
			}
			return intercept(ctx, in, &grpc.UnaryServerInfo{Server: srv, FullMethod: "/store/" + method}, func(ctx context.Context, _ any) (any, error) {
				v, err := call(ctx, method, in.GetValue())
				return wrapperspb.String(v), err
			})
		}})
	}
	d.Streams = []grpc.StreamDesc{{StreamName: "Watch", ServerStreams: true, ClientStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
		in := new(wrapperspb.StringValue)
		if err := s.RecvMsg(in); err != nil {
			return err
		}
		v, err := call(s.Context(), "Put", in.GetValue())
		if err != nil {
			return err
		}
		return s.SendMsg(wrapperspb.String(v))
	}}}
	return d
}

func newStore() *store { return &store{values: make(map[string]string)} }

func (s *store) handle(ctx context.Context, method, value string) (string, error) {
	return s.call(ctx, method, value), nil
}

// written names the resource of what writes.
func written(ctx context.Context, method string, _ any) string {
	if method == "/store/Get" {
		return ""
	}
	return "r" + resourceOf(ctx)
}

// serve runs a server and answers a connection to it.
func serve(t testing.TB, g *guard.Guard, d *grpc.ServiceDesc) *grpc.ClientConn {
	t.Helper()
	at, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	guarded := &grpcguard.Server{Guard: g, Resource: written}
	s := grpc.NewServer(grpc.UnaryInterceptor(guarded.Unary), grpc.StreamInterceptor(guarded.Stream))
	s.RegisterService(d, nil)
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(at) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	c, err := grpc.Dial(at.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()), //nolint:staticcheck // NewClient is newer than the oldest version
		grpc.WithUnaryInterceptor(grpcguard.UnaryClientInterceptor), grpc.WithStreamInterceptor(grpcguard.StreamClientInterceptor))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// held is a lease with a token.
type held guard.Token

func (h held) Token() guard.Token { return guard.Token(h) }
func (h held) Err() error         { return nil }

type writer struct {
	c        *grpc.ClientConn
	resource string
}

func (w writer) ask(ctx context.Context, method, value string) (string, error) {
	out := new(wrapperspb.StringValue)
	err := w.c.Invoke(metadata.AppendToOutgoingContext(ctx, "resource-bin", w.resource), "/store/"+method, wrapperspb.String(value), out)
	return out.GetValue(), err
}

func (w writer) Write(ctx context.Context, t guard.Token, value string) error {
	_, err := w.ask(grpcguard.WithLease(ctx, held(t)), "Put", value)
	return err
}

func (w writer) Raise(ctx context.Context, t guard.Token) error {
	_, err := w.ask(grpcguard.WithLease(ctx, held(t)), "Raise", "")
	return err
}

func (w writer) Read(ctx context.Context) (string, error) { return w.ask(ctx, "Get", "") }

// stream writes by a stream.
type stream struct{ writer }

func (w stream) Write(ctx context.Context, t guard.Token, value string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ctx = grpcguard.WithLease(metadata.AppendToOutgoingContext(ctx, "resource-bin", w.resource), held(t))
	s, err := w.c.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/store/Watch")
	if err != nil {
		return err
	}
	_ = s.SendMsg(wrapperspb.String(value)) // RecvMsg tells what the server answered
	return grpcguard.Check(s.RecvMsg(new(wrapperspb.StringValue)))
}

func TestGuard(t *testing.T) {
	c := serve(t, new(guard.Guard), service(newStore().handle))
	t.Run("Unary", func(t *testing.T) {
		guardtest.Run(t, guardtest.Harness{Open: func(t testing.TB, resource string) guardtest.Writer { return writer{c, "u" + resource} }})
	})
	t.Run("Stream", func(t *testing.T) {
		guardtest.Run(t, guardtest.Harness{Open: func(t testing.TB, resource string) guardtest.Writer { return stream{writer{c, "s" + resource}} }})
	})
}

// TestGuardBehind compares where the state is, behind an interceptor that has no guard.
func TestGuardBehind(t *testing.T) {
	var g guard.Guard
	s := newStore()
	c := serve(t, nil, service(func(ctx context.Context, method, value string) (out string, err error) {
		token, ok := grpcguard.FromContext(ctx)
		if !ok {
			return s.handle(ctx, method, value)
		}
		err = g.Do(resourceOf(ctx), token, func() error {
			out = s.call(ctx, method, value)
			return nil
		})
		return out, grpcguard.Error(err)
	}))
	guardtest.Run(t, guardtest.Harness{Open: func(t testing.TB, resource string) guardtest.Writer { return writer{c, resource} }})
}

// TestAnswers is what a client in any language sees.
func TestAnswers(t *testing.T) {
	var g guard.Guard
	if err := g.Raise("ra", 42); err != nil {
		t.Fatal(err)
	}
	s := newStore()
	w := writer{serve(t, &g, service(s.handle)), "a"}
	for name, test := range map[string]struct {
		method string
		tokens []string
		code   codes.Code
	}{
		"Stale":       {"Put", []string{"41"}, codes.FailedPrecondition},
		"Missing":     {"Put", nil, codes.InvalidArgument},
		"Empty":       {"Put", []string{""}, codes.InvalidArgument},
		"Text":        {"Put", []string{"4x"}, codes.InvalidArgument},
		"Zero":        {"Put", []string{"0"}, codes.InvalidArgument},
		"TooGreat":    {"Put", []string{"9007199254740992"}, codes.InvalidArgument},
		"Twice":       {"Put", []string{"42", "43"}, codes.InvalidArgument},
		"Admitted":    {"Put", []string{"42"}, codes.OK},
		"ReadOfStale": {"Get", []string{"41"}, codes.OK},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			for _, token := range test.tokens {
				ctx = metadata.AppendToOutgoingContext(ctx, grpcguard.MetadataKey, token)
			}
			_, err := w.ask(ctx, test.method, "x")
			if status.Code(err) != test.code || errors.Is(err, guard.ErrStale) != (test.code == codes.FailedPrecondition) {
				t.Fatalf("answer: got %v, want status %v, and ErrStale for FailedPrecondition only", err, test.code)
			}
		})
	}
	if len(s.tokens) != 1 || s.tokens[0] != 42 {
		t.Fatalf("tokens that the handler saw: got %v, want 42", s.tokens)
	}
}

// TestOtherErrors are no stale token, and what a guard's error tells beside is not sent.
func TestOtherErrors(t *testing.T) {
	other := status.Error(codes.FailedPrecondition, "the order is closed")
	if err := grpcguard.Check(other); err != other || errors.Is(err, guard.ErrStale) {
		t.Fatalf("Check of another failed precondition: got %v, want it as it is", err)
	}
	if err := grpcguard.Check(nil); err != nil {
		t.Fatalf("Check of nil: got %v", err)
	}
	if err := grpcguard.Error(errors.New("password")); status.Code(err) != codes.Internal || strings.Contains(err.Error(), "password") {
		t.Fatalf("Error of an unknown error: got %v, want Internal without its text", err)
	}
	if err := grpcguard.Error(nil); err != nil {
		t.Fatalf("Error of nil: got %v", err)
	}
}

// TestNothingIsSentAfterTheLease ends.
func TestNothingIsSentAfterTheLease(t *testing.T) {
	c, err := fencelock.New(memory.New(memory.NewStore()))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	l, err := c.TryLock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	s := newStore()
	w := writer{serve(t, nil, service(s.handle)), "a"}
	put := func(l grpcguard.Lease) error {
		// A token that was already there is replaced.
		ctx := metadata.AppendToOutgoingContext(t.Context(), grpcguard.MetadataKey, strconv.Itoa(1))
		_, err := w.ask(grpcguard.WithLease(ctx, l), "Put", "x")
		return err
	}
	if err := put(l); err != nil {
		t.Fatalf("call under the lease: got %v, want nil", err)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := put(l); !errors.Is(err, fencelock.ErrReleased) {
		t.Fatalf("call after Release: got %v, want ErrReleased", err)
	}
	if err := put(held(0)); !errors.Is(err, driver.ErrInvalid) {
		t.Fatalf("call without a token: got %v, want ErrInvalid", err)
	}
	if len(s.tokens) != 1 || s.tokens[0] != l.Token() {
		t.Fatalf("tokens that the server saw: got %v, want that of the lease once", s.tokens)
	}
}
