package memory

import (
	"github.com/fencelock/fencelock/driver"
)

// Entries lists the live holders and waiters of a name. Those that have expired do not count: the next step
// drops them.
func (s *Store) Entries(n driver.Name) (entries []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.names[n]
	if st == nil || st.Idle(s.now()) {
		return nil
	}
	for _, h := range st.Holders {
		entries = append(entries, "holder "+h.ID)
	}
	for _, w := range st.Queue {
		entries = append(entries, "waiter "+w.ID)
	}
	return entries
}
