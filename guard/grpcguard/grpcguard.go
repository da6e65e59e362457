// Package grpcguard carries fencing tokens over gRPC: a client sends the token of its lease in the metadata fencing-token with
// every call, and a server refuses those that are stale, with status FailedPrecondition. It is what guard/httpguard is for
// HTTP.
//
// A server that is one process can keep the marks in a [guard.Guard]. One that has several must compare where the state
// is, for example with guard/pgguard in the transaction of the write: then the interceptor of [Server] only hands on the
// token, by [FromContext], and the handler returns what [Error] makes of the guard's error.
package grpcguard

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/fencelock/fencelock/guard"
)

// MetadataKey is the key of the metadata. Its value is the token in decimal.
const MetadataKey = "fencing-token"

// StaleReason and Domain are the reason and the domain of the google.rpc.ErrorInfo that comes with status
// FailedPrecondition.
const (
	StaleReason = "STALE_FENCING_TOKEN"
	Domain      = "fencelock"
)

// Lease is what a call is made under, such as a *fencelock.Lease.
type Lease interface {
	Token() guard.Token
	Err() error
}

type leaseKey struct{}

// WithLease makes the calls under the context, by a client with the interceptors of this package, be made under the lease.
func WithLease(ctx context.Context, l Lease) context.Context {
	return context.WithValue(ctx, leaseKey{}, l)
}

// outgoing adds the token of the context's lease, if it has one.
func outgoing(ctx context.Context) (context.Context, error) {
	l, ok := ctx.Value(leaseKey{}).(Lease)
	if !ok {
		return ctx, nil
	}
	token := l.Token()
	err := guard.CheckToken(token)
	if err == nil {
		err = l.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("guard: call not made: %w", err)
	}
	md, _ := metadata.FromOutgoingContext(ctx)
	md = md.Copy()
	md.Set(MetadataKey, token.String())
	return metadata.NewOutgoingContext(ctx, md), nil
}

// UnaryClientInterceptor makes calls under the lease of [WithLease]; those without one are passed on as they are. If the
// lease has ended nothing is sent, and the error is that of the lease. A refusal by the server becomes an error that
// matches [guard.ErrStale], and still carries the status.
func UnaryClientInterceptor(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	ctx, err := outgoing(ctx)
	if err != nil {
		return err
	}
	return Check(invoke(ctx, method, req, reply, cc, opts...))
}

// StreamClientInterceptor is UnaryClientInterceptor for streams. The token is sent once, when the stream is opened. What
// the stream answers is for [Check].
func StreamClientInterceptor(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	ctx, err := outgoing(ctx)
	if err != nil {
		return nil, err
	}
	s, err := open(ctx, desc, cc, method, opts...)
	return s, Check(err)
}

// staleError is a status that matches guard.ErrStale.
type staleError struct{ error }

func (e *staleError) Unwrap() []error { return []error{guard.ErrStale, e.error} }

func (e *staleError) GRPCStatus() *status.Status { return status.Convert(e.error) }

// Check makes an error matching [guard.ErrStale] of one by which a server refused the token. Any other one, and nil, is
// answered as it is.
func Check(err error) error {
	s, ok := status.FromError(err)
	if err == nil || !ok || s.Code() != codes.FailedPrecondition {
		return err
	}
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetReason() == StaleReason && info.GetDomain() == Domain {
			return &staleError{err}
		}
	}
	return err
}

// Server lets calls with a token through.
type Server struct {
	// Guard, if not nil, admits the calls: those for one resource one at a time, each for as long as its handler takes.
	Guard *guard.Guard

	// Resource names what a call writes to, for Guard; the request is nil for streams. A call for which it
	// answers "" changes nothing: it needs no token and is not compared. Default is the full name of the method.
	Resource func(ctx context.Context, method string, request any) string
}

func (s *Server) resource(ctx context.Context, method string, request any) string {
	if s.Resource == nil {
		return method
	}
	return s.Resource(ctx, method, request)
}

// do calls handle under the token of the call.
func (s *Server) do(ctx context.Context, resource string, handle func(context.Context) error) error {
	if resource == "" {
		return handle(ctx)
	}
	token, err := parse(metadata.ValueFromIncomingContext(ctx, MetadataKey))
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	ctx = context.WithValue(ctx, tokenKey{}, token)
	if s.Guard == nil {
		return handle(ctx)
	}
	var handled error
	if err := s.Guard.Do(resource, token, func() error {
		handled = handle(ctx)
		return nil
	}); err != nil {
		return Error(err)
	}
	return handled
}

// Unary is the interceptor for calls with one request. Without a token, or with what is none, it answers status
// InvalidArgument; if Guard refuses it, FailedPrecondition with a google.rpc.ErrorInfo.
func (s *Server) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (reply any, err error) {
	err = s.do(ctx, s.resource(ctx, info.FullMethod, req), func(ctx context.Context) (err error) {
		reply, err = handler(ctx, req)
		return err
	})
	return reply, err
}

// Stream is the interceptor for streams, as Unary. The token is compared when a stream is opened; with a Guard, others for
// its resource wait until it ends.
func (s *Server) Stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx := stream.Context()
	return s.do(ctx, s.resource(ctx, info.FullMethod, nil), func(ctx context.Context) error {
		return handler(srv, &serverStream{stream, ctx})
	})
}

type serverStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *serverStream) Context() context.Context { return s.ctx }

func parse(values []string) (guard.Token, error) {
	if len(values) == 0 {
		return 0, errors.New("the call needs metadata " + MetadataKey)
	}
	t, err := guard.ParseToken(values[0])
	if err != nil || len(values) > 1 {
		return 0, errors.New("the metadata " + MetadataKey + " must be there once, with the number of a token")
	}
	return t, nil
}

type tokenKey struct{}

// FromContext answers the token of a call that a [Server] let through.
func FromContext(ctx context.Context) (guard.Token, bool) {
	t, ok := ctx.Value(tokenKey{}).(guard.Token)
	return t, ok
}

// Error is what a handler returns for an error of a guard: status FailedPrecondition with a google.rpc.ErrorInfo if err
// matches [guard.ErrStale]. Any other error becomes Internal, and its text is not sent. Nil stays nil.
func Error(err error) error {
	switch {
	case err == nil:
		return nil
	case !errors.Is(err, guard.ErrStale):
		return status.Error(codes.Internal, "internal error")
	}
	s := status.New(codes.FailedPrecondition, "A later holder of the lock has been here. Do not repeat the call.")
	detailed, err := s.WithDetails(&errdetails.ErrorInfo{Reason: StaleReason, Domain: Domain})
	if err != nil {
		return s.Err()
	}
	return detailed.Err()
}
