#!/bin/sh
# test.sh runs everything: the tests of the module under the race detector, the drivers once more with the newest
# versions of their client libraries, and the suite on containers if a container engine answers. It ends with a
# table of what ran where, and fails if anything failed, if docs/choosing.md says something else or, in CI, if a row of
# the table is missing.
#
#	test.sh docs	runs nothing, and writes what the latest run has shown into docs/choosing.md
set -u
cd "$(dirname "$0")"

# Rows of the table, as backend/provider.
processes='memory/local file/local redis/process redis/cluster-process rueidis/process rueidis/cluster-process etcd/process postgres/process redlock/process'
containers='redis/container redis/valkey-container rueidis/container etcd/container postgres/container'

# The groups of the suite that look at the engine more than at a client library or server. Each driver runs them with its own library
# on a server; they are not repeated with further libraries, on further servers of the same kind, or on two backends at once.
engine='^(Concurrency|Process|Renewal|Loss|Release|Leaks|Cost|Limits|Reentrancy|LockAll|Do|Inspect)$'

# The newest versions of client libraries known to pass; go.mod has the oldest.
newest='github.com/redis/go-redis/v9@v9.23.0 github.com/redis/rueidis@v1.0.79 github.com/jackc/pgx/v5@v5.13.0 go.etcd.io/etcd/client/v3@v3.6.16'

results=$PWD/.cache/results
if [ "${1:-}" = docs ]; then
	# shellcheck disable=SC2086 # one argument for each row
	exec go run ./conformance/internal/table -docs docs/choosing.md -write "$results" $processes
fi
rm -rf "$results"
mkdir -p "$results" .cache/newest
export FENCELOCK_RESULTS="$results"
status=0

step() { echo; echo "== $*"; }

step "root module; the suite on two backends at once without the groups $engine"
# One package at a time: the suite measures time, and packages would take it from each other.
go test -race -p 1 -timeout 20m -skip "^TestServerConformance\$/$engine" ./... || status=1

step "drivers with the newest client libraries: $newest; the suite on one server, without the same groups"
cp go.mod .cache/newest/go.mod
cp go.sum .cache/newest/go.sum
# shellcheck disable=SC2086 # one argument for each version
go get -modfile=.cache/newest/go.mod $newest &&
	FENCELOCK_RESULTS='' go test -modfile=.cache/newest/go.mod -p 1 -timeout 15m \
		-skip "^TestClusterConformance\$|^TestConformance\$/$engine" \
		./driver/goredis ./driver/rueidis ./driver/etcd ./driver/postgres || status=1

step "bench"
(cd bench && go test ./...) || status=1

rows=$processes
if timeout 30 docker version >/dev/null 2>&1; then
	step "containers; the suite on Valkey and through rueidis without the same groups"
	if images=$(conformance/containers/images.sh); then
		eval "$images"
		(cd conformance/containers && go test -race -timeout 20m -skip "^TestConformance(Rueidis|Valkey)\$/$engine" ./...) || status=1
	else
		status=1
	fi
	rows="$rows $containers"
else
	step "no container engine answers: nothing ran on containers"
	[ "${CI:-}" = true ] && rows="$rows $containers"
fi

step "conformance"
# shellcheck disable=SC2086 # one argument for each row
go run ./conformance/internal/table -docs docs/choosing.md "$results" $rows || status=1
[ "$status" = 0 ] && echo ok || echo FAILED
exit "$status"
