# The commands of this project. `make demo` and `make test` are all that a newcomer needs.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
export NO_MKDOCS_2_WARNING := 1
# What the tests use of the optional dependencies, and the first pip that knows --group.
EXTRAS := examples,transformers,s3,gcs,azure
PIP := 'pip>=25.1'
# Processes of a test run: at least four, since most of a test of processes is waiting for them.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 4); echo $$((n > 4 ? n : 4)))

.PHONY: help demo test test-all test-quick test-core test-torch check lint types imports language docs docs-serve bench wheel web install install-dev clean

help: ## show this text
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

demo: .venv/.installed ## install, then train the digits example and leave the results to be browsed
	$(BIN)/zerolab run examples/digits/experiment.yaml

test: .venv/.installed-dev ## install what tests need when it is missing, then run the suite
	tools/suite.sh -n $(WORKERS) --dist worksteal -m "not soak" $(ARGS)

test-all: .venv/.installed-dev ## the suite and its longest tests (soak), as before a release
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-quick: .venv/.installed-dev ## the tests of everyday work: none that start processes or a browser, or take long
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not processes and not browser and not slow and not soak" $(ARGS)

test-core: .venv/.installed-dev ## quick tests of the core in a copy of the tree without any extension
	tools/core_tests.sh $(ARGS)

# Another torch and Python in an environment of their own. CUDA builds run on a CPU, too.
TORCH ?= 2.13.0
TORCH_ENV = .torch-envs/$(TORCH)-$(shell $(PYTHON) -c 'import sys; print("py%d.%d" % sys.version_info[:2])')

test-torch: ## run the engine and trial suites on another torch: make test-torch TORCH=2.11.0 [PYTHON=python3.12]
	test -x $(TORCH_ENV)/bin/python || $(PYTHON) -m venv $(TORCH_ENV)
	$(TORCH_ENV)/bin/pip install -q $(PIP)
	$(TORCH_ENV)/bin/pip install torch==$(TORCH) -e '.[$(EXTRAS)]' --group test
	$(TORCH_ENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests/engine tests/trial $(ARGS)

check: lint types imports language docs ## lint, types, import rules, plain language and documentation

lint: .venv/.installed-dev ## ruff, rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed-dev ## mypy --strict on the three packages
	$(BIN)/mypy

imports: .venv/.installed-dev ## import-linter's contracts
	$(BIN)/lint-imports --no-cache

language: .venv/.installed-dev ## share of unidiomatic sentences in docs, messages and tests, and of vague names
	$(BIN)/python tools/prose_check.py --max 3 --subjects --docs
	$(BIN)/python tools/identifier_check.py --max 0.5

docs: .venv/.installed-dev ## build the documentation; a server started afterwards shows it at /docs
	$(BIN)/mkdocs build --strict
	@echo "documentation: server/zeroserver/docs; read it with 'make docs-serve' or at /docs of a server"

docs-serve: .venv/.installed-dev ## show the documentation at http://127.0.0.1:8000 and follow changes
	$(BIN)/mkdocs serve

bench: .venv/.installed-dev ## the benchmarks, one after the other, short
	$(BIN)/python -m benchmarks

wheel: .venv/.installed-dev ## build sdist and wheel, and run them on Python 3.11, 3.12 and 3.13
	tools/wheel_check.sh

web: ## build the page (needs Node on the PATH; an installation builds it by itself)
	cd server/web && npm ci --no-audit --no-fund && npm run build

install: .venv/.installed ## create .venv and install the project

install-dev: .venv/.installed-dev ## the same with everything the tests and checks need

# torch: the CPU build 2.13.0 where none is installed and no NVIDIA driver answers; else pip's choice.
# pip speaks: a download of a gigabyte must not look like a hang.
.venv/.torch:
	@echo "Installing into .venv, once; nothing outside of this folder is changed."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' \
	  || { if command -v nvidia-smi >/dev/null; then \
	         echo "1 of 2: torch with CUDA, about 3 GB to download: five minutes or more"; \
	         $(BIN)/pip install torch; \
	       else \
	         echo "1 of 2: torch for the CPU, about 200 MB to download: one or two minutes"; \
	         $(BIN)/pip install torch==2.13.0; fi; }
	touch $@

.venv/.installed: pyproject.toml hatch_build.py server/web/package-lock.json | .venv/.torch
	@echo "2 of 2: zerolab, some 60 small packages, and its web page: about a minute"
	$(BIN)/pip install -e '.[examples]'
	touch $@

.venv/.installed-dev: .venv/.installed
	@echo "What tests and checks need, among it a PostgreSQL: about a minute"
	$(BIN)/pip install -q $(PIP)
	$(BIN)/pip install -e '.[$(EXTRAS)]' --group test --group check --group docs
	touch $@

clean: ## remove what was built and installed
	rm -rf .venv dist build server/zeroserver/static server/zeroserver/docs server/web/node_modules
