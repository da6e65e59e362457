package servers_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"syscall"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
)

// A server that is killed and comes back has kept what it had on disk; started empty it has
// forgotten everything.
func ExampleStartRedis() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	redis, err := servers.StartRedis(ctx, &servers.RedisOptions{AppendFsync: "always"})
	if err != nil {
		log.Fatal(err)
	}
	defer redis.Close()

	check := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	get := func() {
		value, err := redis.Do(ctx, "GET", "k")
		check(err)
		fmt.Println(value)
	}
	_, err = redis.Do(ctx, "SET", "k", "v")
	check(err)

	check(redis.Kill())
	check(redis.Start(ctx))
	get()

	check(redis.Kill())
	check(redis.StartEmpty(ctx))
	get()
	// Output:
	// v
	// <nil>
}

// A request is executed, but its reply is lost and the connection reset.
func ExampleProxy_DropNextReply() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	redis, err := servers.StartRedis(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer redis.Close()
	proxy, err := servers.NewProxy(redis.Addr())
	if err != nil {
		log.Fatal(err)
	}
	defer proxy.Close()

	client, err := net.Dial("tcp", proxy.Addr())
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	proxy.DropNextReply(nil)
	fmt.Fprintf(client, "INCR counter\r\n")
	_, err = client.Read(make([]byte, 1))
	fmt.Println("connection reset:", errors.Is(err, syscall.ECONNRESET))
	fmt.Println("replies dropped:", proxy.Stats().ToClient.Dropped)

	value, err := redis.Do(ctx, "GET", "counter")
	fmt.Println("counter:", value, err)
	// Output:
	// connection reset: true
	// replies dropped: 1
	// counter: 1 <nil>
}
