# `make demo` and `make test` are all that a newcomer types; `make help` lists the rest.
# Everything lives in .venv and build/; system packages are installed only where one is missing.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)
FUZZ_SECONDS ?= 3600
KILL_ROUNDS ?= 1000
STRESS_SECONDS ?= 600
PYTEST_ARGS ?=
# The second limit is for a test that hangs in the engine, where Python cannot stop it: its process
# prints what every thread was doing, and ends.
PYTEST_TIMEOUT := --timeout 240 -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true

PTSAVE_CMAKE_ARGS ?= -DPTSAVE_WERROR=ON

export PYTHON VENV JOBS PTSAVE_CMAKE_ARGS

BIN := $(VENV)/bin
RUN := $(BIN)/python
CMAKE := $(BIN)/cmake
CTEST := $(BIN)/ctest --output-on-failure --no-tests=error
PIP_INSTALL := $(RUN) -m pip install --disable-pip-version-check --no-input --quiet
BUILD_STAMP := $(VENV)/.build-stamp
SETUP_STAMP := $(VENV)/.setup-stamp
INSTALL_STAMP := $(VENV)/.install-stamp

CONFIGURE = $(CMAKE) -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPTSAVE_WERROR=ON
CXX_FILES = $(shell find csrc tests benchmarks -path csrc/third_party -prune -o '(' -name '*.h' -o -name '*.cpp' ')' -print)
# gcc 12's ThreadSanitizer does not know the address layout of newer kernels.
NO_ASLR = $(shell setarch -R true 2>/dev/null && echo setarch -R)

.DELETE_ON_ERROR:
.PHONY: help setup build compare demo docs release-check test test-cpp test-python test-accelerator test-torch test-all accelerator accelerator-sanitizer accelerator-standin negative-controls lint format asan tsan fuzz \
        fuzz-short wheels fuzz-parser fuzz-unpickler fuzz-unpickler-asan fuzz-outline kill stress tier-faults benchmark wheel clean \
        lint-python lint-types lint-format lint-cpp asan-build tsan-build

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

# ------------------------------------------------------------------------------------------ set-up

# What the goal needs of the system, all of it looked for before anything is downloaded.
NEEDS := python
test test-cpp test-all lint lint-cpp asan asan-build tsan tsan-build: NEEDS := python tests
fuzz fuzz-parser: NEEDS := python fuzz
benchmark: NEEDS := python benchmark

setup: $(SETUP_STAMP)  ## create .venv with everything pinned

# All that `make demo` needs; the rest takes twice as long.
$(BUILD_STAMP): requirements-dev.txt
	tools/system_packages.sh $(NEEDS)
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -c $< torch click tqdm numpy cmake ninja pybind11 setuptools wheel
	@touch $@

$(SETUP_STAMP): $(BUILD_STAMP)
	$(PIP_INSTALL) -r requirements-dev.txt
	@touch $@

build: $(BUILD_STAMP)  ## compile the extension in place and install ptsave (editable) into .venv
	$(RUN) setup.py --quiet build_ext --inplace
	@$(MAKE) --silent --no-print-directory $(INSTALL_STAMP)

$(INSTALL_STAMP): $(BUILD_STAMP) setup.py pyproject.toml
	$(PIP_INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

# --------------------------------------------------------------------------------------------- use

demo: build  ## train one step, save and load it with stock torch and ptsave, print the table
	$(RUN) -m benchmarks.demo

# About two hours on two cores; a report of each with RESULTS=benchmarks/results.
benchmark: $(SETUP_STAMP) build  ## all benchmarks: make benchmark [ROUNDS=5] [STATES=as-found] [RESULTS=folder]
	tools/system_packages.sh benchmark
	$(CONFIGURE) -B build/cpp-benchmark -DPTSAVE_BUILD_BENCHMARKS=ON
	$(CMAKE) --build build/cpp-benchmark --parallel $(JOBS)
	build/cpp-benchmark/crc32_benchmark
	set -e; for name in $(BENCHMARKS); do \
	  $(RUN) -m benchmarks.$$name $(MEASURE) $(if $(RESULTS),--output $(RESULTS)/$$name.md); \
	done

BENCHMARKS := serialization object_graph state_dicts optimizer_state restore archive command first_calls \
  weights async_save convert ranks distributed appending capture capture_diff integrations tiers checks \
  deltas sharing
benchmark: ROUNDS ?= 2
MEASURE = $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(STATES),--states $(STATES))

# WORKS are those of `python -m benchmarks.as_found --help`; the exit status says if one is slower.
compare: $(SETUP_STAMP) build  ## calls as users meet them: make compare BASE=main [WORKS="nosync warm"] [STATES=cold]
	$(RUN) -m benchmarks.as_found $(WORKS) $(if $(BASE),--base $(BASE)) $(MEASURE) \
	  $(if $(RESULTS),--output $(RESULTS)/as_found.md)

# A warning is an error, and so is a reference that leads nowhere.
docs: $(SETUP_STAMP) $(if $(BUILT),,build)  ## the documentation, as pages in build/docs
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going --jobs auto docs build/docs

wheel: $(BUILD_STAMP)  ## build a wheel for this torch, this Python and this system into dist/
	$(RUN) -m pip wheel --disable-pip-version-check --no-build-isolation --no-deps -w dist .

# Hours and some 40 GB the first time: make wheels WHEELS="--python 3.11 --torch 2.13".
wheels:  ## a wheel for each Python into dist/, with an engine for each torch; test all pairs
	tools/system_packages.sh python
	$(PYTHON) tools/wheels $(WHEELS)

release-check: $(SETUP_STAMP)  ## what RELEASE.md wants checked, of the source distribution
	rm -rf build/release && mkdir -p build/release
	$(RUN) setup.py --quiet sdist --dist-dir build/release
	$(BIN)/twine check --strict build/release/*
	$(RUN) tools/release_check.py build/release/*.tar.gz

# ------------------------------------------------------------------------------------------- tests

test: test-cpp test-python test-accelerator  ## C++ unit tests and pytest

build/core/build.ninja: $(BUILD_STAMP)
	tools/system_packages.sh tests
	$(CONFIGURE) -B build/core -DPTSAVE_BUILD_TESTS=ON -DPTSAVE_FAULT_INJECTION=ON -DPTSAVE_UNITY=OFF

test-cpp: build/core/build.ninja  ## C++ unit tests of core
	$(CMAKE) --build build/core --parallel $(JOBS)
	$(CTEST) --test-dir build/core --parallel $(JOBS)

test-python: $(SETUP_STAMP) build  ## pytest without what is slow or large
	$(RUN) -m pytest -n $(JOBS) --maxprocesses 8 $(PYTEST_TIMEOUT) $(PYTEST_ARGS)

# With RECORD=1, docs/tested.md gets the results of the accelerator's tests.
RESULT := build/accelerator-result.json
TEST_ACCELERATOR = $(if $(RECORD),PTSAVE_ACCELERATOR_RESULT=$(RESULT)) $(1) -m pytest tests/accelerator $(2) $(PYTEST_ARGS)
RECORD_RESULT = $(if $(RECORD),$(PYTHON) tools/wheels/report.py $(RESULT))

# In a process of its own: a backend that is registered stays.
test-accelerator: $(SETUP_STAMP) build  ## tests on two devices that are made of memory and threads
	$(call TEST_ACCELERATOR,$(RUN),$(PYTEST_TIMEOUT))
	$(RECORD_RESULT)

build/fake-accelerator/build.ninja: $(BUILD_STAMP)
	$(RUN) setup.py --quiet build_fake_accelerator

# Torch's CUDA build and what it needs take 5.5 GB, so no other target makes this environment.
STANDIN_TORCH := 2.14.1
STANDIN_VENV := build/standin-venv
STANDIN_STAMP := $(STANDIN_VENV)/.torch-$(STANDIN_TORCH)-stamp

$(STANDIN_STAMP):
	tools/system_packages.sh python
	$(PYTHON) -m venv --clear $(STANDIN_VENV)
	sed "/^torch==/d" requirements-dev.txt >$(STANDIN_VENV)/pins.txt
	$(STANDIN_VENV)/bin/python -m pip install --disable-pip-version-check --no-input --quiet \
	  -c $(STANDIN_VENV)/pins.txt torch==$(STANDIN_TORCH) click tqdm numpy cmake ninja pybind11 setuptools wheel \
	  hypothesis pytest pytest-timeout safetensors zstandard "nvidia-cuda-crt==13.0.*"
	@touch $@

# The last lines say what passed, and why other tests did not.
accelerator-standin: $(STANDIN_STAMP) build  ## the same tests with torch for CUDA, on a stand-in for its runtime
	$(STANDIN_VENV)/bin/python setup.py --quiet build_standin
	LD_PRELOAD=$(abspath build/standin/libstandin.so) PTSAVE_ACCELERATOR=real PYTHONPATH=$(CURDIR) \
	  $(call TEST_ACCELERATOR,$(STANDIN_VENV)/bin/python,$(PYTEST_TIMEOUT))
	$(RECORD_RESULT)

# In a copy of the tree; tests/accelerator/negative_controls.md is the list.
negative-controls: $(SETUP_STAMP)  ## tests notice each missing wait: make negative-controls [CONTROLS="3 17"]
	$(RUN) tools/negative_controls.py $(CONTROLS)

# For a machine with a GPU that may have no network: everything is taken from PYTHON's environment.
# It may be lent for minutes, so neither a failed test nor one that hangs costs the benchmark.
accelerator: ROUNDS ?= 1
accelerator:  ## the same tests (3 minutes at most), and the benchmark, on this machine's accelerator, with PYTHON
	$(PYTHON) setup.py --quiet build_ext --inplace
	rm -f build/accelerator.md
	status=0; \
	PTSAVE_ACCELERATOR=real PYTHONPATH="$(CURDIR):$$PYTHONPATH" \
	  $(call TEST_ACCELERATOR,timeout --signal INT --kill-after 10 180 $(PYTHON),-rfEX -o faulthandler_timeout=60) \
	  || status=1; \
	$(if $(RECORD),$(RECORD_RESULT) || status=1;) \
	$(PYTHON) -m benchmarks.accelerator --rounds $(ROUNDS) --rest 2 --output build/accelerator.md || status=1; \
	! grep --silent "(failed)" build/accelerator.md || status=1; \
	exit $$status

accelerator-sanitizer:  ## tests on this machine's GPU under NVIDIA's compute-sanitizer, with PYTHON
	PTSAVE_ACCELERATOR=real compute-sanitizer --error-exitcode 1 --target-processes all \
	  $(PYTHON) -m pytest tests/accelerator/test_save.py tests/accelerator/test_load.py $(PYTEST_ARGS)

# In a copy of the tree and an environment of its own, with PYTHON and CXX: docs/install.md says what passes.
test-torch:  ## the Python tests with another torch: make test-torch TORCH=2.9.1
	@test -n "$(TORCH)" || { echo "make test-torch TORCH=2.9.1" >&2; exit 2; }
	tools/test_torch.sh $(TORCH) $(PYTEST_ARGS)

test-all: $(SETUP_STAMP) test-cpp build  ## every test: also slow ones and ones that need several GiB
	$(RUN) -m pytest -m "" $(PYTEST_ARGS)
	$(RUN) -m pytest -m "" tests/accelerator $(PYTEST_ARGS)

kill: $(SETUP_STAMP) build  ## kill a saving process KILL_ROUNDS times at random moments
	PTSAVE_KILL_ROUNDS=$(KILL_ROUNDS) $(RUN) -m pytest -m kill $(PYTEST_ARGS)

# About half an hour on two cores.
tier-faults: $(SETUP_STAMP) build  ## kill ranks, hosts and servers of runs in several places, and damage copies
	PTSAVE_KILL_ROUNDS=$(KILL_ROUNDS) PTSAVE_MUTATIONS=10000 \
	  $(RUN) -m pytest -s tests/training/test_tier_faults.py $(PYTEST_ARGS)

stress: $(SETUP_STAMP) build  ## many save to one path for STRESS_SECONDS; every bit flipped
	PTSAVE_STRESS_SECONDS=$(STRESS_SECONDS) PTSAVE_EVERY_BIT=1 PTSAVE_MUTATIONS=20000 \
	  $(RUN) -m pytest tests/writing/test_stress.py \
	  tests/archive/test_hostile.py tests/archive/test_overlap.py tests/archive/test_unpickler.py \
	  tests/deltas/test_hostile_patches.py tests/deltas/test_format.py \
	  $(PYTEST_ARGS)

asan: asan-build  ## C++ unit tests under AddressSanitizer and UndefinedBehaviorSanitizer
	UBSAN_OPTIONS=print_stacktrace=1 $(CTEST) --test-dir build/asan --parallel $(JOBS)

asan-build: $(BUILD_STAMP)
	tools/system_packages.sh tests
	$(CONFIGURE) -B build/asan -DPTSAVE_BUILD_TESTS=ON -DPTSAVE_FAULT_INJECTION=ON \
	  -DPTSAVE_SANITIZE=address,undefined
	$(CMAKE) --build build/asan --parallel $(JOBS)

tsan: tsan-build  ## C++ unit tests under ThreadSanitizer
	TSAN_OPTIONS=die_after_fork=0 $(NO_ASLR) $(CTEST) --test-dir build/tsan --parallel $(JOBS)

tsan-build: $(BUILD_STAMP)
	tools/system_packages.sh tests
	$(CONFIGURE) -B build/tsan -DPTSAVE_BUILD_TESTS=ON -DPTSAVE_FAULT_INJECTION=ON \
	  -DPTSAVE_SANITIZE=thread
	$(NO_ASLR) $(CMAKE) --build build/tsan --parallel $(JOBS)

fuzz: fuzz-parser fuzz-unpickler fuzz-outline  ## fuzz parser, unpickler and outlines, FUZZ_SECONDS together

fuzz-parser: $(BUILD_STAMP)
	tools/system_packages.sh fuzz
	$(CONFIGURE) -B build/fuzz -DPTSAVE_BUILD_FUZZERS=ON -DCMAKE_CXX_COMPILER=clang++
	$(CMAKE) --build build/fuzz --parallel $(JOBS)
	$(RUN) tools/fuzz.py build/fuzz $$(( $(FUZZ_SECONDS) / 3 ))

fuzz-unpickler: $(SETUP_STAMP) build
	$(RUN) tests/fuzz/unpickler_fuzzer.py $$(( $(FUZZ_SECONDS) / 3 )) build/fuzz

fuzz-outline: $(SETUP_STAMP) build
	$(RUN) tests/fuzz/outline_fuzzer.py $$(( $(FUZZ_SECONDS) / 3 )) build/fuzz

# Python is not compiled with the sanitizers, so their runtime is preloaded; what Python keeps until
# it exits would be reported as leaks.
fuzz-unpickler-asan: $(SETUP_STAMP)  ## fuzz the unpickler under ASan and UBSan
	rm -rf build/asan-python && mkdir -p build/asan-python
	cp -r ptsave csrc setup.py pyproject.toml CMakeLists.txt README.md build/asan-python/
	rm -rf build/asan-python/ptsave/engines/torch_* build/asan-python/ptsave/_core*.so
	cd build/asan-python && PTSAVE_CMAKE_ARGS=-DPTSAVE_SANITIZE=address,undefined \
	  $(abspath $(RUN)) setup.py --quiet build_ext --inplace
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	PYTHONPATH=build/asan-python \
	  $(RUN) tests/fuzz/unpickler_fuzzer.py $$(( $(FUZZ_SECONDS) / 2 )) build/fuzz

fuzz-short:  ## fuzz for one minute
	@$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=60

# ----------------------------------------------------------------------------------------- linters

lint: lint-python lint-types lint-format lint-cpp  ## ruff, prose, mypy, clang-format, clang-tidy

lint-python: $(SETUP_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(RUN) tools/prose.py

lint-types: $(SETUP_STAMP)
	$(BIN)/mypy

lint-format: $(SETUP_STAMP)
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

# Beside running tests nothing may be built anew: make lint BUILT=1.
BUILT ?=
lint-cpp lint-types: $(SETUP_STAMP) $(if $(BUILT),,build)
lint-cpp: build/core/build.ninja build/fake-accelerator/build.ninja
	$(RUN) tools/clang_tidy.py

format: $(SETUP_STAMP)  ## let ruff and clang-format rewrite what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:  ## remove what was built, keep .venv
	rm -rf build dist *.egg-info ptsave/_built.py ptsave/engines/torch_* ptsave/_core*.so $(INSTALL_STAMP)
