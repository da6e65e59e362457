package memory_test

import (
	"testing"

	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/memory"
)

func TestConformance(t *testing.T) {
	conformance.Run(t, conformance.Harness{
		Provider: "local",
		New: func(testing.TB) *conformance.Backend {
			store := memory.NewStore()
			return &conformance.Backend{
				Driver:    func(testing.TB) driver.Driver { return memory.New(store) },
				Leftovers: func(_ testing.TB, n driver.Name) []string { return store.Entries(n) },
			}
		},
		Skips: map[conformance.Need]string{
			conformance.URL:      "the store lives in this process",
			conformance.Wired:    "nothing is sent",
			conformance.Server:   "there is none",
			conformance.Requests: "nothing is sent",
		},
	})
}
