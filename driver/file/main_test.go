package file

import (
	"os"
	"testing"

	"github.com/fencelock/fencelock/conformance/worker"
)

// childMain is set where the tests have processes of their own.
var childMain = func() {}

func TestMain(m *testing.M) {
	worker.Main() // the suite's processes are this test binary
	childMain()
	os.Exit(m.Run())
}
