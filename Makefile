# Everything installs into .venv; the stamp is renewed when what we depend on changes.
PYTHON ?= python3
BIN := .venv/bin
.PHONY: demo test test-fast test-faults test-loops lint format docs clean

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

demo: .venv/.ready
	$(BIN)/python templates/demo.py

test: .venv/.ready lint
	$(BIN)/python -m pytest -m "not faults and not loops"

test-fast: .venv/.ready
	$(BIN)/python -m pytest -m "not faults and not loops and not slow"

test-faults: .venv/.ready
	$(BIN)/python -m pytest -m faults

test-loops: .venv/.ready
	$(BIN)/python -m pytest -m loops

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
	rm -rf .venv build dist *.egg-info
