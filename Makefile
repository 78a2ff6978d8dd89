# Everything installs into .venv; the stamp is renewed when what we depend on changes, or the Python does, as in
# make test PYTHON=python3.13
PYTHON ?= python3
PYTHON_VERSION := $(shell $(PYTHON) -c 'import platform; print(platform.python_version())')
BIN := .venv/bin
# Tests that need nothing but this repository and its dependencies, and no more than minutes.
EVERYWHERE := not faults and not loops and not compat and not families and not storage and not slurm and not ray
# Tests wait for processes more than they compute, so two run at once; `make test SIDE_BY_SIDE=` runs one after another.
SIDE_BY_SIDE ?= -n 2 --dist worksteal
# The range of pyproject.toml: `make test-oldest` and `make test-newest` run the tests with either end of it, each in an
# environment of its own. PyPI's builds of torch bring CUDA: several gigabytes.
TORCH_oldest := 2.11.*
TORCH_newest := 2.15.*
# What else pyproject.toml depends on: the oldest versions that it allows, or what pip takes.
OTHERS_oldest := $(shell sed -n '/^dependencies/,/^]/ {/"torch/!s/^ *"\([a-z]*\)>=\([0-9.]*\)".*/\1==\2/p;}' pyproject.toml)
OTHERS_newest :=
# torch_xla goes with the torch of its own version, and Python 3.10 to 3.13.
TORCH_xla := 2.9.*
# The folder of torch_openreg in a checkout of PyTorch, at the release that is installed: make test-openreg OPENREG=...
OPENREG ?=
# For `make gpu` on a machine without a network: a folder of wheels of the small dependencies. torch is the machine's own.
WHEELS ?=
# Where a Python has all of these: make gpu GPU_PYTHON=python3
GPU_PYTHON ?= .venv-gpu/bin/python
GPU_NEEDS := questionary pyyaml pydantic safetensors typer xxhash numpy pytest pytest-timeout
# Where they can be had: accelerate is measured beside; steps in 8 bits; tests side by side.
GPU_WANTS := accelerate torchao pytest-xdist
# For all sections together; what they have by then is kept.
GPU_MINUTES ?= 19
# Some sections only, where a command may not take so long: gpu.json keeps the others.
GPU_ONLY ?=
# Images of containers often set it; every process that a test starts would then compile the package anew.
export PYTHONDONTWRITEBYTECODE :=
.PHONY: demo test test-fast test-faults test-loops test-compat test-families test-storage test-slurm test-ray test-oldest test-newest test-xla test-openreg gpu lint format docs clean

# An environment; what another Python had there goes.
%/.python-$(PYTHON_VERSION):
	$(PYTHON) -m venv --clear $(@D)
	touch $@

# --no-compile: Python compiles what it imports; all of it would take half of the time.
.venv/.ready: .venv/.python-$(PYTHON_VERSION) pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[test]'
	touch $@

demo: .venv/.ready
	$(BIN)/python templates/demo.py

test: .venv/.ready lint
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "$(EVERYWHERE)"

test-fast: .venv/.ready
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "$(EVERYWHERE) and not slow"

test-faults: .venv/.ready
	$(BIN)/python -m pytest -m faults

test-loops: .venv/.ready
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m loops

.venv/.compat: .venv/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,compat]'
	touch $@

test-compat: .venv/.compat
	$(BIN)/python -m pytest -m compat

test-families: .venv/.ready
	$(BIN)/python -m pytest -m families tests/test_families.py

test-slurm: .venv/.ready
	$(BIN)/python -m pytest -m slurm tests/test_slurm.py

test-ray: .venv/.ready
	$(BIN)/python -m pytest -m ray tests/test_ray.py

.venv-storage/.ready: .venv-storage/.python-$(PYTHON_VERSION) pyproject.toml
	.venv-storage/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test,test-storage]'
	touch $@

test-storage: .venv-storage/.ready
	.venv-storage/bin/python -m pytest -m storage tests/test_storage_s3.py

.venv-oldest/.ready .venv-newest/.ready: .venv-%/.ready: .venv-%/.python-$(PYTHON_VERSION) pyproject.toml
	$(@D)/bin/python -m pip install --quiet 'torch==$(TORCH_$*)'
	$(@D)/bin/python -m pip install --quiet --editable '.[test]' $(OTHERS_$*)
	touch $@

test-oldest test-newest: test-%: .venv-%/.ready
	.venv-$*/bin/python -m pytest $(SIDE_BY_SIDE) -m "$(EVERYWHERE)"

.venv-xla/.ready: .venv-xla/.python-$(PYTHON_VERSION) pyproject.toml
	$(@D)/bin/python -m pip install --quiet 'torch==$(TORCH_xla)' 'torch_xla==$(TORCH_xla)' 'numpy>=1.26' pytest pytest-timeout
	$(@D)/bin/python -m pip install --quiet --editable .
	touch $@

test-xla: .venv-xla/.ready
	.venv-xla/bin/python -m pytest -m xla tests/test_xla.py

.venv-openreg/.ready: .venv-openreg/.python-$(PYTHON_VERSION) pyproject.toml
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]' setuptools wheel cmake ninja
	$(@D)/bin/python -m pip install --quiet --no-build-isolation --no-deps '$(OPENREG)'
	touch $@

test-openreg: .venv-openreg/.ready
	PATH="$(CURDIR)/.venv-openreg/bin:$$PATH" .venv-openreg/bin/python -m pytest -m openreg tests/test_openreg.py

# PYTHON's own packages, pip among them, are named in around.pth: venv itself takes none of another environment.
.venv-gpu/.ready: pyproject.toml
	$(PYTHON) -m venv --without-pip --system-site-packages .venv-gpu
	$(PYTHON) -c 'import site; print("import site;", *(f"site.addsitedir({place!r});" for place in site.getsitepackages()))' \
		> "$$(.venv-gpu/bin/python -c 'import site; print(site.getsitepackages()[0])')/around.pth"
	.venv-gpu/bin/python -c 'import torch' || { echo 'make gpu: torch is not among the packages of $(PYTHON); name a Python that has it: make gpu PYTHON=...' >&2; exit 1; }
	.venv-gpu/bin/python -m pip install --quiet $(if $(WHEELS),--no-index --find-links $(WHEELS)) $(GPU_NEEDS)
	-for package in $(GPU_WANTS); do .venv-gpu/bin/python -m pip install --quiet --retries 1 --timeout 10 $(if $(WHEELS),--no-index --find-links $(WHEELS)) $$package; done
	touch $@

gpu: export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu: $(if $(filter .venv-gpu/%,$(GPU_PYTHON)),.venv-gpu/.ready)
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU_ONLY:%=--only %) --minutes $(GPU_MINUTES) --output gpu.json --table gpu.md

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.ready
	$(BIN)/python -m docs.generate

clean:
	rm -rf .venv .venv-storage .venv-oldest .venv-newest .venv-xla .venv-openreg .venv-gpu build dist *.egg-info
