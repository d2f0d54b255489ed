# Tangram. `make help` lists what there is to do; every target installs what it needs (root, or sudo).
SHELL := /bin/sh
.DEFAULT_GOAL := help
export PATH := $(CURDIR)/.cache/tools/bin:$(PATH)
export UV_PYTHON_DOWNLOADS := never
RUN := uv run --frozen --no-sync
PYTEST := TANGRAM_SHIM_BUILD=$(CURDIR)/build/shim $(RUN) pytest
# what a run of everything takes longest for
SLOWEST := --durations=25 --durations-min=3
# on all processors, and half as many files again, since with one each half of the time went by waiting: tests of one file share fixtures that
# take seconds, so files are dealt out; what measures shares of time runs alone
WORKERS := $(shell expr $$(nproc) + $$(nproc) / 2)
ON_ALL = $(PYTEST) $(SLOWEST) -n $(WORKERS) --dist loadfile --ignore=tests/integration/gputime
GPU_TIME = $(PYTEST) $(SLOWEST) tests/integration/gputime
# what runs beside others gets the time that they leave, so that it changes nothing that they measure
IDLE := $(shell chrt --idle 0 true 2>/dev/null && echo chrt --idle 0 || echo nice -n 19)
SIDE_BY_SIDE = $(RUN) python -m hack.side_by_side
SHIM = $(MAKE) -j$(shell nproc) -Otarget -C shim BUILD=$(CURDIR)/build/shim PYTHON="$(CURDIR)/.venv/bin/python"
FUZZED = $(or $(TESTS),tests/unit tests/contract)
# the end-to-end tests stop and kill programs of the cluster, which are root's
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] || echo 'sudo -E env "PATH=$$PATH" "HOME=$$HOME" PYTHONDONTWRITEBYTECODE=1')

PREPARE = $(RUN) python -m hack.prepare $(addprefix --provider ,$(PROVIDER)) $(PREVIOUS)
CLUSTER_UP = $(PREPARE) && \
	$(RUN) python -m hack.cluster up $(addprefix --replace --provider ,$(PROVIDER)) && $(RUN) python -m hack.cluster load

.PHONY: help demo test lint unit library shim sanitized arm64 faults driver-abi fuzz e2e prepare images reproducible cluster-up cluster-down bench update test-autoscalers clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# also when uv is gone since, as it is for who had it in a PATH that root has not
.venv/.synced: pyproject.toml uv.lock hack/bootstrap $(if $(wildcard .cache/tools/bin/uv)$(shell command -v uv),,FORCE)
	@hack/bootstrap
	@uv sync --frozen --quiet
	@touch $@
FORCE:

demo: .venv/.synced ## a local cluster, the chart, pods that share a GPU, shown step by step
	@$(RUN) python -m hack.demo

# also where Docker answers: the end-to-end tests stop and kill programs of our own cluster
test e2e: PROVIDER = local
# an upgrade begins with the release before this one
test e2e: PREVIOUS = --previous
# What computes runs beside what waits. On the cluster much is waited for, so the domain's tests run there: they know no clock, process or socket.
# Nothing runs beside the tests of GPU time. Some tests before that run programs of the cluster, and have not the time to build them.
test: .venv/.synced ## everything that needs no GPU: lint, C, arm64, unit, contract, integration, real cluster
	@$(SIDE_BY_SIDE) '$(MAKE) --no-print-directory lint' '$(MAKE) --no-print-directory sanitized' '$(IDLE) $(MAKE) --no-print-directory prepare PROVIDER=$(PROVIDER) PREVIOUS=$(PREVIOUS)'
	@status=0; $(ON_ALL) --ignore=tests/unit/vgpu tests/unit tests/contract tests/integration || status=$$?; \
	$(GPU_TIME) || status=$$?; \
	$(SIDE_BY_SIDE) '$(IDLE) env $(ON_ALL) -n auto --timeout 600 tests/unit/vgpu' '$(IDLE) $(MAKE) --no-print-directory arm64' '$(CLUSTER_UP) && $(AS_ROOT) $(RUN) pytest $(SLOWEST) -p no:cacheprovider tests/e2e' || status=$$?; \
	$(RUN) python -m hack.cluster down --quiet; exit $$status

lint: .venv/.synced ## style, types, layer contracts, generated files
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	$(RUN) mypy --python-version 3.10 clients/python/src
	$(RUN) lint-imports
	hack/verify-proto
	hack/verify-reference

unit: .venv/.synced shim ## the tests that need no cluster
	@status=0; $(ON_ALL) tests/unit tests/contract tests/integration || status=$$?; $(GPU_TIME) || status=$$?; exit $$status

library: .venv/.synced ## the interception library and the fake driver alone: what tangramctl needs
	$(SHIM) lib fake

shim: .venv/.synced ## the interception library, the fake driver and their C tests under sanitizers
	$(SHIM) lib fake unit asan tsan

sanitized: .venv/.synced ## the same, and the library's integration tests under ASan, UBSan and TSan (about two minutes)
	$(SHIM) lib fake unit sanitized

arm64: .venv/.synced ## the library for arm64, and its tests under qemu's user mode (half a minute; installs qemu-user)
	@$(AS_ROOT) $(RUN) python -m hack.arm64 packages
	$(RUN) python -m hack.arm64

faults: .venv/.synced ## kill, stop, stall (ROUNDS=1000, STALLS=100, KILLS=20, SEED=1; half an hour), then the fault matrix on the local cluster (half an hour)
	$(SHIM) lib
	TANGRAM_SHIM_BUILD=$(CURDIR)/build/shim TANGRAM_FAULT_ROUNDS=$(or $(ROUNDS),1000) TANGRAM_FAULT_SEED=$(or $(SEED),1) \
	TANGRAM_STALL_ROUNDS=$(or $(STALLS),100) TANGRAM_RESTART_KILLS=$(or $(KILLS),20) \
	$(RUN) pytest -rP $(addprefix tests/integration/gputime/test_,fault_matrix.py stalls.py restarts.py)
	$(MAKE) cluster-up PROVIDER=local
	$(AS_ROOT) env TANGRAM_MATRIX_ROUNDS=$(or $(ROUNDS),1000) TANGRAM_FAULT_SEED=$(or $(SEED),1) \
	$(RUN) pytest -p no:cacheprovider -rP tests/e2e/test_matrix.py

driver-abi: .venv/.synced ## compare the kernel driver's interface with NVIDIA's sources; MIRROR=a clone of open-gpu-kernel-modules
	@test -n "$(MIRROR)" || { echo "make driver-abi: MIRROR= a git clone of github.com/NVIDIA/open-gpu-kernel-modules, with its tags"; exit 2; }
	$(RUN) python -m hack.driver_abi $(MIRROR) --check

fuzz: .venv/.synced shim ## the property tests with other examples, EXAMPLES=1000 each in the order of SEED=, which it prints
	@seed=$(or $(SEED),$$(shuf -i 1-4294967295 -n 1)); echo "make fuzz SEED=$$seed EXAMPLES=$(or $(EXAMPLES),1000) TESTS='$(FUZZED)'"; \
	EXAMPLES=$(or $(EXAMPLES),1000) $(PYTEST) -n auto --timeout 0 -m hypothesis --hypothesis-profile=fuzz --hypothesis-seed=$$seed $(FUZZED)

e2e: cluster-up ## the tests on the local cluster, which stays up
	$(AS_ROOT) $(RUN) pytest -p no:cacheprovider tests/e2e

prepare: .venv/.synced ## build the programs and images of the local cluster, and start nothing
	$(PREPARE)

images: .venv/.synced ## build the container images (Docker where it answers, else buildah)
	$(RUN) python -m hack.images build

reproducible: .venv/.synced ## build library, wheel and image twice and compare the bytes, which a release does (ten minutes; without Docker)
	$(RUN) python -m hack.release reproducible

cluster-up: .venv/.synced ## bring up the local cluster and load the images (again: no-op); PROVIDER=local|kind
	@$(CLUSTER_UP)

cluster-down: .venv/.synced ## stop the local cluster and leave nothing behind
	$(RUN) python -m hack.cluster down

bench: .venv/.synced shim ## measure what the docs claim; writes bench/**/*.csv
	$(RUN) python -m bench

update: .venv/.synced ## regenerate what is generated (proto)
	hack/update-proto

test-autoscalers: ## what Karpenter's simulation and kube-scheduler's framework do with placeholders (Go; minutes when nothing is compiled yet)
	cd hack/autoscalers/karpenter && go test -count=1 ./...
	cd hack/autoscalers/scheduler && go test -count=1 ./...

clean: ## remove build results (not the cluster, not its cache)
	rm -rf build tangramctl/lib .mypy_cache .ruff_cache .pytest_cache .hypothesis
