# Targets are the README's commands.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow smollm2 smollm2-saes lint types imports proven bench clean

demo: $(INSTALLED)
	$(BIN)/headattr demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow" -n auto

test-slow: $(INSTALLED) smollm2-saes
	$(BIN)/python -m pytest -m slow -rs

smollm2: $(INSTALLED)
	$(BIN)/python scripts/get_smollm2.py

smollm2-saes: smollm2
	$(BIN)/python scripts/train_smollm2_saes.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/basedpyright

imports: $(INSTALLED)
	$(BIN)/lint-imports

proven: $(INSTALLED)
	$(BIN)/python -m pytest tests/test_identities.py --write-proven -n 0

bench: $(INSTALLED)
	$(BIN)/python benchmarks/bench_qk.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) headattr-demo .pytest_cache .ruff_cache
