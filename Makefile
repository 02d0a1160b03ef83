# Targets are the README's commands.
PYTHON ?= python3
PIP_ARGS ?=
ACCEPT ?=
VENV := .venv
BIN := $(VENV)/bin
SAES := $(or $(HEADATTR_CACHE),$(HOME)/.cache/headattr)/smollm2-saes
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow smollm2 smollm2-saes gemma3 test-gemma3 lint types imports proven bench clean

demo: $(INSTALLED)
	$(BIN)/headattr demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow" -n auto

test-slow: $(INSTALLED) smollm2-saes
	$(BIN)/python -m pytest -m slow -rs

smollm2: $(INSTALLED)
	$(BIN)/python scripts/get_smollm2.py

smollm2-saes: smollm2
	$(BIN)/headattr train sae dictionaries/smollm2/resid_pre_12.toml --out "$(SAES)/resid_pre_12"
	$(BIN)/headattr train sae dictionaries/smollm2/resid_pre_13.toml --out "$(SAES)/resid_pre_13"

# Opt-in, under the Gemma Terms of Use: make gemma3 ACCEPT=--accept-gemma-terms
gemma3: $(INSTALLED)
	$(BIN)/python scripts/get_gemma3.py $(ACCEPT)

test-gemma3: gemma3
	$(BIN)/python -m pytest tests/test_gemma3.py -n 0 -rs

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
	$(BIN)/python benchmarks/run.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) headattr-demo .pytest_cache .ruff_cache
