package file

import "github.com/fencelock/fencelock/driver"

// Entries lists the ids of the name's live holders and waiters.
func (d *Driver) Entries(n driver.Name) (ids []string, err error) {
	r, err := d.read(d.open, d.path(n))
	if err != nil || r == nil {
		return nil, err
	}
	r.enter(d.sys.boot, 0)
	now := d.sys.now()
	for _, h := range r.State.Live(now) {
		ids = append(ids, h.ID)
	}
	for _, w := range r.State.Queue {
		ids = append(ids, w.ID)
	}
	return ids, nil
}
