# Every target first sets up its requirements. `make help` lists them.
#
# PYTHON     the Python (>= 3.11) that makes the environment
# VENV       where the environment is made
# EXECUTOR   how `make demo` starts its trials: local or ray; DEMO_TRIALS how many; DEMO_ARGS is more for its
#            `memtune search`
# VENV_ARGS  --system-site-packages keeps a torch that PYTHON already has (a CUDA build, say) instead of the pinned one;
#            PYTHON must not be in an environment itself then
SHELL := /bin/bash -o pipefail
PYTHON ?= python3
VENV ?= .venv
VENV_ARGS ?=
EXTRAS ?= ray,gpu,hf,dev

BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find csrc -path csrc/simulated_device -prune -o -name '*.cpp' -print -o -name '*.h' -print)

EXECUTOR ?= local
BUDGET ?= 540MiB
DEMO_OUT ?= tuned.yaml
DEMO_TRIALS ?= 8
DEMO_ARGS ?=
PYTEST_ARGS ?=
FUZZ_ARGS ?=
DEVICE ?= cuda
CHECKS ?=

.PHONY: docs docs-curves help setup demo test test-rates test-slow test-device test-triton test-chaos native-tests test-native fuzz audit lint report format bench-predict bench-published bench-recompute bench-layout bench-order bench-plan bench-overhead bench-search bench-sharding bench-offload gpu-check clean

help:  ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(READY)  ## make the environment: everything memtune, its extras and its tests need, at pinned versions

# Where the native code is compiled for the Python of VENV: once, for the module and for the C++ tests.
NATIVE := build/native-$(notdir $(VENV))

# Python compiles a module when it is first imported. pip would compile all: of 200 MB of sources most are never imported.
PIP := $(BIN)/python -m pip install -q --no-compile -c $(VENV)/constraints.txt

# A step by its name, with a dot every two seconds while it runs: downloads and the compiler are silent for minutes.
define step
@printf '%s ' '$(1)'; { $(2); } & pid=$$!; n=0; \
while kill -0 $$pid 2>/dev/null; do sleep 0.5; n=$$((n + 1)); [ $$((n % 4)) != 0 ] || printf .; done; \
wait $$pid; code=$$?; echo " $$((n / 2)) s"; exit $$code
endef

# torch first and by its exact version, so that any build of that version (also a prepared CPU build) is accepted and no later
# package requests another. With a torch of the outer Python the other pins still apply.
$(READY): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "memtune needs Python 3.11 or later, this is " + sys.version.split()[0] + ". Fix: make setup PYTHON=python3.11")'
	$(call step,environment,$(PYTHON) -m venv $(VENV_ARGS) $(VENV))
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(call step,PyTorch,$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) "$$(grep '^torch==' constraints.txt)")
	$(call step,build tools,$(PIP) scikit-build-core nanobind cmake ninja)
	$(call step,memtune: compiling its native code and installing the packages it needs,PATH="$(abspath $(BIN)):$$PATH" $(PIP) --no-build-isolation -C build-dir=$(NATIVE) -e '.[$(EXTRAS)]')
	touch $@

demo: setup  ## search a real model under a memory budget on this CPU, then train with the config it found
	$(BIN)/memtune search examples/gpt.py --device cpu --workers 2 --max-memory $(BUDGET) --executor $(EXECUTOR) --out $(DEMO_OUT) --trials $(DEMO_TRIALS) --force $(DEMO_ARGS)
	$(BIN)/memtune run $(DEMO_OUT) -- $(BIN)/python examples/train_gpt.py $(DEMO_OUT)

# By file, so that fixtures of a module (a group of ranks, a recording) are set up once. Two workers more than cores, because
# some tests wait for deadlines, signals or a terminal; more than four gain little: searches among the tests start processes of
# their own. tests/conftest.py orders the files.
WORKERS ?= $(shell echo $$(($(CORES) < 2 ? $(CORES) + 2 : 4)))
CORES := $(shell nproc 2> /dev/null || echo 2)
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# A part of the slow tests is about 40 CPU seconds on average; one of the longest alone is as much.
SLOW_SEED ?=
SLOW_PART := $(if $(SLOW_SEED),--slow-part $(SLOW_SEED)/300)

test: setup test-native  ## all tests but those that need a GPU and the slow ones, of which SLOW_SEED draws one in 300
	$(BIN)/pytest $(SIDE_BY_SIDE) $(if $(SLOW_SEED),-m 'not gpu and not device' $(SLOW_PART)) $(PYTEST_ARGS)

SPEEDS := 0.1 10
SCALE := 100
KILLS ?= 100
SEED ?= 0
TRIALS ?= 500

test-rates: setup  ## after `make test`: the tests that can depend on the CPU's rates, for a CPU a tenth and ten times as fast
	for speed in $(SPEEDS); do MEMTUNE_TEST_SPEED=$$speed $(BIN)/pytest $(SIDE_BY_SIDE) --rate-readers $(PYTEST_ARGS) || exit; done

test-slow: setup  ## the tests marked slow, or those one in 300 that SLOW_SEED draws
	$(BIN)/pytest -m 'slow and not gpu and not device' $(SLOW_PART) $(PYTEST_ARGS)

test-device: setup  ## on the simulated accelerator its own tests, all suites of techniques, examples, kills and failing applies; the first run compiles it (less than a minute of CPU time)
	PYTHONPATH=tests $(BIN)/python -c "from support.simulated_device import build; build()"
	$(BIN)/pytest -n 0 -m device tests/testing/simulated_device $(PYTEST_ARGS)
	$(BIN)/pytest -n 0 -m '' --on-device sim tests/search_spaces tests/chaos tests/test_examples.py $(PYTEST_ARGS)

test-triton: setup  ## the Triton kernels against the native ones in Triton's interpreter, and compiled for NVIDIA's GPUs; downloads Triton (155 MB)
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/triton triton==3.4.0
	PYTHONPATH=$(abspath $(VENV))/triton TRITON_INTERPRET=1 $(BIN)/pytest -n 0 -m slow -k interpreted tests/parallel/collectives/test_quantization.py tests/activations/offload/test_compression.py $(PYTEST_ARGS)
	PYTHONPATH=$(abspath $(VENV))/triton $(BIN)/pytest -n 0 -m slow tests/parallel/collectives/test_quantization_compiled.py tests/activations/offload/test_compression_compiled.py $(PYTEST_ARGS)

test-chaos: setup  ## faults of disks, files and processes: tests/chaos at SCALE times the cases of `make test`, KILLS kills of each kind, TRIALS trials in one driver, with counts; another SEED draws other ones
	MEMTUNE_CHAOS=$(SCALE) MEMTUNE_KILLS=$(KILLS) MEMTUNE_TRIALS=$(TRIALS) MEMTUNE_SEED=$(SEED) $(BIN)/pytest -rP --timeout 7200 -m "not gpu and not device" $(PYTEST_ARGS) tests/chaos

audit: setup  ## known weaknesses of the pinned dependencies; needs an index and a database of weaknesses that can be reached
	$(BIN)/python -m pip install -q pip-audit
	$(BIN)/pip-audit --no-deps --disable-pip -r constraints.txt

native-tests: setup
	[ -f $(NATIVE)/CMakeCache.txt ] || PATH="$(abspath $(BIN)):$$PATH" cmake -S . -B $(NATIVE) -G Ninja --log-level=WARNING
	PATH="$(abspath $(BIN)):$$PATH" cmake --build $(NATIVE) --target native_tests

test-native: native-tests  ## the C++ tests
	PATH="$(abspath $(BIN)):$$PATH" ctest --test-dir $(NATIVE) --output-on-failure

FUZZ_RANKS ?= 1 2 4
MEMTUNE_FUZZ_SECONDS ?= 120

fuzz: setup  ## random models, settings and loops against the plain model, MEMTUNE_FUZZ_SECONDS on each of FUZZ_RANKS (FUZZ_ARGS="--first SEED")
	cd tests && for ranks in $(FUZZ_RANKS); do MEMTUNE_FUZZ_SECONDS=$(MEMTUNE_FUZZ_SECONDS) $(abspath $(BIN))/python -m fuzz --ranks $$ranks $(FUZZ_ARGS) || exit; done

lint: setup  ## the checks of CI other than tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup  ## build the documentation into build/site; dead links are errors, and the build needs no network
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt mkdocs-material mkdocstrings-python
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q

docs-curves: setup  ## simulate a step with each technique again, for the drawings of the catalogue (a minute)
	$(BIN)/python docs/hooks/technique_curves.py

report: setup  ## list files over 700 lines and functions over 60
	$(BIN)/python tests/size_report.py

format: setup  ## sort imports and lay out the Python code
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

RESULTS := benchmarks/results/predict-cpu

bench-predict: setup  ## predicted against measured peaks on this CPU: 13 models, recompute, offload, batch (about 15 minutes on 2 cores)
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt accelerate
	mkdir -p $(dir $(RESULTS))
	$(BIN)/python benchmarks/predict.py --speed --json $(RESULTS).json --markdown $(RESULTS).md

BUDGETS := benchmarks/results/recompute-budget

bench-recompute: setup  ## recompute techniques (dynamic ones if MEMTUNE_DTR_LOGS names the logs' folder): `planned` against the others over a sweep of budgets, some plans trained for real
	mkdir -p $(dir $(BUDGETS))
	$(BIN)/python benchmarks/recompute_claims.py --json benchmarks/results/recompute-claims.json --markdown benchmarks/results/recompute-claims.md
	$(BIN)/python benchmarks/planned_speed.py --json benchmarks/results/planned-speed.json
	$(BIN)/python benchmarks/recompute_budget.py --measure 3 --resume --json $(BUDGETS).json --markdown $(BUDGETS).md --plot $(BUDGETS).svg
	$(BIN)/python benchmarks/recompute_dynamic.py --json benchmarks/results/recompute-dynamic.json --markdown benchmarks/results/recompute-dynamic.md
	$(BIN)/python benchmarks/frozen_speed.py --json benchmarks/results/frozen-speed.json --markdown benchmarks/results/frozen-speed.md

bench-plan: setup  ## `memtune plan` in full, with cold caches: a 7B GPT on 64 GPUs, a 405B-shaped one on 16,384 (about 3 minutes on 2 cores)
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/plan_speed.py --repeats 3 --json benchmarks/results/plan-speed.json

OVERHEAD := benchmarks/results/overhead
PLANNED := benchmarks/results/planned-clock

bench-overhead: setup  ## host time of each mechanism against stock PyTorch's, on steps of small ops; `planned` on the clock over a sweep of budgets (about 10 minutes on 2 cores)
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/overhead.py --json $(OVERHEAD).json --markdown $(OVERHEAD).md
	$(BIN)/python benchmarks/planned_clock.py --json $(PLANNED).json --markdown $(PLANNED).md

bench-search: setup  ## regret of the setting that a search ships after 3, 6 and 12 trials, on simulated clusters (about 20 minutes on 2 cores)
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/search_quality.py --draws 40 --json benchmarks/results/search-quality.json --markdown benchmarks/results/search-quality.md

LAYOUTS := benchmarks/results/layout

bench-layout: setup  ## layouts of MiniMalloc's instances (MEMTUNE_MINIMALLOC names their folder), of 100,000 buffers and of training steps
	mkdir -p $(dir $(LAYOUTS))
	$(BIN)/python benchmarks/layout.py --json $(LAYOUTS).json --markdown $(LAYOUTS).md
	$(BIN)/python benchmarks/layout_traces.py --json $(LAYOUTS)-traces.json --markdown $(LAYOUTS)-traces.md --plot $(LAYOUTS)-gpt.svg

bench-order: setup  ## operator orders of whole training steps over the tests' models, and of 10,000 ops
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/order.py --json benchmarks/results/order.json --markdown benchmarks/results/order.md

PUBLISHED := benchmarks/results/published-gpu

bench-published: setup  ## predictions for GPUs against published measurements, without a GPU (MEMTUNE_GPU_PUBLISHED names a folder of further cases; about half an hour on 2 cores)
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/published_gpu.py --json $(PUBLISHED).json --markdown $(PUBLISHED).md --plot $(PUBLISHED).svg

SHARDING := benchmarks/results/sharding

bench-sharding: setup  ## sharding on 2 and 4 gloo ranks (exactness, bytes, peaks, quantised training), and the simulator against published ratios
	mkdir -p $(dir $(SHARDING))
	$(BIN)/python benchmarks/sharding.py --json $(SHARDING).json --markdown $(SHARDING).md

# Only this benchmark uses DeepSpeed: its CPU Adam is compiled at first use, for minutes, with this environment's ninja (a killed
# build leaves a lock that the next one would wait for). Without it, or without fio (Debian's), the comparison is skipped and the
# result gives the reason.
bench-offload: setup  ## the host optimizer against torch's fused AdamW, DeepSpeed's and the memory's bandwidth (500M parameters: 12 GB of memory); SSD against fio; peaks, bytes and published ratios
	-DS_BUILD_OPS=0 $(BIN)/python -m pip install -q --no-build-isolation --no-deps deepspeed hjson py-cpuinfo einops msgpack
	rm -f $(VENV)/torch_extensions/*/lock
	PATH="$(abspath $(BIN)):$$PATH" TORCH_EXTENSIONS_DIR=$(abspath $(VENV))/torch_extensions \
		$(BIN)/python benchmarks/host_optimizer.py --json benchmarks/results/host-optimizer.json
	$(BIN)/python benchmarks/ssd.py --json benchmarks/results/ssd.json
	$(BIN)/python benchmarks/orchestration.py --json benchmarks/results/orchestration.json
	$(BIN)/python benchmarks/link_contention.py --json benchmarks/results/link-contention.json
	$(BIN)/python benchmarks/smart_infinity.py --json benchmarks/results/smart-infinity.json
	$(BIN)/python benchmarks/offload_published.py --json benchmarks/results/offload-published.json
	$(BIN)/python benchmarks/offload_peaks.py --json benchmarks/results/offload-peaks.json --markdown benchmarks/results/offload-peaks.md

gpu-check:  ## needs no network: build with PYTHON, run the gpu tests and benchmarks, or CHECKS of them (DEVICE=cpu: their CPU form; DEVICE=sim: on the simulated accelerator)
ifneq ($(filter $(DEVICE),cpu sim),)
	$(MAKE) setup
	PYTHON=$(abspath $(BIN))/python .ci/gpu-check $(DEVICE) $(CHECKS)
else
	PYTHON=$(PYTHON) .ci/gpu-check $(DEVICE) $(CHECKS)
endif

clean:  ## remove builds and caches, keep the environment
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
