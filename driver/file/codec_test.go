package file

import (
	"reflect"
	"testing"
	"testing/quick"

	"github.com/fencelock/fencelock/driver/internal/state"
)

// TestCodec: every field of a record comes back, so that one that is added to the state machine and
// forgotten here is noticed; and whatever is cut off makes it bad.
func TestCodec(t *testing.T) {
	check := func(a about, s state.Name, cut uint16) bool {
		data := appendState(appendAbout(nil, &a), &s)
		var gotA about
		var gotS state.Name
		d := decoder{rest: data}
		d.about(&gotA)
		d.state(&gotS)
		if d.bad || len(d.rest) > 0 || !reflect.DeepEqual(gotA, a) || !same(gotS.Holders, s.Holders) || !same(gotS.Queue, s.Queue) ||
			gotS.Last != s.Last {
			t.Logf("read back: got %+v %+v, want %+v %+v", gotA, gotS, a, s)
			return false
		}
		d = decoder{rest: data[:int(cut)%len(data)]}
		d.about(&gotA)
		d.state(&gotS)
		return d.bad
	}
	if err := quick.Check(check, &quick.Config{MaxCount: 300}); err != nil {
		t.Fatal(err)
	}
	// The comparison above lists the fields of these.
	if about, name := reflect.TypeFor[about]().NumField(), reflect.TypeFor[state.Name]().NumField(); about != 5 || name != 3 {
		t.Fatalf("fields: got %d and %d, want 5 and 3 as the codec has", about, name)
	}
}

// same holds an empty list for none.
func same[T any](a, b []T) bool {
	return len(a) == 0 && len(b) == 0 || reflect.DeepEqual(a, b)
}
