# Every target sets up what it needs: `make demo` and `make test` work on a fresh checkout.
PY ?= python3
VENV ?= .venv
OUT ?= runs/demo
JOBS ?= 2
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed_for_demo
DEMO_NEEDS := $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
RUN := $(VENV)/bin/python -m
PYTEST := OMP_NUM_THREADS=1 $(RUN) pytest -q
BY_FILE := --dist loadfile --no-loadscope-reorder  # so that one worker makes what the tests of a file share

$(STAMP): EXTRAS := test
$(DEMO_STAMP): EXTRAS := plots
$(STAMP) $(DEMO_STAMP): setup.py pyproject.toml constraints.txt
	@echo "installing dpengine and torch into $(VENV) (about 1 minute)"
	@$(PY) -m venv $(VENV)
	@$(RUN) pip install -q -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# The demo needs no test tool. After `make test` it uses what is installed.
demo: $(DEMO_NEEDS)
	@echo "starting the demo: it trains on census data, and writes its results to $(OUT)"
	@$(RUN) tutorials.demo --out $(OUT)

demo-quick: $(DEMO_NEEDS)
	@$(RUN) tutorials.demo --data adult --quick --out $(OUT)

test: $(STAMP)
	@$(PYTEST) -n $(JOBS) $(BY_FILE)

slow: $(STAMP)
	@$(PYTEST) -n $(JOBS) $(BY_FILE) -m "slow and not gpu and not nightly"

planted: $(STAMP)
	@$(PYTEST) -n $(JOBS) -m planted

mutations: $(STAMP)
	@$(PYTEST) -n $(JOBS) -m nightly tests/mutations

# Trains models of other libraries, which it installs, and writes docs/models.md.
models: $(STAMP)
	@$(RUN) pip install -q -c constraints.txt -e '.[test-models]'
	@$(PYTEST) -n $(JOBS) -m nightly tests/models --write-models docs/models.md
	@$(PYTEST) -n $(JOBS) -m nightly tests/users/test_whole_models.py tests/users/test_hugging_face.py

# Long random searches, and cases that `test` and `slow` leave out. `make mutations` and `make models` have the other tests with this marker.
searches: $(STAMP)
	@$(PYTEST) -n $(JOBS) $(BY_FILE) -m nightly --ignore=tests/mutations --ignore=tests/models

readme: $(STAMP)
	@$(PYTEST) -m "not gpu" tests/test_readme.py

# The parts that need no torch, without torch, under each Python of the list that is installed.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
NEED_TORCH := --ignore=tests/accounting/test_overviews.py --ignore=tests/accounting/test_own_accountant.py -k "not a_wrong_call"
pythons:
	@for each in $(PYTHONS); do \
		$$each -c "" 2>/dev/null || { echo "$$each is not installed"; continue; }; \
		echo "== $$each"; \
		$$each -m venv .venv/pythons/$$each || exit; \
		.venv/pythons/$$each/bin/python -m pip install -q numpy scipy 'dp-accounting>=0.6,<0.7' pytest-xdist hypothesis mpmath || exit; \
		.venv/pythons/$$each/bin/python -m pytest -q -n $(JOBS) $(NEED_TORCH) \
			tests/accounting tests/ledger_file/test_lines.py tests/cli/test_budget.py tests/cli/test_main.py || exit; \
	done

lint: $(STAMP)
	@$(RUN) ruff format --check .
	@$(RUN) ruff check .
	@$(RUN) mypy

# For a machine that has its own torch (a GPU build, say): adds what is missing and leaves torch alone.
gpu:
	@$(PY) -m venv --system-site-packages $(VENV)
	@$(RUN) pip install -q --no-deps -e . dp-accounting opt-einsum
	@touch $(STAMP)

.PHONY: demo demo-quick test slow planted models mutations searches readme pythons lint gpu
