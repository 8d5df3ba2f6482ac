# make benchmark   environment, pinned dependencies, then ./benchmark.py; ARGS="--model llama --runs 3" passes flags on
# make test        the tests; ARGS="tests/plan -x" passes flags on; make test-quick leaves out trainings and launchers
# make nemo        .venv-nemo, where --engine nemo works; make test-nemo runs the tests that need it
PYTHON ?= python3
ARGS ?=
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet install
NEMO_PIP := $(VENV)-nemo/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints-nemo.txt

.PHONY: benchmark test test-quick lint install install-dev nemo test-nemo

benchmark: install
	$(VENV)/bin/python benchmark.py $(ARGS)

test: install-dev
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-quick: install-dev
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

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
	@test -x $(VENV)-nemo/bin/python || $(PYTHON) -m venv $(VENV)-nemo
	$(NEMO_PIP) torch
	$(NEMO_PIP) --requirement requirements-nemo.txt
	$(VENV)-nemo/bin/python -m pip check

test-nemo: nemo
	$(NEMO_PIP) pytest pytest-timeout
	$(VENV)-nemo/bin/python -m pytest tests/nemo_recipes $(ARGS)
