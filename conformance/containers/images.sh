#!/bin/sh
# images.sh makes sure that the engine has an image of every server below, and prints which to use, as lines
# `export NAME='image'` on stdout; what it does goes to stderr. In a Makefile or a shell:
#
#	env=$(./images.sh) && eval "$env" && go test ./...
#
# (not `eval "$(./images.sh)"`: that hides a failure). Per server, the first of these that works:
#
#  1. the image the setting names (default: the official one) is there already;
#  2. the image built here earlier from Debian's packages is there (remove it to try the registry again:
#     docker rmi fencelock-servers:trixie);
#  3. docker pull, for at most five minutes;
#  4. one image with all the servers is built from Debian's packages, out of the archives in this machine's
#     own apt sources. That needs root or a sudo without password.
#
# With an image built here, testcontainers' reaper, which is an image too, is switched off by one more line, unless its
# setting is made already. An image that a setting names is never replaced by another: if it cannot be had, the script fails.
# A later run finds the images and does nothing. Concurrent runs are safe, the last one built is kept.
set -eu

release=trixie
built=fencelock-servers:$release

# One line per server: setting, official image, Debian package.
servers='
FENCELOCK_REDIS_IMAGE     redis:8                      redis-server
FENCELOCK_VALKEY_IMAGE    valkey/valkey:8              valkey-server
FENCELOCK_POSTGRES_IMAGE  postgres:17                  postgresql-17
FENCELOCK_ETCD_IMAGE      quay.io/coreos/etcd:v3.5.21  etcd-server
'

say() { echo "images.sh: $*" >&2; }
die() { say "$*"; exit 1; }

as_root() {
	if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

have() { docker image inspect "$1" >/dev/null 2>&1; }

packages=$(echo "$servers" | awk 'NF { printf "%s%s", sep, $3; sep = "," }')

# An image built from an older list of packages does not count.
have_built() {
	[ "$(docker image inspect -f '{{index .Config.Labels "fencelock.packages"}}' "$built" 2>/dev/null)" = "$packages" ]
}

# apt itself reads its sources, so every format and option it knows is understood. The order is apt's;
# archives without this release (security, third parties) make debootstrap fail at its first request.
archives() {
	apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | grep -E '^https?://' | awk '!seen[$0]++'
}

install_debootstrap() {
	command -v debootstrap >/dev/null || [ -x /usr/sbin/debootstrap ] && return
	say "installing debootstrap"
	as_root timeout 600 sh -c 'apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends debootstrap' >"$work/log" 2>&1 ||
		die "no image can be pulled, and debootstrap, which could build one, is missing and cannot be installed: $(tail -n 3 "$work/log")"
}

clean_up() {
	# An interrupted debootstrap leaves these mounted.
	for mount in "$work"/root/proc "$work"/root/sys; do
		if mountpoint -q "$mount" 2>/dev/null; then as_root umount "$mount" || true; fi
	done
	as_root rm -rf --one-file-system "$work"
}

build() {
	have_built && return
	command -v apt-get >/dev/null || die "no image can be pulled, and without apt none can be built"
	as_root true 2>/dev/null || die "no image can be pulled, and building one needs root or a sudo without password"
	work=$(mktemp -d)
	trap clean_up EXIT
	trap 'exit 130' INT TERM
	install_debootstrap
	ok=
	for archive in $(archives); do
		say "building $built from Debian's packages ($packages), about a minute"
		as_root rm -rf --one-file-system "$work/root"
		if as_root env PATH="$PATH:/usr/sbin:/sbin" timeout 1200 debootstrap --variant=minbase \
			--include="$packages,ca-certificates" "$release" "$work/root" "$archive" >"$work/log" 2>&1; then
			ok=1
			break
		fi
		say "not from this archive: $(tail -n 1 "$work/log")"
	done
	[ "$ok" ] || die "no image can be pulled, and no archive in apt's sources could build one of Debian $release"
	as_root tar -C "$work/root" --exclude='./var/cache/apt/archives/*.deb' --exclude='./var/lib/apt/lists/*' -c . >"$work/image.tar"
	timeout 600 docker import --change "LABEL fencelock.packages=$packages" "$work/image.tar" "$built" >/dev/null ||
		die "docker import failed"
	have_built || die "the image just built is not found as $built"
	say "built $built"
}

command -v docker >/dev/null || die "no docker command"
timeout 30 docker version >/dev/null 2>&1 || die "the container engine does not answer: $(timeout 30 docker version 2>&1 | tail -n 1)"

exports=
while read -r setting official package; do
	[ "$setting" ] || continue
	eval "image=\${$setting:-$official}"
	if have "$image" && [ "$image" != "$built" ]; then
		say "$setting: $image is here"
	elif [ "$image" = "$built" ] || { [ "$image" = "$official" ] && have_built; }; then
		build
		image=$built
		say "$setting: $image is here, with Debian's $package"
	elif say "pulling $image" && timeout --foreground 300 docker pull -q "$image" </dev/null >&2; then
		say "$setting: pulled $image"
	elif [ "$image" = "$official" ]; then
		build
		image=$built
		say "$setting: $image, with Debian's $package"
	else
		die "$setting names $image, which is not here and cannot be pulled"
	fi
	exports="${exports}export $setting='$image'
"
done <<END
$servers
END
case $exports in
*"'$built'"*) exports="${exports}export TESTCONTAINERS_RYUK_DISABLED='${TESTCONTAINERS_RYUK_DISABLED-true}'
" ;;
esac
printf %s "$exports"
