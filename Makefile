# Every target that runs something sets up first; a set-up with nothing to do takes milliseconds.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= python3
# Each worker imports torch; more of them than this wait for memory, not for cores.
PYTEST_ARGS ?= -n auto --maxprocesses 4 --dist loadgroup
BENCH ?= trace

BIN := $(VENV)/bin
DEMO_PLAN := build/qwen3_14b.plan.yaml

# What the environment was last set up for.  It is kept in the environment, since several checkouts may
# share one: the install is editable, so it has to follow the checkout that is in use.
STAMP := $(VENV)/.offplan-setup
WANTED := $(CURDIR) $(shell cksum < pyproject.toml)

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Make the virtual environment, or bring it up to date
	@if [ "$$(cat "$(STAMP)" 2>/dev/null)" = "$(WANTED)" ]; then exit 0; fi; \
	rm -f "$(STAMP)"; \
	[ -x "$(BIN)/python" ] || $(PYTHON) -m venv --clear "$(VENV)"; \
	echo "setting up $(VENV) (PyTorch is several GB, so the first time takes minutes)" >&2; \
	"$(BIN)/python" -m pip install --quiet 'hatchling>=1.26' editables; \
	"$(BIN)/python" -m pip install --quiet --no-build-isolation --editable '.[dev]'; \
	echo "$(WANTED)" > "$(STAMP)"

.PHONY: demo
demo: setup ## Analyze a 4-layer Qwen3-14B, then gate the plan; no GPU needed
	@mkdir -p $(dir $(DEMO_PLAN))
	"$(BIN)/offplan" analyze sample_graphs/qwen3_14b.py -p layers=4 -o $(DEMO_PLAN)
	"$(BIN)/offplan" gate $(DEMO_PLAN) --max-alias-skipped 0

.PHONY: test
test: setup ## Run all tests; those that need a GPU are skipped where there is none
	@"$(BIN)/python" -m pytest $(PYTEST_ARGS)

.PHONY: check
check: setup ## Check format, lint and types, as CI does
	"$(BIN)/ruff" format --check .
	"$(BIN)/ruff" check .
	"$(BIN)/mypy"

.PHONY: format
format: setup ## Format the code and apply the safe lint fixes
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

.PHONY: bench
bench: setup ## Run one benchmark: make bench BENCH=trace
	"$(BIN)/python" benchmarks/$(BENCH).py

.PHONY: clean
clean: ## Remove caches and what the demo wrote; the environment stays
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis offplan.plan.yaml
	find offplan tests sample_graphs benchmarks -name __pycache__ -type d -exec rm -rf {} +
