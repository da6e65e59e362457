package redislua

import (
	"errors"
	"io"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// slotTag is the rule of the Redis Cluster specification, written down once more: what is hashed of a
// key.
func slotTag(key string) string {
	open := strings.IndexByte(key, '{')
	if open < 0 {
		return key
	}
	shut := strings.IndexByte(key[open+1:], '}')
	if shut <= 0 {
		return key
	}
	return key[open+1 : open+1+shut]
}

// TestKeys makes the keys of many names that differ in what could confuse them.
func TestKeys(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 2))
	space := keyspace("ns:")
	const letters = "{}{}%.a:7BD\x00"
	names := map[string]bool{"a": true, "{a}": true, "{a}.": true, "{}": true, "}": true, "%7Ba%7D": true, strings.Repeat("}", 512): true}
	for range 20000 {
		var b strings.Builder
		for range 1 + rng.IntN(7) {
			b.WriteByte(letters[rng.IntN(len(letters))])
		}
		names[b.String()] = true
	}
	owner := map[string]driver.Name{}
	for name := range names {
		for _, kind := range kinds {
			n := driver.Name{Kind: kind, Name: name}
			var w Words
			space.keys(&w, n)
			if want := len(parts[kind].all); w.Len() != want {
				t.Fatalf("keys of %q: got %d, want %d", name, w.Len(), want)
			}
			tag := slotTag(string(w.At(0)))
			if own := slotTag(name); own != name && tag != own {
				t.Errorf("hash tag of %q: got %q, want its own, %q", name, tag, own)
			}
			for i := range w.Len() {
				key := string(w.At(i))
				if other, taken := owner[key]; taken {
					t.Errorf("key %q: got it for %v and for %v", key, other, n)
				}
				owner[key] = n
				if got := slotTag(key); got != tag || got == key {
					t.Errorf("hash tag of key %q: got %q, want %q as in the name's other keys", key, got, tag)
				}
			}
			if got, ok := space.name(string(w.At(0))); !ok || got != n {
				t.Errorf("name of key %q: got %v, %v, want %v", w.At(0), got, ok, n)
			}
			if got, ok := space.name(string(w.At(1))); ok {
				t.Errorf("name of key %q, which is not one of holders: got %v, want none", w.At(1), got)
			}
		}
	}
	for _, foreign := range []string{"", "ns:", "ns:l", "ns:l:", "ns:l:}", "ns:l:{", "ns:l:a", "ns:l:{a", "ns:l:a}", "ns:l:a.", "ns:l:{{a}}", "ns:l:{%}", "ns:z:{a}", "other:l:{a}"} {
		if n, ok := space.name(foreign); ok {
			t.Errorf("name of key %q: got %v, want none", foreign, n)
		}
	}
}

func TestWords(t *testing.T) {
	var w Words
	w.add("a", "", "b")
	w.add()
	w.number(1 << 53)
	w.duration(1500 * time.Microsecond)
	w.duration(24 * time.Hour)
	for i, want := range []string{"ab", "", "9007199254740992", "2", "86400000"} {
		if got := string(w.At(i)); got != want {
			t.Errorf("word %d: got %q, want %q", i, got, want)
		}
	}
}

// TestErrorClass goes through what a client library can report (L8).
func TestErrorClass(t *testing.T) {
	refused := errors.New("OOM command not allowed")
	for _, test := range []struct {
		what        string
		call        Call
		unavailable bool
	}{
		{"never sent", Call{Err: io.EOF}, true},
		{"refused before it was sent, as when connecting", Call{Err: refused, Refusal: "WRONGPASS no"}, true},
		{"sent once, refused", Call{Err: refused, Refusal: "OOM no", Sent: 1}, true},
		{"sent once, no answer", Call{Err: io.EOF, Sent: 1}, false},
		{"sent twice, then refused", Call{Err: refused, Refusal: "LOADING no", Sent: 2}, false},
		{"sent once, failed in its middle", Call{Err: refused, Refusal: half + " OOM no", Sent: 1}, false},
	} {
		err := test.call.result()
		if !errors.Is(err, test.call.Err) || errors.Is(err, driver.ErrUnavailable) != test.unavailable {
			t.Errorf("%s: got %v, want the cause, and ErrUnavailable %v (L8)", test.what, err, test.unavailable)
		}
	}
	// Whatever the server refuses with did surely not happen, and is no contention.
	for _, code := range []string{"ASK 1 h:1", "BUSY x", "CLUSTERDOWN x", "CROSSSLOT x", "ERR x", "FENCELOCK x", "LOADING x", "MASTERDOWN x",
		"MISCONF x", "MOVED 1 h:1", "NOAUTH x", "NOPERM x", "NOREPLICAS x", "NOSCRIPT x", "OOM x", "READONLY x", "TRYAGAIN x", "UNKILLABLE x",
		"WRONGPASS x", "WRONGTYPE x"} {
		call := Call{Err: errors.New(code), Refusal: code, Sent: 1}
		if err := call.result(); !errors.Is(err, call.Err) || !errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("refused with %s: got %v, want ErrUnavailable with the cause (L8)", code, err)
		}
	}
	ok := Call{Sent: 3}
	if err := ok.result(); err != nil {
		t.Errorf("no error: got %v, want nil", err)
	}
}

func TestAnswer(t *testing.T) {
	const ttl = 1500 * time.Microsecond
	for _, test := range []struct {
		reply any
		want  driver.Answer
	}{
		{int64(0), driver.Answer{State: driver.Held}},
		{int64(1), driver.Answer{State: driver.Waiting}},
		{int64(2), driver.Answer{State: driver.Gone}},
		{"0000000000000012", driver.Answer{State: driver.Granted, Token: 12, TTL: ttl}},
		{[]any{"9007199254740991", int64(7)}, driver.Answer{State: driver.Granted, Token: 1<<53 - 1, TTL: 7 * time.Millisecond}},
	} {
		if got, err := answer(test.reply, ttl); err != nil || got != test.want {
			t.Errorf("answer %v: got %+v, %v, want %+v", test.reply, got, err, test.want)
		}
	}
	for _, reply := range []any{nil, "", "x", "-1", int64(-1), int64(3), int64(1) << 40, 1.0, []any{}, []any{"1"}, []any{int64(1), int64(1)},
		[]any{"1", "1"}, []any{"1", int64(1), int64(1)}, errors.New("1")} {
		if got, err := answer(reply, ttl); err == nil || errors.Is(err, driver.ErrUnavailable) || got.State == driver.Granted {
			t.Errorf("answer %v: got %+v, %v, want an unknown outcome (L8)", reply, got, err)
		}
	}
}

func TestGrantMessage(t *testing.T) {
	space := keyspace("ns:")
	want := driver.Event{Kind: driver.EventGranted, Token: 17,
		Owner: driver.Owner{Name: driver.Name{Kind: driver.KindPermit, Name: "a b"}, ID: "ID"}}
	if got, ok := space.grant("0000000000000017 ID ns:p:{a b}"); !ok || !reflect.DeepEqual(got, want) {
		t.Errorf("message: got %+v, %v, want %+v", got, ok, want)
	}
	for _, payload := range []string{"", "17", "17 ID", "17 ID x", "x ID ns:p:{a}", "17  ns:p:{a}", "17 ID other:p:{a}"} {
		if got, ok := space.grant(payload); ok {
			t.Errorf("message %q: got %+v, want none", payload, got)
		}
	}
}

// TestScripts looks at what a server would only show under memory pressure or on another version.
func TestScripts(t *testing.T) {
	seen := map[string]bool{}
	for _, kind := range kinds {
		s := scripts[kind]
		for _, script := range []*Script{s.acquire, s.release, s.extend, s.poll, s.force, s.list, fence} {
			if strings.HasPrefix(script.Text, "#!") {
				t.Errorf("script begins with %.20q: Redis would refuse it as a whole without memory (F108)", script.Text)
			}
			if script != fence && seen[script.SHA] {
				t.Errorf("two scripts have the hash %s", script.SHA)
			}
			seen[script.SHA] = true
			for _, later := range []string{"PEXPIRETIME", "'GT'", "'LT'", "'NX', 'GET'"} {
				if strings.Contains(script.Text, later) {
					t.Errorf("script uses %s, which Redis 6.2 does not have", later)
				}
			}
		}
	}
}
