package postgres

import (
	"crypto/rand"
	"errors"
	"math"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelock/fencelock/driver"
)

// newSchema is a name for a schema of one test.
func newSchema() string { return "t_" + strings.ToLower(rand.Text()) }

func TestEnsureSchemaAtTheSameTime(t *testing.T) {
	s := sharedServer(t)
	o := &Options{Schema: newSchema(), Namespace: "x"}
	var all sync.WaitGroup
	for range 8 {
		pool := newPool(t, s.URL())
		all.Go(func() {
			for range 2 {
				if err := EnsureSchema(t.Context(), pool, o); err != nil {
					t.Errorf("EnsureSchema, eight at the same time: got %v, want nil", err)
				}
			}
		})
	}
	all.Wait()
	d, err := New(newPool(t, s.URL()), o)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	r := request("a", time.Minute)
	locked(t, d, r, driver.Granted, "L1")
	if got := psql(t, s, "SELECT count(*) FROM %s.leases", o.Schema); got != "1" {
		t.Errorf("leases in the schema: got %s, want 1", got)
	}
	if got := psql(t, s, "SELECT count(*) FROM fencelock.leases WHERE ns = 'x'"); got != "0" {
		t.Errorf("leases in the default schema: got %s, want 0", got)
	}
}

// TestSchemaNamedByAKeyword: the name is quoted everywhere.
func TestSchemaNamedByAKeyword(t *testing.T) {
	s := sharedServer(t)
	o := &Options{Schema: "select", Namespace: namespace()}
	ensure(t, newPool(t, s.URL()), o)
	d, err := New(newPool(t, s.URL()), o)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	everyStep(t, d)
}

// TestSchemaMadeByAnAdmin: who owns an empty schema need not be allowed to create others.
func TestSchemaMadeByAnAdmin(t *testing.T) {
	role, address := asRole(t)
	schema := "made_for_" + role
	psql(t, sharedServer(t), "CREATE SCHEMA %s AUTHORIZATION %s", schema, role)
	o := &Options{Namespace: namespace(), Schema: schema}
	pool := newPool(t, address)
	ensure(t, pool, o)
	d, err := New(pool, o)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	everyStep(t, d)
	err = EnsureSchema(t.Context(), pool, &Options{Schema: "made_for_nobody"})
	if !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), `make schema "made_for_nobody"`) {
		t.Errorf("EnsureSchema by a role that may not create it: got %v, want ErrUnavailable that says so", err)
	}
}

func TestSchemaThatIsNewer(t *testing.T) {
	s := sharedServer(t)
	o := &Options{Schema: newSchema()}
	pool := newPool(t, s.URL())
	ensure(t, pool, o)
	psql(t, s, "CREATE OR REPLACE FUNCTION %s.version() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 2'", o.Schema)
	if err := EnsureSchema(t.Context(), pool, o); !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("EnsureSchema on a newer schema: got %v, want ErrUnavailable and the version", err)
	}
}

func TestSchemaThatIsMissing(t *testing.T) {
	s := sharedServer(t)
	d, err := New(newPool(t, s.URL()), &Options{Schema: "nowhere"})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	_, err = d.Lock(t.Context(), request("a", time.Minute))
	if !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), "EnsureSchema") {
		t.Errorf("Lock without the schema: got %v, want ErrUnavailable that names EnsureSchema", err)
	}
}

// everyStep makes one of each.
func everyStep(t *testing.T, d *Driver) {
	t.Helper()
	d.sweep.close() // it may begin by itself, and no two run at the same time
	r, w := request("every", time.Minute), waiting(request("every", time.Minute), time.Minute)
	first := locked(t, d, r, driver.Granted, "L1")
	locked(t, d, w, driver.Waiting, "W4")
	polled(t, d, w, driver.Waiting)
	extended(t, d, r.Owner, 2*time.Minute, driver.Granted)
	for _, e := range d.Extend(t.Context(), []driver.Extension{{Owner: r.Owner, TTL: time.Minute}, {Owner: w.Owner, TTL: time.Minute}}) {
		if e.Err != nil {
			t.Fatalf("Extend of two: got %v, want nil", e.Err)
		}
	}
	released(t, d, r.Owner, true)
	if second := polled(t, d, w, driver.Granted); second.Token <= first.Token {
		t.Fatalf("second token: got %v, want more than %v (T1)", second.Token, first.Token)
	}
	if n, err := d.ForceUnlock(t.Context(), r.Name); n != 1 || err != nil {
		t.Fatalf("ForceUnlock: got %d, %v, want 1", n, err)
	}
	token, err := d.NextToken(t.Context(), r.Name, 0)
	if err == nil {
		err = d.Advance(t.Context(), r.Name, token)
	}
	if err == nil {
		err = d.List(t.Context(), driver.Name{}, func(driver.Holding) bool { return true })
	}
	if err == nil {
		err = d.sweepPage(t.Context(), 10)
	}
	if err != nil {
		t.Fatalf("NextToken, Advance, List or sweep: got %v, want nil", err)
	}
	p := request("permits", time.Minute)
	p.Name.Kind, p.Limit = driver.KindPermit, 2
	if a, err := d.Acquire(t.Context(), p); err != nil || a.State != driver.Granted {
		t.Fatalf("Acquire: got %v, %v, want granted", a.State, err)
	}
	released(t, d, p.Owner, true)
}

// stateChecked is the SQLSTATE of an argument that a step refuses.
const stateChecked = "23514"

var granting sync.Mutex

// asRole is the URL for a new role that was given the rights that schema.sql names, and nothing else.
func asRole(t *testing.T, grants ...string) (role, address string) {
	t.Helper()
	s := sharedServer(t)
	role = "r_" + strings.ToLower(rand.Text())
	granting.Lock() // two GRANTs on one object do not get along
	defer granting.Unlock()
	psql(t, s, "CREATE ROLE %s LOGIN; %s", role, strings.ReplaceAll(strings.Join(grants, "; "), "app", role))
	return role, strings.Replace(s.URL(), "postgres@", role+"@", 1)
}

var leastRights = []string{"GRANT USAGE ON SCHEMA fencelock TO app", "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA fencelock TO app"}

func TestLeastPrivilege(t *testing.T) {
	for _, right := range leastRights {
		if !strings.Contains(schemaSQL, right) {
			t.Errorf("schema.sql: got no %q, want what this test grants", right)
		}
	}
	_, address := asRole(t, leastRights...)
	ns := namespace()
	opened, err := driver.Open(t.Context(), address+"&namespace="+ns)
	if err != nil {
		t.Fatalf("open as a role with the least rights: got %v, want a driver", err)
	}
	defer opened.Close()
	d := opened.(*Driver)
	everyStep(t, d)
	r := request("mine", time.Minute)
	a := locked(t, d, r, driver.Granted, "L1")
	tx, err := d.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := d.VerifyTx(t.Context(), tx, "mine", a.Token); err != nil {
		t.Errorf("VerifyTx as a role with the least rights: got %v, want nil", err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, statement := range []string{
		"SELECT * FROM fencelock.leases", "UPDATE fencelock.names SET last = 0", "DELETE FROM fencelock.waiters",
		"SELECT fencelock.leave('" + ns + "', 1::int2, 'mine', 1, now())", "CREATE TABLE fencelock.t ()",
	} {
		if _, err := d.pool.Exec(t.Context(), statement); err == nil || !strings.Contains(err.Error(), "42501") {
			t.Errorf("%s as a role with the least rights: got %v, want permission denied", statement, err)
		}
	}
}

// TestSearchPath: a role that puts operators, functions and types of its own before those of the system does not have the steps call
// them, with the rights of the owner.
func TestSearchPath(t *testing.T) {
	t.Parallel()
	role, address := asRole(t, leastRights...)
	s := sharedServer(t)
	psql(t, s, `CREATE SCHEMA %[1]s;
		GRANT USAGE ON SCHEMA %[1]s TO %[1]s;
		CREATE FUNCTION %[1]s.trap() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RAISE ''trapped''; END';
		CREATE DOMAIN %[1]s.timestamptz AS pg_catalog.timestamptz CHECK (%[1]s.trap());
		CREATE DOMAIN %[1]s.xid AS pg_catalog.xid CHECK (%[1]s.trap());
		CREATE TYPE %[1]s.record AS (trap integer);
		CREATE FUNCTION %[1]s.clock_timestamp() RETURNS pg_catalog.timestamptz LANGUAGE sql AS 'SELECT NULL::pg_catalog.timestamptz WHERE %[1]s.trap()';
		CREATE FUNCTION %[1]s.round(numeric) RETURNS numeric LANGUAGE sql AS 'SELECT $1 WHERE %[1]s.trap()';
		CREATE FUNCTION %[1]s.current_setting(text) RETURNS text LANGUAGE sql AS 'SELECT $1 WHERE %[1]s.trap()';
		CREATE FUNCTION %[1]s.set_config(text, text, boolean) RETURNS text LANGUAGE sql AS 'SELECT $1 WHERE %[1]s.trap()'`, role)
	for _, kind := range []string{"text", "bytea"} {
		psql(t, s, "CREATE FUNCTION %[1]s.octet_length(%[2]s) RETURNS integer LANGUAGE sql AS 'SELECT 1 WHERE %[1]s.trap()'", role, kind)
	}
	for _, operator := range []string{"=", "<>", "<=", ">=", ">", "<", "+", "-", "*"} {
		for i, kinds := range [][2]string{{"text", "text"}, {"bytea", "bytea"}, {"smallint", "smallint"}, {"bigint", "bigint"}, {"bigint", "integer"},
			{"integer", "integer"}, {"numeric", "integer"}, {"pg_catalog.xid", "pg_catalog.xid"}, {"pg_catalog.timestamptz", "pg_catalog.timestamptz"},
			{"pg_catalog.timestamptz", "interval"}, {"bigint", "interval"}} {
			psql(t, s, `CREATE FUNCTION %[1]s.f%[5]d(%[3]s, %[4]s) RETURNS boolean LANGUAGE sql AS 'SELECT %[1]s.trap()';
				CREATE OPERATOR %[1]s.%[2]s (FUNCTION = %[1]s.f%[5]d, LEFTARG = %[3]s, RIGHTARG = %[4]s);
				ALTER FUNCTION %[1]s.f%[5]d(%[3]s, %[4]s) RENAME TO f%[5]d_%[6]x`, role, operator, kinds[0], kinds[1], i, operator)
		}
	}
	psql(t, s, "ALTER ROLE %[1]s SET search_path = %[1]s, pg_catalog", role)
	d := on(t, address, namespace())
	if _, err := d.pool.Exec(t.Context(), "SELECT 'a'::text = 'a'::text"); err == nil || !strings.Contains(err.Error(), "trapped") {
		t.Fatalf("comparison with this search path: got %v, want a trap", err)
	}
	everyStep(t, d)
	for range 3 { // the first one makes the name
		r := request("again", time.Minute)
		locked(t, d, r, driver.Granted, "L1")
		released(t, d, r.Owner, true)
	}
}

// TestArguments: a role that may call the steps, whatever it tells them, cannot spoil a name for others.
func TestArguments(t *testing.T) {
	t.Parallel()
	_, address := asRole(t, leastRights...)
	ns := namespace()
	d, stranger := on(t, address, ns), newPool(t, address)
	r, w := request("a", time.Minute), waiting(request("a", time.Minute), time.Minute)
	locked(t, d, r, driver.Granted, "L1")
	refused := func(what, call string, args ...any) {
		t.Helper()
		_, err := stranger.Exec(t.Context(), "SELECT fencelock."+call, append([]any{pgx.QueryExecModeExec, ns}, args...)...)
		var answered *pgconn.PgError
		if !errors.As(err, &answered) || answered.Code != stateChecked {
			t.Errorf("step with a bad %s: got %v, want SQLSTATE %s", what, err, stateChecked)
		}
	}
	for what, bad := range map[string][]any{
		"empty channel":     {"a", "intruder", 1, 0, "", 1000000, ""},
		"long channel":      {"a", "intruder", 1, 0, "", 1000000, strings.Repeat("c", 64)},
		"empty owner":       {"a", "", 1, 0, "", 1000000, "c"},
		"long owner":        {"a", strings.Repeat("o", 8000), 1, 0, "", 1000000, "c"},
		"empty name":        {"", "intruder", 1, 0, "", 1000000, "c"},
		"long name":         {strings.Repeat("n", 513), "intruder", 1, 0, "", 1000000, "c"},
		"limit 0":           {"a", "intruder", 0, 0, "", 1000000, "c"},
		"great floor":       {"a", "intruder", 1, int64(math.MaxInt64), "", 1000000, "c"},
		"negative floor":    {"a", "intruder", 1, -1, "", 1000000, "c"},
		"long holder":       {"a", "intruder", 1, 0, strings.Repeat("h", 1025), 1000000, "c"},
		"endless claim":     {"a", "intruder", 1, 0, "", int64(math.MaxInt64), "c"},
		"claim in the past": {"a", "intruder", 1, 0, "", -1, "c"},
	} {
		refused(what, "lock($1, 1::int2, $2::text::bytea, $3, 1000000, $4::int4, $5::int8, $6::text::bytea, true, $7::int8, $8)", bad...)
	}
	refused("floor of NextToken", "next_token($1, 1::int2, 'a', $2::int8)", int64(math.MaxInt64))
	refused("floor of Advance", "advance($1, 1::int2, 'a', $2::int8)", int64(math.MaxInt64))
	for _, extend := range []string{"extend_one($1, 1::int2, 'a', $2, $3::int8)", "extend($1, '{1}', ARRAY['a'::bytea], ARRAY[$2], ARRAY[$3::int8])"} {
		refused("TTL of Extend", extend, r.ID, int64(math.MaxInt64))
	}
	locked(t, d, w, driver.Waiting, "W4")
	released(t, d, r.Owner, true)
	polled(t, d, w, driver.Granted)
}

func TestNoPrivilege(t *testing.T) {
	_, address := asRole(t)
	d := on(t, address, namespace())
	_, err := d.Lock(t.Context(), request("a", time.Minute))
	if !errors.Is(err, driver.ErrUnavailable) || !strings.Contains(err.Error(), "rights") {
		t.Errorf("Lock by a role without rights: got %v, want ErrUnavailable that says so", err)
	}
	_, err = driver.Open(t.Context(), address+"&schema=of_somebody_else")
	if !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("open by a role that may not create the schema: got %v, want ErrUnavailable", err)
	}
}

func TestURL(t *testing.T) {
	s := sharedServer(t)
	ns := namespace()
	for _, scheme := range []string{"postgres", "postgresql"} {
		u := strings.Replace(s.URL(), "postgres://", scheme+"://", 1) + "&pool_max_conns=2&connect_timeout=5&application_name=test&namespace=" + ns
		d, err := driver.Open(t.Context(), u)
		if err != nil {
			t.Fatalf("open %s: got %v, want a driver", u, err)
		}
		everyStep(t, d.(*Driver))
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Errorf("second Close: got %v, want nil", err)
		}
		if _, err := d.Lock(t.Context(), request("a", time.Minute)); !errors.Is(err, driver.ErrUnavailable) {
			t.Errorf("Lock after Close: got %v, want ErrUnavailable", err)
		}
	}
	host, port, err := net.SplitHostPort(s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range []string{"postgres:///postgres", "postgres://"} { // where libpq looks for a Unix socket, or elsewhere
		t.Setenv("PGUSER", "postgres")
		t.Setenv("PGDATABASE", "postgres")
		d, err := driver.Open(t.Context(), u+"?sslmode=disable&host="+host+"&port="+port+"&namespace="+ns)
		if err != nil {
			t.Fatalf("open %s with a host as parameter: got %v, want a driver", u, err)
		}
		everyStep(t, d.(*Driver))
		d.Close()
	}

	const secret = "se%2Fcret"
	base := "postgres://user:" + secret + "@127.0.0.1:1/db"
	for query, want := range map[string]error{
		"?sslmode=disable":  driver.ErrUnavailable, // nobody listens at port 1
		"?namespace=/":      driver.ErrInvalid,
		"?schema=A":         driver.ErrInvalid,
		"?schema=pg_x":      driver.ErrInvalid,
		"?no_such=1":        driver.ErrInvalid,
		"?sslmode=no_such":  driver.ErrInvalid,
		"?pool_max_conns=x": driver.ErrInvalid,
		"?sslmode=disable&sslpassword=x&sslpassword=y": driver.ErrInvalid,
		"?connect_timeout=" + secret:                   driver.ErrInvalid,
		"#fragment":                                    driver.ErrInvalid,
	} {
		d, err := driver.Open(t.Context(), base+query)
		if !errors.Is(err, want) {
			t.Errorf("open with %s: got %v, want %v", query, err, want)
		}
		plain, _ := url.PathUnescape(secret)
		if err != nil && (strings.Contains(err.Error(), secret) || strings.Contains(err.Error(), plain)) {
			t.Errorf("open with %s: got the password in %q", query, err)
		}
		if err == nil {
			d.Close()
		}
	}
}

func TestNewRefuses(t *testing.T) {
	pool := newPool(t, sharedServer(t).URL())
	for name, o := range map[string]*Options{
		"schema": {Schema: `x"; DROP TABLE y`}, "namespace": {Namespace: ".x"},
	} {
		if _, err := New(pool, o); !errors.Is(err, driver.ErrInvalid) || !strings.Contains(err.Error(), name) {
			t.Errorf("New with a bad %s: got %v, want ErrInvalid that names it", name, err)
		}
	}
	if _, err := New(nil, nil); !errors.Is(err, driver.ErrInvalid) {
		t.Errorf("New without a pool: got %v, want ErrInvalid", err)
	}
}
