package redlock

import (
	"testing"

	"github.com/fencelock/fencelock/driver"
)

func votes(kinds string) []vote {
	all := make([]vote, len(kinds))
	for i, k := range kinds {
		switch k {
		case 'm':
			all[i] = vote{said: mine, token: 7, slot: "0"}
		case 'n': // with another token
			all[i] = vote{said: mine, token: 6, slot: "0"}
		case 'o':
			all[i] = vote{said: other, token: 5, busy: map[string]string{"0": "X"}}
		case 'p': // somebody else again
			all[i] = vote{said: other, token: 5, busy: map[string]string{"0": "Y"}}
		case 'l':
			all[i] = vote{said: low, token: 8}
		case 'f':
			all[i] = vote{said: far, token: 3}
		case 'q':
			all[i] = vote{said: uncounted, token: 7, slot: "0"}
		case '!':
			all[i] = vote{said: failed}
		case '?':
			all[i] = vote{said: unknown}
		}
	}
	return all
}

func TestVerdict(t *testing.T) {
	for kinds, want := range map[string]verdict{
		".....": open, "mm...": open, "mmm..": won, "mmm??": won, "nnn..": won,
		"mmnn.": open, "mmn..": open, // one more for either may come
		"mmn!.": open, "mmnn?": vague, "mmnn!": again,
		"ooo..": held, "oo...": open, "oom..": open, "oom!!": held, "oomm!": again,
		"ooom.": held, "oopm.": open, "oppm!": held, "oopmm": again, "oomm?": vague, "oommm": won,
		"lll..": again, "ll...": open, "llo..": open, "lloo.": open, "lloo!": held,
		"fff..": again, "mm???": vague, "???..": open, "?????": vague, "!!!!!": short, "!!!..": open,
		"m!!!!": short, "mm!!?": vague, "mm!!!": short,
		"qqmm.": open, "qqmm!": short, "qqqqq": short, "qqmmm": won,
	} {
		b := newBallot("M", 5, 1, 0)
		b.propose(7, "0")
		b.votes = votes(kinds)
		if got := b.verdict(); got != want {
			t.Errorf("verdict of %s: got %d, want %d", kinds, got, want)
		}
	}
}

// TestNextProposal: after a proposal that was too far ahead of the clocks the next one begins at what the nodes have said.
func TestNextProposal(t *testing.T) {
	for _, test := range []struct {
		kinds       string
		floor, want driver.Token
	}{{"fff", 0, 4}, {"fff", 9, 10}, {"lll", 0, 50}, {"fml", 0, 9}, {"ooo", 0, 50}, {"ooo", 60, 61}, {"ffm", 0, 8}} {
		b := newBallot("M", 3, 1, test.floor)
		b.propose(100, "0")
		b.votes = votes(test.kinds)
		if got := b.next(50); got != test.want {
			t.Errorf("next proposal after %s with floor %d: got %d, want %d (T4)", test.kinds, test.floor, got, test.want)
		}
	}
}

// TestCountOfPermitsIsUnsound: if each of five nodes counted to 2, three permits could have a majority each. What the
// ballot asks for instead refuses the third.
func TestCountOfPermitsIsUnsound(t *testing.T) {
	permits := [][]int{{0, 1, 2}, {0, 3, 4}, {1, 2, 3}} // the nodes of each
	count := make([]int, 5)
	for _, nodes := range permits {
		if len(nodes) < 3 {
			t.Fatal("void: no majority")
		}
		for _, n := range nodes {
			if count[n]++; count[n] > 2 {
				t.Fatalf("void: node %d would have refused", n)
			}
		}
	}
	// Each of the first two has a slot of its own; the third asks for either.
	for _, slot := range []string{"0", "1"} {
		b := newBallot("third", 5, 2, 0)
		b.propose(7, slot)
		busy := []map[string]string{{"0": "a", "1": "b"}, {"0": "a"}, {"0": "a"}, {"1": "b"}, {"1": "b"}}
		for n := range b.votes {
			b.votes[n] = vote{said: mine, token: 7, slot: slot, busy: busy[n]}
			if busy[n][slot] != "" {
				b.votes[n].said = other
			}
		}
		if v := b.verdict(); v != held {
			t.Errorf("verdict on a third permit of 2 in slot %s: got %d, want held (S1)", slot, v)
		}
	}
	// A permit with a greater limit counts for one with a lesser one.
	b := newBallot("small", 5, 1, 0)
	b.propose(7, "0")
	for n := range b.votes {
		b.votes[n] = vote{said: mine, token: 7, slot: "0"}
		if n < 3 {
			b.votes[n].busy = map[string]string{"4": "big"}
		}
	}
	if v := b.verdict(); v != held {
		t.Errorf("verdict on a second permit with limit 1: got %d, want held (S1)", v)
	}
}
