# Everything here works from a fresh clone with nothing but Python 3.11 and pip.
# The virtual environment is made on first use and redone only when pyproject.toml changes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
VLLM_STAMP := $(VENV)/.installed-vllm
MODELS := .midstream/models
MODELS_STAMP := $(MODELS)/.made
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

ENGINE ?= vllm
REAL := $(if $(filter vllm,$(ENGINE)),$(MODELS_STAMP))
SEEDS ?= 200
WORKERS ?= 2
BENCH ?= control
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo up test check bench sim storm vllm clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUN_STAMP) $(REAL) ## Move answers of real vLLM while they stream, verify (ENGINE=sim: a trace on simulated engines, fast)
	@$(BIN)/midstream demo --engine $(ENGINE) $(ARGS)

up: $(RUN_STAMP) ## Start a whole local cluster; Ctrl-C ends all of it (ARGS="--instances 4")
	@$(BIN)/midstream up $(ARGS)

test: $(DEV_STAMP) $(REAL) ## Run all tests (ARGS="tests/control -k fold"; ENGINE=sim: without real vLLM; WORKERS=0: in this process)
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(DEV_STAMP) $(REAL) ## Lint, format, types, layers, then all tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy -p midstream
	@$(BIN)/lint-imports --no-cache
	@$(MAKE) --no-print-directory test

bench: $(DEV_STAMP) ## Measure (BENCH=control, ARGS=--json)
	@$(BIN)/midstream bench $(BENCH) $(ARGS)

sim: $(DEV_STAMP) ## Simulate the whole cluster under faults (SEEDS=200)
	@$(BIN)/python -m midstream.api.simulation --seeds $(SEEDS) $(ARGS)

storm: $(DEV_STAMP) ## 1,000 moves on every transfer backend, cancelled, killed, counted (ARGS="--backends shm")
	@$(BIN)/python -m tests.migration.transfer_storm $(ARGS)

vllm: $(DEV_STAMP) $(MODELS_STAMP) ## Install vLLM (GPU: all of it; else its CPU set) and make the two small models

clean: ## Remove the virtual environment, caches and local cluster data
	rm -rf $(VENV) .midstream .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "midstream needs Python 3.11 or newer: none found" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "midstream needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	@echo "installing midstream into $(VENV) ..." >&2
	@$(PIP) install --editable .
	@touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	@echo "installing midstream with its test tools into $(VENV) ..." >&2
	@$(PIP) install --editable '.[dev]'
	@touch $(RUN_STAMP) $@

$(VLLM_STAMP): $(wildcard requirements/*) | $(RUN_STAMP)
	@$(BIN)/python requirements/install_vllm.py
	@touch $@

$(MODELS_STAMP): instance/engines/vllm/model_files.py | $(VLLM_STAMP)
	@$(BIN)/python -m midstream.instance.engines.vllm.model_files --folder $(MODELS)
	@touch $@
