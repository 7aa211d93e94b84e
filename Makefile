# Two commands: `make serve` and `make test`. Each sets up .venv by itself; both need only Python and make.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
export HF_HUB_OFFLINE := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: serve test check lint types imports chaos clean

# PORT=8000 MODEL=/path/to/a/hugging-face/folder CONFIG=configs/2p2d.yaml
serve: $(VENV)/.installed
	@$(VENV)/bin/ttserve serve $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model $(MODEL)) $(if $(CONFIG),--config $(CONFIG))

# TESTS=tests/kv_transfer runs a part.
test: $(VENV)/.installed-dev
	@# Exit code 5: none of the asked tests is of this kind. Those that start Ray look for what they
	@# leave behind on the whole host, and a host has room for one cluster: they run alone.
	$(VENV)/bin/python -m pytest -q -n 2 -m "not ray" $(TESTS) || [ $$? = 5 ]
	$(VENV)/bin/python -m pytest -q -m ray $(TESTS) || [ $$? = 5 ]

check: lint types imports test

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed-dev
	$(VENV)/bin/mypy

# The import contracts are in pyproject.toml; the tool needs Python 3.11.
imports: $(VENV)/.installed-dev
	@if [ -x $(VENV)/bin/lint-imports ]; then $(VENV)/bin/lint-imports --no-logo; else echo "imports: skipped, needs Python 3.11"; fi

# EVENTS=20000000 SEED=7 JOBS=8 for a night of it; docs/chaos.md.
chaos: $(VENV)/.installed
	$(VENV)/bin/ttserve chaos --jobs $(or $(JOBS),2) $(if $(EVENTS),--events $(EVENTS)) $(if $(SEED),--seed $(SEED))

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache chaos

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
		{ echo "ttserve needs Python 3.10 to 3.12: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || \
		{ rm -rf $(VENV); echo "no venv; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Setting up $(VENV): the first time this downloads PyTorch and Ray and takes minutes."
	$(PIP) install --quiet --constraint constraints.txt --editable '.[examples,plot]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@
