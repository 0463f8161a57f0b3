# One door to the common tasks. Every target sets up first; when nothing changed that takes no time.
SHELL := /bin/bash
BIN := .venv/bin
# Idle threads sleep instead of spinning: two torch processes share the cores without slowing each other down.
export OMP_WAIT_POLICY := PASSIVE
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1
PYTEST := $(BIN)/python -m pytest
RUN := $(BIN)/torchspec run
SMOKE_STORE := .torchspec/smoke

.DEFAULT_GOAL := help
.PHONY: help setup demo stop smoke unit test lint real faults quality peers screenshot clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with everything pinned (the other targets do it too)
	@scripts/setup

demo: setup  ## train a drafter for a small real model through a local Prefect server; ends with a report
	@$(BIN)/python -m infra.local demo

stop: setup  ## end the Prefect server and worker that `make demo` started
	@$(BIN)/python -m infra.local stop

smoke: setup  ## the whole walk on a tiny random model, from nothing, without Prefect
	@rm -rf $(SMOKE_STORE)
	@$(RUN) configs/smoke.yaml run.store=$(SMOKE_STORE)

unit: setup  ## the fast tests
	@$(PYTEST) -q tests/unit

lint: setup  ## ruff and mypy
	@$(BIN)/ruff check --cache-dir .torchspec/ruff .
	@$(BIN)/mypy

real: setup  ## tests on the real model, vLLM, a real Prefect server
	@$(PYTEST) -q tests/real

faults: setup  ## tests that kill processes and damage files
	@$(PYTEST) -q tests/faults

test: setup  ## everything: lint, every test, the smoke walk
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory smoke
	@$(MAKE) --no-print-directory real
	@$(MAKE) --no-print-directory faults

quality: setup  ## train every kind of drafter on real answers and print its margin over trivial drafters (over an hour)
	@$(PYTEST) -q -s tests/quality

peers: setup  ## compare with other projects' drafters on identical weights (installs them into .torchspec/peers)
	@$(BIN)/pip install -q --no-deps --upgrade --target .torchspec/peers -r requirements/peers.txt
	@$(PYTEST) -q tests/peers

screenshot: setup  ## picture of the newest run in the Prefect UI, into docs/images/ (needs chromium)
	@$(BIN)/python -m scripts.screenshot_ui

clean:  ## remove the environment and the logs; results in .torchspec/store stay
	rm -rf .venv build *.egg-info $(SMOKE_STORE) .torchspec/mypy .torchspec/ruff .torchspec/setup.log .torchspec/libraries.txt
