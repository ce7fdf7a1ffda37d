# Everything runs in .venv, which is made when it is first needed.
SHELL := bash
PYTHON ?= python3
EXPERIMENT ?= mnist_hyperband
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.stamp
# Colab's Python, where there is one; uv or pyenv can bring it.
MATRIX_PYTHON ?= $(shell python3.13 -c '' 2>/dev/null && echo python3.13 || echo $(PYTHON))

.PHONY: help install sweep test test-matrix check bench bench-gpu experiments clean
.DEFAULT_GOAL := help

help:  ## Show this help
	@echo 'Usage: make TARGET [EXPERIMENT=name] [ARGS="..."] [PYTHON=python3.12]'
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1 \2/p' $(MAKEFILE_LIST) \
	  | while read -r target text; do printf '  %-12s %s\n' "$$target" "$$text"; done

install: $(STAMP)  ## Make .venv with jaxpack and all that its development needs

sweep: $(STAMP)  ## Run one sweep: EXPERIMENT (default mnist_hyperband) with ARGS
	$(BIN)/python -m experiments.$(EXPERIMENT) $(ARGS)

test: $(STAMP)  ## Run the tests, with ARGS for pytest; ARGS=--slow runs all
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-matrix:  ## Run the tests with today's newest releases, then with Colab's
	rm -rf .venv-newest .venv-colab
	@$(call make-venv,.venv-newest,$(MATRIX_PYTHON))
	@$(call make-venv,.venv-colab,$(MATRIX_PYTHON),-c constraints-colab.txt)
	@failed=; for name in newest colab; do \
	  python=.venv-$$name/bin/python; \
	  $$python -c 'import sys, jax, flax, optax, numpy; print("\n$$name: Python", sys.version.split()[0], \
	    *(f"{m.__name__} {m.__version__}" for m in (jax, flax, optax, numpy)))'; \
	  $$python -m pytest -n 2 --dist worksteal $(ARGS) || failed+=" $$name"; \
	done; [ -z "$$failed" ] || { echo "test-matrix: failed with$$failed" >&2; exit 1; }

check: $(STAMP)  ## Check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check

bench: $(STAMP)  ## Time steps and sweeps on this machine, in under 15 minutes
	$(BIN)/python -m experiments.step_time $(ARGS)
	$(BIN)/python -m experiments.sweep_time $(ARGS)

bench-gpu:  ## Check and time on a GPU, with PYTHON as it is: no .venv is needed
	PYTHONPATH=. $(PYTHON) -m experiments.bench_gpu $(ARGS)

experiments: $(STAMP)  ## Run the paper's study at a small size, in under 20 minutes
	$(BIN)/python -m experiments.table $(ARGS)

clean:  ## Remove .venv, caches and build products, but no results in runs/
	rm -rf .venv .venv-newest .venv-colab build dist
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call make-venv,FOLDER,PYTHON,OPTIONS): jaxpack and its development's needs in a
# virtual environment, by uv where there is one; OPTIONS are those of pip.
define make-venv
$(2) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "jaxpack needs Python 3.11 or newer, but $(2) is $$($(2) --version 2>&1);" \
    "name another with: make PYTHON=python3.12 ..." >&2; exit 1; }; \
extras=dev; \
if nvidia-smi -L || [ -e /dev/nvidia0 ] || [ -e /proc/driver/nvidia ]; then \
  extras=dev,cuda12; \
fi >/dev/null 2>&1; \
set -ex; \
if uv --version >/dev/null 2>&1; then \
  uv venv --quiet --allow-existing --python "$$(command -v $(2))" $(1); \
  uv pip install --python $(1)/bin/python $(3) -e ".[$$extras]"; \
else \
  $(2) -m venv $(1); \
  $(1)/bin/python -m pip install $(3) -e ".[$$extras]"; \
fi
endef

# The stamp is written last, so that an installation that broke off is done again.
$(STAMP): pyproject.toml constraints.txt
	@$(call make-venv,.venv,$(PYTHON),-c constraints.txt)
	@touch $@
