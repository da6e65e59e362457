package postgres

import (
	"context"
	"net/url"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelock/fencelock/driver"
)

func init() {
	driver.Register("postgres", open)
	driver.Register("postgresql", open)
}

// URLParameters lists the parameters of a URL that are passed on to pgx, with the meanings that they have there.
func URLParameters() []string {
	return []string{
		"host", "port", "sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslsni",
		"application_name", "connect_timeout", "target_session_attrs", "search_path",
		"pool_max_conns", "pool_min_conns", "pool_max_conn_lifetime", "pool_max_conn_lifetime_jitter",
		"pool_max_conn_idle_time", "pool_health_check_period",
	}
}

// openTimeout bounds the opening of a URL.
const openTimeout = 30 * time.Second

func open(ctx context.Context, u *url.URL) (driver.Driver, error) {
	params := driver.NewParams(u)
	o := &Options{
		Namespace: params.String("namespace", driver.DefaultNamespace),
		Schema:    params.String("schema", DefaultSchema),
	}
	passed := url.Values{}
	for _, name := range URLParameters() {
		if v := params.String(name, ""); v != "" {
			passed.Set(name, v)
		}
	}
	if err := params.Err(); err != nil {
		return nil, err
	}
	if _, err := o.withDefaults(); err != nil {
		return nil, err
	}
	if u.Opaque != "" || u.Fragment != "" {
		return nil, driver.Invalid("url", u.Host, "must be postgres://user@host:port/database")
	}
	address := *u
	address.RawQuery = passed.Encode()
	if address.Host == "" && address.Path == "" {
		address.Path = "/" // without a path, the text would lose its slashes
	}
	config, err := pgxpool.ParseConfig(address.String())
	if err != nil {
		// The error may repeat the URL, which may hold a password.
		return nil, driver.Invalid("url", u.Host, "pgx cannot read it: look at ports, durations, numbers, sslmode and certificates")
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, unavailable(err)
	}
	d, err := New(pool, o)
	if err == nil {
		d.owned = true
		err = d.ensureSchema(ctx)
	}
	if err != nil {
		pool.Close()
		return nil, err
	}
	return d, nil
}
