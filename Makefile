# Everything a person types. Each target makes the virtual environment that it needs.
#   make sweep                                    a first look, in a minute or two
#   make sweep MODEL=llama3-8b                    the default grid, each series until out of memory
#   make sweep EXPERIMENT=checkpointing           a published study again, with its questions answered (docs/)
#   make sweep MODEL=tiny DEVICE=cpu              real training on this machine's CPU
#   make sweep MODEL=llama3-8b GPU=h100-80gb precision=bf16 batch_size=1,2,4      any value of conf/ by its name
#   make sweep MODEL=llama3-8b ARGS="--dry-run"                                  anything else for sweep.run
PYTHON ?= python3
# Tests that run at once.
JOBS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed

GROUPS_ := MODEL ENGINE DEVICE GPU GRID EXPERIMENT
options := $(strip $(foreach g,$(GROUPS_),$(if $($(g)),$(shell echo $(g) | tr A-Z a-z)=$($(g)))))
values := $(strip $(filter-out $(foreach g,$(GROUPS_) PYTHON ARGS JOBS,$(g)=%),$(MAKEOVERRIDES)))
overrides := $(options) $(values) $(if $(MODEL)$(EXPERIMENT),,experiment=first)

.PHONY: setup help sweep plots report docs test test-all lint bench gpu-check clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --progress-bar off --editable '.[dev]'
	touch $@

help:
	@sed -n 's/^# \{0,1\}//p;/^PYTHON/q' Makefile
	@echo 'Also: make setup, plots, report, docs, test, test-all, lint, bench, gpu-check, clean'

sweep: $(INSTALLED)
	@$(BIN)/python -m sweep.run $(foreach o,$(overrides),'$(subst ','\'',$(o))') $(ARGS)

plots: $(INSTALLED)
	@$(BIN)/python -m sweep.plots

report: $(INSTALLED)
	@$(BIN)/python -m sweep.report

# The pages of the published studies, from docs/records/ and what results/ has of their experiments.
docs: $(INSTALLED)
	@$(BIN)/python -m sweep.studies --take results

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow and not gpu and not alone"

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -n $(JOBS) -m "not gpu and not alone"
	$(BIN)/python -m pytest -m "alone and not gpu"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python tests/bench.py

# On a machine with an NVIDIA GPU: the real one and the virtual one side by side. Where nothing can be installed:
# python -m sweep.gpu_check, with torch, transformers and accelerate alone.
gpu-check: $(INSTALLED)
	$(BIN)/python -m sweep.gpu_check

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
