# Two commands do all the set-up: `make demo` and `make test`. One environment, .venv, holds everything.
# PYTHON=python3.12 make ... chooses another interpreter.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest

.DELETE_ON_ERROR:
.PHONY: demo fleet-demo test test-long lint format bench soak elasticity reload-bench swap-bench scale-bench vm-test constraints clean

demo: .venv/.demo
	@$(BIN)/python docs/demo.py

fleet-demo: .venv/.upstream
	@$(BIN)/python docs/fleet_demo.py

test: .venv/.dev .venv/.mosquitto .venv/.chromium .venv/.postgresql
	$(PYTEST) -m "not long"

test-long: .venv/.dev .venv/.mosquitto .venv/.chromium .venv/.postgresql .venv/.perf_analyzer
	$(PYTEST) -m long

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Takes a quarter of an hour; PEERS_DIR names a folder of environments with other servers (tests/peers/README.md).
bench: .venv/.dev
	$(BIN)/python tests/bench.py $(BENCH_OPTIONS)

# Ten minutes at 80 % load.
soak: .venv/.dev
	$(BIN)/python tests/load/soak.py $(SOAK_OPTIONS)

# Takes 16 minutes; wants a machine that does nothing else.
elasticity: .venv/.dev
	$(BIN)/python tests/load/elasticity.py

reload-bench: .venv/.dev
	$(BIN)/python tests/load/reload.py

swap-bench: .venv/.dev
	$(BIN)/python tests/load/swap.py

# Two minutes for each database; wants a machine that does nothing else.
scale-bench: .venv/.dev
	$(BIN)/python tests/load/fleet.py --database sqlite
	$(BIN)/python tests/load/fleet.py --database postgresql

# Boots the image on an emulated arm64 machine: needs root, 6 GB in build/vm and up to an hour.
vm-test: .venv/.dev .venv/.qemu .demo/ppocr-v4/manifest.json
	$(BIN)/python tests/vm/run.py $(VM_OPTIONS)

# Exact versions for each Python: make constraints PYTHONS="python3.10 python3.11 python3.12"
constraints: .venv/.dev
	$(BIN)/python .ci/constraints.py $(PYTHONS) > constraints.txt.new
	mv constraints.txt.new constraints.txt

clean:
	rm -rf .venv .demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.venv/.pip: constraints.txt
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv || { echo "Python's venv module is missing: apt-get install -y python3-venv"; exit 1; }
	@$(PIP) install --upgrade pip
	@touch $@

.venv/.demo: .venv/.pip pyproject.toml
	@echo "Installing what the demo needs (about a minute)"
	@$(PIP) install --constraint constraints.txt --editable ".[build,demo]"
	@$(BIN)/python -c "import models.tasks" 2>/dev/null || $(MAKE) --no-print-directory .venv/.opencv
	@touch $@

.venv/.upstream: .venv/.demo
	@echo "Installing what an upstream needs"
	@$(PIP) install --constraint constraints.txt --editable ".[upstream]"
	@touch $@

.venv/.dev: .venv/.demo
	@echo "Installing what the tests need"
	@$(PIP) install --constraint constraints.txt --group test --group lint
	@touch $@

# OpenCV's wheel leans on two system libraries that a bare server lacks.
.venv/.opencv:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing the system libraries of OpenCV"; \
	  apt-get update -qq && apt-get install -y -qq libgl1 libglib2.0-0 >/dev/null; \
	fi
	@$(BIN)/python -c "import models.tasks" || \
	  { echo "OpenCV needs system libraries: apt-get install -y libgl1 libglib2.0-0"; exit 1; }
	@touch $@

.venv/.qemu: | .venv/.pip
	@for tool in qemu-system-aarch64 mmdebstrap sfdisk cpio depmod; do command -v $$tool >/dev/null || missing=$$tool; done; \
	[ -z "$$missing" ] || { echo "Installing the emulator" && apt-get update -qq && \
	  apt-get install -y -qq --no-install-recommends \
	  qemu-system-arm mmdebstrap arch-test fdisk kmod cpio ipxe-qemu- >/dev/null; }
	@touch $@

.demo/ppocr-v4/manifest.json: | .venv/.demo
	$(BIN)/provision build models/zoo/ppocr-v4.toml --target cpu --out .demo/ppocr-v4

# The MQTT tests use a real broker. Where it cannot be installed they are skipped, and the summary says so.
.venv/.mosquitto: | .venv/.pip
	@command -v mosquitto >/dev/null || [ -x /usr/sbin/mosquitto ] || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Installing mosquitto" && \
	    apt-get update -qq && apt-get install -y -qq mosquitto mosquitto-clients >/dev/null; } || \
	  echo "mosquitto is missing and this user may not install it: its tests will be skipped"
	@touch $@

# The status page is tested in a real browser, on the same terms.
.venv/.chromium: | .venv/.pip
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Installing chromium" && \
	    apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
	  echo "chromium is missing and this user may not install it: its tests will be skipped"
	@touch $@

# The upstream's database is tested on PostgreSQL too, on the same terms; its own service is not used.
.venv/.postgresql: | .venv/.pip
	@ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Installing PostgreSQL" && \
	    apt-get update -qq && apt-get install -y -qq postgresql >/dev/null; } || \
	  echo "PostgreSQL is missing and this user may not install it: its tests will be skipped"
	@touch $@

# Triton's load generator must run unchanged. Its wheel needs glibc 2.38; on an older system the one that tritonclient
# carried till 2.41 does, with CUDA's runtime library, to which it is linked without using a GPU.
.venv/.perf_analyzer: | .venv/.pip
	@$(PIP) install --no-deps perf-analyzer==2.60.0 2>/dev/null || { \
	  folder=$$PWD/.venv/perf_analyzer && echo "Installing perf_analyzer for an older system" && \
	  $(PIP) install --no-deps --target $$folder tritonclient==2.41.1 nvidia-cuda-runtime-cu12==12.9.79 && \
	  { ldconfig -p | grep -q libb64 || { [ "$$(id -u)" = 0 ] && apt-get install -y -qq libb64-0d >/dev/null; }; } && \
	  printf '#!/bin/sh\nLD_LIBRARY_PATH=%s/nvidia/cuda_runtime/lib exec %s/bin/perf_analyzer "$$@"\n' $$folder $$folder \
	    > $(BIN)/perf_analyzer && chmod +x $(BIN)/perf_analyzer $$folder/bin/perf_analyzer; } || \
	  echo "perf_analyzer cannot be installed here: its tests will be skipped"
	@touch $@
