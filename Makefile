# Everything a developer types. `make demo` and `make test` work as the first command in a fresh clone:
# they make .venv with what constraints.txt pins, and need nothing but Python 3.11 or newer, as these versions do.

PYTHON ?= python3
# `make test TORCH=2.15` tests with another torch than the oldest, in an environment of its own; 2.14 and 2.15 come with
# CUDA libraries (5.4 GB), and 2.15 needs Python 3.11
TORCH ?= 2.13
VENV := .venv$(addprefix -torch-,$(filter-out 2.13,$(TORCH)))
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt $(wildcard constraints-torch-$(TORCH).txt)
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt
KNOWN := $(patsubst constraints-torch-%.txt,%,$(wildcard constraints-torch-*.txt))
# the tests to run: `make test TESTS=tests/runtime`
TESTS ?=
unexport PYTHONDONTWRITEBYTECODE  # tests start many processes, which would all compile Penstock again
# tests of the runtime wait for processes at times, so there are more workers than cores; each loads all modules
WORKERS ?= 4
# all tests of a module run in one worker, which starts their processes once
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -q $(TESTS)

.PHONY: demo test test-all test-core check docs format bench clean

demo: $(VENV)/demo
	$(BIN)/penstock demo

test: $(VENV)/kernel
	$(PYTEST) -m 'not full'

test-all: $(VENV)/kernel
	$(PYTEST) --hypothesis-profile full

# the rooms that need no torch, with another Python: `make test-core PYTHON=python3.13`
CORE := .venv-core-$(notdir $(PYTHON))
CORE_ROOMS := ir formats families validation lowering cost bounds simulation search planning view
test-core:
	@$(MAKE) --no-print-directory VENV=$(CORE) $(CORE)/core-dev
	$(CORE)/bin/python -m pytest -n $(WORKERS) --dist loadfile -q -m 'not full' $(addprefix tests/,$(CORE_ROOMS))

$(CORE)/core-dev: $(CORE)/core
	$(PIP) -e '.[search,serve,view]' hypothesis pandas pytest pytest-xdist selenium
	@touch $@

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(VENV)/dev
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .

bench: $(VENV)/dev
	$(BIN)/python -m benchmarks.plan
	$(BIN)/python -m benchmarks.runtime
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.composition
	$(BIN)/python -m benchmarks.predict
	$(BIN)/python -m benchmarks.checkpoints
	$(BIN)/python -m benchmarks.search 1 10

clean:
	rm -rf .venv .venv-torch-* .venv-core-* site .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/core: pyproject.toml $(CONSTRAINTS)
	@test "$(TORCH)" = 2.13 || test -f constraints-torch-$(TORCH).txt || { echo "TORCH is one of: 2.13 $(KNOWN)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "the versions in constraints.txt need Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# of the lines for one package, the last file's counts
	awk -F== '/^[^#]/ {pin[$$1] = $$0} END {for (name in pin) print pin[name]}' $(CONSTRAINTS) > $(VENV)/constraints.txt
	$(PIP) -e .
	@touch $@

$(VENV)/demo: $(VENV)/core
	$(PIP) -e '.[search,torch]'
	@touch $@

$(VENV)/dev: $(VENV)/core
	$(PIP) -e '.[dev]'
	@touch $@

# compile the search kernel once, before all workers need it at the same time
$(VENV)/kernel: $(VENV)/dev $(wildcard src/penstock/search/*.py)
	$(BIN)/penstock search -p 2 -m 4 -v 2 --moves 10 > /dev/null
	@touch $@
