# make test    everything CI checks, in a virtual environment of its own
# make check   style, types and the direction of imports
# make bench   our speed on this machine against installed peers
# make demo    train, evaluate and generate on this machine, in minutes
# make docs    build the documentation: site/index.html, which opens from disk
# make release build sdist and wheel in dist/, check them, and try the wheel in an empty environment
# make fuzz    100,000 mutated files through every loader
# make properties  10,000 random calls of three frameworks against the oracle; make layers  as many of their layers
# make kill    kill a run twenty times and resume it; make elastic  lose a worker of torchrun; make hang  stop one
# make soak    10 million tokens through a model that learns; make steps  as many steps of the recurrence in float32
# make oldest  install the oldest dependencies that are allowed, and run the tests of the library with them
# make newest  the same with the newest that there are
# make audit   ask PyPI for known weaknesses of the versions in constraints.txt; fails where it cannot ask
# make clean   remove the environment and caches

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt# the versions that are tested; /dev/null takes the newest there are
EXTRA ?= torch# of the wheel that `make release` tries

.PHONY: test suite browser check style types bench format clean demo docs release fuzz properties layers kill elastic \
	hang soak steps oldest newest audit
.DEFAULT_GOAL := test
export PYTHONDONTWRITEBYTECODE :=# modules are compiled once, and not by each of the suite's many processes

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[dev]"
	touch $@

test: style browser
	$(MAKE) --jobs 2 types suite

suite: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup

browser:  # for the tests of pages; where none can be had they skip, and say so
	@for b in chromium chromium-browser google-chrome; do command -v $$b > /dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then apt-get install -y -qq chromium > /dev/null; fi || \
	echo "No browser could be installed; tests of pages will be skipped (apt install chromium)."

check: style types
	$(BIN)/python -m pytest -q tests/test_docs.py -k imports

style: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/fastweights bench memory

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) site dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.docs: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[docs]"
	touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Open site/index.html"

$(VENV)/.release: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) "build>=1.2" "twine>=6"
	touch $@

release: $(VENV)/.release
	rm -rf dist build/release
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet --constraint $(CONSTRAINTS) "$$(ls $(CURDIR)/dist/*.whl)[$(EXTRA)]"
	cd build/release && bin/python $(CURDIR)/tests/smoke.py

$(VENV)/.demo: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[lm]"
	touch $@

demo: $(VENV)/.demo
	rm -rf runs/demo
	$(BIN)/fastweights demo runs/demo

fuzz properties layers kill elastic soak steps: $(VENV)/.installed
	cd tests && PYTHONPATH=.. OMP_NUM_THREADS=1 ../$(BIN)/python -m reliability.$@

hang: $(VENV)/.installed
	cd tests && PYTHONPATH=.. OMP_NUM_THREADS=1 ../$(BIN)/python -m reliability.kill --hang

LIBRARY := tests/test_torch.py tests/test_features.py tests/test_layers.py tests/test_jax.py tests/test_fwl.py \
	tests/test_sequential.py tests/test_lm_model.py tests/test_damage.py tests/test_hf_head.py

oldest: RESOLUTION := lowest-direct
newest: RESOLUTION := highest
oldest newest:
	$(PYTHON) -m venv build/$@
	build/$@/bin/pip install --quiet uv
	VIRTUAL_ENV=build/$@ build/$@/bin/uv pip install --quiet --resolution $(RESOLUTION) \
		--index-strategy unsafe-best-match ".[torch,jax,keras,lm,hf,lab,inspect]" "pytest>=8" "hypothesis>=6"
	build/$@/bin/python -m pytest -q $(LIBRARY)

audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/pip install --quiet pip-audit
	build/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip
