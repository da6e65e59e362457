// Package postgres keeps locks in a PostgreSQL database, version 13 or later. The conformance suite runs on 15 and 17. It
// passed on 13.16 too, and on 18.6 fourteen of its groups, when this was written; 14 and 16 were
// never tried.
//
// # Guarantees
//
// Exclusion, tokens, queue and semaphores are exact among all clients of one schema and namespace, under the
// assumptions that there is one primary and that its clock is not stepped forward by more than the margin
// of a lease. Leases are rows that expire by the server's clock; no session lock is used, so a connection
// may die, and a pooler in transaction mode may stand in between, without a lock being lost or left.
//
// Each step is one function call in the schema, hence one transaction. Its commit is flushed to the disk before
// it is answered, whatever synchronous_commit the role, the database or the pooler says, so a crash of the
// server forgets neither lease nor token. A failover to an *asynchronous* standby can lose the last steps: then a
// lock may be held twice until the first holder's next extension, which finds its lease gone. Tokens stay
// unique and monotonic, since they follow the clock, provided the failover takes longer than the two servers'
// clocks differ. With synchronous replication nothing is lost.
//
// Waiters stand in a queue of rows, first come first served; whoever frees a name gives it to the head
// in the same step. A client that waits listens (LISTEN) on one connection of its own and is told of grants; it polls
// as well, because a notification may be lost, and behind a pooler in transaction mode always is. That is found
// out by a trial and told to the Observer once.
//
// # Options
//
// See [Options]. By URL: postgres://user:password@host:5432/database?namespace=x&schema=y, also postgresql://.
// Further parameters are those of the pgx pool and connection that are listed at [URLParameters]; with host it can be the
// directory of a Unix socket, as in postgres:///database?host=/var/run/postgresql. What a URL leaves
// out, such as the password, pgx takes from the usual environment (PGPASSWORD, ~/.pgpass). Opening a URL
// creates the schema if it is absent, as [EnsureSchema] does; that needs the right to do so only the first
// time.
//
// An application that has a pool uses [New] and calls EnsureSchema in its migrations, or runs schema.sql, which also
// says what rights a role needs. One that uses database/sql makes a pgxpool.Pool, passes it to
// [New], and gets its sql.DB from stdlib.OpenDBFromPool, so that both share connections.
//
// A step takes a connection from the pool for one statement. While the application has all of them, steps wait, and a lease
// that is not extended in time is lost: have some to spare, or a pool for the locks alone. A client that waits takes one more
// out of the pool for as long as it listens. Statements are sent without preparing them by name, which works behind any pooler.
//
// # Errors
//
// A refusal of the server, by SQLSTATE, and a failure to connect match [driver.ErrUnavailable]: the step's
// transaction was rolled back. So does a hot standby, which is refused. A connection that ends in the middle of a step,
// also by pg_terminate_backend, leaves the outcome unknown. Serialization failures and deadlocks are tried
// again a few times. A step waits no longer than 5 s for the row of its name (55P03), and is ended by a
// statement_timeout (57014), which should not be below 1 s. The isolation level that a role or database has
// as default does not matter, but with another than READ COMMITTED a step takes three round trips instead of one.
//
// # Fencing
//
// A token is max(last + 1, floor + 1, microseconds since 1970 by the server's clock). The last one of a name is
// kept for at least 48 h after its last use and until it lies below the clock by as much. Rows are cleared up as a
// part of the traffic, a page of names after every 128 steps, of one client or of many.
//
// Where the protected data is in the same database, [Driver.VerifyTx] is better than comparing tokens: a
// transaction that has called it commits only if nobody else got the lock before.
//
// # What it does not do
//
// Work on a standby, or on several primaries (multi-master, logical replication): each would have locks of
// its own. Protect from a role that may write to the tables.
//
// A transaction that holds its snapshot for hours (a backup, a forgotten psql) keeps the server from removing old
// versions of rows; names that are locked thousands of times meanwhile get slow until it ends.
package postgres

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/driver"
)

// Options are the settings of [New] and [EnsureSchema]. The zero value, and nil, are the defaults.
type Options struct {
	// Namespace keeps the locks of several applications in one schema apart. The default is
	// [driver.DefaultNamespace]; for the bounds see [driver.CheckNamespace].
	Namespace string

	// Schema is the schema of the tables and functions: 1 to 63 of a-z, 0-9 and underscore, not beginning
	// with a digit. The default is [DefaultSchema].
	Schema string
}

// DefaultSchema is the schema of a driver whose user names none.
const DefaultSchema = "fencelock"

var schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

func (o *Options) withDefaults() (Options, error) {
	var all Options
	if o != nil {
		all = *o
	}
	if all.Namespace == "" {
		all.Namespace = driver.DefaultNamespace
	}
	if all.Schema == "" {
		all.Schema = DefaultSchema
	}
	if !schemaName.MatchString(all.Schema) || strings.HasPrefix(all.Schema, "pg_") {
		return all, driver.Invalid("schema", all.Schema, "must be 1 to 63 of a-z 0-9 _ and begin with neither a digit nor pg_")
	}
	return all, driver.CheckNamespace(all.Namespace)
}

// Driver is one client's connection to the locks in a database. It implements every optional interface of package
// driver.
type Driver struct {
	pool   *pgxpool.Pool
	owned  bool   // Close closes the pool
	schema string // quoted
	ns     string
	inbox  inbox
	sweep  sweeper
	asking asking

	// explicit is set once the server's default has turned out to be another isolation level than a step needs.
	explicit atomic.Bool

	open    context.Context // ends with Close
	end     context.CancelFunc
	closing sync.Once
}

// New makes a driver on the user's pool, which it never closes; nil options are the defaults. It sends nothing: the schema
// must be there when the first step is made, see [EnsureSchema]. It fails with an error matching
// [driver.ErrInvalid].
func New(pool *pgxpool.Pool, o *Options) (*Driver, error) {
	all, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	if pool == nil {
		return nil, driver.Invalid("pool", nil, "must not be nil")
	}
	d := &Driver{pool: pool, schema: `"` + all.Schema + `"`, ns: all.Namespace}
	d.open, d.end = context.WithCancel(context.Background())
	d.inbox.init(d)
	d.sweep.init()
	return d, nil
}

// Info implements driver.Driver.
func (d *Driver) Info() driver.Info { return driver.Info{Backend: "postgres", Durable: true} }

// Close implements driver.Driver. It ends the connection that listens and, if the driver was opened by URL, the pool.
func (d *Driver) Close() error {
	d.closing.Do(func() {
		d.end()
		d.inbox.close()
		d.sweep.close()
		if d.owned {
			d.pool.Close()
		}
	})
	return nil
}

// Lock implements driver.Locker.
func (d *Driver) Lock(ctx context.Context, r driver.Request) (driver.Answer, error) {
	done := d.asking.begin(r.ID)
	defer done()
	a, err := d.ask(ctx, "lock($1,$2,$3,$4,$5,$6,$7,$8,$9,$10,$11)", d.ns, int16(r.Name.Kind), []byte(r.Name.Name), r.ID, r.TTL.Microseconds(),
		int32(min(r.Limit, mostPermits)), int64(r.Floor), []byte(r.Holder), r.Wait, r.Claim.Microseconds(), d.inbox.address())
	if err != nil {
		return driver.Answer{}, err
	}
	if driver.State(a.state) == driver.Waiting { // who gets the lock at once needs no connection more
		d.inbox.want(r.Claim)
	}
	d.inbox.deliver(r.Name, a.granted, r.ID)
	d.sweep.look(d, r.Name)
	return a.answer(), nil
}

// mostPermits is the greatest limit that is stored; nobody counts that far.
const mostPermits = 1<<31 - 1

// Acquire implements driver.Semaphore.
func (d *Driver) Acquire(ctx context.Context, r driver.Request) (driver.Answer, error) {
	return d.Lock(ctx, r)
}

// Release implements driver.Locker.
func (d *Driver) Release(ctx context.Context, o driver.Owner) (bool, error) {
	d.asking.wait(ctx, o.ID)
	a, err := d.ask(ctx, "release($1,$2,$3,$4,$5)",
		d.ns, int16(o.Name.Kind), []byte(o.Name.Name), o.ID, d.inbox.address())
	if err != nil {
		return false, err
	}
	d.inbox.deliver(o.Name, a.granted, o.ID)
	d.sweep.look(d, o.Name)
	return driver.State(a.state) != driver.Gone, nil
}

// Extend implements driver.Locker.
func (d *Driver) Extend(ctx context.Context, leases []driver.Extension) []driver.Result {
	owner := func(i int) driver.Owner { return leases[i].Owner }
	one := func(i int) driver.Result {
		e := leases[i]
		a, err := d.ask(ctx, "extend_one($1,$2::int2,$3,$4,$5::int8)",
			d.ns, int16(e.Name.Kind), []byte(e.Name.Name), e.ID, e.TTL.Microseconds())
		return a.result(err)
	}
	if len(leases) == 1 {
		return []driver.Result{one(0)}
	}
	results := make([]driver.Result, len(leases))
	rest := d.batch(ctx, results, all(len(leases)), owner, func(i int) int64 { return leases[i].TTL.Microseconds() },
		"SELECT i, state, token, ttl FROM "+d.schema+".extend($1,$2,$3,$4,$5)")
	for _, i := range rest {
		results[i] = one(i)
	}
	return results
}

// Poll implements driver.Queue.
func (d *Driver) Poll(ctx context.Context, waiters []driver.Poll) []driver.Result {
	for _, w := range waiters {
		d.inbox.want(w.Claim)
	}
	owner := func(i int) driver.Owner { return waiters[i].Owner }
	one := func(i int) driver.Result {
		w := waiters[i]
		a, err := d.ask(ctx, "poll_one($1,$2::int2,$3,$4,$5::int8,$6::int8,$7)",
			d.ns, int16(w.Name.Kind), []byte(w.Name.Name), w.ID, w.TTL.Microseconds(), w.Claim.Microseconds(), d.inbox.address())
		if err == nil {
			d.inbox.deliver(w.Name, a.granted, w.ID)
		}
		return a.result(err)
	}
	results := make([]driver.Result, len(waiters))
	ask := func(some []int, serve string) []int {
		return d.batch(ctx, results, some, owner, func(i int) int64 { return waiters[i].Claim.Microseconds() },
			"SELECT i, state, NULL::int8, NULL::int8 FROM "+d.schema+".poll($1,$2,$3,$4,$5,"+serve+")")
	}
	// Mostly it is a name that is to be served. Once one waiter has been sent alone, that is done, and the others of the
	// name go together; not again one by one if the name still looks as if it were to be served, because its lease has
	// ended but is pinned.
	var later []int
	served := make(map[driver.Name]bool)
	for _, i := range ask(all(len(waiters)), "true") {
		if n := waiters[i].Name; served[n] {
			later = append(later, i)
		} else {
			served[n] = true
			results[i] = one(i)
		}
	}
	for _, i := range ask(later, "false") {
		results[i] = one(i)
	}
	return results
}

// NextToken implements driver.FencingSource.
func (d *Driver) NextToken(ctx context.Context, n driver.Name, floor driver.Token) (driver.Token, error) {
	var token int64
	err := d.step(ctx, "next_token($1,$2::int2,$3,$4::int8)", &token,
		d.ns, int16(n.Kind), []byte(n.Name), int64(floor))
	return driver.Token(token), err
}

// Advance implements driver.FencingSource.
func (d *Driver) Advance(ctx context.Context, n driver.Name, floor driver.Token) error {
	return d.step(ctx, "advance($1,$2::int2,$3,$4::int8)", nil,
		d.ns, int16(n.Kind), []byte(n.Name), int64(floor))
}

// ForceUnlock implements driver.ForceUnlocker. A lease that a transaction has pinned by [Driver.VerifyTx] ends for its
// holder, but the name is not given to anybody before that transaction has ended.
func (d *Driver) ForceUnlock(ctx context.Context, n driver.Name) (int, error) {
	var ended int32
	var granted string
	err := d.row(ctx, "SELECT ended, coalesce(granted, '') FROM "+d.schema+".force_unlock($1,$2::int2,$3,$4)", []any{&ended, &granted},
		d.ns, int16(n.Kind), []byte(n.Name), d.inbox.address())
	if err != nil {
		return 0, err
	}
	d.inbox.deliver(n, granted, "")
	return int(ended), nil
}

// listPage is how many leases List reads in one statement.
const listPage = 500

// List implements driver.Lister. It reads a page at a time, so that a slow reader holds neither a connection nor a snapshot.
func (d *Driver) List(ctx context.Context, only driver.Name, yield func(driver.Holding) bool) error {
	after := driver.Owner{Name: only}
	for {
		var page []driver.Holding
		err := d.query(ctx, func(ctx context.Context, q querier) error {
			page = page[:0]
			rows, err := q.Query(ctx, "SELECT kind, name, owner, token, ttl, holder FROM "+d.schema+".list($1,$2::int2,$3,$4,$5,$6::int4)",
				pgx.QueryExecModeExec, d.ns, int16(after.Name.Kind), []byte(after.Name.Name), after.ID, only.Name != "", int32(listPage))
			if err != nil {
				return err
			}
			defer rows.Close()
			for rows.Next() {
				var kind int16
				var name, holder []byte
				var owner string
				var token, ttl int64
				if err := rows.Scan(&kind, &name, &owner, &token, &ttl, &holder); err != nil {
					return err
				}
				page = append(page, driver.Holding{
					Owner: driver.Owner{Name: driver.Name{Kind: driver.Kind(kind), Name: string(name)}, ID: owner},
					Token: driver.Token(token), Left: time.Duration(ttl) * time.Microsecond, Holder: string(holder)})
			}
			return rows.Err()
		})
		if err != nil {
			return err
		}
		for _, h := range page {
			if !yield(h) {
				return nil
			}
		}
		if len(page) < listPage {
			return nil
		}
		after = page[len(page)-1].Owner
	}
}

// answer is what a step about one owner answers.
type answer struct {
	state   int64
	token   int64
	ttl     int64
	granted string // see deliver
}

func (a *answer) answer() driver.Answer {
	if driver.State(a.state) != driver.Granted {
		return driver.Answer{State: driver.State(a.state)}
	}
	return driver.Answer{State: driver.Granted, Token: driver.Token(a.token), TTL: time.Duration(a.ttl) * time.Microsecond}
}

func (a *answer) result(err error) driver.Result {
	if err != nil {
		return driver.Result{Err: err}
	}
	return driver.Result{Answer: a.answer()}
}

// batchSize is how many owners go into one statement: enough to be cheap, few enough to be over soon.
const batchSize = 1000

// Further states of an owner in a batch.
const (
	alone = 0 // is to be asked for by a step of its own
	inUse = 5 // somebody has the row locked
)

// Somebody who has rows locked is done soon; often it is the batch before this one. So if there are many of them, they
// are asked for again in one batch, after a pause, and only in the end each alone.
const (
	fewLocked      = 2
	firstLockPause = 10 * time.Millisecond
	lastLockPause  = 640 * time.Millisecond
)

// batch sends those owners in as few statements as is good, puts what was answered into results, and answers the indexes of
// those that are to be sent alone. arg is the last argument of the function, for one owner.
func (d *Driver) batch(ctx context.Context, results []driver.Result, which []int, owner func(int) driver.Owner, arg func(int) int64, sql string) (rest []int) {
	for pause := firstLockPause; ; pause *= 4 {
		var later []int
		for part := range slices.Chunk(which, batchSize) {
			err := d.batchOnce(ctx, results, part, owner, arg, sql)
			for _, i := range part {
				switch {
				case err != nil:
					results[i] = driver.Result{Err: err}
				case results[i].State == alone:
					rest = append(rest, i)
				case results[i].State == inUse:
					later = append(later, i)
				}
			}
		}
		if len(later) <= fewLocked || pause > lastLockPause {
			return append(rest, later...)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done(): // which the next statement tells
		}
		which = later
	}
}

// batchOnce is one statement of a batch.
func (d *Driver) batchOnce(ctx context.Context, results []driver.Result, part []int, owner func(int) driver.Owner, arg func(int) int64, sql string) error {
	var kinds []int16
	var names [][]byte
	var owners []string
	var args []int64
	for _, i := range part {
		o := owner(i)
		kinds, names, owners = append(kinds, int16(o.Name.Kind)), append(names, []byte(o.Name.Name)), append(owners, o.ID)
		args = append(args, arg(i))
	}
	return d.query(ctx, func(ctx context.Context, q querier) error {
		for _, i := range part {
			results[i] = driver.Result{}
		}
		rows, err := q.Query(ctx, sql, pgx.QueryExecModeExec, d.ns, kinds, names, owners, args)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var i int64
			var a answer
			var token, ttl *int64
			if err := rows.Scan(&i, &a.state, &token, &ttl); err != nil {
				return err
			}
			if token != nil {
				a.token, a.ttl = *token, *ttl
			}
			if i < 1 || int(i) > len(part) {
				return fmt.Errorf("answer about owner %d of %d", i, len(part))
			}
			results[part[i-1]].Answer = a.answer()
		}
		return rows.Err()
	})
}

func all(n int) []int {
	which := make([]int, n)
	for i := range which {
		which[i] = i
	}
	return which
}

var errClosed = driver.Unavailable(errors.New("postgres: the driver is closed"))
