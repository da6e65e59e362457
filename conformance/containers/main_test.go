package containers

import (
	"os"
	"testing"

	"github.com/fencelock/fencelock/lab"
)

func TestMain(m *testing.M) {
	lab.Main() // the processes of the suite and of the lab are this test binary
	os.Exit(m.Run())
}
