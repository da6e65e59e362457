// Package containers runs real backend servers as containers, with the same controls as the local processes of
// package servers: it is for tests of drivers against the versions and images that users run, the official ones or,
// where no registry can be reached, one built from Debian's packages (images.sh). The faults come from the container
// engine.
//
// [StartRedis], [StartValkey], [StartEtcd] and [StartPostgres] start a server. The engine must run on this machine: the
// servers' ports are published on 127.0.0.1 only. No container outlives its Close; what a killed test leaves behind,
// testcontainers' reaper removes, unless it is disabled (TESTCONTAINERS_RYUK_DISABLED).
//
// Its tests need the engine and the images, and fail without:
//
//	env=$(./images.sh) && eval "$env" && go test ./...
//
// The package is a module of its own and never tagged: testcontainers and the engine's client stay out of the go.sum
// of everybody who imports a driver, and it always tests the library it lies in, by a replace directive in its go.mod.
// So nothing outside this repository can require it.
package containers
