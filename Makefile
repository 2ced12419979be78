# What people type. `make` lists it.

CARGO ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release

.DEFAULT_GOAL := help

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: setup build ## Real programs with and without Pagecrew: time, page faults, memory
	$(RELEASE)/pagecrew demo

.PHONY: test
test: setup built ## Every test that takes no longer than a few minutes
	@bash scripts/test-real.sh --put-back
	@bash scripts/within.sh 40 $(CARGO) test --workspace --profile checked
	@if [ -e scripts/test-real.sh ]; then bash scripts/test-real.sh; fi
	@$(MAKE) --no-print-directory models-and-guests

# Models of all interleavings take a CPU and nothing else, and have what the guests leave of it.
.PHONY: models-and-guests
models-and-guests:
	@mkdir -p $(TARGET)/loom; \
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=$(TARGET)/loom nice $(CARGO) test --package pagecrew --profile checked --lib model \
		>$(TARGET)/loom/output 2>&1 & models=$$!; \
	bash scripts/guests.sh --short; status=$$?; \
	wait $$models || status=$$?; \
	cat $(TARGET)/loom/output; \
	exit $$status

# What `test` needs, in two rows of about the same length: the end of each build is one crate, which leaves the other CPUs idle.
.PHONY: built
built:
	@( $(CARGO) build --workspace --release && \
	RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=$(TARGET)/loom $(CARGO) test --package pagecrew --profile checked --lib --no-run ) & others=$$!; \
	$(CARGO) build --workspace --profile checked --lib --bins --tests; status=$$?; \
	wait $$others || status=$$?; \
	exit $$status

.PHONY: test-guests
test-guests: setup build ## The machines that users have, one after the other under QEMU: Debian 12 and 13, NUMA, aarch64, a container, ...
	bash scripts/guests.sh; status=$$?; bash scripts/guests.sh --table && exit $$status

.PHONY: test-long
test-long: setup build ## Every test
	@bash scripts/test-real.sh --put-back
	$(CARGO) build --workspace --profile checked
	$(CARGO) test --workspace --profile checked -- --include-ignored
	@if [ -e scripts/test-real.sh ]; then bash scripts/test-real.sh --long; fi
	@bash scripts/mutants.sh

.PHONY: fuzz
fuzz: ## Programs and packets made up by a fuzzer, for five minutes each (needs cargo-fuzz; what is worth keeping goes to the corpus)
	cd fuzz && $(CARGO) fuzz run --sanitizer none frame -- -max_total_time=300 -max_len=800
	cd fuzz && $(CARGO) fuzz run --sanitizer none pool -- -max_total_time=300 -max_len=4200

.PHONY: bench
bench: setup build ## Every benchmark but reclaim, side by side with what a user would have instead
	$(RELEASE)/pagecrew bench

.PHONY: check
check: check-rust check-scripts ## Format, lints and documentation, with warnings as errors

# In the profile of developers, the only one in which what is there under `debug_assertions` is compiled.
.PHONY: check-rust
check-rust:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

.PHONY: check-scripts
check-scripts:
	@if command -v shellcheck >/dev/null; then \
		shellcheck --external-sources scripts/*.sh scripts/guests/init scripts/guests/*.sh tests/guest/*.sh .ci/run; \
	else \
		echo "check: shellcheck is not installed; the scripts are not checked" >&2; \
	fi

.PHONY: build
build: ## The command and the preload library
	$(CARGO) build --workspace --release

.PHONY: setup
setup: ## What the demo, the benchmarks and the tests use besides Rust, gcc and python3
	@bash scripts/setup.sh

UNITS = pagecrew-pool.service pagecrew-trim.service pagecrew-reclaim.service pagecrew.service
AT = $(DESTDIR)$(PREFIX)

.PHONY: install
install: build ## The command, the library and the services into PREFIX (default: /usr/local)
	install -D -m 755 $(RELEASE)/pagecrew $(AT)/bin/pagecrew
	install -D -m 644 $(RELEASE)/libpagecrew_preload.so $(AT)/lib/pagecrew/libpagecrew_preload.so
	install -D -m 644 contrib/pagecrew.toml $(AT)/share/doc/pagecrew/pagecrew.toml
	install -D -m 644 -t $(AT)/lib/systemd/system $(addprefix contrib/,$(UNITS))
	sed -i 's|=/usr/local/bin/|=$(PREFIX)/bin/|' $(addprefix $(AT)/lib/systemd/system/,$(UNITS))
	install -D -m 644 -t $(AT)/share/doc/pagecrew/docs docs/*.md $(wildcard docs/*.svg)
	install -D -m 644 -t $(AT)/share/doc/pagecrew contrib/grafana/pagecrew.json contrib/prometheus/pagecrew.rules.yml

.PHONY: uninstall
uninstall: ## Remove what install has put there; services that run go on until they are stopped
	rm -f $(AT)/bin/pagecrew $(addprefix $(AT)/lib/systemd/system/,$(UNITS))
	rm -rf $(AT)/lib/pagecrew $(AT)/share/doc/pagecrew

.PHONY: clean
clean: ## Remove what was built
	$(CARGO) clean
