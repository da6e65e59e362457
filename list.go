package fencelock

import (
	"context"
	"encoding/json"
	"time"

	"github.com/fencelock/fencelock/driver"
)

// Holding is a lease as the backend knows it, of whatever client.
type Holding struct {
	Kind   Kind
	Name   string
	Token  Token
	Left   time.Duration // until it ends if nobody extends it
	Holder HolderInfo
}

// List answers all leases in the backend's namespace, in no order. It is no snapshot, and may read all the
// names there are: it is for operators, not for programs. Errors as [Locker]; without [Listing] it matches
// [errors.ErrUnsupported].
func (c *Client) List(ctx context.Context) ([]Holding, error) {
	return c.list(ctx, "list", driver.Name{})
}

// Inspect answers who holds one name. By the time it returns that may have changed.
func (c *Client) Inspect(ctx context.Context, kind Kind, name string) ([]Holding, error) {
	if name == "" {
		return nil, c.opError("inspect", driver.Name{Kind: kind}, driver.Invalid("name of length", 0, "must be 1 to 512 bytes"))
	}
	return c.list(ctx, "inspect", driver.Name{Kind: kind, Name: name})
}

func (c *Client) list(ctx context.Context, op string, n driver.Name) ([]Holding, error) {
	lister, able := driver.As[driver.Lister](c.d)
	if err := c.checkCall(ctx, nameOrAll(n), able, Listing); err != nil {
		return nil, c.opError(op, nameOrAll(n), err)
	}
	// Listing may take long: only the caller bounds it.
	held, err := call(ctx, c, 24*time.Hour, func(ctx context.Context) ([]Holding, error) {
		var held []Holding
		err := lister.List(ctx, n, func(h driver.Holding) bool {
			held = append(held, holding(h))
			return true
		})
		return held, err
	}, nil)
	if err != nil {
		return nil, c.failure(ctx, op, nameOrAll(n), err, time.Time{})
	}
	return held, nil
}

func holding(h driver.Holding) Holding {
	out := Holding{Kind: h.Name.Kind, Name: h.Name.Name, Token: h.Token, Left: h.Left}
	if json.Unmarshal([]byte(h.Holder), &out.Holder) != nil {
		out.Holder = HolderInfo{Label: h.Holder} // written by somebody else; show it as it is
	}
	// The holder wrote when it asked. If it had to wait, its token tells better: the server's clock at the grant,
	// unless tokens run ahead of that.
	if served := time.UnixMicro(int64(h.Token)); served.After(out.Holder.Since) && !served.After(time.Now()) {
		out.Holder.Since = served
	}
	return out
}

// ForceUnlock takes the name away from all its holders and reports how many there were. They are told at
// their next renewal, so two may believe until then: it is for an operator who knows that the holder is dead
// or harmless. Tokens go on rising, so guards refuse the old holder. Errors as [Locker]; without
// [ForceUnlocks] it matches [errors.ErrUnsupported].
func (c *Client) ForceUnlock(ctx context.Context, kind Kind, name string) (int, error) {
	n := driver.Name{Kind: kind, Name: name}
	f, able := driver.As[driver.ForceUnlocker](c.d)
	if err := c.checkCall(ctx, n, able, ForceUnlocks); err != nil {
		return 0, c.opError("force unlock", n, err)
	}
	ended, err := call(ctx, c, c.requestTimeout(c.cfg.ttl), func(ctx context.Context) (int, error) {
		return f.ForceUnlock(ctx, n)
	}, nil)
	if err != nil {
		return 0, c.failure(ctx, "force unlock", n, err, time.Time{})
	}
	return ended, nil
}

// nameOfAll stands for all names in errors.
var (
	nameOfAll  = driver.Name{Name: "*"}
	errNoNames = driver.Invalid("names", 0, "must be at least one")
)

func nameOrAll(n driver.Name) driver.Name {
	if n.Name == "" {
		return nameOfAll
	}
	return n
}
