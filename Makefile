# make         builds the command
# make test    provides the servers, runs everything, ends with a table of what ran where
# make docs    writes what the latest make test has shown into docs/choosing.md, and what the lab shows into docs/behaviour.md
# make lint    gofmt and the linters of .golangci.yaml, go vet's among them
# make bench   fencelock, raw commands and other libraries in turn, into docs/performance.md; BENCH=--quick is shorter
# make bench-drivers  the benchmarks of each driver by itself
# make profile CPU and allocation profiles of each path into .cache/profiles, and what is on top of them
#
# Debian packages that are missing are installed when we may (root or sudo); else the target says what to install.

GOLANGCI_VERSION := v2.14.0
GOLANGCI := .cache/golangci-lint-$(GOLANGCI_VERSION)
.PHONY: build test docs lint bench bench-drivers profile servers clean

build:
	go build -o bin/ ./cmd/fencelock

test: servers
	./test.sh

docs: servers
	./test.sh docs
	go run ./cmd/fencelock compare --docs docs

servers:
	conformance/servers/provide.sh

bench: servers
	cd bench && go run . $(BENCH) -docs ../docs

bench-drivers: servers
	go test -run '^$$' -bench Pair -benchtime 9x ./driver/goredis
	go test -run '^$$' -bench Crowd -benchtime 7x ./driver/goredis ./driver/rueidis
	go test -run '^$$' -bench Extend -benchtime 3000x ./driver/goredis
	go test -run '^$$' -bench 'HeldLeases|LossSignal' -benchtime 1x ./driver/goredis
	go test -run '^$$' -bench Pair -benchtime 1000x ./driver/etcd
	go test -run '^$$' -bench 'Handoff|LossSignal' -benchtime 20x ./driver/etcd
	go test -run '^$$' -bench Waiters -benchtime 3x ./driver/etcd
	go test -run '^$$' -bench 'Uncontended|Handover' -benchtime 2000x ./driver/postgres
	go test -run '^$$' -bench Extensions -benchtime 3x ./driver/postgres
	go test -run '^$$' -bench 'Pair|Crowd' -benchtime 9x ./driver/redlock
	go test -run '^$$' -bench OneStopped -benchtime 1000x ./driver/redlock
	go test -run '^$$' -bench Both -benchtime 500x ./driver/migrate
	go test -run '^$$' -bench . -benchtime 3x .

profile: servers
	cd bench && go run . -profile ../.cache/profiles

lint: $(GOLANGCI)
	@unformatted=$$(gofmt -l .); [ -z "$$unformatted" ] || { echo "not formatted: $$unformatted"; exit 1; }
	$(GOLANGCI) run ./...
	cd conformance/containers && $(CURDIR)/$(GOLANGCI) run --config $(CURDIR)/.golangci.yaml ./...
	cd bench && $(CURDIR)/$(GOLANGCI) run --config $(CURDIR)/.golangci.yaml ./...

$(GOLANGCI):
	@mkdir -p $(@D)
	GOBIN=$(CURDIR)/$(@D) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	@mv $(@D)/golangci-lint $@

clean:
	rm -rf bin .cache
