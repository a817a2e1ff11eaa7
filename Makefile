# `make demo` and `make test` need nothing but Python 3.11 or 3.12 on Linux.
# The first that runs and fits (version managers leave shims on the path that do not run).
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
# Installed first: the plain name pulls the CUDA build and gigabytes of libraries where there is no GPU.
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint docs clean

demo: $(READY)
	$(BIN)/python examples/train_gpt.py

test: lint
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/mkdocs build --strict

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found; install one, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip "setuptools>=77"
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist site runs *.egg-info
