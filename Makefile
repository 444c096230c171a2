# Start with these two commands, on a Debian machine with Rust: `make demo` and `make test`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.PHONY: build install packages tools demo test test-ublk test-vhost-user test-kernels sim soak man clean
.PHONY: check fmt clippy tidy deny publish-check msrv

TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
TOOLS := $(TARGET)/tools
export PATH := $(TOOLS)/bin:$(PATH)
export CARGO_TARGET_DIR := $(TARGET)
FSX_VERSION := 0.3.0

# Builds the product alone: feature unification must not add the simulator's planted bugs to it.
build:
	cargo build --locked --release -p forkdisk-cli

# Installs the program, its units and rules, the helper by which mount(8) and /etc/fstab mount pools, and the manual
# pages. DESTDIR is for packages. The prefix is /usr, since the units name the program there.
DESTDIR :=
install: man
	install -D -m 755 $(TARGET)/release/forkdisk $(DESTDIR)/usr/bin/forkdisk
	install -D -m 644 -t $(DESTDIR)/usr/lib/systemd/system contrib/systemd/*
	install -D -m 644 -t $(DESTDIR)/usr/lib/udev/rules.d contrib/udev/*
	install -d $(DESTDIR)/usr/sbin
	ln -sf ../bin/forkdisk $(DESTDIR)/usr/sbin/mount.fuse.forkdisk
	install -D -m 644 -t $(DESTDIR)/usr/share/man/man1 $(TARGET)/man1/*

packages:
	scripts/packages

$(TOOLS)/bin/fsx:
	cargo install --quiet --locked --root $(TOOLS) --version $(FSX_VERSION) fsx

tools: $(TOOLS)/bin/fsx

demo: packages build
	scripts/demo $(TARGET)/release/forkdisk

test: packages tools
	scripts/test $(TARGET)

# Tests attaching by ublk in a 6.12 kernel under software emulation: three to six minutes, not part of `make test`.
test-ublk:
	cargo build --locked -p forkdisk-cli
	scripts/test-ublk $(TARGET)/debug/forkdisk

# Tests vhost-user-blk with real guests under software emulation: five to ten minutes, not part of `make test`.
test-vhost-user:
	cargo build --locked --release -p forkdisk-cli
	scripts/test-vhost-user $(TARGET)/release/forkdisk

# Runs the end-to-end tests of all doors, and ublk, in a 6.12 kernel under software emulation: an hour at most.
# `make test` runs the same tests of the doors in a 6.1 kernel.
test-kernels: packages
	cargo build --locked --release -p forkdisk-cli
	tests=$$(cargo test --locked --release -p forkdisk-cli --test e2e --no-run --message-format json \
	    | sed -n 's/.*"name":"e2e".*"executable":"\([^"]*\)".*/\1/p'); \
	scripts/test-kernels $(TARGET)/release/forkdisk "$$tests"

# Runs the crash simulator: make sim ARGS="--seeds 50 --steps 2000"
sim:
	cargo build --locked --release -p forkdisk-sim
	$(TARGET)/release/forkdisk-sim $(or $(ARGS),--seeds 300 --steps 2000)

# Simulates new seeds of all profiles, without end or for HOURS; continues where the last run ended. Ctrl-C ends it.
soak:
	cargo build --locked --release -p forkdisk-sim
	$(TARGET)/release/forkdisk-sim --soak $(TARGET)/soak $(if $(HOURS),--hours $(HOURS)) $(if $(JOBS),--jobs $(JOBS)) \
	    --commit $$(git describe --always --dirty)

check: fmt clippy tidy deny publish-check

fmt:
	cargo fmt --all --check

clippy:
	cargo clippy --locked --workspace --exclude forkdisk-sim --all-targets -- -D warnings
	cargo clippy --locked -p forkdisk-sim --all-targets -- -D warnings

# Checks the whole repository against the rules of crates/tidy.
tidy:
	cargo test --locked --quiet -p forkdisk-tidy

deny:
	scripts/deny $(TOOLS)

# Packages the published crates and builds each from its package, as `cargo publish` would, without uploading.
publish-check:
	scripts/publish-check $(TARGET)

# Checks the published crates with the oldest compiler that they support. Installs it by rustup if it is missing.
msrv:
	scripts/msrv $(TARGET)

# Generates manual pages and completions from the parser's definitions.
man: build
	$(TARGET)/release/forkdisk man $(TARGET)/man1
	for shell in bash zsh fish; do \
	    $(TARGET)/release/forkdisk completions $$shell > $(TARGET)/forkdisk.$$shell; \
	done

clean:
	cargo clean
