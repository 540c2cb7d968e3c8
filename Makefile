# make test    everything CI checks, in a virtual environment of its own
# make check   style, types and the direction of imports
# make bench   our speed on this machine against installed peers
# make demo    train, evaluate and generate on this machine, in minutes
# make docs    build the documentation: site/index.html, which opens from disk
# make clean   remove the environment and caches

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test check bench format clean demo docs
.DEFAULT_GOAL := test

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

test: check
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_docs.py -k imports

bench: $(VENV)/.installed
	$(BIN)/fastweights bench memory

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) site dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Open site/index.html"

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[lm]"
	touch $@

demo: $(VENV)/.demo
	rm -rf runs/demo
	$(BIN)/fastweights demo runs/demo
