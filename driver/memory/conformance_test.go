package memory_test

import (
	"testing"
	"time"

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

// TestOwnStore: drivers made without a store share nothing.
func TestOwnStore(t *testing.T) {
	r := driver.Request{Owner: driver.Owner{Name: driver.Name{Kind: driver.KindLock, Name: "x"}, ID: "a"}, TTL: time.Minute, Limit: 1}
	for range 2 {
		d := memory.New(nil)
		defer d.Close()
		if a, err := d.Lock(t.Context(), r); err != nil || a.State != driver.Granted {
			t.Errorf("Lock on a driver with a store of its own: got %v and error %v, want granted (L1)", a.State, err)
		}
		r.ID += "b"
	}
}
