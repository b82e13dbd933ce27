# Two commands do all the set-up on a machine with python3 (3.11+), make and git: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help hodei venv browser docker slurm kubernetes demo test retest unit real lint format bench bench-kube fuzz clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Two stamps for one venv: users need the command and its server, developers also the test tools, which take longest to
# fetch. A venv may lack pip where Debian's python3-venv is not installed; then pip is brought in by what is at hand.
$(BIN)/.server: pyproject.toml
	@sh scripts/make-venv.sh "$(PYTHON)" "$(VENV)"
	@$(BIN)/python scripts/install.py server
	@touch $@

$(BIN)/.ready: pyproject.toml
	@sh scripts/make-venv.sh "$(PYTHON)" "$(VENV)"
	@$(BIN)/python scripts/install.py dev
	@touch $(BIN)/.server $@

hodei: $(BIN)/.server  ## .venv with the hodei command and its server, no developer tools

venv: $(BIN)/.ready  ## .venv with hodei and the developer tools

demo: hodei  ## the main job on the embedded default, to the end
	@sh scripts/demo.sh $(BIN)

browser:  ## Chromium for the tests that look at pages, by apt-get if root
	@sh scripts/install-browser.sh

docker:  ## Docker's daemon for the tests that run containers, by apt-get if root
	@sh scripts/install-docker.sh

slurm:  ## Slurm's daemons for the tests that need a cluster, by apt-get if root
	@sh scripts/install-slurm.sh

kubernetes:  ## the Kubernetes control plane of the tests, built once
	@sh tests/real/kubernetes/build.sh
	@sh scripts/build-helm.sh

test: venv  ## all tests
	$(PYTEST)

retest: venv  ## the few tests that failed last time once more, alone: what passes now is flaky, which is a defect to report
	@sh scripts/retest.sh $(BIN)

unit: venv  ## the tests that take seconds
	$(PYTEST) -m 'not real and not slow and not browser'

real: venv  ## the tests that start real servers and processes
	$(PYTEST) -m 'real or slow'

lint: venv  ## ruff, mypy, import-linter
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: venv  ## let ruff lay out the code
	$(BIN)/ruff check --fix src tests
	$(BIN)/ruff format src tests

bench: venv  ## figures and ratios of this machine
	$(BIN)/hodei bench engine
	$(BIN)/hodei bench queue
	$(BIN)/hodei bench server
	$(BIN)/hodei bench server --backend local --jobs 5000
	$(BIN)/hodei bench targets
	$(BIN)/hodei bench docker
	$(BIN)/python tests/slurm_cluster.py $(BIN)/hodei bench slurm

bench-kube: venv kubernetes  ## Hodei and kube-scheduler in turns on one real apiserver
	cd tests && ../$(BIN)/python -m real.kubernetes.bench

fuzz: venv  ## 10,000 fault runs of the real controller, on all cores
	$(BIN)/python -m hodei.sim.faults --seeds 10000

clean:  ## away with the venv and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
