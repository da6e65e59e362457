package redislua

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// List implements driver.Lister. Without a name it scans the keys of the server, a page at a time.
func (d *Driver) List(ctx context.Context, n driver.Name, yield func(driver.Holding) bool) error {
	err := d.list(ctx, n, yield)
	if err == nil || errors.Is(err, errStop) {
		return nil
	}
	return driver.Unavailable(err) // a reading that failed did nothing, however it failed
}

var errStop = errors.New("no more is wanted")

func (d *Driver) list(ctx context.Context, n driver.Name, yield func(driver.Holding) bool) error {
	if n.Name != "" {
		return d.holdings(ctx, []driver.Name{n}, yield)
	}
	var stopped error // others of several servers may have pages on their way
	for _, kind := range kinds {
		seen := make(map[driver.Name]bool) // a scan may find a key twice
		err := d.client.Scan(ctx, d.space.pattern(kind), parts[kind].redis, func(keys []string) error {
			if stopped != nil {
				return stopped
			}
			names := make([]driver.Name, 0, len(keys))
			for _, key := range keys {
				if name, ok := d.space.name(key); ok && !seen[name] {
					seen[name] = true
					names = append(names, name)
				}
			}
			stopped = d.holdings(ctx, names, yield)
			return stopped
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// holdings yields the leases of the names; errStop if yield wants no more.
func (d *Driver) holdings(ctx context.Context, names []driver.Name, yield func(driver.Holding) bool) (err error) {
	b := newBatch(d, len(names))
	for i, n := range names {
		c := b.add(i, scripts[n.Kind].list, n)
		d.space.holders(&c.Keys, n)
		c.Args.add()
	}
	b.run(ctx, func(_ *Call, item int, reply any, failed error) {
		if err == nil {
			err = failed
		}
		if err == nil {
			err = ReadHoldings(names[item], reply, yield)
		}
	})
	return err
}

// ReadHoldings reads what a script answers about one name: of each lease id, milliseconds left, token and holder. It fails
// with an error of its own if yield wants no more.
func ReadHoldings(n driver.Name, reply any, yield func(driver.Holding) bool) error {
	fields, ok := reply.([]any)
	if !ok {
		return unexpected(reply)
	}
	for ; len(fields) >= 4; fields = fields[4:] {
		id, _ := fields[0].(string)
		left, _ := fields[1].(int64)
		text, _ := fields[2].(string)
		holder, _ := fields[3].(string)
		token, bad := strconv.ParseUint(text, 10, 64)
		if id == "" || bad != nil {
			return unexpected(reply)
		}
		if !yield(driver.Holding{Owner: driver.Owner{Name: n, ID: id}, Token: driver.Token(token),
			Left: time.Duration(left) * time.Millisecond, Holder: holder}) {
			return errStop
		}
	}
	return nil
}
