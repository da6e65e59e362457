#!/bin/sh
# provide.sh makes sure that the programs which package servers starts, and the browser that looks at the lab's page, are installed: what is missing comes from Debian's
# packages, which needs root or a sudo without password. It does nothing when all are there, and never starts a service.
set -eu

# One line per program: its name or a pattern of its path, and its Debian package.
programs='
redis-server                          redis-server
gcc                                   gcc libc6-dev
/usr/lib/postgresql/*/bin/postgres    postgresql
/usr/sbin/pgbouncer                   pgbouncer
chromium                              chromium
'

say() { echo "provide.sh: $*" >&2; }

as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

missing=
while read -r program package; do
	[ "$program" ] || continue
	# shellcheck disable=SC2086 # a pattern
	command -v $program >/dev/null 2>&1 || missing="$missing $package"
done <<END
$programs
END
[ "$missing" ] || exit 0

if ! command -v apt-get >/dev/null || ! as_root true 2>/dev/null; then
	say "the tests need$missing; install what is missing, or run this as root on Debian"
	exit 1
fi
say "installing$missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Debian starts a service when it installs one; this policy forbids that for as long as we install, unless there is one.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
	printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
	as_root chmod 755 "$policy"
	trap 'rm -f "$log"; as_root rm -f "$policy"' EXIT
fi
as_root timeout 900 sh -c "apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing" >"$log" 2>&1 || {
	say "failed:"
	tail -n 5 "$log" >&2
	exit 1
}
