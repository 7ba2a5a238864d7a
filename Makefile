# Every target first sets up its environment: once, and again when pyproject.toml, a lock or the set-up script changes.
PYTHON ?= $(shell command -v python3 || command -v python)
BIN := .venv/bin
HARNESS := .venv-harness/bin
# Tests run in several processes, so each uses one thread. If the environment turns compiled modules off, each process
# would compile torch and the others again, which takes 12 s.
export PYTHONDONTWRITEBYTECODE :=
PYTEST_ENV := OMP_NUM_THREADS=1
WORKERS ?= 2

.PHONY: help setup quickstart test test-all lint style types pytest docs release evidence compat harness architectures recipes real-data soak lock audit atlas clouds claims clean

help:
	@echo "make quickstart     fine-tune a small chat model on the CPU"
	@echo "make test           run lint, type checks and tests"
	@echo "make evidence       run what a release rests on in addition to make test: whole runs with scores, every architecture"
	@echo "make test-all       run every test, including the slow ones"
	@echo "make lint           run only lint and type checks"
	@echo "make docs           write the documentation site to build/site"
	@echo "make release        build wheel and sdist in dist/, and try them in a new environment"
	@echo "make compat         run the core tests with the oldest and the newest libraries that pip may choose"
	@echo "make harness        test the interface to lm-evaluation-harness, with its forty packages"
	@echo "make clouds         give launch files to the real SkyPilot and xpk, with their two hundred packages"
	@echo "make architectures  check every model architecture; writes docs/models.md"
	@echo "make recipes        measure the recipes: preflight, and their --tiny runs; writes README's table of recipes"
	@echo "make atlas          compile popular models for many TPU slices (MINUTES=15, FRESH=1); writes docs/ATLAS.md"
	@echo "make real-data      download public data sets and run trillora inspect on each"
	@echo "make soak           run the reliability tests at full scale (hours; PART=kills for one part); writes dev/SOAK.md"
	@echo "make lock           update the locks, the exact packages with their hashes (UPGRADE=1: newest versions)"
	@echo "make claims         list the figures in README and docs: fresh, stale or without a record (WRITE=1: write them)"
	@echo "make audit          look up known vulnerabilities of the locked packages"
	@echo "make clean          remove environments and caches"

setup:
	@$(PYTHON) tools/setup_env.py

quickstart:
	@$(PYTHON) tools/setup_env.py --runtime
	@$(BIN)/trillora quickstart

# mypy runs next to the tests, which sometimes wait.
test: style
	@$(MAKE) --no-print-directory -j 2 types pytest

# Every test and every case. A twentieth of the random repetitions; make soak runs all of them.
test-all: export TRILLORA_DOSE = full
test-all: export TRILLORA_DOSE_SCALE = 0.05
test-all: test

# The slow tests that promises rest on; .ci/run runs them after make test. `tools/evidence.py --write` records a run in dev/.
evidence: setup
	$(BIN)/python tools/evidence.py --workers $(WORKERS)

pytest: setup
	$(PYTEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q

lint: style types

style: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tools/check_english.py

types: setup
	$(BIN)/mypy src

# Also part of the tests (tests/project/test_docs.py). The theme, Material for MkDocs 9.8, gets security updates until 2027-05-05
# and prints that with the name of its successor at every build; the variable turns off this text and nothing else.
docs: setup
	@for page in recipe command api; do $(BIN)/python tools/$${page}_reference.py || exit 1; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html; to read it: $(BIN)/python -m http.server --directory build/site"

# The tests build their own; they are also part of make test.
release: setup
	$(BIN)/python tools/release.py
	$(PYTEST_ENV) $(BIN)/python -m pytest -q tests/system/test_release.py

compat: compat-oldest compat-newest

compat-%:
	@$(PYTHON) tools/setup_env.py --compat $*
	$(PYTEST_ENV) .venv-$*/bin/python -m pytest -n $(WORKERS) -q -m core

harness:
	@$(PYTHON) tools/setup_env.py --harness
	$(PYTEST_ENV) $(HARNESS)/python -m pytest -q tests/evaluation/test_harness.py

clouds: setup
	@$(PYTHON) tools/setup_env.py --clouds
	$(PYTEST_ENV) TRILLORA_CLOUDS=.venv-clouds/bin $(BIN)/python -m pytest -q tests/launch/test_managed_jobs.py

architectures: setup
	$(BIN)/python tools/architectures.py --jobs $(WORKERS)

# Preflight needs x86-64 Linux for the TPU compiler; elsewhere it estimates, and known answers of the compiler stay.
recipes: setup
	$(BIN)/python tools/recipes.py --jobs $(WORKERS)

# Compiles only what docs/atlas.jsonl lacks. FRESH=1 compiles everything again.
atlas: setup
	$(BIN)/python tools/atlas.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(FRESH),--fresh)

real-data: setup
	$(BIN)/python tools/real_data.py

soak: setup
	$(BIN)/python tools/soak.py --workers $(WORKERS) $(addprefix --part ,$(PART))

lock: setup
	@$(BIN)/python tools/lock.py $(if $(UPGRADE),--upgrade)

# Needs only git and Python.
claims:
	@$(PYTHON) tools/claims.py $(if $(WRITE),--write)

audit: setup
	@$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/pip-audit --strict --requirement locks/dev.txt --require-hashes --disable-pip

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-harness .venv-clouds .architectures .mypy_cache .ruff_cache .pytest_cache build dist src/*.egg-info
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
