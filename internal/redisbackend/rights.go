package redisbackend

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
)

// Rights answers the lists of rights in the package comment of a file, by paragraph.
func Rights(tb testing.TB, file string) (lists [][]string) {
	tb.Helper()
	source, err := os.ReadFile(file)
	if err != nil {
		tb.Fatal(err)
	}
	for paragraph := range strings.SplitSeq(string(source), "\n//\n") {
		if strings.Contains(paragraph, "//\t~") || strings.Contains(paragraph, "//\t&") {
			lists = append(lists, strings.Fields(strings.ReplaceAll(paragraph, "//", "")))
		}
	}
	return lists
}

// LeastRights does everything as the user app with the password pw, who has these rights, and then without each of them
// in turn: then one of the servers must have denied it. everything is told which right is missing, and answers what
// went wrong.
func LeastRights(t *testing.T, nodes []Server, rights []string, everything func(missing string) error) {
	setUser := func(rights []string) {
		for _, s := range nodes {
			s.setUser(t, rights)
			s.Must(t, "ACL", "LOG", "RESET")
			s.Must(t, "SCRIPT", "FLUSH")
		}
	}
	denied := func() (objects []string) {
		for _, s := range nodes {
			log, _ := s.Must(t, "ACL", "LOG").([]any)
			for _, entry := range log {
				fields, _ := entry.([]any)
				if i := slices.Index(fields, any("object")); i >= 0 && i+1 < len(fields) {
					objects = append(objects, fmt.Sprint(fields[i+1]))
				}
			}
		}
		return objects
	}
	setUser(rights)
	if err := everything(""); err != nil {
		t.Errorf("with the rights listed: got %v, want nil", err)
	}
	if d := denied(); len(d) > 0 {
		t.Errorf("with the rights listed: the server denied %q", d)
	}
	for i, right := range rights {
		setUser(slices.Delete(slices.Clone(rights), i, i+1))
		_ = everything(right) // it may fail or not: a message that cannot be sent is no error
		name, isCommand := strings.CutPrefix(right, "+")
		Eventually(t, "denial without "+right, func() bool {
			d := denied()
			return isCommand && slices.Contains(d, name) || !isCommand && len(d) > 0
		})
	}
}

// setUser lets the user app, password pw, have these rights and no others.
func (s Server) setUser(t *testing.T, rights []string) {
	t.Helper()
	s.Must(t, append([]string{"ACL", "SETUSER", "app", "reset", "on", ">pw"}, rights...)...)
}
