package file_test

import (
	"os"
	"testing"

	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/file"
)

func TestConformance(t *testing.T) {
	conformance.Run(t, conformance.Harness{
		Provider: "local",
		New: func(t testing.TB) *conformance.Backend {
			dir := memoryDir(t)
			open := func(t testing.TB) *file.Driver {
				d, err := file.New(dir, nil)
				if err != nil {
					t.Fatalf("New: got %v, want nil", err)
				}
				return d
			}
			return &conformance.Backend{
				Driver: func(t testing.TB) driver.Driver { return open(t) },
				URL:    "file://" + dir,
				Leftovers: func(t testing.TB, n driver.Name) []string {
					d := open(t)
					defer d.Close()
					entries, err := d.Entries(n)
					if err != nil {
						t.Fatalf("entries of %v: got %v, want nil", n, err)
					}
					return entries
				},
			}
		},
		Skips: map[conformance.Need]string{
			conformance.Wired:    "nothing is sent: processes meet in a directory",
			conformance.Server:   "there is none",
			conformance.Requests: "nothing is sent",
		},
	})
}

// memoryDir is a directory that is no longer there after the test, in memory if the system has such a place: the
// suite's TTLs are short, and flushing a busy disk can take longer.
func memoryDir(t testing.TB) string {
	const shm = "/dev/shm"
	if info, err := os.Stat(shm); err != nil || !info.IsDir() {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(shm, "fencelock-") //nolint:usetesting // t.TempDir is on the disk
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove %s: got %v, want nil", dir, err)
		}
	})
	return dir
}
