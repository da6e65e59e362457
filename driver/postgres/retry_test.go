package postgres

import (
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/conformance/servers"
	"github.com/fencelock/fencelock/driver"
)

// onSchema makes a driver on a schema of its own, which a test may do something to.
func onSchema(t *testing.T, s *servers.Postgres, address, schema string) *Driver {
	t.Helper()
	t.Cleanup(func() { psql(t, s, "DROP SCHEMA IF EXISTS %s CASCADE", schema) })
	pool := newPool(t, address)
	ensure(t, pool, &Options{Schema: schema})
	d, err := New(pool, &Options{Schema: schema, Namespace: namespace()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// gate lets statements that change leases of the schema wait at their beginning for whoever has this advisory lock.
func gate(t *testing.T, s *servers.Postgres, schema string, key int) {
	t.Helper()
	psql(t, s, `CREATE FUNCTION %[1]s.gate() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0 AS
			'BEGIN PERFORM pg_catalog.pg_advisory_xact_lock_shared(%[2]d); RETURN NULL; END';
		CREATE TRIGGER gate BEFORE UPDATE ON %[1]s.leases FOR EACH STATEMENT EXECUTE FUNCTION %[1]s.gate()`, schema, key)
}

// TestDeadlock: a step has the row of its name and waits for that of its lease, somebody else has them the other way round. The
// server ends the step, which is made again and succeeds.
func TestDeadlock(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	const schema, key = "deadlock", 40001
	// The step looks soon whether it waits in a ring, and whoever looks is the victim.
	d := onSchema(t, s, s.URL()+"&deadlock_timeout=10ms", schema)
	gate(t, s, schema, key)
	for op, step := range map[string]func(driver.Request, driver.Token) error{
		"Lock": func(r driver.Request, token driver.Token) error { // again, as after a lost reply
			a, err := d.Lock(t.Context(), r)
			if err == nil && (a.State != driver.Granted || a.Token != token) {
				err = fmt.Errorf("%v with token %v, want granted with %v", a.State, a.Token, token)
			}
			return err
		},
		"Release": func(r driver.Request, _ driver.Token) error {
			found, err := d.Release(t.Context(), r.Owner)
			if err == nil && !found {
				err = errors.New("found nothing")
			}
			return err
		},
	} {
		r := request(op, time.Minute)
		a := locked(t, d, r, driver.Granted, "L1")
		closed, other := admin(t, s), admin(t, s)
		do(t, closed, "SELECT pg_advisory_xact_lock($1)", key)
		do(t, other, "SET LOCAL deadlock_timeout = '1h'")
		do(t, other, "SELECT FROM deadlock.leases WHERE ns = $1 AND owner = $2 FOR UPDATE", d.ns, r.ID)
		stepped, got := make(chan error, 1), make(chan error, 1)
		go func() { stepped <- step(r, a.Token) }()
		blocked(t, s, `"deadlock".`, 1) // it has the row of the name
		go func() {
			_, err := other.Exec(t.Context(), "SELECT FROM deadlock.names WHERE ns = $1 FOR UPDATE", d.ns)
			got <- err
		}()
		blocked(t, s, "FROM deadlock.names", 1)
		if err := closed.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-got; err != nil { // the step has the row until it ends, and the other does not let it succeed
			t.Fatalf("void: got %v for the other, want the step to be the victim", err)
		}
		if err := other.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-stepped; err != nil {
			t.Errorf("%s that the server ends for a deadlock: got %v, want it to be made again (L8)", op, err)
		}
	}
}

// TestRetries: how often a step is made whose transaction the server has rolled back, by SQLSTATE.
func TestRetries(t *testing.T) {
	t.Parallel()
	s := sharedServer(t)
	const schema, division = "retries", "22012"
	d := onSchema(t, s, s.URL(), schema)
	leases := 2
	var batch []driver.Extension
	for i := range leases {
		r := request(fmt.Sprint("extended", i), time.Minute)
		locked(t, d, r, driver.Granted, "L1")
		batch = append(batch, driver.Extension{Owner: r.Owner, TTL: time.Hour})
	}
	// A sequence goes on although what used it is rolled back.
	psql(t, s, `CREATE SEQUENCE retries.tries; CREATE TABLE retries.failures (code text, n int);
		CREATE FUNCTION retries.fail() RETURNS trigger LANGUAGE plpgsql AS $$
		DECLARE f retries.failures; BEGIN
			SELECT * INTO f FROM retries.failures;
			IF nextval('retries.tries') <= f.n THEN RAISE EXCEPTION USING ERRCODE = f.code, MESSAGE = 'as the test wants it'; END IF;
			RETURN NULL;
		END $$;
		CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON retries.leases FOR EACH STATEMENT EXECUTE FUNCTION retries.fail()`)
	const always = 1000
	for i, test := range []struct {
		code            string
		failures, tries int
	}{
		{stateSerialization, 1, 2},
		{stateDeadlock, mostTries - 1, mostTries},
		{stateSerialization, always, mostTries},
		{stateDeadlock, always, mostTries},
		{division, always, 1},
	} {
		for op, step := range map[string]func() (driver.State, error){
			"Lock": func() (driver.State, error) {
				a, err := d.Lock(t.Context(), request(fmt.Sprint(i), time.Minute))
				if err == nil {
					leases++
				}
				return a.State, err
			},
			"Extend of two": func() (driver.State, error) {
				both := d.Extend(t.Context(), batch)
				if both[0].State != both[1].State {
					t.Errorf("Extend of two: got %v and %v, want the same", both[0].State, both[1].State)
				}
				return both[1].State, both[1].Err
			},
		} {
			psql(t, s, "ALTER SEQUENCE retries.tries RESTART; TRUNCATE retries.failures; INSERT INTO retries.failures VALUES ('%s', %d)", test.code, test.failures)
			state, err := step()
			var answered *pgconn.PgError
			switch {
			case test.failures < always && (err != nil || state != driver.Granted):
				t.Errorf("%s that fails %d times with %s: got %v, %v, want granted", op, test.failures, test.code, state, err)
			case test.failures == always && (!errors.Is(err, driver.ErrUnavailable) || !errors.As(err, &answered) || answered.Code != test.code):
				t.Errorf("%s that always fails with %s: got %v, want ErrUnavailable with it (L8)", op, test.code, err)
			}
			if got := psql(t, s, "SELECT last_value FROM retries.tries"); got != strconv.Itoa(test.tries) {
				t.Errorf("tries of %s that fails %d times with %s: got %s, want %d", op, test.failures, test.code, got, test.tries)
			}
		}
	}
	if got := psql(t, s, "SELECT count(*) FROM retries.leases"); got != strconv.Itoa(leases) {
		t.Errorf("leases: got %s, want %d: none of a Lock that has failed (L8)", got, leases)
	}
}
