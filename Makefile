PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SLOW := .venv-slow
PYTEST := $(BIN)/python -m pytest

.PHONY: demo demo-short reproduce reproduce-quick test test-cluster test-chaos test-slow test-unit lint install clean-demo help

help:
	@echo "make demo       train a small model with NoLoCo on this machine, 4 replicas of 2 stages (about 5 minutes)"
	@echo "make demo-short the same with less training, and its figures checked"
	@echo "make clean-demo forget the demo's runs"
	@echo "make reproduce  the paper's comparison at small scale, for docs/results.md (about 80 minutes, resumable)"
	@echo "make reproduce-quick  a small part of it (10 minutes), and a check of all-reduce <= NoLoCo < local"
	@echo "make test       linters, type checker, unit, multi-process and end-to-end tests (under 8 minutes on 2 cores)"
	@echo "make test-slow  what make test leaves out for its time or its libraries (requirements-slow.txt, in $(SLOW))"
	@echo "make test-cluster  SLURM, the launchers and MPI; installs SLURM (as root, from Debian) and MPICH (under .venv/cluster)"
	@echo "make test-chaos three runs of 4 replicas, each struck by 20 kills, suspensions, cut links and the like (as root)"
	@echo "make test-unit  the tests that start no other process"
	@echo "make lint       linters and type checker"
	@echo "make install    the virtual environment alone"

install: $(VENV)/.installed

$(VENV)/.installed: requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

demo: install
	$(BIN)/python tools/demo.py

clean-demo:
	rm -rf runs/demo runs/demo_short

demo-short: install
	$(BIN)/python tools/demo.py --short --check

reproduce: install
	$(BIN)/python -m tools.reproduce
	$(BIN)/python -m tools.reproduce --report

reproduce-quick: install
	$(BIN)/python -m tools.reproduce --quick

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-unit: install
	$(PYTEST) tests/unit

# MPICH has an environment of its own: what training runs on does not change.
MPICH := $(VENV)/cluster
SLURM_PACKAGES := slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge

$(MPICH)/.installed: $(VENV)/.installed
	rm -rf $(MPICH)
	$(BIN)/python -m venv $(MPICH)
	$(MPICH)/bin/python -m pip install --quiet --disable-pip-version-check mpich==5.0.2
	touch $@

test-cluster: install $(MPICH)/.installed
	command -v /usr/sbin/slurmctld >/dev/null || \
	  (apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends $(SLURM_PACKAGES))
	NOLOCO_TEST_CLUSTER=1 MPIEXEC=$(abspath $(MPICH))/bin/mpiexec MPI4PY_LIBMPI=$(abspath $(MPICH))/lib/libmpi.so.12 \
	  $(PYTEST) --durations=20 tests/cluster

test-chaos: install
	NOLOCO_TEST_CHAOS=1 $(PYTEST) --durations=5 -s tests/chaos

test: lint
	$(PYTEST) --durations=20 -m "not slow" tests/unit tests/dist tests/e2e tests/cluster

# Libraries that only the longer tests need lie in an environment of their own, which sees the first one's; transformers
# 4.57, in a folder of its own, shadows version 5 in the processes that are given it.
$(SLOW)/.installed: requirements-slow.txt $(VENV)/.installed
	rm -rf $(SLOW)
	$(BIN)/python -m venv $(SLOW)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(SLOW)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first.pth
	$(SLOW)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-slow.txt
	$(SLOW)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(SLOW)/transformers4 \
		transformers==4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.2
	touch $@

test-slow: install $(SLOW)/.installed
	$(PYTEST) --durations=20 -m slow tests
	PYTHONPATH=$(CURDIR) NOLOCO_TRANSFORMERS4=$(CURDIR)/$(SLOW)/transformers4 \
		$(SLOW)/bin/python -m pytest --durations=20 tests/slow \
		tests/unit/test_tokenizer_json.py tests/unit/test_cuts.py
