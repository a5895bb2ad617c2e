PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-long test-all check lint docs benchmarks coverage clean

demo: .venv/run
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_gpt.py \
		--report demo.html

test: .venv/dev
	$(BIN)/python -m pytest -q -n 2 -m "not long"

# What takes more than a second each, and the rows on ranks.
test-long: .venv/dev
	$(BIN)/python -m pytest -q -n 2 -m long

# A minute: every folder of the package, in one process.
CHECKED := data lowering cost/test_machine.py frontend/test_capture.py passes/test_passes.py \
	sched/search sched/test_joint.py test_edges.py test_house.py test_seeded_bugs.py test_tiny.py

check: lint
	$(BIN)/python -m pytest -q -n 2 $(CHECKED:%=tests/%) \
		-k "not side_by_side and not wiring and not killed \
		and (not edges or batch-1 or words-1)"
	$(BIN)/python tests/budget.py

test-all: .venv/dev
	WHOLE=1 $(BIN)/python -m pytest -q -n 2

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/run: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e '.[report]'
	@touch $@

.venv/dev: .venv/run
	$(PIP) -e '.[dev,models,frameworks]'
	@touch $@

# Pages in build/docs/index.html; a warning is an error.
docs: .venv/docs
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs

.venv/docs: .venv/run
	$(PIP) -e '.[docs]'
	@touch $@

.venv/coverage: .venv/dev
	$(PIP) -e '.[coverage]'
	@touch $@

coverage: .venv/coverage
	$(BIN)/python benchmarks/coverage.py --markdown docs/coverage.md

benchmarks: .venv/dev
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/planning_time.py
	$(BIN)/python benchmarks/capture_time.py
	$(BIN)/python benchmarks/fidelity.py
	$(BIN)/python benchmarks/together.py
	$(BIN)/python benchmarks/replicas.py
	$(BIN)/python benchmarks/runtime.py
	$(BIN)/python benchmarks/faults.py

clean:
	rm -rf .venv build *.egg-info demo.html
