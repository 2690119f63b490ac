# SPDX-License-Identifier: Apache-2.0
# Thin: everything happens in the project's own .venv, made on the first call. Needs python3, python3-venv, gcc, g++, make;
# never root. Settings of pip (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) are respected.
#
#   make demo                            trains one model over ranks of two vendors
#   make demo RANKS=host:2,sim-a:2       another mix
#   make test                            lint, types and all tests; ends with pytest's summary
#   make bench BENCH="all_reduce --compare gloo"
#   make docs | clean
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
RANKS ?=
BENCH ?= all_reduce
ENVS ?= lint types tests

DEMO_PLUGINS := hetccl-vendor-oneccl hetccl-transport-tcp
PLUGINS := $(patsubst plugins/%/pyproject.toml,%,$(filter-out plugins/_template/%,$(wildcard plugins/*/pyproject.toml)))
BUILD := "setuptools>=77" wheel "cython>=3.1"
DOWNLOADS := $(VENV)/downloads
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL = $(PIP) install -qq --no-build-isolation $(if $(wildcard $(DOWNLOADS)),--find-links $(DOWNLOADS))
NATIVE := $(shell find hetccl -name '*.pyx' -o -name '*.pxd' -o -name '*.[ch]')
STAMP := $(VENV)/.stamp
export TORCH

.PHONY: demo test bench docs clean venv core torch plugins fetch docs-tools
.NOTPARALLEL:
.SUFFIXES:

# Downloads come first and are not counted; set-up time is what this machine needs to build and install.
demo: $(BIN)/python
	@set -e; now() { date +%s; }; \
	$(MAKE) -s $(STAMP)-downloads; start=$$(now); \
	$(MAKE) -s core torch $(DEMO_PLUGINS:%=$(STAMP)-%); built=$$(now); \
	$(MAKE) -s fetch; \
	$(BIN)/python -m hetccl.demo $(RANKS:%=--ranks %) \
	    --setup-seconds $$((built - start + $$(cat $(VENV)/seconds)))

# All parts run, whatever fails; the tests come last, so that pytest's summary is the last word.
test: venv
	@failed=; \
	for env in $(filter-out tests,$(ENVS)); do \
	    echo "== $$env"; $(BIN)/tox run -qq -e $$env || failed="$$failed $$env"; \
	done; \
	[ -z "$$failed" ] || echo "== FAILED:$$failed"; \
	$(if $(filter tests,$(ENVS)),echo "== tests"; $(BIN)/tox run -qq -e tests || failed="$$failed tests";) \
	[ -z "$$failed" ]

bench: venv
	@$(BIN)/hetccl bench $(BENCH)

docs: docs-tools
	@$(BIN)/tox run -qq -e docs && echo "docs/_build/html/index.html"

clean:
	rm -rf $(VENV) .tox build dist *.egg-info plugins/*/build plugins/*/*.egg-info docs/_build docs/generated
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hetccl plugins tests -name '*.so' -delete -o -name __pycache__ -prune -exec rm -rf {} +

# The one environment that all test environments of tox.ini share, so that the extensions are compiled once.
venv: core torch plugins $(STAMP)-dev fetch

core: $(STAMP)-core
torch: $(STAMP)-torch
plugins: $(PLUGINS:%=$(STAMP)-%)

$(BIN)/python:
	@start=$$(date +%s); $(PYTHON) -m venv $(VENV) && echo $$(($$(date +%s) - start)) > $(VENV)/seconds

# Installed without its compiled modules (HETCCL_EXT=none), which are built in place, so that a change costs one of them.
$(STAMP)-core: $(NATIVE) setup.py $(STAMP)-installed
	@echo "set-up: compiling hetccl"
	@$(BIN)/python setup.py -q build_ext --inplace >/dev/null
	@touch $@

$(STAMP)-installed: pyproject.toml $(BIN)/python
	@echo "set-up: installing hetccl"
	@$(INSTALL) $(BUILD)
	@HETCCL_EXT=none $(INSTALL) -e .
	@touch $@

$(STAMP)-torch: $(BIN)/python
	@echo "set-up: installing $(TORCH)"
	@$(INSTALL) numpy $(TORCH)
	@rm -rf $(DOWNLOADS)
	@touch $@

$(STAMP)-dev: $(STAMP)-installed
	@echo "set-up: installing the test tools"
	@$(INSTALL) "hetccl[test,dev]"
	@touch $@

docs-tools: $(STAMP)-docs
$(STAMP)-docs: $(STAMP)-core
	@echo "set-up: installing the tools of the manual"
	@$(INSTALL) "hetccl[docs]" tox
	@touch $@

define plugin
$(STAMP)-$(1): $(shell find plugins/$(1) -name '*.pyx' -o -name '*.[ch]' -o -name pyproject.toml -o -name setup.py) $(STAMP)-core
	@echo "set-up: installing $(1)"
	@$(INSTALL) -e plugins/$(1)
	@touch $$@
endef
$(foreach name,$(PLUGINS),$(eval $(call plugin,$(name))))

# Vendor libraries that may not be shipped with hetccl; the command does nothing where they are there already.
fetch: $(if $(filter hetccl-vendor-oneccl,$(PLUGINS)),$(STAMP)-hetccl-vendor-oneccl)
	@$(if $(filter hetccl-vendor-oneccl,$(PLUGINS)),$(BIN)/hetccl fetch oneccl,true)

$(STAMP)-downloads: $(BIN)/python
	@echo "downloading torch and the build tools (not counted as set-up)"
	@$(PIP) download -qq -d $(DOWNLOADS) $(BUILD) "stevedore>=5.3" "PyYAML>=6" numpy $(TORCH)
	@touch $@
