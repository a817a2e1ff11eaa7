# `make demo` and `make test` need nothing but Python 3.11 or 3.12 on Linux.
PYTHON ?= $(firstword $(foreach p,python3.12 python3.11 python3,$(shell command -v $(p) 2>/dev/null)))
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
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13) and "Python 3.11 or 3.12 is needed, this is " + sys.version + "; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip "setuptools>=77"
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist site runs *.egg-info
