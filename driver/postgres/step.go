package postgres

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/driver"
)

// querier is a connection, or a transaction on one.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// step calls a function of the schema that answers one value.
func (d *Driver) step(ctx context.Context, call string, into any, args ...any) error {
	return d.row(ctx, "SELECT "+d.schema+"."+call, []any{into}, args...)
}

// ask makes a step about one owner.
func (d *Driver) ask(ctx context.Context, call string, args ...any) (a answer, err error) {
	var text string
	if err := d.step(ctx, call, &text, args...); err != nil {
		return answer{}, err
	}
	part := strings.SplitN(text, " ", 4) // see answer in schema.sql
	if len(part) != 4 {
		return answer{}, fmt.Errorf("postgres: answer %q", text)
	}
	for i, into := range []*int64{&a.state, &a.token, &a.ttl} {
		if part[i] == "" {
			continue
		}
		if *into, err = strconv.ParseInt(part[i], 10, 64); err != nil {
			return answer{}, fmt.Errorf("postgres: answer %q: %w", text, err)
		}
	}
	a.granted = part[3]
	return a, nil
}

// row runs a statement that answers one row.
func (d *Driver) row(ctx context.Context, sql string, into []any, args ...any) error {
	return d.query(ctx, func(ctx context.Context, q querier) error {
		return q.QueryRow(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...).Scan(into...)
	})
}

// mostTries bounds how often a step is made that surely had no effect and may have one if made again.
const mostTries = 5

// query runs one statement, in a transaction of its own.
func (d *Driver) query(ctx context.Context, f func(context.Context, querier) error) error {
	return d.retry(ctx, d.explicit.Load, f)
}

// transaction runs several statements, which may be run again.
func (d *Driver) transaction(ctx context.Context, f func(context.Context, pgx.Tx) error) error {
	return d.retry(ctx, func() bool { return true }, func(ctx context.Context, q querier) error { return f(ctx, q.(pgx.Tx)) })
}

// leastTime is what a statement gets that was sent, even if its context ends sooner.
const leastTime = 500 * time.Millisecond

func (d *Driver) retry(ctx context.Context, explicit func() bool, f func(context.Context, querier) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(d.open, cancel)
	defer stop()
	for try := 1; ; try++ {
		if d.open.Err() != nil {
			return errClosed
		}
		err := d.once(ctx, explicit(), f)
		var again *retryError
		if !errors.As(err, &again) || try == mostTries || ctx.Err() != nil {
			return err
		}
	}
}

// asking knows the owners whose request for a lock is under way. It goes through another connection than the release that
// undoes it and could be overtaken: then it would take the lock for nobody.
type asking struct {
	mu     sync.Mutex
	owners map[string]chan struct{}
}

// begin is called before a request is sent, and its result after the answer.
func (a *asking) begin(id string) (done func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.owners == nil {
		a.owners = make(map[string]chan struct{})
	}
	answered := make(chan struct{})
	a.owners[id] = answered
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.owners[id] == answered { // the owner has not asked again meanwhile
			delete(a.owners, id)
		}
		close(answered)
	}
}

// wait waits for the answer to the owner's latest request, if one is under way, until ctx ends.
func (a *asking) wait(ctx context.Context, id string) {
	a.mu.Lock()
	answered := a.owners[id]
	a.mu.Unlock()
	if answered == nil {
		return
	}
	select {
	case <-answered:
	case <-ctx.Done():
	}
}

// retryError marks a failure that was without effect and may not happen again.
type retryError struct{ error }

func (e *retryError) Unwrap() error { return e.error }

func (d *Driver) once(ctx context.Context, explicit bool, f func(context.Context, querier) error) error {
	if err := ctx.Err(); err != nil {
		return unavailable(err)
	}
	conn, err := d.pool.Acquire(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("postgres: no connection: %w", err) // a time-out, no refusal
		}
		return unavailable(err)
	}
	defer conn.Release()

	run, end := d.limit(ctx, conn.Conn())
	if explicit {
		err = inTx(run, conn.Conn(), f)
	} else {
		err = f(run, conn.Conn())
	}
	if end() && errors.Is(err, os.ErrDeadlineExceeded) {
		err = errors.Join(ctx.Err(), err)
	}
	return d.classify(err, conn.Conn())
}

// limit answers the context for what is done on the connection, which never ends: for one that can, pgx would start a goroutine with each
// statement. Instead the deadline of the socket ends it, but not at once when ctx ends: a statement that was sent is
// executed, whatever we do, since to close the connection while it lies in the server's buffer does not stop it, and the clean-up goes
// after it. end is to be called when all is done, and reports whether ctx ended before.
func (d *Driver) limit(ctx context.Context, conn *pgx.Conn) (run context.Context, end func() bool) {
	sent := time.Now()
	socket := conn.PgConn().Conn()
	over, seen := make(chan struct{}), make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(seen)
		select {
		case <-time.After(leastTime - time.Since(sent)):
		case <-d.open.Done():
		case <-over:
			return
		}
		_ = socket.SetDeadline(time.Unix(1, 0)) // fails if it is closed, and then all is over
	})
	return context.WithoutCancel(ctx), func() bool {
		if stop() {
			return false
		}
		close(over)
		<-seen
		_ = socket.SetDeadline(time.Time{})
		return true
	}
}

// beginSQL lets the server end a transaction whose client has stopped or is cut off in its middle: it has the row of a name
// locked. That is sooner than others give up waiting for the row.
const beginSQL = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL idle_in_transaction_session_timeout = '2s'"

// inTx is for a server whose default isolation level is another: the step costs three round trips.
func inTx(ctx context.Context, conn *pgx.Conn, f func(context.Context, querier) error) error {
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: beginSQL})
	if err != nil {
		return err
	}
	if err := f(ctx, tx); err != nil {
		_ = tx.Rollback(ctx) // if it fails the connection is closed, and the server rolls back
		return err
	}
	return tx.Commit(ctx)
}

// SQLSTATEs. FL002 is raised by begin in schema.sql.
const (
	stateIsolation     = "FL002"
	stateSerialization = "40001"
	stateDeadlock      = "40P01"
	stateLockTimeout   = "55P03"
	stateCancelled     = "57014"
	stateForbidden     = "42501"
)

// hints say what an operator should look at.
var hints = map[string]string{
	stateLockTimeout: "the row of the name is locked by another transaction",
	stateCancelled:   "the server ended the statement; statement_timeout should not be below 1 s",
	stateForbidden:   "the role lacks rights that schema.sql names",
	"3F000":          "the schema is missing: see EnsureSchema",
	"42P01":          "the schema is missing: see EnsureSchema",
	"42883":          "the schema is missing or old: see EnsureSchema",
}

// classify tells what an error says about the step: that it surely did not happen, or nothing.
func (d *Driver) classify(err error, conn *pgx.Conn) error {
	if err == nil {
		return nil
	}
	var answered *pgconn.PgError
	switch {
	case errors.Is(err, errStandby):
		return unavailable(err)
	case errors.As(err, &answered):
		// The server has answered with an error and then that it is ready for more, or the connection would be
		// closed by now: so it has rolled back. One that ends after the error may have been ended for another
		// reason, even after the commit.
		if conn.IsClosed() || !fromServer(answered.Code) {
			return fmt.Errorf("postgres: %w", err)
		}
		if hint := hints[answered.Code]; hint != "" {
			err = fmt.Errorf("%s: %w", hint, err)
		}
		switch answered.Code {
		case stateIsolation:
			d.explicit.Store(true)
			err = &retryError{err}
		case stateSerialization, stateDeadlock:
			err = &retryError{err}
		}
		return unavailable(err)
	case pgconn.SafeToRetry(err):
		// Not a byte was sent. The connection had broken while it lay in the pool.
		return unavailable(&retryError{err})
	}
	return fmt.Errorf("postgres: %w", err)
}

// fromServer reports whether the SQLSTATE is one with which a server tells of a transaction that it has rolled back, and not one
// with which a pooler tells that it has lost the server.
func fromServer(code string) bool {
	for _, class := range []string{"08", "40003", "57P", "58", "XX"} {
		if strings.HasPrefix(code, class) {
			return false
		}
	}
	return true
}

var errStandby = errors.New("this server is a hot standby: locks live on the primary only")

func unavailable(err error) error { return driver.Unavailable(fmt.Errorf("postgres: %w", err)) }
