package httpguard_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/memory"
	"github.com/fencelock/fencelock/guard"
	"github.com/fencelock/fencelock/guard/httpguard"
)

// A server refuses what comes from a holder that somebody has succeeded.
func Example() {
	server := httptest.NewServer(&httpguard.Handler{
		Next:  http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Println("written") }),
		Guard: new(guard.Guard),
	})
	defer server.Close()
	put := func(lease httpguard.Lease) error {
		client := &http.Client{Transport: &httpguard.Transport{Lease: lease}}
		r, err := http.NewRequest(http.MethodPut, server.URL+"/orders/7", strings.NewReader("paid"))
		if err != nil {
			return err
		}
		answer, err := client.Do(r)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		return httpguard.Check(answer)
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
	late := first.Token() // this writer will be paused, and does not know that its lease ends
	if err := first.Release(ctx); err != nil {
		log.Fatal(err)
	}
	second, err := locks.Lock(ctx, "orders/7")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("second:", put(second))
	fmt.Println("first is stale:", errors.Is(put(held(late)), guard.ErrStale))
	// Output:
	// written
	// second: <nil>
	// first is stale: true
}
