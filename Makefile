# Everything a developer types. `make demo` and `make test` work as the first command in a fresh clone:
# they make .venv with what constraints.txt pins, and need nothing but Python 3.10 or newer.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check docs format bench clean

demo: .venv/core
	$(BIN)/penstock show 1f1b --ranks 4 --microbatches 8
	$(BIN)/penstock show zbv --ranks 4 --microbatches 8
	$(BIN)/penstock compare 1f1b zb-h1 zb-h2 -p 8 -m 24 --costs zb-h4096-p8-m24
	@echo "A schedule that hangs, and why:"
	$(BIN)/penstock check examples/deadlock.csv || true

test: .venv/dev
	$(BIN)/python -m pytest -n auto --dist loadgroup -q

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
	$(BIN)/python -m benchmarks.composition
	$(BIN)/python -m benchmarks.search 1 10

clean:
	rm -rf .venv site .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Penstock needs Python 3.10 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/dev: .venv/core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
