# `make demo` and `make test` are all a fresh machine needs: python3, pip, gcc and make. Both create
# .venv and install what constraints.txt pins (read there about torch with and without CUDA).

PYTHON ?= python3
# The first candidate that runs: a version manager's shim may exist without a version behind it.
PYTHON312 ?= $(firstword $(foreach candidate,python3.12 \
	$(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12),\
	$(shell $(candidate) -c 'print("$(candidate)")' 2>/dev/null)))

VENV := .venv
BIN := $(VENV)/bin
VENV211 := .venv-2.11
BIN211 := $(VENV211)/bin

PYTEST_JOBS ?= 2
PYTEST_ARGS ?=
# One thread per worker: two workers with the default of one thread per core fight for the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(PYTEST_JOBS) $(PYTEST_ARGS)
PYTEST211 := OMP_NUM_THREADS=1 $(BIN211)/python -m pytest -q -n $(PYTEST_JOBS) $(PYTEST_ARGS)

DEMO_PROMPT := class Stack:\n    """A last-in, first-out collection."""\n\n    def __init__(self, items=()):\n        self._items = list(items)\n\n    def push(self, item):

.PHONY: demo test test-all test-2.11 lint types contracts format clean
.DEFAULT_GOAL := test

# One thread: to share the work of so small a model costs more than the work.
demo: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python scripts/generate.py --prompt "$$(printf '$(DEMO_PROMPT)')" \
		--max-new-tokens 96 --temperature 0.7 --top-p 0.9 --seed 3 --stream --stats

test: lint types contracts
	$(PYTEST)

test-all: lint types contracts
	$(PYTEST) -m ""

# The versions of the GPU image; lint, types and contracts do not depend on them.
test-2.11: $(VENV211)/.installed
	$(PYTEST211)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/pyright

contracts: $(VENV)/.installed-dev
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

# $(call create-venv,python,folder). Debian's python3 comes without ensurepip, which `venv` needs to
# install pip: there, the pip that runs $(PYTHON) installs it.
define create-venv
	@test -n "$(1)" || { echo "No Python 3.12 found: make $@ PYTHON312=/path/to/python3.12" >&2; exit 1; }
	@$(1) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"glm53 needs Python 3.11 or newer, this is %d.%d: make PYTHON=/path/to/python" % sys.version_info[:2])'
	@test -x $(2)/bin/python || echo "Creating $(2)"
	@test -x $(2)/bin/python || $(1) -m venv $(2) || { rm -rf $(2) && \
		$(1) -m venv --without-pip $(2) && $(1) -m pip --python $(2)/bin/python install --quiet pip; }
endef

# Separate stamps, so that the demo does not wait for the development tools. A stamp is written
# last: an interrupted installation starts again.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(call create-venv,$(PYTHON),$(VENV))
	@echo "Installing glm53 (the first time takes minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the development tools"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV211)/.installed: pyproject.toml constraints-2.11.txt
	$(call create-venv,$(PYTHON312),$(VENV211))
	@echo "Installing torch 2.11 and glm53 (several GB)"
	@$(BIN211)/python -m pip install --quiet --disable-pip-version-check -c constraints-2.11.txt -e '.[dev,gpu]'
	@touch $@
