package lab_test

import (
	"os"
	"testing"

	_ "github.com/fencelock/fencelock/driver/etcd"
	_ "github.com/fencelock/fencelock/driver/file"
	_ "github.com/fencelock/fencelock/driver/goredis"
	_ "github.com/fencelock/fencelock/driver/postgres"
	_ "github.com/fencelock/fencelock/driver/redlock"
	"github.com/fencelock/fencelock/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

func TestScenarios(t *testing.T) {
	for _, b := range lab.Backends() {
		for _, sc := range lab.Scenarios() {
			if !sc.Fits(b) {
				continue
			}
			t.Run(sc.Name+"/"+b.Name, func(t *testing.T) {
				r, err := lab.Run(t.Context(), b, sc, nil)
				if err != nil {
					t.Fatal(err)
				}
				for _, l := range r.Lanes {
					t.Logf("%s: void %q, findings %v, told %v lead %v, next %v", l.Name, l.Void, l.Findings, l.Told, l.Lead, l.Next)
				}
				for _, u := range r.Unexpected {
					t.Errorf("%s", u)
				}
				if r.Valid() == 0 {
					t.Errorf("no lane counts")
				}
			})
		}
	}
}
