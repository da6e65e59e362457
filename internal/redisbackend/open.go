package redisbackend

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

// open opens a URL that must be good.
func (b Driver) open(tb testing.TB, url string) Full {
	tb.Helper()
	d, err := driver.Open(tb.Context(), url)
	if err != nil {
		tb.Fatalf("Open %s: got %v, want nil", url, err)
	}
	tb.Cleanup(func() { d.Close() })
	return d.(Full)
}

// TestOpen opens URLs that are good, with and without the parameters, and such that are not. bad are parameters that must
// be refused, and what the error must name.
func (b Driver) TestOpen(t *testing.T, parameters string, bad map[string]string) {
	s := b.start(t, &servers.RedisOptions{Password: "s3cret?"})
	n := LockName("x")
	plain, withPassword := b.Scheme+"://", b.Scheme+"://:s3cret%3F@"+s.Addr()
	for _, url := range []string{
		withPassword,
		plain + "default:s3cret%3F@" + s.Addr() + "/0?namespace=mine&" + parameters,
		withPassword + "/1",
	} {
		d, err := driver.Open(t.Context(), url)
		if err != nil {
			t.Fatalf("Open %s: got %v, want nil", url, err)
		}
		if a, err := d.Lock(t.Context(), Request(n, NewID(), time.Minute)); a.State != driver.Granted || err != nil {
			t.Errorf("Lock in a namespace or database of its own: got %v, %v, want granted", a.State, err)
		}
		if err := d.Close(); err != nil {
			t.Errorf("Close: got %v, want nil", err)
		}
		if _, err := d.Lock(t.Context(), Request(n, NewID(), time.Minute)); !errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("Lock after Close: got %v, want ErrUnavailable", err)
		}
	}
	if reply := s.Must(t, "EXISTS", "mine:l:{x}", "fencelock:l:{x}"); reply != int64(2) {
		t.Errorf("keys of two namespaces: got %v, want 2", reply)
	}
	Eventually(t, "no connection of drivers that were closed", func() bool { return s.ClientsOfType(t, "normal") == 1 })

	type refusal struct {
		class error
		text  string
	}
	refused := map[string]refusal{
		plain + ":wrong-pw@" + s.Addr():                                 {driver.ErrUnavailable, "WRONGPASS"},
		plain + s.Addr():                                                {driver.ErrUnavailable, "NOAUTH"},
		plain + ":wrong-pw@" + Nobody(t):                                {driver.ErrUnavailable, "connection refused"},
		b.Scheme + "s://:s3cret%3F@" + s.Addr() + "?dial_timeout=1s":    {driver.ErrUnavailable, ""},
		withPassword + "/99":                                            {driver.ErrUnavailable, "DB index"},
		withPassword + "/x":                                             {driver.ErrInvalid, `"/x"`},
		withPassword + "/-1":                                            {driver.ErrInvalid, `"/-1"`},
		withPassword + "?namespace=a%3Ab":                               {driver.ErrInvalid, "namespace"},
		withPassword + "?namespace=a%7Bb%7D":                            {driver.ErrInvalid, "namespace"},
		withPassword + ",127.0.0.1:1":                                   {driver.ErrInvalid, "+cluster"},
		b.Scheme + "+sentinel://:s3cret%3F@" + s.Addr():                 {driver.ErrInvalid, "master"},
		b.Scheme + "+sentinel://a?master=x&sentinel_passwort=s3cret":    {driver.ErrInvalid, "sentinel_passwort"},
		b.Scheme + "+sentinel://" + Nobody(t) + "?master=x":             {driver.ErrUnavailable, ""},
		b.Scheme + "+cluster://:s3cret%3F@" + s.Addr() + "/1":           {driver.ErrInvalid, `"/1"`},
		b.Scheme + "+cluster://:s3cret%3F@a,,b":                         {driver.ErrInvalid, "url host"},
		b.Scheme + "+cluster://:s3cret%3F@" + s.Addr():                  {driver.ErrUnavailable, "cluster support disabled"},
		b.Scheme + "+cluster://:wrong-pw@" + Nobody(t) + ",127.0.0.1:1": {driver.ErrUnavailable, "connection refused"},
		b.Scheme + ":///0":                                              {driver.ErrInvalid, "host"},
		b.Scheme + ":x":                                                 {driver.ErrInvalid, "host"},
	}
	for parameter, text := range bad {
		refused[withPassword+"?"+parameter] = refusal{driver.ErrInvalid, text}
	}
	for url, want := range refused {
		d, err := driver.Open(t.Context(), url)
		if d != nil || !errors.Is(err, want.class) || !strings.Contains(err.Error(), want.text) {
			t.Errorf("Open %s: got %v, want %v with %q", url, err, want.class, want.text)
		}
		for _, secret := range []string{"s3cret", "wrong-pw"} {
			if err != nil && strings.Contains(err.Error(), secret) {
				t.Errorf("Open: the error tells the password: %v", err)
			}
		}
	}
}

// TestOpenIsBounded opens a server that accepts connections and does not answer.
func (b Driver) TestOpenIsBounded(t *testing.T) {
	s := b.Start(t)
	if err := s.Pause(); err != nil {
		t.Fatal(err)
	}
	deadline, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	cancelled, cancel2 := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel2)
	defer cancel2()
	for want, ctx := range map[error]context.Context{context.DeadlineExceeded: deadline, context.Canceled: cancelled} {
		began := time.Now()
		d, err := driver.Open(ctx, b.Scheme+"://"+s.Addr()+"?dial_timeout=1m")
		if d != nil || !errors.Is(err, driver.ErrUnavailable) || !errors.Is(err, want) {
			t.Errorf("Open of a silent server: got %v, want ErrUnavailable and %v", err, want)
		}
		if took := time.Since(began); took > Patience {
			t.Errorf("Open of a silent server until %v: took %v", want, took)
		}
	}
	if err := s.Resume(); err != nil {
		t.Fatal(err)
	}
}

// TestLeastRights runs all steps as a user that has the rights which the comment of package goredis lists, and on a
// Cluster some more.
func (b Driver) TestLeastRights(t *testing.T, onCluster ...string) {
	rights := Rights(t, "../goredis/goredis.go")
	if len(rights) != 2 || len(rights[0]) < 20 {
		t.Fatalf("rights in the package comment: got %q", rights)
	}
	t.Run("Single", func(t *testing.T) {
		s := b.Start(t, "--maxmemory-policy", "allkeys-lru")
		b.withRights(t, []Server{s}, Options{Addr: s.Addr()}, rights[0])
	})
	t.Run("Cluster", func(t *testing.T) {
		c, nodes := b.startCluster(t)
		for _, s := range nodes {
			s.Must(t, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
		}
		b.withRights(t, nodes, Options{Cluster: c.Addrs()}, slices.Concat(rights[0], rights[1], onCluster))
	})
}

func (b Driver) withRights(t *testing.T, nodes []Server, o Options, rights []string) {
	for _, s := range nodes {
		s.setUser(t, rights)
	}
	o.Username, o.Password = "app", "pw"
	d := b.Connect(t, o)
	e := ListenTo(d)
	for _, n := range []driver.Name{LockName("x"), PermitName("x")} {
		for _, step := range StepsOn(t, d, n) {
			if err := step.Do(d); err != nil {
				t.Errorf("%s with the rights listed: got %v, want nil", step.What, err)
			}
		}
	}
	e.Next(t, driver.EventWarning, "about allkeys-lru")
	h, w := driver.Owner{Name: LockName("y"), ID: NewID()}, driver.Owner{Name: LockName("y"), ID: NewID()}
	MustLock(t, d, Request(h.Name, h.ID, time.Minute), driver.Granted)
	MustLock(t, d, Waiting(w.Name, w.ID, time.Minute), driver.Waiting)
	if o.Cluster == nil {
		Eventually(t, "subscription", func() bool { return len(nodes[0].Channels(t)) == 1 })
	}
	for o.Cluster != nil && e.Next(t, driver.EventRecheck, "when the subscription stands, with the rights listed").Owner.Name != w.Name {
	} // on a Cluster each name has its own
	MustRelease(t, d, h)
	// The steps above have brought messages, too.
	for e.Next(t, driver.EventGranted, "with the rights listed").Owner != w {
	}
	if err := d.List(t.Context(), driver.Name{}, func(driver.Holding) bool { return true }); err != nil {
		t.Errorf("List with the rights listed: got %v, want nil", err)
	}
}
