# Every target sets up what it needs: `make demo` and `make test` work on a fresh checkout.
PY ?= python3
VENV ?= .venv
OUT ?= runs/demo
JOBS ?= 2
STAMP := $(VENV)/.installed
RUN := $(VENV)/bin/python -m
PYTEST := OMP_NUM_THREADS=1 $(RUN) pytest -q
BY_FILE := --dist loadfile --no-loadscope-reorder  # so that one worker makes what the tests of a file share

$(STAMP): setup.py pyproject.toml constraints.txt
	@echo "[1/2] creating $(VENV) (about 1 minute)"
	@$(PY) -m venv $(VENV)
	@$(RUN) pip install -q -c constraints.txt -e '.[plots,test]'
	@touch $@

demo: $(STAMP)
	@$(RUN) tutorials.demo --out $(OUT)

demo-quick: $(STAMP)
	@$(RUN) tutorials.demo --data adult --quick --out $(OUT)

test: $(STAMP)
	@$(PYTEST) -n $(JOBS) $(BY_FILE)

slow: $(STAMP)
	@$(PYTEST) -n $(JOBS) $(BY_FILE) -m "slow and not gpu and not nightly"

# Compares with the baseline commit: see tests/differential/test_differential.py.
differential: $(STAMP)
	@$(PYTEST) tests/differential -m "nightly or not nightly"

planted: $(STAMP)
	@$(PYTEST) -n $(JOBS) -m planted

mutations: $(STAMP)
	@$(PYTEST) -n $(JOBS) -m nightly tests/mutations

# Long random searches, and cases that `test` and `slow` leave out. `make mutations` and `make differential` have the other tests with this marker.
searches: $(STAMP)
	@$(PYTEST) -n $(JOBS) $(BY_FILE) -m nightly --ignore=tests/mutations --ignore=tests/differential

readme: $(STAMP)
	@$(PYTEST) -m "not gpu" tests/test_readme.py

lint: $(STAMP)
	@$(RUN) ruff format --check .
	@$(RUN) ruff check .
	@$(RUN) mypy

# For a machine that has its own torch (a GPU build, say): adds what is missing and leaves torch alone.
gpu:
	@$(PY) -m venv --system-site-packages $(VENV)
	@$(RUN) pip install -q --no-deps -e . dp-accounting opt-einsum
	@touch $(STAMP)

.PHONY: demo demo-quick test slow differential planted mutations searches readme lint gpu
