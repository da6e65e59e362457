package rueidis_test

import (
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

// survivor is a lock that is held and waited for while a primary is lost.
type survivor struct {
	driver.Owner
	d      redisbackend.Full
	events redisbackend.Events
	waiter driver.Owner
	token  driver.Token
}

func newSurvivor(t *testing.T, url string) *survivor {
	t.Helper()
	opened, err := driver.Open(t.Context(), url)
	if err != nil {
		t.Fatalf("Open: got %v, want nil", err)
	}
	t.Cleanup(func() { opened.Close() })
	n := redisbackend.LockName("x")
	s := &survivor{Owner: driver.Owner{Name: n, ID: redisbackend.NewID()}, d: opened.(redisbackend.Full),
		waiter: driver.Owner{Name: n, ID: redisbackend.NewID()}}
	s.events = redisbackend.ListenTo(s.d)
	s.token = redisbackend.MustLock(t, s.d, redisbackend.Request(n, s.ID, time.Hour), driver.Granted).Token
	redisbackend.MustLock(t, s.d, redisbackend.Waiting(n, s.waiter.ID, time.Hour), driver.Waiting)
	s.events.Next(t, driver.EventRecheck, "when the subscription stands")
	return s
}

// lives expects that nothing was lost, and hands over to the waiter.
func (s *survivor) lives(t *testing.T) {
	t.Helper()
	redisbackend.Eventually(t, "Extend after a failover", func() bool {
		r := s.d.Extend(t.Context(), []driver.Extension{{Owner: s.Owner, TTL: time.Hour}})[0]
		if r.Err == nil && (r.State != driver.Granted || r.Token != s.token) {
			t.Fatalf("Extend after a failover: got %+v, want granted with token %v: nothing was lost (T3)", r, s.token)
		}
		return r.Err == nil
	})
	s.events.Next(t, driver.EventRecheck, "after the node of the subscription was killed")
	redisbackend.MustLock(t, s.d, redisbackend.Request(s.Name, redisbackend.NewID(), time.Minute), driver.Held)
	redisbackend.MustRelease(t, s.d, s.Owner)
	if e := s.events.Next(t, driver.EventGranted, "after a failover"); e.Owner != s.waiter || e.Token <= s.token {
		t.Errorf("event after a failover: got %+v, want %+v and a token above %v (T1)", e, s.waiter, s.token)
	}
}

// TestClusterFailover kills the primary of a lock, whose replica has everything.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	c := redisbackend.StartCluster(t, 1)
	s := newSurvivor(t, "rueidis+cluster://"+strings.Join(c.Addrs(), ","))
	slot, err := c.Slot(t.Context(), s.Name.Name)
	if err != nil {
		t.Fatal(err)
	}
	primary, err := c.Primary(t.Context(), slot)
	if err != nil {
		t.Fatal(err)
	}
	inStep(t, redisbackend.Rueidis.On(primary), 1)
	if err := primary.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.AwaitPrimary(t.Context(), slot); err != nil {
		t.Fatal(err)
	}
	s.lives(t)
}

// TestSentinelFailover kills the primary that sentinels watch, with passwords for both, when its replicas have
// everything.
func TestSentinelFailover(t *testing.T) {
	t.Parallel()
	c, err := servers.StartRedisSentinels(t.Context(),
		&servers.RedisSentinelOptions{Redis: servers.RedisOptions{Password: "data-pw"}, SentinelPassword: "watch-pw"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	url := "rueidis+sentinel://:data-pw@" + strings.Join(c.SentinelAddrs(), ",") + "/0?sentinel_password=watch-pw&master="
	if d, err := driver.Open(t.Context(), url+"nobody"); d != nil || err == nil || strings.Contains(err.Error(), "-pw") {
		t.Errorf("Open with a name that the sentinels do not know: got %v, want an error without the password", err)
	}
	s := newSurvivor(t, url+servers.RedisSentinelName)
	primary, err := c.Primary(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	inStep(t, redisbackend.Rueidis.On(primary), 2)
	if err := primary.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.AwaitPrimary(t.Context(), primary); err != nil {
		t.Fatal(err)
	}
	s.lives(t)
}

// inStep waits until so many replicas have everything.
func inStep(t *testing.T, primary redisbackend.Server, replicas int64) {
	t.Helper()
	redisbackend.Eventually(t, "replicas in step", func() bool {
		info, _ := primary.Must(t, "INFO", "replication").(string)
		offset := field(info, "master_repl_offset:")
		in := int64(0)
		for line := range strings.Lines(info) {
			if strings.HasPrefix(line, "slave") && strings.Contains(line, "offset="+offset+",") {
				in++
			}
		}
		return offset != "" && in == replicas
	})
}

func field(info, name string) string {
	_, rest, _ := strings.Cut(info, name)
	value, _, _ := strings.Cut(rest, "\r\n")
	return value
}
