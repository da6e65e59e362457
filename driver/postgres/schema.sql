-- fencelock for PostgreSQL 13 and later: schema version 1.
--
-- EnsureSchema, and opening a postgres:// URL, run this file by themselves. To do it by hand, run it once, as the
-- role that shall own the schema, in one transaction: psql -1 -f schema.sql. For another schema than "fencelock"
-- replace that word everywhere but in these comments. A role that may not create schemas in the database needs one that is
-- empty and its own: CREATE SCHEMA fencelock AUTHORIZATION owner.
--
-- The role of an application needs no more than this:
--
--   GRANT USAGE ON SCHEMA fencelock TO app;
--   GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA fencelock TO app;
--
-- All functions that a driver calls run with the rights of the owner and are steps: each leaves a name in a state
-- that another step could have left. So a role with these grants can take, extend, give and list locks, and can
-- forge nothing; it has no access to the tables.

-- Not IF NOT EXISTS, which needs the right to create schemas in the database even if there is nothing to do.
DO $$ BEGIN
	IF to_regnamespace('fencelock') IS NULL THEN
		CREATE SCHEMA fencelock;
	END IF;
END $$;

-- What a step is told is checked before it stores any of it. Others work with that later: what one role lets wait must not
-- make another one's release fail.
CREATE DOMAIN fencelock.key AS bytea CHECK (octet_length(VALUE) BETWEEN 1 AND 512);
CREATE DOMAIN fencelock.id AS text CHECK (octet_length(VALUE) BETWEEN 1 AND 256); -- with key, a payload that NOTIFY takes
CREATE DOMAIN fencelock.channel AS text CHECK (octet_length(VALUE) BETWEEN 1 AND 63); -- what LISTEN takes
CREATE DOMAIN fencelock.holder AS bytea CHECK (octet_length(VALUE) <= 1024);
CREATE DOMAIN fencelock.most AS integer CHECK (VALUE > 0);
CREATE DOMAIN fencelock.floor AS bigint CHECK (VALUE BETWEEN 0 AND 1::bigint << 53); -- far from where tokens end
CREATE DOMAIN fencelock.duration AS bigint CHECK (VALUE BETWEEN 0 AND 366 * 86400000000); -- in microseconds

-- What is remembered of a name. Its row is locked by every step that takes, gives or queues, before that
-- step looks at anything else. last is the last token. sole spares an uncontended pair a look: '' says that the name has
-- neither lease nor waiter, an owner that it has none besides a lease of this owner, and null nothing.
CREATE TABLE fencelock.names (
	ns   text COLLATE "C" NOT NULL,
	kind smallint NOT NULL,
	name bytea NOT NULL,
	last bigint NOT NULL,
	used timestamptz NOT NULL,
	sole text COLLATE "C",
	PRIMARY KEY (ns, kind, name)
) WITH (fillfactor = 70, vacuum_truncate = off);

-- Who holds. An extension locks this row only, not the name's.
CREATE TABLE fencelock.leases (
	ns      text COLLATE "C" NOT NULL,
	kind    smallint NOT NULL,
	name    bytea NOT NULL,
	owner   text COLLATE "C" NOT NULL,
	token   bigint NOT NULL,
	expires timestamptz NOT NULL,
	holder  bytea NOT NULL,
	PRIMARY KEY (ns, kind, name, owner)
) WITH (fillfactor = 70, vacuum_truncate = off);

-- Who waits, in the order of place. A poll locks these rows only, not the name's.
CREATE TABLE fencelock.waiters (
	ns      text COLLATE "C" NOT NULL,
	kind    smallint NOT NULL,
	name    bytea NOT NULL,
	place   bigint NOT NULL,
	owner   text COLLATE "C" NOT NULL,
	most    integer NOT NULL,
	floor   bigint NOT NULL,
	claim   bigint NOT NULL,
	expires timestamptz NOT NULL,
	holder  bytea NOT NULL,
	channel text NOT NULL,
	PRIMARY KEY (ns, kind, name, owner)
) WITH (fillfactor = 70);

CREATE INDEX waiters_place ON fencelock.waiters (ns, kind, name, place);

-- For a table of a page or two a plan would be to read all of it, and stay so in a session while the table grows. lock and release
-- do not set enable_seqscan, as others do; so their tables are made of some empty pages, which a vacuum leaves.
INSERT INTO fencelock.names SELECT '', i, decode(repeat('00', 512), 'hex'), 0, now() FROM generate_series(1, 300) i;
DELETE FROM fencelock.names;
INSERT INTO fencelock.leases SELECT '', i, decode(repeat('00', 512), 'hex'), '', 0, now(), '' FROM generate_series(1, 300) i;
DELETE FROM fencelock.leases;

CREATE FUNCTION fencelock.version() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 1';

-- later, answer, mint and sound become part of the statements of lock and release, which have the search path of their caller: hence the
-- schema with each operator and function.

CREATE FUNCTION fencelock.later(p_from timestamptz, p_by bigint) RETURNS timestamptz LANGUAGE sql STABLE
AS $$ SELECT p_from OPERATOR(pg_catalog.+) (p_by OPERATOR(pg_catalog.*) interval '1 microsecond') $$;

-- answer is what a step about one owner answers, as one text: to write a row costs nearly as much as a statement. Token and time left
-- are there only with a lease, and grants, an owner and a token each, only if there are any.
CREATE FUNCTION fencelock.answer(p_state integer, p_token bigint, p_ttl bigint, p_granted text) RETURNS text LANGUAGE sql STABLE
AS $$ SELECT pg_catalog.concat(p_state, ' ', p_token, ' ', p_ttl, ' ', p_granted) $$;

CREATE FUNCTION fencelock.elapsed(p_from timestamptz, p_to timestamptz) RETURNS bigint LANGUAGE sql STABLE
AS $$ SELECT round(extract(epoch FROM p_to - p_from) * 1000000)::bigint $$;

-- Microseconds since 1970: the clock that tokens follow.
CREATE FUNCTION fencelock.micros(p_t timestamptz) RETURNS bigint LANGUAGE sql STABLE
AS $$ SELECT round(extract(epoch FROM p_t) * 1000000)::bigint $$;

CREATE FUNCTION fencelock.mint(p_last bigint, p_floor bigint, p_now timestamptz) RETURNS bigint LANGUAGE sql STABLE
AS $$ SELECT greatest(p_last OPERATOR(pg_catalog.+) 1, p_floor OPERATOR(pg_catalog.+) 1,
	(pg_catalog.date_part('epoch', p_now) OPERATOR(pg_catalog.*) 1000000)::bigint) $$; -- extract would do sums of numeric

CREATE FUNCTION fencelock.refuse() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	IF pg_catalog.pg_is_in_recovery() THEN
		RAISE EXCEPTION USING ERRCODE = 'FL001',
			MESSAGE = 'this server is a hot standby: locks live on the primary only';
	END IF;
	-- With one snapshot for the whole step it would miss what was committed while it waited for the row.
	RAISE EXCEPTION USING ERRCODE = 'FL002',
		MESSAGE = 'a step needs a transaction that is READ COMMITTED and READ WRITE';
END $$;

-- Each step begins with begin; but lock and release with sound, and with bound only what they leave to others. It is the initial value
-- of a variable, since that takes no statement.

-- sound refuses where a step cannot be what it must be, and makes the commit durable: only here, since behind a pooler nobody can
-- know what a session is set to.
CREATE FUNCTION fencelock.sound() RETURNS boolean LANGUAGE sql AS $$
	SELECT CASE
		WHEN pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.<>) 'read committed'
			OR pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.<>) 'off' -- so on a standby
		THEN fencelock.refuse()
		ELSE pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) ANY (ARRAY['on', 'remote_apply'])
			OR pg_catalog.set_config('synchronous_commit', 'on', true) IS NOT NULL
		END $$;

-- bound limits how long a step waits for a row, and lets plans use the indexes however few rows a table had when they were made.
CREATE FUNCTION fencelock.bound() RETURNS boolean LANGUAGE sql AS $$
	SELECT pg_catalog.set_config('lock_timeout', '5s', true) IS NOT NULL
		AND pg_catalog.set_config('enable_seqscan', 'off', true) IS NOT NULL $$;

CREATE FUNCTION fencelock.begin() RETURNS boolean LANGUAGE sql AS 'SELECT fencelock.sound() AND fencelock.bound()';

-- enter locks the name's row, made if need be, and answers the last token.
CREATE FUNCTION fencelock.enter(p_ns text, p_kind smallint, p_name bytea) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	v_last bigint;
BEGIN
	FOR i IN 1..100 LOOP
		SELECT n.last INTO v_last FROM fencelock.names n
			WHERE n.ns = p_ns AND n.kind = p_kind AND n.name = p_name FOR NO KEY UPDATE;
		IF FOUND THEN
			RETURN v_last;
		END IF;
		INSERT INTO fencelock.names VALUES (p_ns, p_kind, p_name, 0, clock_timestamp()) ON CONFLICT DO NOTHING;
		IF FOUND THEN
			RETURN 0;
		END IF;
	END LOOP;
	RAISE EXCEPTION USING ERRCODE = '40001', MESSAGE = 'the row of the name comes and goes';
END $$;

-- leave stores the last token and the time of use. A use within the hour after one that is stored is not
-- worth a row version.
CREATE FUNCTION fencelock.leave(p_ns text, p_kind smallint, p_name bytea, p_last bigint, p_now timestamptz) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	UPDATE fencelock.names n SET last = p_last, used = p_now
		WHERE n.ns = p_ns AND n.kind = p_kind AND n.name = p_name AND (n.last <> p_last OR n.used < p_now - interval '1 hour');
END $$;

-- settle is leave for a step that may have changed who holds and waits.
CREATE FUNCTION fencelock.settle(p_ns text, p_kind smallint, p_name bytea, p_last bigint, p_now timestamptz, p_sole text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	UPDATE fencelock.names n SET last = p_last, used = p_now, sole = p_sole
		WHERE n.ns = p_ns AND n.kind = p_kind AND n.name = p_name
			AND (n.last <> p_last OR n.used < p_now - interval '1 hour' OR n.sole IS DISTINCT FROM p_sole);
END $$;

-- serve drops what has expired and grants to the head of the queue while the head's own limit allows it. The caller
-- has locked the name's row. It answers the last token, how many hold and wait now, and the grants to waiters
-- of the channel p_mine. Those of another channel are sent there, unless it begins with "!".
--
-- An expired lease that is locked counts as held: an extension may be about to be committed, or a user's
-- transaction has pinned it.
CREATE FUNCTION fencelock.serve(p_ns text, p_kind smallint, p_name bytea, p_now timestamptz, p_mine text,
	INOUT p_last bigint, OUT held integer, OUT queued integer, OUT granted text) LANGUAGE plpgsql AS $$
DECLARE
	v_dead integer;
	v_gone integer;
	v_next fencelock.waiters;
BEGIN
	SELECT l.n, l.dead, w.n, w.dead INTO held, v_dead, queued, v_gone
	FROM (
		SELECT count(*) AS n, count(*) FILTER (WHERE l.expires <= p_now) AS dead FROM fencelock.leases l
		WHERE l.ns = p_ns AND l.kind = p_kind AND l.name = p_name) l,
	(
		SELECT count(*) AS n, count(*) FILTER (WHERE w.expires <= p_now) AS dead FROM fencelock.waiters w
		WHERE w.ns = p_ns AND w.kind = p_kind AND w.name = p_name) w;
	IF v_dead > 0 THEN
		WITH dead AS (
			SELECT l.owner FROM fencelock.leases l
			WHERE l.ns = p_ns AND l.kind = p_kind AND l.name = p_name AND l.expires <= p_now FOR UPDATE SKIP LOCKED)
		DELETE FROM fencelock.leases l USING dead
			WHERE l.ns = p_ns AND l.kind = p_kind AND l.name = p_name AND l.owner = dead.owner;
		GET DIAGNOSTICS v_dead = ROW_COUNT;
		held := held - v_dead;
	END IF;
	IF v_gone > 0 THEN
		DELETE FROM fencelock.waiters w
			WHERE w.ns = p_ns AND w.kind = p_kind AND w.name = p_name AND w.expires <= p_now;
		GET DIAGNOSTICS v_gone = ROW_COUNT;
		queued := queued - v_gone;
	END IF;

	WHILE queued > 0 LOOP
		SELECT * INTO v_next FROM fencelock.waiters w
			WHERE w.ns = p_ns AND w.kind = p_kind AND w.name = p_name ORDER BY w.place LIMIT 1;
		EXIT WHEN held >= v_next.most;
		DELETE FROM fencelock.waiters w
			WHERE w.ns = p_ns AND w.kind = p_kind AND w.name = p_name AND w.owner = v_next.owner;
		p_last := fencelock.mint(p_last, v_next.floor, p_now);
		-- From now on and not from p_now: the row may have been locked by a poll, which was perhaps sent after p_now, and
		-- the waiter counts the claim from its latest poll.
		INSERT INTO fencelock.leases VALUES (p_ns, p_kind, p_name, v_next.owner, p_last,
			fencelock.later(clock_timestamp(), v_next.claim), v_next.holder);
		held := held + 1;
		queued := queued - 1;
		IF v_next.channel = p_mine THEN
			granted := concat_ws(' ', granted, v_next.owner, p_last);
		ELSIF left(v_next.channel, 1) <> '!' THEN
			PERFORM pg_notify(v_next.channel, format('%s %s %s %s', p_kind, v_next.owner, p_last, encode(p_name, 'hex')));
		END IF;
	END LOOP;
END $$;

-- busy says, without a lock, that the owner has nothing, cannot get it, and that nobody is to be served.
CREATE FUNCTION fencelock.busy(p_ns text, p_kind smallint, p_name bytea, p_owner text, p_most integer) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	v_now timestamptz := clock_timestamp();
	v_held integer;
BEGIN
	SELECT count(*) INTO v_held FROM fencelock.leases l
		WHERE l.ns = p_ns AND l.kind = p_kind AND l.name = p_name AND l.expires > v_now;
	IF v_held = 0 THEN
		RETURN false;
	END IF;
	RETURN v_held >= coalesce((
		SELECT w.most FROM fencelock.waiters w
		WHERE w.ns = p_ns AND w.kind = p_kind AND w.name = p_name AND w.expires > v_now ORDER BY w.place LIMIT 1
	), p_most) AND NOT EXISTS (
		SELECT FROM fencelock.leases l
		WHERE l.ns = p_ns AND l.kind = p_kind AND l.name = p_name AND l.owner = p_owner AND l.expires > v_now
	) AND NOT EXISTS (
		SELECT FROM fencelock.waiters w
		WHERE w.ns = p_ns AND w.kind = p_kind AND w.name = p_name AND w.owner = p_owner AND w.expires > v_now);
END $$;

-- renew is for an owner that may hold already: it prolongs the lease and answers token and time left. held is true
-- also for a lease that has expired but is pinned; then token is null.
CREATE FUNCTION fencelock.renew(p_ns text, p_kind smallint, p_name bytea, p_owner text, p_now timestamptz, p_ttl bigint,
	OUT held boolean, OUT token bigint, OUT ttl bigint) LANGUAGE plpgsql AS $$
DECLARE
	v_lease fencelock.leases;
BEGIN
	UPDATE fencelock.leases l SET expires = greatest(l.expires, fencelock.later(p_now, p_ttl))
		WHERE l.ns = p_ns AND l.kind = p_kind AND l.name = p_name AND l.owner = p_owner AND l.expires > p_now
		RETURNING l.* INTO v_lease;
	held := FOUND;
	IF held THEN
		token := v_lease.token;
		ttl := fencelock.elapsed(p_now, v_lease.expires);
	ELSE
		held := EXISTS (SELECT FROM fencelock.leases l
			WHERE l.ns = p_ns AND l.kind = p_kind AND l.name = p_name AND l.owner = p_owner);
	END IF;
END $$;

-- What follows are the steps, but for contend and yield, which are parts. States: 0 ask alone, 1 held, 2 granted, 3 waiting, 4 gone, 5 locked.

-- contend is lock for a name that is not known to be free.
CREATE FUNCTION fencelock.contend(p_ns text, p_kind smallint, p_name fencelock.key, p_owner fencelock.id, p_ttl fencelock.duration,
	p_most fencelock.most, p_floor fencelock.floor, p_holder fencelock.holder, p_wait boolean, p_claim fencelock.duration,
	p_mine fencelock.channel,
	OUT state smallint, OUT token bigint, OUT ttl bigint, OUT granted text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_bound boolean := fencelock.bound();
	v_now timestamptz;
	v_last bigint;
	v_name record;
	v_mine record;
BEGIN
	IF NOT p_wait AND fencelock.busy(p_ns, p_kind, p_name, p_owner, p_most) THEN
		state := 1;
		RETURN;
	END IF;
	v_last := fencelock.enter(p_ns, p_kind, p_name);
	v_now := clock_timestamp(); -- not before the row is ours: what the step before this one wrote must not lie in the future
	v_name := fencelock.serve(p_ns, p_kind, p_name, v_now, p_mine, v_last);
	v_last := v_name.p_last;
	granted := v_name.granted;
	IF v_name.held > 0 THEN
		v_mine := fencelock.renew(p_ns, p_kind, p_name, p_owner, v_now, p_ttl);
		IF v_mine.held THEN
			state := CASE WHEN v_mine.token IS NULL THEN 1 ELSE 2 END;
			token := v_mine.token;
			ttl := v_mine.ttl;
		END IF;
	END IF;
	IF state IS NULL AND v_name.queued > 0 THEN
		UPDATE fencelock.waiters w SET expires = fencelock.later(v_now, p_claim)
			WHERE w.ns = p_ns AND w.kind = p_kind AND w.name = p_name AND w.owner = p_owner;
		IF FOUND THEN
			state := 3;
		END IF;
	END IF;
	IF state IS NULL AND v_name.queued = 0 AND v_name.held < p_most THEN
		v_last := fencelock.mint(v_last, p_floor, v_now);
		v_name.held := v_name.held + 1;
		INSERT INTO fencelock.leases VALUES (p_ns, p_kind, p_name, p_owner, v_last, fencelock.later(v_now, p_ttl), p_holder);
		state := 2;
		token := v_last;
		ttl := p_ttl;
	ELSIF state IS NULL AND NOT p_wait THEN
		state := 1;
	ELSIF state IS NULL THEN
		INSERT INTO fencelock.waiters
			SELECT p_ns, p_kind, p_name, coalesce(max(w.place), 0) + 1, p_owner, p_most, p_floor, p_claim,
				fencelock.later(v_now, p_claim), p_holder, p_mine
			FROM fencelock.waiters w WHERE w.ns = p_ns AND w.kind = p_kind AND w.name = p_name;
		state := 3;
	END IF;
	IF state = 1 THEN
		PERFORM fencelock.leave(p_ns, p_kind, p_name, v_last, v_now);
	ELSE
		PERFORM fencelock.settle(p_ns, p_kind, p_name, v_last, v_now,
			CASE WHEN state = 2 AND v_name.held = 1 AND v_name.queued = 0 THEN p_owner END);
	END IF;
END $$;

-- lock and release are mostly for a name that nobody else wants, and what they do then is here. To set a search path or to check domains
-- would take as long as one of the statements: hence they write the schema with each operator, function and type, and leave everything
-- else, arguments out of bounds too, to contend and yield. They need not look who holds or waits, since sole is read from
-- the row that they have locked. A row of a name with an xmax may be locked, and to wait for it is left to those as well: to set a
-- configuration, such as lock_timeout, would take as long as all checks. (A lock that comes just after this look is waited for without
-- that limit.)

CREATE FUNCTION fencelock.lock(p_ns text, p_kind smallint, p_name bytea, p_owner text, p_ttl bigint, p_most integer, p_floor bigint,
	p_holder bytea, p_wait boolean, p_claim bigint, p_mine text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
	v_sound boolean := fencelock.sound() AND pg_catalog.octet_length(p_owner) OPERATOR(pg_catalog.<=) 256 AND p_owner OPERATOR(pg_catalog.<>) ''
		AND pg_catalog.octet_length(p_holder) OPERATOR(pg_catalog.<=) 1024
		AND p_floor OPERATOR(pg_catalog.>=) 0 AND p_floor OPERATOR(pg_catalog.<=) 9007199254740992
		AND p_ttl OPERATOR(pg_catalog.>=) 0 AND p_ttl OPERATOR(pg_catalog.<=) 31622400000000;
	v_token bigint;
	v_answer pg_catalog.record;
BEGIN
	IF v_sound THEN
		UPDATE fencelock.names n
			SET last = fencelock.mint(n.last, p_floor, pg_catalog.clock_timestamp()), used = pg_catalog.clock_timestamp(), sole = p_owner
			WHERE n.ns OPERATOR(pg_catalog.=) p_ns AND n.kind OPERATOR(pg_catalog.=) p_kind AND n.name OPERATOR(pg_catalog.=) p_name
				AND n.sole OPERATOR(pg_catalog.=) '' AND n.xmax OPERATOR(pg_catalog.=) '0'::pg_catalog.xid
			RETURNING n.last INTO v_token;
		IF FOUND THEN
			-- By the clock after the row was ours: what the step before this one wrote must not lie in the future.
			INSERT INTO fencelock.leases VALUES (p_ns, p_kind, p_name, p_owner, v_token,
				fencelock.later(pg_catalog.clock_timestamp(), p_ttl), p_holder);
			RETURN fencelock.answer(2, v_token, p_ttl, NULL);
		END IF;
	END IF;
	v_answer := fencelock.contend(p_ns, p_kind, p_name, p_owner, p_ttl, p_most, p_floor, p_holder, p_wait, p_claim, p_mine);
	RETURN fencelock.answer(v_answer.state, v_answer.token, v_answer.ttl, v_answer.granted);
END $$;

-- extend prolongs many leases. It waits for no row: those that somebody has locked are answered 5 and to be sent again, or
-- to extend_one. So two batches, or a batch and a step, never wait for each other in a ring. The plan for many is not that for
-- few, hence a custom one.
CREATE FUNCTION fencelock.extend(p_ns text, p_kinds smallint[], p_names bytea[], p_owners text[], p_ttls fencelock.duration[],
	OUT i bigint, OUT state smallint, OUT token bigint, OUT ttl bigint) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_custom_plan AS $$
#variable_conflict use_column
DECLARE
	v_begun boolean := fencelock.begin();
	v_now timestamptz := clock_timestamp();
	v_done bigint[];
BEGIN
	FOR i, state, token, ttl IN
		WITH want AS (
			SELECT * FROM unnest(p_kinds, p_names, p_owners, p_ttls) WITH ORDINALITY AS w(kind, name, owner, ttl, i)),
		free AS MATERIALIZED (
			SELECT l.kind, l.name, l.owner, want.ttl, want.i FROM want JOIN fencelock.leases l
				ON l.ns = p_ns AND l.kind = want.kind AND l.name = want.name AND l.owner = want.owner
			WHERE l.expires > v_now FOR NO KEY UPDATE OF l SKIP LOCKED)
		UPDATE fencelock.leases l SET expires = greatest(l.expires, fencelock.later(v_now, free.ttl)) FROM free
			WHERE l.ns = p_ns AND l.kind = free.kind AND l.name = free.name AND l.owner = free.owner
			RETURNING free.i, 2, l.token, fencelock.elapsed(v_now, l.expires)
	LOOP
		v_done := v_done || i;
		RETURN NEXT;
	END LOOP;
	IF cardinality(v_done) = cardinality(p_kinds) THEN
		RETURN;
	END IF;
	RETURN QUERY
		SELECT w.i, (CASE WHEN EXISTS (SELECT FROM fencelock.leases l
				WHERE l.ns = p_ns AND l.kind = w.kind AND l.name = w.name AND l.owner = w.owner AND l.expires > v_now)
			THEN 5 ELSE 4 END)::smallint, NULL::bigint, NULL::bigint
		FROM unnest(p_kinds, p_names, p_owners) WITH ORDINALITY AS w(kind, name, owner, i)
			LEFT JOIN unnest(v_done) AS done(i) ON done.i = w.i
		WHERE done.i IS NULL;
END $$;

CREATE FUNCTION fencelock.extend_one(p_ns text, p_kind smallint, p_name bytea, p_owner text, p_ttl fencelock.duration) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_begun boolean := fencelock.begin();
	v_now timestamptz;
	v_mine record;
BEGIN
	-- The lock first, so that the time is that of the extension and not that before a wait.
	PERFORM FROM fencelock.leases l
		WHERE l.ns = p_ns AND l.kind = p_kind AND l.name = p_name AND l.owner = p_owner FOR NO KEY UPDATE;
	v_now := clock_timestamp();
	v_mine := fencelock.renew(p_ns, p_kind, p_name, p_owner, v_now, p_ttl);
	RETURN fencelock.answer(CASE WHEN v_mine.token IS NULL THEN 4 ELSE 2 END, v_mine.token, v_mine.ttl, NULL);
END $$;

-- yield is release for a name that others may hold or want, or where nothing is to be released.
CREATE FUNCTION fencelock.yield(p_ns text, p_kind smallint, p_name bytea, p_owner text, p_mine text, OUT ended boolean, OUT granted text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_bound boolean := fencelock.bound();
	v_now timestamptz;
	v_last bigint;
	v_expires timestamptz;
	v_others boolean;
	v_name record;
BEGIN
	ended := false;
	SELECT n.last INTO v_last FROM fencelock.names n
		WHERE n.ns = p_ns AND n.kind = p_kind AND n.name = p_name FOR NO KEY UPDATE;
	IF NOT FOUND THEN
		RETURN;
	END IF;
	v_now := clock_timestamp();
	WITH free AS (
		SELECT l.owner FROM fencelock.leases l
		WHERE l.ns = p_ns AND l.kind = p_kind AND l.name = p_name AND l.owner = p_owner FOR UPDATE SKIP LOCKED)
	DELETE FROM fencelock.leases l USING free
		WHERE l.ns = p_ns AND l.kind = p_kind AND l.name = p_name AND l.owner = free.owner
		RETURNING l.expires,
			EXISTS (SELECT FROM fencelock.waiters w WHERE w.ns = p_ns AND w.kind = p_kind AND w.name = p_name)
			OR EXISTS (SELECT FROM fencelock.leases x WHERE x.ns = p_ns AND x.kind = p_kind AND x.name = p_name AND x.owner <> p_owner)
		INTO v_expires, v_others;
	IF v_expires IS NULL THEN
		-- It is absent, or pinned by a user's transaction, or just being extended. It ends now, and the row goes
		-- when it can. This does not wait for a pin: expires is no part of a key. It is set to the beginning of time, since a
		-- batch that extends has read the clock earlier than it comes to the row.
		UPDATE fencelock.leases l SET expires = '-infinity'
			WHERE l.ns = p_ns AND l.kind = p_kind AND l.name = p_name AND l.owner = p_owner AND l.expires > v_now
			RETURNING 'infinity'::timestamptz INTO v_expires;
	END IF;
	IF v_expires > v_now THEN
		ended := true;
	ELSE
		DELETE FROM fencelock.waiters w
			WHERE w.ns = p_ns AND w.kind = p_kind AND w.name = p_name AND w.owner = p_owner
			RETURNING w.expires INTO v_expires;
		ended := coalesce(v_expires > v_now, false);
	END IF;
	IF v_others = false THEN -- there is nobody to be served
		PERFORM fencelock.settle(p_ns, p_kind, p_name, v_last, v_now, '');
		RETURN;
	END IF;
	v_name := fencelock.serve(p_ns, p_kind, p_name, v_now, p_mine, v_last);
	granted := v_name.granted;
	IF v_name.held = 0 AND v_name.queued = 0 THEN
		PERFORM fencelock.settle(p_ns, p_kind, p_name, v_name.p_last, v_now, '');
	ELSE
		PERFORM fencelock.leave(p_ns, p_kind, p_name, v_name.p_last, v_now);
	END IF;
END $$;

CREATE FUNCTION fencelock.release(p_ns text, p_kind smallint, p_name bytea, p_owner text, p_mine text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
	v_begun boolean := fencelock.sound();
	v_expires timestamp with time zone;
	v_answer pg_catalog.record;
BEGIN
	UPDATE fencelock.names n SET sole = ''
		WHERE n.ns OPERATOR(pg_catalog.=) p_ns AND n.kind OPERATOR(pg_catalog.=) p_kind AND n.name OPERATOR(pg_catalog.=) p_name
			AND n.sole OPERATOR(pg_catalog.=) p_owner AND n.xmax OPERATOR(pg_catalog.=) '0'::pg_catalog.xid;
	IF FOUND THEN
		-- A lease with an xmax may be pinned, which is not to be waited for: yield sees to that. (A pin that comes between this look and
		-- the deletion is waited for.)
		DELETE FROM fencelock.leases l
			WHERE l.ns OPERATOR(pg_catalog.=) p_ns AND l.kind OPERATOR(pg_catalog.=) p_kind AND l.name OPERATOR(pg_catalog.=) p_name
				AND l.owner OPERATOR(pg_catalog.=) p_owner AND l.xmax OPERATOR(pg_catalog.=) '0'::pg_catalog.xid
			RETURNING l.expires INTO v_expires;
		IF FOUND THEN
			RETURN fencelock.answer(CASE WHEN v_expires OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp() THEN 2 ELSE 4 END, NULL, NULL, NULL);
		END IF;
		UPDATE fencelock.names n SET sole = NULL
			WHERE n.ns OPERATOR(pg_catalog.=) p_ns AND n.kind OPERATOR(pg_catalog.=) p_kind AND n.name OPERATOR(pg_catalog.=) p_name;
	END IF;
	v_answer := fencelock.yield(p_ns, p_kind, p_name, p_owner, p_mine);
	RETURN fencelock.answer(CASE WHEN v_answer.ended THEN 2 ELSE 4 END, NULL, NULL, v_answer.granted);
END $$;

-- poll renews many entries of queues. Like extend it waits for nobody and answers 5 if an entry is locked. An owner that
-- holds by now or, if p_serve, whose name is to be served is answered 0 and to be sent to poll_one.
CREATE FUNCTION fencelock.poll(p_ns text, p_kinds smallint[], p_names bytea[], p_owners text[], p_claims fencelock.duration[],
	p_serve boolean, OUT i bigint, OUT state smallint) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_custom_plan AS $$
#variable_conflict use_column
DECLARE
	v_begun boolean := fencelock.begin();
	v_now timestamptz := clock_timestamp();
	v_done bigint[];
BEGIN
	WITH want AS (
		SELECT * FROM unnest(p_kinds, p_names, p_owners, p_claims) WITH ORDINALITY AS w(kind, name, owner, claim, i)),
	free AS MATERIALIZED (
		SELECT w.kind, w.name, w.owner, want.claim, want.i FROM want JOIN fencelock.waiters w
			ON w.ns = p_ns AND w.kind = want.kind AND w.name = want.name AND w.owner = want.owner
		WHERE w.expires > v_now FOR NO KEY UPDATE OF w SKIP LOCKED),
	done AS (
		UPDATE fencelock.waiters w SET expires = fencelock.later(v_now, free.claim) FROM free
			WHERE w.ns = p_ns AND w.kind = free.kind AND w.name = free.name AND w.owner = free.owner
			RETURNING free.i)
	SELECT array_agg(done.i) INTO v_done FROM done;
	RETURN QUERY
		WITH want AS (
			SELECT * FROM unnest(p_kinds, p_names, p_owners) WITH ORDINALITY AS w(kind, name, owner, i)),
		due AS (
			SELECT n.kind, n.name, coalesce(h.n < q.most, false) AS due FROM (SELECT DISTINCT want.kind, want.name FROM want) n
			CROSS JOIN LATERAL (
				SELECT count(*) AS n FROM fencelock.leases l
				WHERE l.ns = p_ns AND l.kind = n.kind AND l.name = n.name AND l.expires > v_now) h
			LEFT JOIN LATERAL (
				SELECT w.most FROM fencelock.waiters w
				WHERE w.ns = p_ns AND w.kind = n.kind AND w.name = n.name AND w.expires > v_now ORDER BY w.place LIMIT 1) q ON true)
		SELECT want.i, (CASE
			WHEN p_serve AND due.due THEN 0
			WHEN done.i IS NOT NULL THEN 3
			WHEN EXISTS (SELECT FROM fencelock.waiters w
				WHERE w.ns = p_ns AND w.kind = want.kind AND w.name = want.name AND w.owner = want.owner AND w.expires > v_now) THEN 5
			WHEN EXISTS (SELECT FROM fencelock.leases l
				WHERE l.ns = p_ns AND l.kind = want.kind AND l.name = want.name AND l.owner = want.owner AND l.expires > v_now) THEN 0
			ELSE 4 END)::smallint
		FROM want JOIN due USING (kind, name) LEFT JOIN unnest(v_done) AS done(i) ON done.i = want.i;
END $$;

CREATE FUNCTION fencelock.poll_one(p_ns text, p_kind smallint, p_name bytea, p_owner text, p_ttl fencelock.duration,
	p_claim fencelock.duration, p_mine text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_begun boolean := fencelock.begin();
	v_now timestamptz;
	v_last bigint;
	v_used timestamptz;
	v_name record;
	v_mine record;
	v_state integer := 4;
BEGIN
	SELECT n.last, n.used INTO v_last, v_used FROM fencelock.names n
		WHERE n.ns = p_ns AND n.kind = p_kind AND n.name = p_name FOR NO KEY UPDATE;
	IF NOT FOUND THEN
		RETURN fencelock.answer(v_state, NULL, NULL, NULL);
	END IF;
	v_now := clock_timestamp();
	UPDATE fencelock.waiters w SET expires = fencelock.later(v_now, p_claim)
		WHERE w.ns = p_ns AND w.kind = p_kind AND w.name = p_name AND w.owner = p_owner AND w.expires > v_now;
	v_name := fencelock.serve(p_ns, p_kind, p_name, v_now, p_mine, v_last);
	v_mine := fencelock.renew(p_ns, p_kind, p_name, p_owner, v_now, p_ttl);
	IF v_mine.token IS NOT NULL THEN
		v_state := 2;
	ELSIF EXISTS (SELECT FROM fencelock.waiters w
		WHERE w.ns = p_ns AND w.kind = p_kind AND w.name = p_name AND w.owner = p_owner) THEN
		v_state := 3;
	END IF;
	IF v_name.p_last <> v_last OR v_used < v_now - interval '1 hour' THEN
		PERFORM fencelock.leave(p_ns, p_kind, p_name, v_name.p_last, v_now);
	END IF;
	RETURN fencelock.answer(v_state, v_mine.token, v_mine.ttl, v_name.granted);
END $$;

CREATE FUNCTION fencelock.next_token(p_ns text, p_kind smallint, p_name fencelock.key, p_floor fencelock.floor, OUT token bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_begun boolean := fencelock.begin();
	v_now timestamptz;
BEGIN
	token := fencelock.enter(p_ns, p_kind, p_name);
	v_now := clock_timestamp();
	token := fencelock.mint(token, p_floor, v_now);
	PERFORM fencelock.leave(p_ns, p_kind, p_name, token, v_now);
END $$;

CREATE FUNCTION fencelock.advance(p_ns text, p_kind smallint, p_name fencelock.key, p_floor fencelock.floor) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_begun boolean := fencelock.begin();
	v_last bigint;
BEGIN
	v_last := fencelock.enter(p_ns, p_kind, p_name);
	PERFORM fencelock.leave(p_ns, p_kind, p_name, greatest(v_last, p_floor), clock_timestamp());
END $$;

CREATE FUNCTION fencelock.force_unlock(p_ns text, p_kind smallint, p_name bytea, p_mine text, OUT ended integer, OUT granted text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_begun boolean := fencelock.begin();
	v_now timestamptz;
	v_last bigint;
	v_name record;
BEGIN
	ended := 0;
	SELECT n.last INTO v_last FROM fencelock.names n
		WHERE n.ns = p_ns AND n.kind = p_kind AND n.name = p_name FOR NO KEY UPDATE;
	IF NOT FOUND THEN
		RETURN;
	END IF;
	v_now := clock_timestamp();
	-- serve deletes what has expired, as far as it is not pinned. As to the time, see release.
	UPDATE fencelock.leases l SET expires = '-infinity'
		WHERE l.ns = p_ns AND l.kind = p_kind AND l.name = p_name AND l.expires > v_now;
	GET DIAGNOSTICS ended = ROW_COUNT;
	v_name := fencelock.serve(p_ns, p_kind, p_name, v_now, p_mine, v_last);
	granted := v_name.granted;
	IF v_name.held = 0 AND v_name.queued = 0 THEN
		PERFORM fencelock.settle(p_ns, p_kind, p_name, v_name.p_last, v_now, '');
	ELSE
		PERFORM fencelock.leave(p_ns, p_kind, p_name, v_name.p_last, v_now);
	END IF;
END $$;

-- list answers one page of live leases: those after a kind, name and owner or, if p_only is not null, of that name.
CREATE FUNCTION fencelock.list(p_ns text, p_kind smallint, p_name bytea, p_owner text, p_only boolean, p_page integer,
	OUT kind smallint, OUT name bytea, OUT owner text, OUT token bigint, OUT ttl bigint, OUT holder bytea) RETURNS SETOF record
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
	v_begun boolean := fencelock.begin();
	v_now timestamptz := clock_timestamp();
BEGIN
	RETURN QUERY
		SELECT l.kind, l.name, l.owner, l.token, fencelock.elapsed(v_now, l.expires), l.holder FROM fencelock.leases l
		WHERE l.ns = p_ns AND (l.kind, l.name, l.owner) > (p_kind, p_name, p_owner)
			AND (NOT p_only OR (l.kind = p_kind AND l.name = p_name)) AND l.expires > v_now
		ORDER BY l.kind, l.name, l.owner LIMIT p_page;
END $$;

-- sweep looks at a page of names after one of them. It drops what has expired there, serves who waits, and forgets names
-- that were unused for 48 hours and whose last token lies as far below the clock. It answers where to go on; null
-- at the end. It waits for no row of a name.
CREATE FUNCTION fencelock.sweep(p_ns text, p_kind smallint, p_name bytea, p_page integer, p_mine text,
	OUT kind smallint, OUT name bytea)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
	v_begun boolean := fencelock.begin();
	v_now timestamptz := clock_timestamp();
	v_old timestamptz := v_now - interval '49 hours'; -- the stored time of use is up to an hour old
	v_seen integer := 0;
	v_last bigint;
	v_at record;
	v_name record;
BEGIN
	FOR v_at IN
		SELECT n.kind, n.name, n.used, n.last FROM fencelock.names n
		WHERE n.ns = p_ns AND (n.kind, n.name) > (p_kind, p_name) ORDER BY n.kind, n.name LIMIT p_page
	LOOP
		v_seen := v_seen + 1;
		kind := v_at.kind;
		name := v_at.name;
		CONTINUE WHEN (v_at.used > v_old OR v_at.last > fencelock.micros(v_old))
			AND NOT EXISTS (SELECT FROM fencelock.leases l
				WHERE l.ns = p_ns AND l.kind = v_at.kind AND l.name = v_at.name AND l.expires <= v_now)
			AND NOT EXISTS (SELECT FROM fencelock.waiters w
				WHERE w.ns = p_ns AND w.kind = v_at.kind AND w.name = v_at.name AND w.expires <= v_now);
		SELECT n.last INTO v_last FROM fencelock.names n
			WHERE n.ns = p_ns AND n.kind = v_at.kind AND n.name = v_at.name FOR UPDATE SKIP LOCKED;
		CONTINUE WHEN NOT FOUND;
		v_name := fencelock.serve(p_ns, v_at.kind, v_at.name, clock_timestamp(), p_mine, v_last);
		IF v_name.held = 0 AND v_name.queued = 0 AND v_last <= fencelock.micros(v_old) THEN
			DELETE FROM fencelock.names n
				WHERE n.ns = p_ns AND n.kind = v_at.kind AND n.name = v_at.name AND n.used <= v_old;
		END IF;
		PERFORM fencelock.leave(p_ns, v_at.kind, v_at.name, v_name.p_last, clock_timestamp());
	END LOOP;
	IF v_seen < p_page THEN
		kind := NULL;
		name := NULL;
	END IF;
END $$;

-- verify answers whether the token is that of the lock's live lease, and pins that lease until the end of the
-- calling transaction, whatever becomes of its holder: nobody gets the lock before.
CREATE FUNCTION fencelock.verify(p_ns text, p_name bytea, p_token bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
BEGIN
	IF pg_is_in_recovery() THEN
		RAISE EXCEPTION USING ERRCODE = 'FL001',
			MESSAGE = 'this server is a hot standby: locks live on the primary only';
	END IF;
	PERFORM FROM fencelock.leases l
		WHERE l.ns = p_ns AND l.kind = 1 AND l.name = p_name AND l.token = p_token AND l.expires > clock_timestamp()
		FOR KEY SHARE;
	RETURN FOUND;
END $$;

REVOKE ALL ON SCHEMA fencelock FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA fencelock FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA fencelock FROM PUBLIC;
