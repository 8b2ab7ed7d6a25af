# Two commands do everything on a fresh machine:
#   make demo   set up, serve a real model with and without DFLASH, show both answering
#   make test   set up, then lint, types and the whole test suite
# VENV=folder uses another environment; PYTHON=python3.12 another interpreter to make it with.
# MODEL=.. DRAFTER=.. take another pair, PORT=.. another port (make serve: 30000 by default).

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.sglang-dflash-$(shell cksum pyproject.toml | cut -d' ' -f1)

MODEL ?=
DRAFTER ?=
PORT ?=
SERVE := $(if $(MODEL),--model $(MODEL)) $(if $(DRAFTER),--drafter $(DRAFTER)) \
  $(if $(PORT),--port $(PORT))

.PHONY: setup demo serve test lint types check clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 12); \
	  sys.exit(0 if ok else "Python 3.11 or 3.12 is needed, found %d.%d. Run: make PYTHON=python3.11" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "Cannot make a virtual environment. On Debian: apt-get install python3-venv"; exit 1; }
	@echo "Installing sglang-dflash and SGLang into $(VENV): about 10 GB, 3 to 8 minutes"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -e '.[test]' 2>&1 \
	  | grep --line-buffered -E '^ *(Collecting|Downloading|Installing|Successfully|ERROR|error)' ; \
	  test $${PIPESTATUS[0]} -eq 0
	@rm -f $(VENV)/.sglang-dflash-*; touch $@

demo: $(STAMP)
	@$(BIN)/python scripts/demo.py $(SERVE)

serve: $(STAMP)
	@exec $(BIN)/python scripts/demo.py --serve $(if $(PORT),,--port 30000) $(SERVE)

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/mypy

test: lint types
	@$(BIN)/python -m pytest $(ARGS)

clean:
	@rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
