# Two commands: `make serve` and `make test`. Each sets up .venv by itself; both need only Python and make.
PYTHON ?= python3
VENV := .venv
# A separate environment, because ttnn has no wheel for Python 3.11. TTNN_PYTHON=/path/to/python3.12 sets its Python.
VENV_TTNN := .venv-ttnn
# Clients that others wrote, which need other versions of packages than we do.
VENV_CLIENTS := .venv-clients
# Tools of `lock`, `sbom` and `audit`.
VENV_TOOLS := .venv-tools
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --retries 10 --timeout 60
export HF_HUB_OFFLINE := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help serve test test-local test-ray test-slow test-slow-local test-slow-ray test-tt test-clients test-helm test-chart build-helm build-chart ci-all check lint types imports chaos fuzz sanitize lock sbom audit clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# PORT=8000 MODEL=/path/to/a/hugging-face/folder CONFIG=configs/2p2d.yaml
serve: $(VENV)/.installed ## Serve a model on this machine. PORT=8000 MODEL=folder CONFIG=file.
	@$(BUILD_KERNELS)
	@$(VENV)/bin/ttserve serve $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model $(MODEL)) $(if $(CONFIG),--config $(CONFIG))

# Exit code 5: no test of the given files is of this kind. Halves of `test` keep what failed apart, for `again-%`.
PYTEST = mkdir -p generated; rm -f generated/$@.passed; \
	{ $(VENV)/bin/python -m pytest -q -o cache_dir=.pytest_cache/$@ $(1) || [ $$? = 5 ]; } && touch generated/$@.passed
# A laptop or a CI machine has two cores at least; a third process computes while others wait for an
# engine that starts, freezes or falls silent. Each begins with its part of the tests in their order,
# so that what the tests of a file share is mostly made once, and takes over from others at the end.
SHARED := --dist worksteal
# The given files, or those with tests of a kind: importing all the others takes long.
FILES = $(or $(TESTS),$(sort $(shell grep -rl --include='test_*.py' 'mark\.$(1)' tests)))

# The output of tests that run beside others is shown when they are done. A host holds one Ray
# cluster at a time, so tests that start Ray run one at a time; they mostly wait.
BESIDE = mkdir -p generated; { $(1); } > generated/$@.log 2>&1; code=$$?; echo; cat generated/$@.log; exit $$code
HALVES = $(MAKE) --no-print-directory --jobs 2 --keep-going

# TESTS=tests/kv_transfer runs a part. Both halves run to their ends, whatever the other's result.
test: $(VENV)/.installed-dev ## Run the tests without slow ones. TESTS=tests/kv_transfer runs a part.
	@$(HALVES) test-local test-ray

test-local: $(VENV)/.installed-dev ## Run the half of `test` that starts no Ray.
	$(call PYTEST,-n 3 $(SHARED) -m "not ray and not slow" $(TESTS))

test-ray: $(VENV)/.installed-dev ## Run the half of `test` that starts Ray.
	@$(call BESIDE,$(call PYTEST,-m "ray and not slow" $(call FILES,ray)))

# The tests that `make test` leaves out: quicker tests cover most of them, and CI runs them all.
test-slow: $(VENV)/.installed-dev ## Run the slow tests, which `test` leaves out.
	@$(HALVES) test-slow-local test-slow-ray

test-slow-local: $(VENV)/.installed-dev
	$(call PYTEST,-n 2 $(SHARED) -m "slow and not ray" $(call FILES,slow))

test-slow-ray: $(VENV)/.installed-dev
	@$(call BESIDE,$(call PYTEST,-m "slow and ray" $(call FILES,slow)))

# Alone, so that a test that needs a quieter machine tells itself from one that fails. Where no failed
# test is known, as after a run that was cut off, pytest ends with code 5.
again-%: $(VENV)/.installed-dev ## Run the failed tests of `test-local` and so on again, one at a time.
	[ -e generated/$*.passed ] || $(VENV)/bin/python -m pytest -q -o cache_dir=.pytest_cache/$* --last-failed --last-failed-no-failures none -rfEp

# The ttnn path on ttnn's mock device: no Tenstorrent hardware, but Python 3.12 and RISC-V binutils.
test-tt: $(VENV_TTNN)/.installed-dev ## Run the ttnn path on ttnn's mock device (Python 3.12).
	TTSERVE_REQUIRE_TTNN=1 $(VENV_TTNN)/bin/python -m pytest -q -n 2 --dist loadfile $(or $(TESTS),tests/tt)

# Unchanged clients against a server with recorded answers; those of Node.js only where it is installed.
test-clients: $(VENV)/.installed-dev $(VENV_CLIENTS)/.installed ## Run clients that others wrote against a server.
	$(VENV)/bin/python -m pytest -q $(or $(TESTS),tests/clients)

# The chart, and the image on a real Kubernetes: that of KUBECONFIG, or else a node started here, which needs
# Go 1.26, root and packages of Debian. 35 minutes the first time.
test-helm: $(VENV)/.installed-dev ## Test the chart, and the image on a real Kubernetes (Go 1.26, root).
	PYTHON=$(VENV)/bin/python helm/kit/test.sh

test-chart: $(VENV)/.installed-dev ## Test the chart without a Kubernetes (Go 1.26).
	PYTHON=$(VENV)/bin/python helm/kit/test.sh chart

build-helm: ## Build the programs and images of `test-helm`.
	helm/kit/test.sh build

build-chart: ## Build the programs of `test-chart`.
	helm/kit/test.sh build-chart

ci-all: ## Run all that CI runs, and what it skips because nothing changed.
	CI_ALL=1 .ci/run

check: lint types imports test ## Run `lint`, `types`, `imports` and `test`.

lint: $(VENV)/.installed-dev ## Run ruff.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed-dev ## Run mypy.
	$(VENV)/bin/mypy

# The import contracts are in pyproject.toml; the tool needs Python 3.11.
imports: $(VENV)/.installed-dev ## Check the import contracts.
	@if [ -x $(VENV)/bin/lint-imports ]; then $(VENV)/bin/lint-imports --no-logo; else echo "imports: skipped, needs Python 3.11"; fi

# For a run over night: EVENTS=20000000 SEED=7 JOBS=8. See docs/chaos.md.
chaos: $(VENV)/.installed ## Inject random faults into simulated clusters. EVENTS=n SEED=n JOBS=n.
	$(VENV)/bin/ttserve chaos --jobs $(or $(JOBS),2) $(if $(EVENTS),--events $(EVENTS)) $(if $(SEED),--seed $(SEED))

# TARGETS="http tools" runs some; a failed input is printed, and kept in generated/fuzz.
fuzz: $(VENV)/.installed-dev ## Change inputs of every parser at random. SECONDS=60 SEED=n TARGETS=names.
	$(VENV)/bin/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED)) $(TARGETS)

# Random shapes in C's kernels, with gcc's or clang's sanitizers.
sanitize: $(VENV)/.installed-dev ## Run the CPU kernels under gcc's sanitizers. CALLS=n SEED=n.
	$(VENV)/bin/python -m tests.kernels --calls $(or $(CALLS),1000) --seed $(or $(SEED),0)

# The versions of constraints.txt with the hashes of all their files, for the image and for `audit`. The
# targets above install by version alone: an index of torch's CPU wheels has other files than PyPI.
LOCK = UV_CUSTOM_COMPILE_COMMAND="make lock" $(VENV_TOOLS)/bin/uv pip compile --quiet --universal \
	--python-version 3.10 --generate-hashes --no-annotate --constraint constraints.txt
lock: $(VENV_TOOLS)/.installed ## Write requirements/*.txt with hashes from constraints.txt.
	$(LOCK) --output-file requirements/runtime.txt pyproject.toml
	$(LOCK) --output-file requirements/build.txt --group build
	$(LOCK) --output-file requirements/tools.txt --group tools

# The packages of $(VENV), as a CycloneDX document.
sbom: $(VENV)/.installed $(VENV_TOOLS)/.installed ## Write a CycloneDX document of what is installed.
	@mkdir -p generated
	$(VENV_TOOLS)/bin/cyclonedx-py environment --validate --output-reproducible --pyproject pyproject.toml --output-file generated/sbom.json $(VENV)/bin/python

# Asks api.osv.dev for known vulnerabilities of the locked versions. An index without vulnerability data,
# which PyPI's mirrors often are, would answer "none".
audit: $(VENV_TOOLS)/.installed ## Look up known vulnerabilities of the locked versions.
	$(VENV_TOOLS)/bin/pip-audit --service osv --strict --disable-pip --require-hashes --progress-spinner off \
		$(addprefix --requirement ,$(wildcard requirements/*.txt)) || \
		{ echo "audit: failed. Either vulnerabilities are listed above, or api.osv.dev could not be reached and nothing was checked."; exit 1; }

clean: ## Remove everything that the other targets made.
	rm -rf $(VENV) $(VENV_TTNN) $(VENV_TOOLS) $(VENV_CLIENTS) .kit generated build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache chaos

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
		{ echo "ttserve needs Python 3.10 to 3.12: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || \
		{ rm -rf $(VENV); echo "no venv; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

comma := ,
INSTALL = $(PIP) install --quiet --constraint constraints.txt
# Without a compiler the build requires ziglang, which not every mirror of PyPI has.
EDITABLE = $(INSTALL) --editable $(1) || \
	{ $(INSTALL) setuptools && $(INSTALL) --no-build-isolation --editable $(1); }

# The kernels are compiled when the package is installed; pip shows no message of the build. `serve` looks
# at their sources' content, which may be another although no time stamp is newer; so does pytest.
BUILD_KERNELS = $(VENV)/bin/python -m replicas.generators.torch.build_kernels --if-changed || true
KERNELS = build_backend.py $(wildcard replicas/generators/torch/csrc/* replicas/generators/torch/build_kernels.py)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt $(KERNELS)
	@echo "Setting up $(VENV): the first time this downloads PyTorch and Ray and takes minutes."
	$(call EDITABLE,'.[examples$(comma)plot]')
	@$(BUILD_KERNELS)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(call EDITABLE,'.[dev]')
	@touch $@

$(VENV_TOOLS)/.installed: requirements/tools.txt
	$(PYTHON) -m venv --clear $(VENV_TOOLS)
	$(VENV_TOOLS)/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes --only-binary :all: --requirement $<
	@touch $@

$(VENV_CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/package.json
	$(PYTHON) -m venv --clear $(VENV_CLIENTS)
	$(VENV_CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement $<
	@if command -v npm > /dev/null; then mkdir $(VENV_CLIENTS)/js && cp tests/clients/package.json $(VENV_CLIENTS)/js && \
		timeout 300 npm install --silent --no-audit --no-fund --no-package-lock --prefix $(VENV_CLIENTS)/js || \
		{ rm -rf $(VENV_CLIENTS)/js; echo "npm failed: the clients for Node.js are left out"; }; \
		else echo "no npm: the clients for Node.js are left out"; fi
	@touch $@

$(VENV_TTNN)/bin/python:
	@python="$(TTNN_PYTHON)"; python="$${python:-$$($(PYTHON) scripts/tt_mock.py find-python)}" && \
		$$python -m venv --clear $(VENV_TTNN) || { rm -rf $(VENV_TTNN); exit 1; }

$(VENV_TTNN)/.installed-dev: $(VENV_TTNN)/bin/python pyproject.toml constraints.txt \
		scripts/tt_mock.py $(wildcard tests/tt/mock/toolchain/*)
	@$(PYTHON) scripts/tt_mock.py binutils
	@echo "Setting up $(VENV_TTNN): the first time this downloads PyTorch and ttnn, 6 GB installed."
	$(VENV_TTNN)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --editable '.[dev]'
	$(PYTHON) scripts/tt_mock.py toolchain $(VENV_TTNN)/bin/python
	@touch $@
