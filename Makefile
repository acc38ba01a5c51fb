# Every target works from a fresh clone with Python 3.11, make and a C++ compiler:
# it creates the virtual environment .venv, builds the native module there and then does its work.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := $(wildcard native/*) CMakeLists.txt

.PHONY: demo test lint bench fuzz clean

# Installed once per change of the dependencies.
$(VENV)/.deps: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch numpy typer rich
	$(BIN)/pip install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	touch $@

# Built once per change of the native sources; the Python sources are used in place.
$(VENV)/.built: $(VENV)/.deps $(NATIVE)
	$(BIN)/pip install -q --no-build-isolation --no-deps -e .
	touch $@

$(VENV)/.test: $(VENV)/.built
	$(BIN)/pip install -q -c constraints.txt "$$($(BIN)/python scripts/extras.py test)"
	touch $@
