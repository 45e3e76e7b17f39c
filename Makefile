# The commands of this project.  On a fresh machine `make run` and `make test` need python3 (3.11 or newer)
# with venv and pip, and nothing else; everything goes to .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
PICTURE := docs/examples/pictures/train_llama
PEERS_STAMP := $(PEERS)/.installed
# Progress is shown by the job itself; extra words for it: make run ARGS="--text my.txt"
ARGS ?=
# PyTorch knows the simulated accelerator for a whole process: what runs on it has one of its own.
ON_ACCELERATORS := tests/gpu \
  $(addprefix tests/training/test_,cached_lookups.py called_parts.py features.py gradients.py host_modules.py host_steps.py leaving_device.py loops.py optimizers.py row_optimizers.py unusual.py)
SIMULATED := --simulate-accelerator tests/accelerator $(ON_ACCELERATORS) \
  tests/property/test_tables_on_device.py tests/stateful/test_device_rows_machine.py

# A file of tests is one process's, as some look at the whole of it: who refers to a gradient, what is alive.
JOBS ?= 2
# A run whose process ended, as at a time limit, fails then: started again, pytest-xdist may wait for good.
# Where pytest-benchmark is installed it would end a run in parallel before the first test: it is left out.
IN_PARALLEL := -p no:benchmark -n $(JOBS) --dist loadfile --max-worker-restart 0

# OpenMP's threads wait in their sleep, not spinning: the store's own threads need the cores meanwhile.
export OMP_WAIT_POLICY ?= PASSIVE
# Programs that tests start find our modules compiled: some machines ask Python to write nothing.
export PYTHONDONTWRITEBYTECODE :=
# PyTorch asks for huge pages: memory that is given back and taken again costs much less.
export THP_MEM_ALLOC_ENABLE ?= 1

.DEFAULT_GOAL := help
.PHONY: help install run picture test test-accelerator test-gpu test-long fuzz check bench figures peers docs coverage clean

help:  ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(STAMP)  ## .venv with tierstore, editable, and every tool, as constraints.txt pins them

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tierstore needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV): PyTorch and the tools, 2 GB on disk; this takes minutes"
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

run: $(STAMP)  ## the main job: a model that the device cannot hold trains, bit for bit
	$(BIN)/python docs/examples/train_llama.py --picture build/train_llama.svg $(ARGS)

picture: $(STAMP)  ## the picture at the beginning of the README, of a run that is made for it
	$(BIN)/python docs/examples/train_llama.py --record $(PICTURE).json --picture $(PICTURE).svg $(ARGS)

test: $(STAMP)  ## the whole suite except what takes minutes, then what runs on the simulated accelerator
	$(BIN)/python -m pytest $(or $(ARGS),$(IN_PARALLEL))
	$(if $(ARGS),,$(BIN)/python -m pytest $(SIMULATED) $(IN_PARALLEL))

test-accelerator: $(STAMP)  ## what runs on the simulated accelerator, which is a process of its own
	$(BIN)/python -m pytest $(if $(ARGS),--simulate-accelerator $(ARGS),$(SIMULATED) $(IN_PARALLEL))

test-gpu: $(STAMP)  ## the same on the accelerator of this machine, such as a GPU; PyTorch's build has to be for it
	$(BIN)/python -m pytest --on-accelerator $(or $(ARGS),$(ON_ACCELERATORS) $(IN_PARALLEL))

test-long: $(STAMP)  ## everything, with Hypothesis' long profile
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -m '' --timeout 3600 $(ARGS)
	$(if $(ARGS),,HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest $(SIMULATED) -m '' --timeout 3600)

fuzz: $(STAMP)  ## all that is read from files, each for an hour, guided by coverage; SECONDS=60 for less
	TIERSTORE_FUZZ_SECONDS=$(or $(SECONDS),3600) $(BIN)/python -m pytest tests/fuzz -m long $(IN_PARALLEL:loadfile=load)

check: $(STAMP)  ## format, lint, types, layers, docs, architecture: what CI checks beside the tests
	scripts/check

bench: $(STAMP)  ## the job files of bench/jobs, or ARGS="my.fio --plots out"
	$(BIN)/python -m bench $(or $(ARGS),$(wildcard bench/jobs/*.fio))

figures: $(STAMP)  ## the figures of docs/benchmarks
	$(BIN)/python -m bench $(ARGS)

peers: $(PEERS_STAMP)  ## .venv-peers with DeepSpeed and others beside tierstore, for python -m bench.peers

$(PEERS_STAMP): pyproject.toml constraints.txt bench/peers/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tierstore needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(PEERS)
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	  $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[io-uring]' \
	  --requirement bench/peers/requirements.txt
	$(PEERS)/bin/python -m bench.peers.ops
	@touch $@

docs: $(STAMP)  ## the documentation as HTML, in docs/_build/html
	$(BIN)/python -m sphinx -n -W --keep-going -q -b html docs docs/_build/html

coverage: $(STAMP)  ## branch coverage: 100 % of the core, at least 95 % overall
	$(BIN)/python -m coverage erase
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest --cov --cov-report= --cov-fail-under=0 $(ARGS)
	$(if $(ARGS),,HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest $(SIMULATED) --cov --cov-append --cov-report= --cov-fail-under=0)
	@$(BIN)/python -m coverage report; overall=$$?; \
	  $(BIN)/python -m coverage report --include='*/tierstore/core/*' --fail-under=100 && exit $$overall

clean:  ## away with .venv and everything that was built
	rm -rf $(VENV) $(PEERS) build dist docs/_build .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache \
	  .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
