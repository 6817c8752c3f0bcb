# Everything that people and CI run. Each target does its own set-up; `make help` lists them.

PYTHON ?= python3
# Of gpu-check, where the working tree cannot be written or is not kept.
REPORT ?= docs/measurements/gpu_check.json
BIN := .venv/bin
PYTESTS = $(BIN)/python -m pytest
RELEASE := .release/bin
# Wheels for every platform that the image is built for, and no index in it: pip's own settings say where packages are.
COMPILE = $(RELEASE)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-build --custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade)

# The stamp file of a dependency group; group dev includes every other one that .venv may have.
installed = $(or $(wildcard $(BIN)/.installed-dev),$(BIN)/.installed-$1)

.DEFAULT_GOAL := help
.PHONY: help venv servers demo test lint format generate benchmark test-versions benchmark-exporter gpu-wheels gpu-check ways stragglers endings gauntlet nodes month soak siege lock sbom audit clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: $(call installed,train) servers ## a real training job, two faults, two notifications (ONCE=1: exit by itself)
	@$(BIN)/python -m examples.demo $(if $(ONCE),--once)

test: venv servers lint ## lint, types, and every test, with real end-to-end runs (PYTEST="…": pytest with these arguments)
	@$(if $(PYTEST),$(PYTESTS) $(PYTEST),$(PYTESTS) -n 2 --dist loadfile -m 'not alone' && $(PYTESTS) -n 2 --dist loadfile -m alone)

lint: venv ## ruff and mypy --strict
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && $(BIN)/mypy

format: venv ## let ruff format the code
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format .

generate: venv ## everything that is committed and made from something else: rules of each speed, dashboards, the metrics' reference
	@$(BIN)/python deploy/prometheus/render.py && $(BIN)/python grafana/generate.py && $(BIN)/python docs/generate.py

benchmark: venv ## what the hook costs a step, beside traceml-ai and prometheus_client (85 minutes); to docs/measurements/
	@$(BIN)/pip install --quiet --disable-pip-version-check --group benchmark
	@$(BIN)/python -m benchmarks.hook_overhead.in_process --training ddp alone fsdp2 by_hand --pairs 250 --json docs/measurements/hook_overhead_in_process.json
	@$(BIN)/python -m benchmarks.hook_overhead.in_process --training ddp_100_ms --pairs 1300 --json docs/measurements/hook_overhead_100_ms.json
	@$(BIN)/python -m benchmarks.hook_overhead --json docs/measurements/hook_overhead.json
	@$(BIN)/python -m benchmarks.hook_overhead.device_clock --json docs/measurements/hook_overhead_device_clock.json

test-versions: ## the hook's tests with the oldest and the newest torch, each in an environment below .versions
	@deploy/test_versions.sh $(PYTHON)

ways: venv ## how true the record is in every way to train, over 1,000 steps (15 minutes); to docs/measurements/
	@$(BIN)/python -m validation.ways --json docs/measurements/ways.json

stragglers: venv ## whether the slow rank of four and its phase are named, by either clock (25 minutes); to docs/measurements/
	@$(BIN)/python -m validation.stragglers --json docs/measurements/stragglers.json
	@$(BIN)/python -m validation.stragglers --device asynchronous --json docs/measurements/stragglers_asynchronous.json

endings: venv ## whether jobs hang at their end more often with the hook, where torch deadlocks at times (1 hour); to docs/measurements/
	@OMP_NUM_THREADS=1 $(BIN)/python -m validation.job_endings --jobs gather hugging_face --pairs 200 150 --json docs/measurements/job_endings.json

benchmark-exporter: venv ## how true and how dear the exporter is, beside nvitop-exporter (18 minutes); to docs/measurements/
	@$(BIN)/pip install --quiet --disable-pip-version-check --group benchmark
	@$(BIN)/python -m validation.blocking_device --json docs/measurements/blocking_device.json
	@$(BIN)/python -m validation.gpu_truth --json docs/measurements/gpu_truth.json
	@$(BIN)/python -m benchmarks.exporter_cost --scrapes 100000 --json docs/measurements/exporter_cost.json

gauntlet: venv servers ## inject every fault and decoy, five times each, on both kinds of device, and score the notifications (6 hours); to docs/measurements/
	@$(BIN)/python -m validation.gauntlet $(GAUNTLET)
	@$(BIN)/python -m validation.gauntlet --device asynchronous $(GAUNTLET)

nodes: venv servers ## eight nodes of one rank each: a rotating straggler, a slow network, a slow rank told apart, by either clock; to docs/measurements/
	@$(BIN)/python -m validation.gauntlet.nodes --json docs/measurements/nodes.json

month: venv servers ## a thousand simulated days of healthy runs, and faulty ones, judged by the rules: false alarms, and how soon a fault is told (4 hours); to docs/measurements/
	@$(BIN)/python -m validation.month $(MONTH)

soak: venv servers ## faults at production speed while what watches them is killed, stopped, restarted and deceived (2 hours); to docs/measurements/
	@$(BIN)/python -m validation.soak --json docs/measurements/soak.json $(SOAK)

siege: venv servers ## every attack of tests/attacks at once on a real job, exporter and Prometheus, as root (20 minutes); to docs/measurements/
	@$(BIN)/python -m validation.siege --json docs/measurements/siege.json $(SIEGE)

gpu-wheels: ## fetch what gpu-check needs on a machine without a network, into .gpu-wheels (14 MiB)
	@$(PYTHON) -m validation.gpu_check.wheels

gpu-check: ## every GPU metric beside nvidia-smi and a known load, and the hook, on a real GPU, without a network (8 minutes); to docs/measurements/
	@$(PYTHON) -m validation.gpu_check --json $(REPORT)

lock: $(RELEASE)/.installed ## pin by hash what the exporter's image installs and is built with (UPGRADE=1: the newest versions)
	@$(COMPILE) pyproject.toml --extra exporter --output-file exporter/requirements.txt
	@$(RELEASE)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' | $(COMPILE) - --output-file exporter/requirements-build.txt

sbom: $(RELEASE)/.installed ## the Python packages of the exporter's image as CycloneDX, to dist/
	@mkdir -p dist && $(RELEASE)/python -W ignore -m cyclonedx_py requirements exporter/requirements.txt --pyproject pyproject.toml --output-reproducible --of JSON --output-file dist/rankscope-exporter.cdx.json

audit: $(RELEASE)/.installed ## whether an advisory is known for one of them; fails where the advisory service cannot say
	@$(RELEASE)/pip-audit --strict --require-hashes --disable-pip --progress-spinner off --requirement exporter/requirements.txt || \
		{ echo 'rankscope: not audited, or not clean: the line above says which; nothing is known of the packages after it' >&2; exit 1; }

$(RELEASE)/.installed: pyproject.toml
	@$(PYTHON) -m venv .release && $(RELEASE)/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(RELEASE)/pip install --quiet --disable-pip-version-check --group release
	@touch $@

venv: $(BIN)/.installed-dev ## the virtual environment .venv with everything for development

# One stamp file for each dependency group of pyproject.toml that .venv has.
$(BIN)/.installed-%: pyproject.toml
	@deploy/setup.sh venv $(PYTHON) $*
	@touch $@

servers: ## Prometheus and Alertmanager, installed by apt unless they are on the PATH
	@deploy/setup.sh servers

clean: ## remove the virtual environment and caches
	rm -rf .venv .release .mypy_cache .ruff_cache .pytest_cache dist
