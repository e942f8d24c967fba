# Everything a developer types. `make demo` and `make test` work as the first command in a fresh clone:
# they make .venv with what constraints.txt pins, and need nothing but Python 3.10 or newer.

PYTHON ?= python3
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE  # tests start many processes, which would all compile Penstock again
# tests of the runtime wait for processes at times, so there are more workers than cores; each loads all modules
WORKERS ?= 4
# all tests of a module run in one worker, which starts their processes once
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -q

.PHONY: demo test test-all check docs format bench clean

demo: .venv/demo
	$(BIN)/penstock demo

test: .venv/kernel
	$(PYTEST) -m 'not full'

test-all: .venv/kernel
	$(PYTEST) --hypothesis-profile full

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: .venv/dev
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .

bench: .venv/dev
	$(BIN)/python -m benchmarks.plan
	$(BIN)/python -m benchmarks.runtime
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.composition
	$(BIN)/python -m benchmarks.predict
	$(BIN)/python -m benchmarks.checkpoints
	$(BIN)/python -m benchmarks.search 1 10

clean:
	rm -rf .venv site .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Penstock needs Python 3.10 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/demo: .venv/core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[search,torch]'
	@touch $@

.venv/dev: .venv/core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# compile the search kernel once, before all workers need it at the same time
.venv/kernel: .venv/dev $(wildcard src/penstock/search/*.py)
	$(BIN)/penstock search -p 2 -m 4 -v 2 --moves 10 > /dev/null
	@touch $@
