# make benchmark   environment, pinned dependencies, then ./benchmark.py; ARGS="--model llama --runs 3" passes flags on
# make test        the tests; ARGS="tests/plan -x" passes flags on
PYTHON ?= python3
ARGS ?=
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet install

.PHONY: benchmark test lint install install-dev nemo

benchmark: install
	$(VENV)/bin/python benchmark.py $(ARGS)

test: install-dev
	$(VENV)/bin/python -m pytest $(ARGS)

lint: install-dev
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/ruff format --quiet --check .
	$(VENV)/bin/mypy

install: $(VENV)/installed

install-dev: $(VENV)/installed-dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: requirements.txt constraints.txt | $(VENV)/bin/python
	$(PIP) --constraint constraints.txt --requirement requirements.txt
	@touch $@

$(VENV)/installed-dev: pyproject.toml requirements.txt constraints.txt | $(VENV)/bin/python
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/installed

# NeMo pins other versions of the same packages, so it gets an environment of its own.
nemo:
	@test -f requirements-nemo.txt || { echo "requirements-nemo.txt is missing in this checkout" >&2; exit 1; }
	@test -x $(VENV)-nemo/bin/python || $(PYTHON) -m venv $(VENV)-nemo
	$(VENV)-nemo/bin/python -m pip --disable-pip-version-check --quiet install --requirement requirements-nemo.txt
