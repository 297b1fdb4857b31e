# Everything that a person or CI runs on this repository. `make` alone lists it.
# Built things live under ~/.cache/tkcc, the virtual environment in .venv; both are made when first needed.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

UV_VERSION := 0.13.9
PY := .venv/bin/python
READY := .venv/ready-$(shell cat requirements/dev.txt pyproject.toml 2>/dev/null | sha256sum | cut -c1-16)
PYTEST := $(PY) -m pytest

export OMP_NUM_THREADS ?= 1

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(READY) ## the virtual environment .venv, with every package as locked in requirements/dev.txt

$(READY): requirements/dev.txt pyproject.toml
	@echo "[setup] Python packages into .venv (several GB on the first run, then from uv's cache)"
	test -x $(PY) || python3 -m venv .venv
	.venv/bin/uv --version 2>/dev/null | grep -q '^uv $(UV_VERSION) ' || $(PY) -m pip install -q uv==$(UV_VERSION)
	.venv/bin/uv pip sync -q --python $(PY) requirements/dev.txt
	.venv/bin/uv pip install -q --python $(PY) --no-deps --editable .
	rm -f .venv/ready-*
	touch $@

.PHONY: setup-cluster
setup-cluster: setup ## what a local Kubernetes needs: Debian packages (as root), and programs built from source
	@bash .ci/packages
	$(PY) -m e2e.cluster build

.PHONY: lock
lock: setup ## write requirements/*.txt anew from pyproject.toml, keeping versions that still fit
	$(PY) -m pip install -q uv==$(UV_VERSION)
	.venv/bin/uv pip compile -q --no-header --no-annotate --extra dev pyproject.toml -o requirements/dev.txt
	for extra in operator engine agents; do \
	  .venv/bin/uv pip compile -q --no-header --no-annotate --extra $$extra -c requirements/dev.txt pyproject.toml \
	    -o requirements/$$extra.txt; \
	done

.PHONY: check
check: setup ## lint, format, types, imports between layers, generated files; no tests
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PY) -m tkcc.api.crd --out crds --check
	$(PY) -m tkcc.api.crd --out charts/tkcc/files/crds --check

.PHONY: test
test: setup ## the tests, but those on a whole cluster: seven minutes on two cores
	$(PYTEST) tests --numprocesses 2 --dist loadfile --ignore tests/operator --ignore tests/shell --ignore tests/kube
	$(PYTEST) tests/kube tests/operator tests/shell  # this order: the last counts the rights that the others used

.PHONY: test-apiserver
test-apiserver: setup-cluster ## of the tests, the operator on a real etcd and API server alone
	$(PYTEST) tests/kube tests/operator tests/shell

.PHONY: e2e
e2e: setup-cluster ## the local cluster, the demo and all stories on it (as root): some 22 minutes on two cores
	$(PYTEST) e2e -m "not full" --timeout 1500

.PHONY: e2e-full
e2e-full: setup-cluster ## the same, and the demo once more on a cluster that is given to it
	$(PYTEST) e2e --timeout 3600

.PHONY: demo
demo: setup ## the main job, from nothing: apply, drift, recompile, canary, promote; report in build/demo
	$(PY) -m e2e.demo

.PHONY: demo-clean
demo-clean: setup ## remove all that the demo left: cluster, namespaces, mounts, build/demo
	$(PY) -m e2e.demo --clean

.PHONY: crds
crds: setup ## write crds/ anew from tkcc.api
	$(PY) -m tkcc.api.crd --out crds
	$(PY) -m tkcc.api.crd --out charts/tkcc/files/crds

.PHONY: bench-engine
bench-engine: setup ## serving speed against transformers, interleaved
	.venv/bin/tkcc bench engine
