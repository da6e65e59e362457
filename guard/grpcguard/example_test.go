package grpcguard_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/memory"
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/guard/grpcguard"
)

// A server refuses what comes from a holder that somebody has succeeded.
func Example() {
	at, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	guarded := &grpcguard.Server{Guard: new(guard.Guard)}
	server := grpc.NewServer(grpc.UnaryInterceptor(guarded.Unary), grpc.StreamInterceptor(guarded.Stream))
	grpc_health_v1.RegisterHealthServer(server, health.NewServer()) // stands for a service that writes
	go server.Serve(at)
	defer server.Stop()
	conn, err := grpc.Dial(at.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()), //nolint:staticcheck // NewClient is newer than the oldest version
		grpc.WithUnaryInterceptor(grpcguard.UnaryClientInterceptor), grpc.WithStreamInterceptor(grpcguard.StreamClientInterceptor))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	call := func(ctx context.Context, lease grpcguard.Lease) error {
		_, err := grpc_health_v1.NewHealthClient(conn).Check(grpcguard.WithLease(ctx, lease), new(grpc_health_v1.HealthCheckRequest))
		return err
	}

	locks, err := fencelock.New(memory.New(memory.NewStore()))
	if err != nil {
		log.Fatal(err)
	}
	defer locks.Close()
	ctx := context.Background()
	first, err := locks.Lock(ctx, "orders/7")
	if err != nil {
		log.Fatal(err)
	}
	late := first.Token() // this caller will be paused, and does not know that its lease ends
	if err := first.Release(ctx); err != nil {
		log.Fatal(err)
	}
	second, err := locks.Lock(ctx, "orders/7")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("second:", call(ctx, second))
	fmt.Println("first is stale:", errors.Is(call(ctx, held(late)), guard.ErrStale))
	// Output:
	// second: <nil>
	// first is stale: true
}
