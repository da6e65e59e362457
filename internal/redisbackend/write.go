package redisbackend

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

// appending is a write that can be seen to be done twice, and what it has seen.
func appending(key, text string) driver.Write {
	return driver.Write{
		Script: "if #KEYS ~= 1 or #ARGV ~= 2 or pcall(function() return now or asked end) then error('it sees too much') end\n" +
			"redis.call('RPUSH', KEYS[1], ARGV[1] .. ' ' .. ARGV[2]) -- the last line may be a comment",
		Keys: []string{key}, Args: []string{text},
	}
}

// mustWrite expects the answer to a request with a write, and answers its token.
func mustWrite(t *testing.T, d Full, r driver.Request, w driver.Write, want driver.State) driver.Token {
	t.Helper()
	a, err := d.LockAndWrite(t.Context(), r, w)
	if err != nil || a.State != want {
		t.Fatalf("LockAndWrite: got %v, %v, want %v", a.State, err, want)
	}
	return a.Token
}

// mustHold expects what a list holds.
func mustHold(t *testing.T, s Server, key string, want ...string) {
	t.Helper()
	var got []string
	list, _ := s.Must(t, "LRANGE", key, "0", "-1").([]any)
	for _, e := range list {
		text, _ := e.(string)
		got = append(got, text)
	}
	if strings.Join(got, ", ") != strings.Join(want, ", ") {
		t.Fatalf("written: got %q, want %q", got, want)
	}
}

// line is what appending writes with the token.
func line(text string, t driver.Token) string {
	digits := t.String()
	return text + " " + strings.Repeat("0", 16-len(digits)) + digits
}

// TestWrite takes locks and writes in one step: when the lock is free, held, one's own already, promised, and when the
// write fails.
func (b Driver) TestWrite(t *testing.T) {
	s := b.Start(t)
	d := s.Driver(t)
	n := LockName("x")
	r := Request(n, NewID(), time.Minute)
	first := line("first", mustWrite(t, d, r, appending("list", "first"), driver.Granted))
	mustHold(t, s, "list", first)

	before := s.Commands(t)
	rival := Request(n, NewID(), time.Minute)
	mustWrite(t, d, rival, appending("list", "rival"), driver.Held)
	after := s.Commands(t)
	if got := after["evalsha"] - before["evalsha"]; got != 1 || after["rpush"] != before["rpush"] || after["set"] != before["set"] {
		t.Errorf("LockAndWrite while held: got %d requests, %d RPUSH and %d SET, want one and nothing written (W2)",
			got, after["rpush"]-before["rpush"], after["set"]-before["set"])
	}
	mustWrite(t, d, r, appending("list", "again"), driver.Granted) // its own already (L5)
	mustHold(t, s, "list", first)

	// A live waiter is served first.
	w := Waiting(n, NewID(), 2*time.Minute)
	MustLock(t, d, w, driver.Waiting)
	s.Must(t, "DEL", "fencelock:l:{x}") // as if expired
	mustWrite(t, d, rival, appending("list", "overtaken"), driver.Held)
	mustHold(t, s, "list", first)
	if p := d.Poll(t.Context(), []driver.Poll{{Owner: w.Owner, TTL: time.Minute, Claim: time.Minute}})[0]; p.Err != nil || p.State != driver.Granted {
		t.Errorf("Poll of the waiter: got %+v, want granted (W4)", p)
	}
	MustRelease(t, d, w.Owner)

	// A write that fails leaves no lock.
	for what, script := range map[string]string{
		"raises":          "redis.call('GET', KEYS[1])",
		"raises its own":  "error('MINE went wrong')",
		"raises nil":      "error()",
		"answers":         "return redis.error_reply('MINE went wrong')",
		"answers caught":  "return redis.pcall('GET', KEYS[1])",
		"is no Lua":       "return return",
		"looks forgotten": "return redis.error_reply('NOSCRIPT no, it is known')",
		"looks half done": "return redis.error_reply('FENCELOCKHALF or so')",
	} {
		failing := appending("list", "")
		failing.Script = script
		if a, err := d.LockAndWrite(t.Context(), rival, failing); !errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("LockAndWrite whose script %s: got %v, %v, want ErrUnavailable (L8)", what, a.State, err)
		}
		if left := s.Must(t, "EXISTS", "fencelock:l:{x}"); left != int64(0) {
			t.Errorf("LockAndWrite whose script %s: got a lock left behind, want none (L7)", what)
		}
	}
	mine, failing := errors.New("mine"), appending("list", "")
	failing.Script = "redis.call('RPUSH', KEYS[1], 'half') error({err = 'MINE went wrong'})"
	failing.Failed = func(message string) error {
		if message != "MINE went wrong" {
			t.Errorf("message of a failed write: got %q, want the script's", message)
		}
		return mine
	}
	if _, err := d.LockAndWrite(t.Context(), rival, failing); !errors.Is(err, mine) || !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("LockAndWrite whose script fails in its middle: got %v, want its own error and ErrUnavailable", err)
	}
	mustHold(t, s, "list", first, "half")

	last := line("last", mustWrite(t, d, rival, appending("list", "last"), driver.Granted))
	mustHold(t, s, "list", first, "half", last)
	MustRelease(t, d, rival.Owner)
}

// TestWriteWhoseReplyIsLost repeats a request that was executed.
func (b Driver) TestWriteWhoseReplyIsLost(t *testing.T) {
	s, p := b.proxied(t)
	d := b.at(t, p.Addr())
	warm := Request(LockName("warm"), NewID(), time.Minute)
	if _, err := d.LockAndWrite(t.Context(), warm, appending("other", "")); err != nil {
		t.Fatal(err)
	}
	r := Request(LockName("x"), NewID(), time.Minute)
	done := p.DropNextReply(&servers.DropOptions{RequestWith: r.ID})
	if a, err := d.LockAndWrite(t.Context(), r, appending("list", "once")); err == nil || errors.Is(err, driver.ErrUnavailable) {
		t.Fatalf("LockAndWrite whose reply is lost: got %v, %v, want an unknown outcome (L8)", a, err)
	}
	<-done
	list, _ := s.Must(t, "LRANGE", "list", "0", "-1").([]any)
	if len(list) != 1 {
		t.Fatalf("void: the request was not executed: %q", list)
	}
	for range 2 {
		a, err := d.LockAndWrite(t.Context(), r, appending("list", "once"))
		if err != nil || a.State != driver.Granted {
			t.Fatalf("LockAndWrite repeated: got %v, %v, want granted (L5)", a, err)
		}
		mustHold(t, s, "list", line("once", a.Token)) // the token of the grant that wrote (T3)
	}
	MustRelease(t, d, r.Owner)
}

// TestWriteInTheSlot writes keys that are in the slot of the lock, and refuses others.
func (b Driver) TestWriteInTheSlot(t *testing.T) {
	t.Parallel()
	c, nodes := b.startCluster(t)
	d := b.Connect(t, Options{Cluster: c.Addrs()})
	for _, n := range []driver.Name{LockName("a"), LockName("orders:{7}:pay"), LockName("odd}"), LockName("b")} {
		tag := map[string]string{"orders:{7}:pay": "7", "odd}": "odd%7D"}[n.Name]
		if tag == "" {
			tag = n.Name
		}
		for _, key := range []string{tag, "{" + tag + "}:state"} {
			r := Request(n, NewID(), time.Minute)
			if a, err := d.LockAndWrite(t.Context(), r, appending(key, "")); err != nil || a.State != driver.Granted {
				t.Fatalf("LockAndWrite of %q with lock %q: got %v, %v, want granted", key, n.Name, a.State, err)
			}
			MustRelease(t, d, r.Owner)
		}
		for _, key := range []string{"elsewhere", "{elsewhere}:" + tag} {
			_, err := d.LockAndWrite(t.Context(), Request(n, NewID(), time.Minute), appending(key, ""))
			if !errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), key) {
				t.Errorf("LockAndWrite of %q with lock %q: got %v, want ErrInvalid that names the key", key, n.Name, err)
			}
		}
	}
	for _, s := range nodes {
		if held := Keys(t, s.Redis, "fencelock:l"); len(held) != 0 {
			t.Errorf("locks left: got %q, want none", held)
		}
	}
}
