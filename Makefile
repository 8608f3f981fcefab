# From a clone to a trained model: `make train`. Everything that is fetched or
# built stays within the clone unless one of these names another place.

# What `make setup` fetches.
DEPS ?= .deps
# The Python environment that tests compare against.
VENV ?= .venv
# Texts to train on; a comma or a space between them is not possible in a name.
TEXT ?=
# The tokens made of them.
DATA ?= outputs/shakespeare/data
# Nodes of `make train`, and further arguments for `elastic run`.
NODES ?= 4
RUN ?=

deps := $(abspath $(DEPS))
export DEPS VENV TEXT
export LIBTORCH ?= $(deps)/libtorch/torch
export CARGO_TARGET_DIR ?= $(CURDIR)/target
export ELASTIC_TEST_PYTHON ?= $(abspath $(VENV))/bin/python

elastic := $(CARGO_TARGET_DIR)/release/elastic
texts := $(or $(TEXT),$(deps)/shakespeare/*.txt)

# The S3 server that `make test-object-store` starts.
S3_VENV ?= .venv-s3
# Seconds of `make fuzz` for each target.
FUZZ_SECONDS ?= 600

.PHONY: help setup build train data test test-object-store fuzz fuzz-smoke venv lint clean

help:
	@echo "make train   fetch libtorch and a text, build, train with $(NODES) nodes on this machine"
	@echo "make setup   fetch libtorch and a text into $(DEPS), once (LIBTORCH, TEXT: bring your own)"
	@echo "make build   build elastic and elastic-worker"
	@echo "make test    run all tests (makes the PyTorch environment first, 4.7 GB)"
	@echo "make test-object-store   run the tests of checkpoints in S3 against a server on this machine"
	@echo "make fuzz    search for bytes that break the checkpoint reader, $(FUZZ_SECONDS) s for each target"
	@echo "make fuzz-smoke   the same inputs as ever and some new ones, 30 s"
	@echo "make venv    make the PyTorch environment in $(VENV)"
	@echo "make lint    formatting, clippy, documentation, licences"
	@echo "make clean   remove what was built; what was fetched stays"

setup:
	@scripts/setup.sh

build: setup
	cargo build --release

# The order of the texts must not depend on the language of the machine.
data: export LC_ALL := C
data: build
	$(elastic) data prepare $(texts) --out $(DATA)

train: data
	$(elastic) run --standalone $(NODES) --min-nodes 1 examples/shakespeare.toml \
		--training.dataset_path=$(DATA) $(RUN)

# Tests start the programs, so these are built first. Test binaries of crates
# that only depend on the engine have no run path of their own.
test: export LD_LIBRARY_PATH := $(LIBTORCH)/lib$(if $(LD_LIBRARY_PATH),:$(LD_LIBRARY_PATH))
# Search the readers of checkpoints for as long as `make fuzz-smoke` does.
test: export ELASTIC_FUZZ_SECONDS ?= 30
test: setup venv
	cargo build --release
	cargo test --release --workspace

venv:
	@scripts/venv.sh

test-object-store: setup
	@S3_VENV=$(S3_VENV) scripts/s3.sh
	ELASTIC_TEST_S3=$(abspath $(S3_VENV))/bin/moto_server \
		cargo test --release -p dcp --features object-store --test object_store

# Stable Rust does: what is searched has no unsafe code for a sanitizer to watch.
fuzz:
	@cargo fuzz --version >/dev/null 2>&1 || cargo install --locked cargo-fuzz
	cd engine/dcp/fuzz && for target in pickle zip index safetensors; do \
		cargo fuzz run --sanitizer none $$target -- \
			-max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=1024 -timeout=10 || exit 1; \
	done

fuzz-smoke:
	ELASTIC_FUZZ_SECONDS=30 cargo test --release -p dcp --test fuzz -- --nocapture

lint: setup
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets -- --deny warnings
	RUSTDOCFLAGS="--deny warnings" cargo doc --release --workspace --no-deps
	@if cargo deny --version >/dev/null 2>&1; then cargo deny check bans licenses sources; \
	else echo "lint: cargo-deny is not installed, licences are not checked"; fi

clean:
	cargo clean
