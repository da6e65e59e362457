package file_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/fencelock/fencelock"
	"github.com/fencelock/fencelock/driver/file"
)

// One process of many on this machine runs the job; the others find it held.
func ExampleNew() {
	dir, err := os.MkdirTemp("", "locks") // in earnest a directory that no cleaner sweeps: /var/lib/myapp/locks
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)

	d, err := file.New(dir, nil)
	if err != nil {
		log.Fatal(err)
	}
	client, err := fencelock.New(d)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()

	err = fencelock.Do(context.Background(), client, "nightly-report", func(ctx context.Context, l *fencelock.Lease) error {
		fmt.Println("running", l.Name())
		return ctx.Err()
	})
	fmt.Println(err)
	// Output:
	// running nightly-report
	// <nil>
}
