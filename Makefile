# make demo   a DAR cell and a residual cell on real text, then their table
# make test   every fast test;  make test-slow  the slow ones too;  make lint  ruff and mypy
# make megablocks  its experts beside a current PyTorch, without a compiler
# make bench  the pathways' cost against the committed baseline
PYTHON ?= python3
VENV := .venv
DARLIT := $(VENV)/bin/darlit
RUNS ?= runs
DEMO_OPTIONS ?=
# Two processes of one thread each: tests are many small computations.
PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile

.PHONY: demo test test-slow lint bench megablocks clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(DARLIT) fit --config experiments/tiny_residual.yaml --runs_dir $(RUNS) --ckpt_path last $(DEMO_OPTIONS)
	$(DARLIT) fit --config experiments/tiny_dar_full.yaml --runs_dir $(RUNS) --ckpt_path last $(DEMO_OPTIONS)
	$(DARLIT) results $(RUNS)
	@echo "Curves: $(VENV)/bin/tensorboard --logdir $(RUNS)"

test: $(VENV)/.installed
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.installed
	$(PYTEST)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

megablocks: $(VENV)/.installed
	$(VENV)/bin/python -m darlit.backbone.experts.install

bench: $(VENV)/.installed
	$(DARLIT) bench path --rounds 9 --clock process --baseline results/bench/cpu.json

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
