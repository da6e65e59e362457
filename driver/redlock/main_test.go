package redlock_test

import (
	"os"
	"testing"

	"github.com/fencelock/fencelock/conformance/worker"
)

func TestMain(m *testing.M) {
	worker.Main() // the suite's processes are this test binary
	os.Exit(m.Run())
}
