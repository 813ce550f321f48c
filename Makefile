# Every target works on a bare machine with Python 3.10 or newer: the first one run makes .venv.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint wheel-check benchmark clean

demo: $(INSTALLED)  ## The main job on the checkpoint that the package carries.
	$(VENV)/bin/quantattn demo

# A file of tests stays in one process: some start what all of their tests read.
test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Type checkers cannot follow the folder mapping of an editable install, so they read an installed copy.
lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell
	rm -rf build
	$(VENV)/bin/python -m pip install --quiet --no-deps --target build/typed .
	cd build/typed && ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p quantattn

wheel-check: $(INSTALLED)
	tools/wheel_check.sh

benchmark: $(INSTALLED)  ## On a machine with a GPU: the speed of the kernels, printed, saved and drawn.
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[benchmark]'
	mkdir -p build
	set -e; for name in quantize_and_write decode prefill; do \
		$(VENV)/bin/python -m benchmarks.$$name --json build/$$name.json --plot build/$$name.svg; done

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt tools/triton_pin.py
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 10) else "quantattn needs Python 3.10 or newer and $(PYTHON) is %s: run make PYTHON=/path/to/a/newer/python3" % v)'
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt $$($(VENV)/bin/python tools/triton_pin.py) -e '.[lint,test]'
	touch $@
