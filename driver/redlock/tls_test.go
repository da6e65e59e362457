package redlock_test

import (
	"errors"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/redlock"
	"github.com/fencelock/fencelock/internal/redisbackend"
	"github.com/fencelock/fencelock/internal/redlockbackend"
	"github.com/fencelock/fencelock/internal/testcert"
)

// TestTLS opens masters that want TLS, a password and a client's certificate. One whose certificate another authority has
// signed is as one that is down.
func TestTLS(t *testing.T) {
	t.Parallel()
	ours, others := t.TempDir(), t.TempDir()
	var m redlockbackend.Masters
	var addrs []string
	for _, dir := range []string{ours, ours, ours, others} {
		if len(addrs)%3 == 0 {
			testcert.Write(t, dir, "redis.test")
		}
		addr := redisbackend.Nobody(t)
		_, port, err := net.SplitHostPort(addr)
		if err != nil {
			t.Fatal(err)
		}
		cert := filepath.Join(dir, "cert.pem")
		m = append(m, redlockbackend.Start(t, 1, &servers.RedisOptions{Password: "s3cret?", Args: []string{
			"--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", filepath.Join(dir, "key.pem"), "--tls-ca-cert-file", cert}})...)
		addrs = append(addrs, addr)
	}
	three, mixed := strings.Join(addrs[:3], ","), strings.Join(addrs[1:], ",")
	const user = "://:s3cret%3F@"
	authority := func(dir string) string { return "?ca=" + url.QueryEscape(filepath.Join(dir, "cert.pem")) }
	pair := "&cert=" + url.QueryEscape(filepath.Join(ours, "cert.pem")) + "&key=" + url.QueryEscape(filepath.Join(ours, "key.pem"))
	files := authority(ours) + pair

	for hosts, reached := range map[string]redlockbackend.Masters{three: m[:3], mixed: m[1:3]} {
		var ds []*redlockbackend.Owning
		for range 2 {
			opened, err := driver.Open(t.Context(), "redlocks"+user+hosts+files)
			if err != nil {
				t.Fatalf("Open of %s with TLS: got %v, want nil", hosts, err)
			}
			d := &redlockbackend.Owning{Driver: opened.(*redlock.Driver)}
			t.Cleanup(func() { d.Close() })
			ds = append(ds, d)
		}
		d, other := ds[0], ds[1]
		freed := make(chan driver.Event, 16)
		other.Notify(func(e driver.Event) {
			if e.Kind == driver.EventFreed || e.Kind == driver.EventRecheck {
				freed <- e
			}
		})
		told := func(want driver.EventKind, when string) {
			t.Helper()
			for {
				select {
				case e := <-freed:
					if e.Kind == want {
						return
					}
				case <-time.After(patience):
					t.Fatalf("event %v %s, over TLS: none within %v", want, when, patience)
				}
			}
		}
		r := request("x", time.Minute)
		token := lock(t, d, r, driver.Granted).Token
		everywhere(t, reached, r)
		waits := request("x", time.Minute)
		waits.Wait, waits.Claim = true, 30*time.Second
		lock(t, other, waits, driver.Held)
		told(driver.EventRecheck, "when the subscription stands")
		extend(t, d, r, time.Hour)
		release(t, d, r)
		told(driver.EventFreed, "after the release")
		if next := lock(t, other, waits, driver.Granted).Token; next <= token {
			t.Errorf("token after the release: got %v after %v, want a greater one (T1)", next, token)
		}
		release(t, other, waits)
	}

	for what, bad := range map[string]struct {
		url   string
		class error
		text  string
	}{
		"with another authority":       {"redlocks" + user + three + authority(others) + pair, driver.ErrUnavailable, "unknown authority"},
		"without the authority":        {"redlocks" + user + three, driver.ErrUnavailable, "unknown authority"},
		"without a certificate":        {"redlocks" + user + three + authority(ours), driver.ErrUnavailable, ""},
		"with another name":            {"redlocks" + user + three + files + "&server-name=other.test", driver.ErrUnavailable, "other.test"},
		"without TLS":                  {"redlock" + user + three, driver.ErrUnavailable, ""},
		"with a wrong password":        {"redlocks://:wrong-s3cret@" + three + files, driver.ErrUnavailable, "WRONGPASS"},
		"with no such authority":       {"redlocks" + user + three + "?ca=/nowhere", driver.ErrInvalid, "/nowhere"},
		"with an authority and no TLS": {"redlock" + user + three + authority(ours), driver.ErrInvalid, "ca"},
	} {
		d, err := driver.Open(t.Context(), bad.url)
		if err == nil {
			d.Close()
		}
		if !errors.Is(err, bad.class) || !strings.Contains(err.Error(), bad.text) || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("Open %s: got %v, want %v with %q and without the password", what, err, bad.class, bad.text)
		}
		if q := (*redlock.QuorumError)(nil); bad.class == driver.ErrUnavailable && (!errors.As(err, &q) || len(q.Nodes) != 3) {
			t.Errorf("Open %s: got %v, want what each of three nodes said (F101)", what, err)
		}
	}
}
