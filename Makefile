# `make` alone prints what can be made. ARGS="--model llama --runs 3" passes flags on: to ./benchmark.py, to pytest, to doctor.
# TORCH=cpu installs PyTorch's CPU build instead of PyPI's default with its 5 GB of CUDA libraries; TORCH=rocm7.2 or TORCH=cu126
# installs another build of PyTorch's own index. PYTHON=python3.12 makes the environment with another Python.
PYTHON ?= python3
ARGS ?=
TORCH ?=
VENV := .venv
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH_BUILD := $(if $(TORCH),--extra-index-url https://download.pytorch.org/whl/$(TORCH) torch==$(TORCH_VERSION)+$(TORCH))
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install
NEMO_PIP := $(VENV)-nemo/bin/python -m pip --disable-pip-version-check install --constraint constraints-nemo.txt
PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))
RECORDED := $(addprefix benchmarks/records/h200/repeated/,dp_mbs4 tp2_mbs4 tp2_pp2_mbs4 tp4_mbs4) \
    $(addprefix benchmarks/records/h100/in-turn-four-gpus/megatron/,tp2_mbs4 tp4_mbs4)
PYTEST := $(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help audit demo benchmark doctor test test-quick test-pages lint install install-dev nemo bridge test-nemo test-core19 test-bridge notice

help:  ## print this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1@\2/p' Makefile | awk -F@ '{ printf "%-18s%s\n", $$1, $$2 }'
	@echo
	@sed -n 's/^# //p' Makefile | head -n 3

demo: $(VENV)/installed-demo  ## no training, no GPU: which layout was fastest on four H200 and H100, with demo/report.html and a picture
	@$(VENV)/bin/python compare.py --results-dir $(RECORDED) --output demo/comparison.png
	@$(VENV)/bin/python -m tprimat report $(RECORDED) --output demo/report.html

benchmark: install  ## environment and pinned dependencies, then ./benchmark.py: both models, real training
	$(VENV)/bin/python benchmark.py $(ARGS)

doctor:  ## check this machine: Python, torch, GPUs, frameworks, disk
	@$(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON)) -m tprimat doctor $(ARGS)

test: install-dev  ## all tests but those of pages
	$(PYTEST) -m "not pages" $(ARGS)

test-quick: install-dev  ## the tests that start no training and no launcher
	$(PYTEST) -m "not slow and not pages" $(ARGS)

test-pages: install-dev  ## the tests of generated pages, pictures and the maintainers' scripts
	$(PYTEST) -m pages tests/pages tests/tools tests/benchmarks $(ARGS)

lint: install-dev  ## ruff and mypy
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/ruff format --quiet --check .
	$(VENV)/bin/mypy

audit:  ## known vulnerabilities of the pinned versions, where advisories can be reached
	@test -x $(VENV)-audit/bin/python || $(PYTHON) -m venv $(VENV)-audit
	@$(VENV)-audit/bin/python -m pip --disable-pip-version-check install --quiet pip-audit
	@$(VENV)-audit/bin/python tools/audit.py

install: $(VENV)/installed  ## .venv with what training and reports need

install-dev: $(VENV)/installed-dev  ## .venv with what tests, types and style need, too

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-demo: constraints.txt | $(VENV)/bin/python
	@test -e $(VENV)/installed || $(PIP) --quiet --constraint constraints.txt jinja2 matplotlib numpy plotly pydantic pyyaml scipy
	@touch $@

$(VENV)/installed: requirements.txt constraints.txt | $(VENV)/bin/python
	@$(MAKE) --no-print-directory notice
	$(PIP) --constraint constraints.txt --requirement requirements.txt $(TORCH_BUILD)
	@touch $@

$(VENV)/installed-dev: pyproject.toml requirements.txt constraints.txt | $(VENV)/bin/python
	@$(MAKE) --no-print-directory notice
	$(PIP) --constraint constraints.txt --editable '.[dev]' $(TORCH_BUILD)
	@touch $@ $(VENV)/installed

notice: | $(VENV)/bin/python
	@if [ -n "$(TORCH)" ] || [ -e /dev/nvidiactl ] || $(VENV)/bin/python -c 'import torch' 2>/dev/null; then :; \
	elif [ -e /dev/kfd ]; then \
	    echo "An AMD GPU: pip's default torch is built for CUDA. For a ROCm build stop here and type, for example: make benchmark TORCH=rocm7.2"; \
	else \
	    echo "No GPU here: pip's default torch brings 5 GB of CUDA libraries. For the small CPU build stop here and type: make benchmark TORCH=cpu"; \
	fi

# NeMo pins other versions of the same packages, so it gets an environment of its own.
nemo:  ## .venv-nemo, where --engine nemo works
	@test -x $(VENV)-nemo/bin/python || $(PYTHON) -m venv $(VENV)-nemo
	$(NEMO_PIP) torch
	$(NEMO_PIP) --requirement requirements-nemo.txt
	$(VENV)-nemo/bin/python -m pip check
	@$(VENV)-nemo/bin/python -c 'import transformer_engine.pytorch' 2>/dev/null || { \
	    echo "Transformer Engine, which NeMo needs, is not installed here. NVIDIA's NeMo container brings it."; \
	    echo "With a CUDA toolkit, this compiles it:"; \
	    echo "    $(VENV)-nemo/bin/python -m pip install --no-build-isolation --constraint constraints-nemo.txt 'transformer-engine[pytorch]'"; }

test-nemo: nemo  ## the tests that need NeMo
	$(NEMO_PIP) pytest pytest-timeout
	$(VENV)-nemo/bin/python -m pytest tests/nemo_recipes tests/cli/test_export_libraries.py $(ARGS)
	ALL_LOSSES=1 $(VENV)-nemo/bin/python -m pytest tests/goldens/test_goldens.py -k losses

# Everything but Megatron-Core is that of .venv. Below Python 3.12 pip would install 0.16.1, the newest that declares such a Python;
# newer ones work there, too.
$(VENV)-core19/installed: $(VENV)/installed-dev
	$(VENV)/bin/python -m venv --without-pip $(VENV)-core19
	packages=$$($(VENV)-core19/bin/python -c '$(PACKAGES)') && $(VENV)/bin/python -c '$(PACKAGES)' >$$packages/venv.pth && \
	    $(PIP) --quiet --no-deps --ignore-requires-python --upgrade --target $$packages megatron-core==0.19.2
	@touch $@

# The packages that a recipe imports are few; pip's own choice would be a hundred, and another torch.
$(VENV)-bridge/installed: requirements-bridge.txt $(VENV)/installed-dev
	$(VENV)/bin/python -m venv --without-pip $(VENV)-bridge
	packages=$$($(VENV)-bridge/bin/python -c '$(PACKAGES)') && $(VENV)/bin/python -c '$(PACKAGES)' >$$packages/venv.pth && \
	    $(PIP) --quiet --no-deps --ignore-requires-python --upgrade --target $$packages --requirement requirements-bridge.txt
	@touch $@

bridge: $(VENV)-bridge/installed  ## .venv-bridge, where recipes of Megatron-Bridge train in tests

test-bridge: bridge  ## recipes of Megatron-Bridge, shrunk, in .venv-bridge
	PYTHONPATH=tests/bridge_recipes/site $(VENV)-bridge/bin/python -m pytest tests/bridge_recipes $(ARGS)

test-core19: $(VENV)-core19/installed  ## trainings on the newest known Megatron-Core, in .venv-core19
	$(VENV)-core19/bin/python -m pytest tests/train/test_compat.py $(ARGS)
	ALL_LOSSES=1 $(VENV)-core19/bin/python -m pytest tests/goldens/test_goldens.py -k losses
