# Two commands on a fresh machine: `make train` and `make test`. Nothing is installed twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --config-settings editable_mode=compat
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes import the package: it is compiled once

.PHONY: help train test slow check format bench clean

help:  ## list these commands
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 10

train: $(VENV)/.installed  ## train PPO on CartPole-v1 until 20 greedy episodes average at least 475
	$(BIN)/raynforce train ppo CartPole-v1 --target 475

test: $(VENV)/.installed-dev  ## run every quick test, three at a time (about 12 minutes on two cores)
	$(BIN)/python -m pytest -n 3

slow: $(VENV)/.installed-dev  ## run every learning run and every cell of the matrices of runtimes and signals (more than an hour)
	$(BIN)/python -m pytest -m slow --timeout 1800

check: $(VENV)/.installed-dev  ## lint, format, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.installed-dev  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed  ## measure speed beside Stable-Baselines3 and RLlib (in venvs of their own)
	$(BIN)/python -m benchmarks

clean:  ## remove the virtual environment and caches, keep runs
	rm -rf $(VENV) .venv-sb3 .venv-contrib .venv-rllib build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Raynforce needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Raynforce into $(VENV) (once, about a minute) …"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing Raynforce and its test tools into $(VENV) (once, about a minute) …"
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed
