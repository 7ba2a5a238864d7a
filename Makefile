# Every target sets its environment up first: once, then whenever pyproject.toml or the set-up script changes.
PYTHON ?= $(shell command -v python3 || command -v python)
BIN := .venv/bin
COMPAT := .venv-compat/bin
# Tests run in several processes: one thread each, or they fight over the cores.
PYTEST_ENV := OMP_NUM_THREADS=1
WORKERS ?= 2

.PHONY: help setup quickstart test lint compat architectures real-data soak clean

help:
	@echo "make quickstart     train a small real model, offline"
	@echo "make test           lint, types and tests"
	@echo "make lint           ruff and mypy only"
	@echo "make compat         the core tests on the oldest supported libraries"
	@echo "make architectures  try every model architecture; writes docs/ARCHITECTURES.md"
	@echo "make real-data      fetch public data sets and look at each with trillora inspect"
	@echo "make soak           the promises about runs at full dose, hours; PART=kills for one; writes dev/SOAK.md"
	@echo "make clean          remove environments and caches"

setup:
	@$(PYTHON) tools/setup_env.py

quickstart: setup
	@$(BIN)/trillora quickstart

test: lint
	$(PYTEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) -q

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy src

compat:
	@$(PYTHON) tools/setup_env.py --compat
	$(PYTEST_ENV) $(COMPAT)/python -m pytest -n $(WORKERS) -q -m core

architectures: setup
	$(BIN)/python tools/architectures.py --jobs $(WORKERS)

real-data: setup
	$(BIN)/python tools/real_data.py

soak: setup
	$(BIN)/python tools/soak.py --workers $(WORKERS) $(addprefix --part ,$(PART))

clean:
	rm -rf .venv .venv-compat .architectures .mypy_cache .ruff_cache .pytest_cache build dist src/*.egg-info
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
