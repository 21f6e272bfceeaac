# The one entry: `make` sets up .venv and opens the panel, `make test` sets up and tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# errors only: pip and setuptools warn of things that nobody who installs this could change
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install -qq --disable-pip-version-check
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: run setup test test-full lint format bench demo-model clean uninstall

run: setup
	@$(BIN)/vq panel

setup: $(STAMP)

$(STAMP): pyproject.toml kernels/packed_attention.c kernels/packed_encode.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "VeloxQuant needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(VENV); the first time takes a few minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade "pip>=25.1"
	@$(PIP) -e . --group dev
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

BUILT := $(VENV) build dist *.egg-info kernels/*.so
CACHES := .pytest_cache .ruff_cache .hypothesis .import_linter_cache

clean:
	rm -rf $(BUILT)

# asks nothing; `make uninstall MODELS=1` removes the demo model too
uninstall:
	@if [ -x $(BIN)/vq ]; then $(BIN)/vq uninstall $(if $(filter-out 0 no,$(MODELS)),--models); \
	  else echo "no $(BIN)/vq, so settings and state stay; \`make setup\` makes it"; fi
	@for path in $(BUILT) $(CACHES); do \
	  if [ -e "$$path" ]; then rm -rf "$$path" && echo "removed $$path" || exit 1; fi; done
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
