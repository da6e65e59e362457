package containers

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	_ "github.com/fencelock/fencelock/driver/redlock"
	"github.com/fencelock/fencelock/lab"
)

// TestLab: scenarios of package lab have the same outcome on servers in containers, of which none is left.
func TestLab(t *testing.T) {
	images := &lab.Images{
		Redis: os.Getenv("FENCELOCK_REDIS_IMAGE"), Etcd: os.Getenv("FENCELOCK_ETCD_IMAGE"), Postgres: os.Getenv("FENCELOCK_POSTGRES_IMAGE"),
	}
	var plan lab.Plan
	for _, b := range lab.Backends() {
		if in, why := b.InContainers(images); why == "" {
			plan.Backends = append(plan.Backends, in)
		}
	}
	plan.Lanes, plan.Parallel = 3, 1                                                     // the clients share this machine with the servers
	plan.Scenarios = []*lab.Scenario{lab.ServerPaused, lab.ServerEmptied, lab.TwoPaused} // pause, kill and start, on several
	want := 0
	for _, sc := range plan.Scenarios {
		for _, b := range plan.Backends {
			if sc.Fits(b) {
				want++
			}
		}
	}
	report, err := plan.Do(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range report.Unexpected() {
		t.Errorf("in containers: not as expected: %s", u)
	}
	if got := len(report.Results); got != want || want < 2*len(plan.Scenarios) {
		t.Errorf("runs: got %d, want all that fit, %d", got, want)
	}
	left, err := exec.Command("docker", "ps", "--all", "--quiet", "--filter", fmt.Sprintf("label=fencelock.lab=%d", os.Getpid())).Output()
	if err != nil || len(left) > 0 {
		t.Errorf("containers after the runs: got %q and error %v, want none", left, err)
	}
}
