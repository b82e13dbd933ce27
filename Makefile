# Two commands do all the set-up on a machine with python3 (3.11+), make and git: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CODE := src tests benchmarks tools scripts examples
PYTEST := $(BIN)/python -m pytest
# Tests run on this many processes; a daemon (Docker, Slurm, Kubernetes) belongs to one of them.
WORKERS ?= auto
PARALLEL := -n $(WORKERS) --dist loadgroup

# LOCKED=1 installs exactly the versions of requirements-dev.lock, checked by their hashes, as CI does.
LOCKED ?=

.DEFAULT_GOAL := help
.PHONY: help hodei venv browser docker slurm metal hosts kubernetes demo test test-daemons test-all retest unit real coverage real-local real-docker real-slurm \
	real-kubernetes real-metal lint format hooks bench bench-kube fuzz lock sbom wheel release clean

help:  ## this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-16s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Set up

# Two stamps for one venv: users need the command and its server, developers also the test tools, which take longest to
# fetch. A venv may lack pip where Debian's python3-venv is not installed; then pip is brought in by what is at hand.
$(BIN)/.server: pyproject.toml
	@sh scripts/make-venv.sh "$(PYTHON)" "$(VENV)"
	@$(BIN)/python scripts/install.py server
	@touch $@

$(BIN)/.ready: pyproject.toml
	@sh scripts/make-venv.sh "$(PYTHON)" "$(VENV)"
	@$(BIN)/python scripts/install.py dev $(if $(LOCKED),--locked)
	@touch $(BIN)/.server $@

hodei: $(BIN)/.server  ## .venv with the hodei command and its server, no developer tools

venv: $(BIN)/.ready  ## .venv with hodei and the developer tools

demo: hodei  ## a tour with the embedded local backend
	@sh scripts/demo.sh $(BIN)

browser:  ## Chromium for the browser tests (apt-get, as root)
	@sh scripts/install-browser.sh

docker:  ## Docker for the container tests (apt-get, as root)
	@sh scripts/install-docker.sh

slurm:  ## Slurm for the cluster tests (apt-get, as root)
	@sh scripts/install-slurm.sh

hosts:  ## an SSH server for the tests of `hodei host add` (apt-get, as root)
	@sh scripts/install-sshd.sh

metal:  ## emulators of BMCs for the bare-metal tests (apt-get, as root, and pip)
	@PYTHON=$(PYTHON) sh scripts/install-metal.sh

kubernetes:  ## a Kubernetes control plane for the tests, built once
	@sh tests/real/kubernetes/build.sh
	@sh scripts/build-helm.sh

##@ Test

test: venv  ## the tests that need no daemon of others: unit, properties, goldens, real local servers
	$(PYTEST) $(PARALLEL) -m 'not docker and not slurm and not kubernetes and not metal and not browser'

test-daemons: venv  ## the tests that make test leaves out: Docker, Slurm, Kubernetes, BMCs, a browser
	$(PYTEST) $(PARALLEL) -m 'docker or slurm or kubernetes or metal or browser'

test-all: venv  ## every test, also with Docker, Slurm, Kubernetes, BMCs, a browser, and the large counts
	HODEI_EXAMPLES=$${HODEI_EXAMPLES:-100} $(PYTEST) $(PARALLEL)

retest: venv  ## rerun the few tests that failed, alone, and report the flaky ones
	@sh scripts/retest.sh $(BIN)

unit: venv  ## the fast tests, without servers and processes
	$(PYTEST) $(PARALLEL) -m 'not real and not slow and not browser'

real: venv  ## the tests that start real servers and processes
	$(PYTEST) $(PARALLEL) -m 'real or slow'

coverage: venv  ## lines and branches that make test reaches, also in servers and agents: htmlcov/index.html
	rm -f .coverage .coverage.*
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(PYTEST) $(PARALLEL) --cov --cov-report=html --cov-report=term:skip-covered \
	    -m 'not docker and not slurm and not kubernetes and not metal and not browser'

real-local: venv  ## those that need only this machine
	$(PYTEST) $(PARALLEL) -m '(real or slow) and not docker and not slurm and not kubernetes and not metal and not browser'

real-docker: venv docker  ## those that need Docker
	$(PYTEST) $(PARALLEL) -m docker

real-slurm: venv slurm  ## those that need Slurm
	$(PYTEST) $(PARALLEL) -m slurm

real-kubernetes: venv kubernetes  ## those that need Kubernetes
	$(PYTEST) $(PARALLEL) -m kubernetes

real-metal: venv metal  ## those that need emulators of BMCs
	$(PYTEST) $(PARALLEL) -m metal

fuzz: venv  ## 10,000 fault runs, on all cores
	$(BIN)/python -m tools.faults --seeds 10000

##@ Check

lint: venv  ## ruff, mypy, import-linter
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: venv  ## format the code with ruff
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

hooks: venv  ## install the pre-commit hooks
	$(BIN)/python -m pip install -q 'pre-commit>=4'
	$(BIN)/pre-commit install

##@ Measure

bench: venv  ## benchmarks on this machine
	$(BIN)/python -m benchmarks engine
	$(BIN)/python -m benchmarks queue
	$(BIN)/python -m benchmarks server
	$(BIN)/python -m benchmarks server --backend local --jobs 5000
	$(BIN)/python -m benchmarks targets
	$(BIN)/python -m benchmarks docker
	$(BIN)/python tests/slurm_cluster.py $(BIN)/python -m benchmarks slurm

bench-kube: venv kubernetes  ## Hodei against kube-scheduler on one real apiserver
	cd tests && ../$(BIN)/python -m real.kubernetes.bench

##@ Release

lock: venv  ## requirements-dev.lock anew, from pyproject.toml
	$(BIN)/python scripts/lock.py

sbom: venv  ## dist/hodei.cdx.json: the software bill of materials (CycloneDX)
	$(BIN)/python scripts/sbom.py dist/hodei.cdx.json

wheel: venv  ## dist/hodei-*.whl
	$(BIN)/python -m pip wheel -q --no-deps --wheel-dir dist .

release: venv  ## VERSION=x.y.z: changelog section, version, tag, wheel, SBOM, image
	$(BIN)/python scripts/release.py "$(VERSION)"

clean:  ## remove the venv and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage htmlcov
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
