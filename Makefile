# Every target works from a fresh clone with Python 3.11, make and a C++ compiler: it makes the virtual environment
# .venv, builds the native module into it and then does its work. Everything else comes from PyPI.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Tests start many processes, and without bytecode each of them would compile torch again.
unexport PYTHONDONTWRITEBYTECODE
# Python compiles what is imported, which is a small part of what is installed.
PIP    := $(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt
NATIVE := $(wildcard native/* src/gradwire/aggregator/packet/*.h) CMakeLists.txt
CUDA_SOURCES := $(foreach folder,gpu cuda_runtime kernels/cuda,$(wildcard src/gradwire/$(folder)/sources/*.cu src/gradwire/$(folder)/sources/*.h))
C_SOURCES := $(wildcard native/*.cpp native/*.h tests/native_tsan/*.cpp src/gradwire/aggregator/*/*.h src/gradwire/aggregator/*/*.c) \
	$(CUDA_SOURCES) $(wildcard tests/support/cuda_on_cpu/*.h tests/native_arm64/*.cpp tests/native_arm64/nanobind/*.h)

.PHONY: demo test test-all test-gpu nightly lint bench bench-link bench-recipes bench-volume bench-aggregation bench-backward bench-federated trials fuzz sanitize soak exits torch-matrix clean

demo: $(VENV)/.built       ## train digits on two workers, fp32 beside CO3
	$(BIN)/gradwire train --task digits --workers 2 --codec none --codec co3

test: $(VENV)/.test        ## the quick tests, two at a time: every promise once, in some four minutes
	$(BIN)/python -m pytest --quick -n 2

test-all: test             ## the quick tests and then all others, in some ten minutes
	$(BIN)/python -m pytest --rest -n 2

# Without an index to install from: PYTHONPATH=src:tests python -m pytest --gpu; without pytest: python tests/gpu/run.py
test-gpu: $(VENV)/.test    ## on a machine with a GPU: the tests that need one, and those that must not mind that it is there
	$(BIN)/python -m pytest --gpu

nightly: $(VENV)/.test     ## identical replicas after 200 steps: all recipes, both aggregations, 2 to 4 ranks; Flower's engines
	$(BIN)/python tests/nightly_replicas.py
	$(BIN)/python -m pytest --slow tests/flower/test_flower_deployment.py tests/flower/test_federated.py

lint: $(VENV)/.lint        ## style, types, the import law and its graph
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python scripts/import_graph.py --check

bench: $(VENV)/.test       ## speed on one core, and on more of them, beside copy, zstd, constriction, torch.topk and eager torch
	$(BIN)/python benchmarks/codec.py
	$(BIN)/python benchmarks/sparse.py
	$(BIN)/python benchmarks/quantizers.py
	$(BIN)/python benchmarks/homomorphic.py
	$(BIN)/python benchmarks/threads.py

bench-link: $(VENV)/.built ## training step on links of 100 Mbit/s to 10 Gbit/s: ten minutes (Linux, root, iproute2)
	$(BIN)/python benchmarks/link.py

bench-recipes: $(VENV)/.built ## training step with every recipe beside co3, at 1 Gbit/s: five minutes (Linux, root, iproute2)
	$(BIN)/python benchmarks/recipes.py

bench-volume: $(VENV)/.built ## bytes of a rank at 2 to 16 ranks, at its interface (Linux, root, iproute2)
	$(BIN)/python benchmarks/volume.py

bench-aggregation: $(VENV)/.built ## sums of sparse gradients, NCF and LSTM at 1 Gbit/s (Linux, root, iproute2, clang)
	$(BIN)/python benchmarks/aggregation.py
	$(BIN)/python benchmarks/sparse_training.py

bench-backward: $(VENV)/.test ## weight gradients from some rows beside exact ones; policies (Fashion-MNIST in DATA: an hour), larger networks
	$(BIN)/python benchmarks/backward.py
	$(BIN)/python benchmarks/backward_policies.py --fashion-mnist $(or $(DATA),data) $(OPTIONS)
	$(BIN)/python benchmarks/backward_policies_report.py
	$(BIN)/python benchmarks/backward_models.py --task text
	$(BIN)/python benchmarks/backward_models_report.py

# DATA holds Fashion-MNIST's idx files and CIFAR-10; on a GPU: make bench-federated OPTIONS="--device cuda --parallel 8"
bench-federated: $(VENV)/.test ## federated learning on Flower: server cost, byte budgets, accuracy against bytes (hours on a CPU)
	$(BIN)/python benchmarks/federated_server.py
	$(BIN)/python benchmarks/federated_budget.py
	$(BIN)/python benchmarks/federated.py --fashion-mnist $(or $(DATA),data) --cifar10 $(or $(DATA),data) $(OPTIONS)
	$(BIN)/python benchmarks/federated_report.py

trials: $(VENV)/.test      ## the aggregator on a bad network, and beside a flood of garbage; killed replicas of torchft: ten minutes
	$(BIN)/python tests/aggregator_trials.py --rounds 10000 --loss 0.01 --duplicate 0.01 --reorder 0.01
	$(BIN)/python tests/aggregator_trials.py --flood 60
	test $$(id -u) != 0 || $(BIN)/python tests/xdp_trials.py
	$(BIN)/python tests/torchft_trials.py --kills 20

fuzz: $(VENV)/.test        ## hostile frames and what they cost, aggregator packets, Flower updates, checkpoints: hours
	$(BIN)/python tests/fuzz_decode.py --frames 500000 --seed 0
	$(BIN)/python tests/fuzz_decode.py --frames 500000 --seed 1 --repair-checksum
	$(BIN)/python tests/fuzz_amplification.py --frames 100000
	$(BIN)/python tests/fuzz_aggregator.py --packets 2000000
	$(BIN)/python tests/fuzz_flower.py --updates 200000
	$(BIN)/python tests/fuzz_checkpoints.py --files 50000

sanitize: $(VENV)/.test    ## the native code under AddressSanitizer and UBSan, and under ThreadSanitizer
	bash scripts/sanitize.sh memory
	bash scripts/sanitize.sh threads

soak: $(VENV)/.test        ## an hour of trainings with kills, stops, full disks, lost packets and jumping clocks
	$(BIN)/python tests/soak.py --minutes 60

exits: $(VENV)/.test       ## how programs end, in every way out, beside plain DDP, on a busy machine: two hours
	$(BIN)/python tests/exit_trials.py --tries 200 --torchrun 40

torch-matrix:              ## the distributed tests on the oldest torch, our own and the newest: an environment for each
	$(PYTHON) scripts/torch_matrix.py

clean:
	rm -rf $(VENV) build

# torch first and alone: its version is the constraint that everything else has to accept.
$(VENV)/.deps: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) scikit-build-core nanobind cmake ninja
	touch $@

# Python sources are used in place; the native module is built again when its sources change.
$(VENV)/.built: $(VENV)/.deps $(NATIVE)
	$(PIP) --no-build-isolation -e .
	touch $@

$(VENV)/.test: $(VENV)/.deps $(NATIVE)
	$(PIP) --no-build-isolation -e ".[test]"
	touch $(VENV)/.built $@

$(VENV)/.lint: $(VENV)/.deps
	$(PIP) ruff mypy import-linter clang-format pre-commit numpy typer rich
	touch $@
