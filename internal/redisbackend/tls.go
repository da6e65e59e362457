package redisbackend

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
	"github.com/fencelock/fencelock/internal/testcert"
)

// TestTLS opens a server and a Cluster that want a client's certificate. deadlines is what Info must say.
func (b Driver) TestTLS(t *testing.T, deadlines bool) {
	t.Parallel()
	dir, tls := t.TempDir(), b.Scheme+"s"
	testcert.Write(t, dir, "redis.test")
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	withTLS := func() (args []string, addr string) {
		addr = Nobody(t)
		_, port, err := net.SplitHostPort(addr)
		if err != nil {
			t.Fatal(err)
		}
		return []string{"--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert}, addr
	}
	args, one := withTLS()
	b.Start(t, args...)
	args, node := withTLS()
	c, err := servers.StartRedisCluster(t.Context(), 1, 0, &servers.RedisOptions{Args: append(args, "--tls-cluster", "yes")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})

	files := "?ca=" + url.QueryEscape(cert) + "&cert=" + url.QueryEscape(cert) + "&key=" + url.QueryEscape(key)
	for _, u := range []string{
		tls + "://" + one + files, tls + "://" + one + files + "&server-name=redis.test", tls + "+cluster://" + node + files,
	} {
		d := b.open(t, u)
		e := ListenTo(d)
		h, w := driver.Owner{Name: LockName("x" + u), ID: NewID()}, driver.Owner{Name: LockName("x" + u), ID: NewID()}
		MustLock(t, d, Request(h.Name, h.ID, time.Minute), driver.Granted)
		MustLock(t, d, Waiting(w.Name, w.ID, time.Minute), driver.Waiting)
		e.Next(t, driver.EventRecheck, "when the subscription stands, over TLS")
		MustRelease(t, d, h)
		e.Next(t, driver.EventGranted, "over TLS")
		if got := d.Info().Deadlines; got != deadlines {
			t.Errorf("Info of %s: got deadlines heeded: %v, want %v", u, got, deadlines)
		}
	}
	for what, u := range map[string]string{
		"without the authority":  tls + "://" + one,
		"without a certificate":  tls + "://" + one + "?ca=" + url.QueryEscape(cert),
		"with another name":      tls + "://" + one + files + "&server-name=other.test",
		"a Cluster without TLS":  b.Scheme + "+cluster://" + node + "?dial_timeout=1s",
		"without TLS":            b.Scheme + "://" + one + "?dial_timeout=1s",
		"sentinels of that name": tls + "+sentinel://" + one + files + "&master=x&server-name=other.test",
	} {
		if d, err := driver.Open(t.Context(), u); d != nil || !errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("Open %s: got %v, want ErrUnavailable", what, err)
		}
	}
	for _, u := range []string{
		tls + "://" + one + "?ca=/nowhere", tls + "://" + one + "?ca=" + url.QueryEscape(key), tls + "://" + one + "?cert=" + url.QueryEscape(cert),
		tls + "://" + one + "?cert=/nowhere&key=/nowhere", b.Scheme + "://" + one + "?ca=" + url.QueryEscape(cert),
	} {
		if d, err := driver.Open(t.Context(), u); d != nil || !errors.Is(err, driver.ErrInvalid) || strings.Contains(err.Error(), "PRIVATE") {
			t.Errorf("Open %s: got %v, want ErrInvalid", u, err)
		}
	}
}
