# The one entry: `make` sets up .venv and opens the panel, `make test` sets up and tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: run setup test test-full lint format bench demo-model clean

run: setup
	@$(BIN)/vq panel

setup: $(STAMP)

$(STAMP): pyproject.toml kernels/packed_attention.c kernels/packed_encode.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "VeloxQuant needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet -e . --group dev
	@touch $(STAMP)

demo-model: setup
	$(BIN)/vq models demo

test: setup
	$(BIN)/vq models demo --quiet
	$(BIN)/python -P -m pytest -m "not slow and not bench" -n 2 --dist loadgroup

test-full: setup
	$(BIN)/vq models demo --quiet
	$(BIN)/python -P -m pytest -m "not bench"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python -P tests/line_budget.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/vq models demo --quiet
	$(BIN)/python -P -m veloxquant.benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info
