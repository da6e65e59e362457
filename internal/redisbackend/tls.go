package redisbackend

import (
	"errors"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/internal/testcert"
)

// TestSentinelTLS opens a primary under Sentinel, all of which speak TLS only, as users of both who have a name.
func (b Driver) TestSentinelTLS(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	testcert.Write(t, dir, "redis.test")
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	listening := func() (settings []string, addr, port string) {
		addr = Nobody(t)
		_, port, err := net.SplitHostPort(addr)
		if err != nil {
			t.Fatal(err)
		}
		return []string{"--tls-port", port, "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert}, addr, port
	}
	args, _, port := listening()
	s := b.Start(t, args...)
	s.Must(t, "ACL", "SETUSER", "app", "on", ">data-pw", "~*", "&*", "+@all")
	s.Must(t, "ACL", "SETUSER", "watcher", "on", ">watcher-pw", "&*", "+@all")

	args, sentinel, _ := listening()
	text := strings.Join([]string{
		"sentinel monitor x 127.0.0.1 " + port + " 1", "sentinel auth-user x watcher", "sentinel auth-pass x watcher-pw",
		"tls-replication yes", "user scout on >scout-pw &* +@all", "user default off", "port 0",
	}, "\n") + "\n"
	for i := 0; i < len(args); i += 2 {
		text += strings.TrimPrefix(args[i], "--") + " " + args[i+1] + "\n"
	}
	file := filepath.Join(dir, "sentinel.conf")
	if err := os.WriteFile(file, []byte("dir "+dir+"\nbind 127.0.0.1\n"+text), 0o600); err != nil {
		t.Fatal(err)
	}
	c := exec.Command("redis-server", file, "--sentinel")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})

	files := "&ca=" + url.QueryEscape(cert) + "&cert=" + url.QueryEscape(cert) + "&key=" + url.QueryEscape(key)
	as := func(data, watch string) string {
		return b.Scheme + "s+sentinel://app:" + data + "@" + sentinel + "/0?master=x&sentinel_user=scout&sentinel_password=" + watch + files
	}
	Eventually(t, "sentinel that knows the primary", func() bool {
		d, err := driver.Open(t.Context(), as("data-pw", "scout-pw"))
		if err == nil {
			d.Close()
		}
		return err == nil
	})
	d := b.open(t, as("data-pw", "scout-pw"))
	e := ListenTo(d)
	h, w := driver.Owner{Name: LockName("x"), ID: NewID()}, driver.Owner{Name: LockName("x"), ID: NewID()}
	MustLock(t, d, Request(h.Name, h.ID, time.Minute), driver.Granted)
	MustLock(t, d, Waiting(w.Name, w.ID, time.Minute), driver.Waiting)
	e.Next(t, driver.EventRecheck, "when the subscription stands, over TLS")
	MustRelease(t, d, h)
	e.Next(t, driver.EventGranted, "over TLS")
	for what, bad := range map[string]string{"the server's": as("wrong-pw", "scout-pw"), "the sentinel's": as("data-pw", "wrong-pw")} {
		d, err := driver.Open(t.Context(), bad)
		if d != nil || !errors.Is(err, driver.ErrUnavailable) || strings.Contains(err.Error(), "-pw") {
			t.Errorf("Open with a wrong password for %s user: got %v, want ErrUnavailable without it", what, err)
		}
	}
}

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
