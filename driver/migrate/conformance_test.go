package migrate_test

import (
	"testing"

	"github.com/fencelock/fencelock/conformance"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/memory"
	"github.com/fencelock/fencelock/driver/migrate"
)

// TestConformance runs the suite between two stores in memory. Phase to is phase from on the other backend, and takes as long.
func TestConformance(t *testing.T) {
	for _, phase := range []migrate.Phase{migrate.From, migrate.Both} {
		t.Run(string(phase), func(t *testing.T) { conformance.Run(t, onMemory(phase)) })
	}
}

func onMemory(phase migrate.Phase) conformance.Harness {
	return conformance.Harness{
		Provider: "local",
		New: func(t testing.TB) *conformance.Backend {
			old, young := memory.NewStore(), memory.NewStore()
			return &conformance.Backend{
				Driver: func(t testing.TB) driver.Driver {
					return open(t, memory.New(old), memory.New(young), phase)
				},
			}
		},
		Skips: map[conformance.Need]string{
			conformance.URL:       "the stores live in this process",
			conformance.Wired:     "nothing is sent",
			conformance.Server:    "there is none",
			conformance.Requests:  "nothing is sent",
			conformance.Leftovers: "the stores show nothing; TestBackendDown, TestCancelledInBoth and TestModel look at them",
		},
	}
}

func open(t testing.TB, old, young driver.Driver, phase migrate.Phase) driver.Driver {
	t.Helper()
	d, err := migrate.New(t.Context(), old, young, &migrate.Options{Phase: phase})
	if err != nil {
		t.Fatalf("New in phase %s: got %v, want nil", phase, err)
	}
	return d
}
