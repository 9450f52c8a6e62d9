# Every command of this project. `make` alone lists them; nothing need be installed or
# activated first. The tools in tools/ do the work and say what they do.

PYTHON ?= python3
# What `make bench`, `make soak` and `make reach` append to: RESULTS=results for the committed files.
RESULTS ?= bench-out
# More arguments for pytest (make test), bench_vllm.py (make bench) and so on.
ARGS ?=
# Or podman, or buildah.
DOCKER ?= docker
HOST ?= 127.0.0.1
PORT ?= 8000

PY := .venv/bin/python
SOURCES = $(shell git ls-files '*.h' '*.hpp' '*.cuh' '*.cpp' '*.cu')
SCRIPTS = $(shell git ls-files .ci/run '*.sh')
DOCKERFILES = $(shell git ls-files 'docker/Dockerfile*')
MODEL := smollm2-135m
SPECULATION := {"method": "ngram", "num_speculative_tokens": 4, \
	"prompt_lookup_min": 1, "prompt_lookup_max": 4}

# CUDA code (ON, OFF, or AUTO: if nvcc is found) is not needed to run on a CPU, so the
# checkout's library goes without unless told otherwise; wheels have it if possible.
WHEEL_CUDA := $(or $(NWOR_CUDA),AUTO)
export NWOR_CUDA ?= OFF
export PYTHON
# Byte code, written by the first imports, makes starts of vLLM 10 s faster.
unexport PYTHONDONTWRITEBYTECODE
# Behind others: what make nvcc has installed, which wheels are then built with.
NVCC := build/nvcc
export PATH := $(PATH):$(CURDIR)/$(NVCC)/nvidia/cu13/bin
# Models are local, and nothing is reported anywhere.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
# In GiB; the models here are small.
export VLLM_CPU_KVCACHE_SPACE ?= 1

.DEFAULT_GOAL := help
.PHONY: help bench picture test serve soak lint format wheel setup models lock deps clean distclean
.PHONY: gpu-test gpu-bench nightly mutation-check rebuild image image-cpu
.PHONY: dist emulated check-vllm test-older test-oldest reach frameworks docs image-check
.PHONY: nvcc

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) \
		| sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

bench: models ## compare speed and outputs with NWOR off and on; appends to bench-out/
	@mkdir -p $(RESULTS)
	$(PY) bench_vllm.py --repeats 25 --json $(RESULTS)/throughput.jsonl $(ARGS)

picture: models ## draw docs/picture.png anew, from a real run of one prompt
	$(PY) -m benchmarks.picture

# Without Prometheus (make deps) the tests that need it fail, and say so; others run.
# Two processes take file after file, those with engines first; one process where ARGS
# choose some tests, because each imports vLLM first.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
test: models ## run the tests; ARGS="-k name" for some of them
	$(PY) -m pytest $(or $(ARGS),$(PARALLEL))

# Few KV blocks, so that requests are preempted, too: 40, and shadow blocks for all of
# them. The caches that oneDNN and torch keep for each batch size, and what glibc holds
# back, grow all through such a run (results/README.md): they are bounded, so that a
# leak can be seen. The KV audit compares everything; the load goes on, up to
# four times as long, until it has looked at 10,000 steps.
SOAK_SERVE_ARGS := --served-model-name $(MODEL) --enforce-eager --max-model-len 1024 \
	--max-num-seqs 16 --block-size 32 --num-gpu-blocks-override 72
SOAK_ENV := ONEDNN_PRIMITIVE_CACHE_CAPACITY=32 LRU_CACHE_CAPACITY=32 \
	MALLOC_MMAP_THRESHOLD_=131072 MALLOC_TRIM_THRESHOLD_=131072 \
	VLLM_NWOR_SHADOW_BLOCKS=32 VLLM_NWOR_AUDIT=log VLLM_NWOR_AUDIT_MIB=4096
soak: models ## serve a mixed load for MINUTES (10) with NWOR on, and check all after it
	@mkdir -p $(RESULTS)
	$(PY) tools/soak/soak.py \
		--model "$$($(PY) tools/setup/make_models.py --path $(MODEL))" \
		--minutes $(or $(MINUTES),10) --audited-steps 10000 --json $(RESULTS)/soak.jsonl \
		--speculative-config '$(SPECULATION)' --serve-args '$(SOAK_SERVE_ARGS)' \
		$(SOAK_ENV:%=--env %) $(ARGS)

# Another million each time: SEED=1000 for those of the committed file.
nightly: models ## what takes too long for make test: faults, simulation, random engines
	@mkdir -p $(RESULTS)
	$(PY) -m tests.simulation --operations 1000000 \
		--json $(RESULTS)/simulation.jsonl --seed $(or $(SEED),$(shell date +%s))
	$(PY) -m pytest -m nightly $(ARGS)
	$(MAKE) test-oldest
	$(MAKE) docs image-check

# Suffix decoding only where arctic-inference is installed. What vLLM itself cannot run
# on a CPU is left out: 0.26 and 0.29 want weights that a checkpoint of Gemma 3n has not
# got, and 0.26 has no latent attention there and crashes in gated delta nets.
STATE_FAULTS := tests/integration/test_state_bugs.py
KIT := tests/e2e/test_conformance.py::test_the_verdicts_on_vllms_own_connectors
KIT_FAULTS := tests/e2e/test_conformance.py::test_a_fault_is_a_breach_of_its_case_alone
KIT_ON_LMCACHE := tests/e2e/test_conformance.py::test_the_verdicts_on_lmcache
REACH := -m "" tests/integration/test_reach.py $(STATE_FAULTS) \
	tests/integration/test_identical_outputs.py::test_tensor_parallel_2 \
	tests/e2e/test_serve.py::test_data_parallel_2
REFUSALS := tests/unit/test_reservation.py tests/unit/test_discovery.py
reach: export NWOR_REACH_RESULTS = $(abspath $(RESULTS))
reach: models ## what NWOR was tried with: run it on this CPU, render docs/reach.md
	@mkdir -p $(RESULTS)
	$(PY) -m pytest $(REACH) $(REFUSALS) $(KIT) $(KIT_FAULTS) $(ARGS)
	$(MAKE) test-older OLDER_TESTS='$(REACH) $(KIT) -k "not 3n"'
	$(MAKE) test-oldest OLDER_TESTS='$(REACH) $(KIT) -k "not (3n or DeepSeek or Next or test_state)"'
	$(PY) tools/results/render.py

# What NWOR touches of them is patched, too, as those who keep a fork do it, and our
# library is built by their own setup.py and CMakeLists.txt.
check-vllm: setup ## does each supported vLLM have what NWOR relies on? fetches sources
	$(PY) tools/check_vllm.py $(ARGS)
	$(PY) -m pytest -m nightly tests/unit/test_apply_to_vllm.py -q

# Its wheel is put before the installed one: their torch is the same.
OLDER_TESTS := tests/integration/test_byte_oracle.py -k "bf16 and not probing"
test-older: OLDER_TESTS := tests/integration/test_byte_oracle.py $(STATE_FAULTS) \
	tests/integration/test_states.py -k "test_state or (bf16 and not probing)"
test-older: models ## the byte oracle and the states' audit on engines of an older vLLM
	vllm=$$($(PY) tools/check_vllm.py --unpack) && PYTHONPATH=$$vllm \
		$(PY) -m pytest $(OLDER_TESTS) $(ARGS)

# Its torch is another one: 6 GB.
test-oldest: models wheel ## the byte oracle on the oldest, in an environment of its own
	python=$$($(PYTHON) tools/setup/setup_env.py --other) && \
		$$python -m pytest $(OLDER_TESTS) $(ARGS)

# make nightly runs these, too, where they are installed: 700 MB of packages.
FRAMEWORKS := .venv-frameworks
frameworks: export NWOR_REACH_RESULTS = $(abspath $(RESULTS))
frameworks: models ## weight updates by trl, verl and AReaL, loads by LMCache and NIXL
	@mkdir -p $(RESULTS)
	$(PY) -m pip install -q --no-deps --upgrade --target $(FRAMEWORKS) \
		-r requirements/frameworks.txt
	$(PY) -m pytest -m nightly tests/e2e/test_frameworks.py tests/e2e/test_nixl.py \
		$(KIT_ON_LMCACHE) $(ARGS)

mutation-check: setup ## plant bugs in a copy of the tree; each must fail a test
	@mkdir -p $(RESULTS)
	$(PY) tools/mutation_check.py --json $(RESULTS)/mutation_check.json $(ARGS)

# These two need an NVIDIA GPU and a PYTHON that has vLLM; .venv is not used. STEPS
# chooses among what tools/gpu/README.md lists.
gpu-test: ## prove it on a GPU: kernels, engines, no waiting; writes results/
	tools/gpu_run.sh $(or $(STEPS),build kernels engines sync layouts)

gpu-bench: ## time it on a GPU at the shape of an 8B model; writes results/
	tools/gpu_run.sh $(or $(STEPS),build bench-kernels bench)

# What `vllm serve` runs; that command looks for a distribution named vllm, which
# vllm-cpu is not. On a CPU, vLLM 0.32 speculates well at temperature 0 only.
serve: models ## OpenAI-compatible server on port 8000 with NWOR on
	export VLLM_NWOR_MODE=$${VLLM_NWOR_MODE-stage}; \
	exec tools/serve.sh $(PY) -m vllm.entrypoints.openai.api_server \
		--model "$$($(PY) tools/setup/make_models.py --path $(MODEL))" \
		--served-model-name $(MODEL) --host $(HOST) --port $(PORT) \
		--enforce-eager --max-model-len 2048 --max-num-seqs 16 \
		--override-generation-config '{"temperature": 0}' \
		--speculative-config '$(SPECULATION)' $(ARGS)

lint: setup ## check style, types, imports and sizes
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports
	$(if $(SOURCES),.venv/bin/clang-format --dry-run -Werror $(SOURCES))
	.venv/bin/shellcheck $(SCRIPTS)
	.venv/bin/hadolint $(DOCKERFILES)
	.venv/bin/actionlint -shellcheck .venv/bin/shellcheck
	.venv/bin/zizmor --offline --quiet --min-severity medium .github
	$(PY) tools/results/render.py --check
	$(PY) tools/sizes.py

format: setup ## apply the style
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(if $(SOURCES),.venv/bin/clang-format -i $(SOURCES))

wheel: setup ## build dist/*.whl, with CUDA code if nvcc is found
	NWOR_CUDA=$(WHEEL_CUDA) $(PY) -m pip wheel . -w dist --no-deps \
		--no-build-isolation

# Needs nvcc, and Debian's g++-aarch64-linux-gnu for that processor's wheel.
dist: setup ## build what is published into dist/, wheels and sdist, and check it
	$(PY) tools/dist.py $(ARGS)

emulated: setup ## test the kernels of dist/'s wheel for aarch64 on an emulated CPU
	$(PY) tools/emulated.py $(ARGS)

# .venv's Python, which has torch, unless PYTHON names another one.
rebuild: ## bring the native library up to date, with CUDA code if nvcc is found
	PYTHON=$(if $(filter file,$(origin PYTHON)),,$(PYTHON)) \
		tools/rebuild_nwor_extension.sh --cuda $(WHEEL_CUDA)

image: ## build the container image vllm-nwor, for GPUs (DOCKER=podman)
	$(DOCKER) build $(ARGS) -f docker/Dockerfile -t vllm-nwor .

image-cpu: ## build the container image vllm-nwor:cpu
	$(DOCKER) build $(ARGS) -f docker/Dockerfile.cpu -t vllm-nwor:cpu .

# As root, with Debian's buildah and mmdebstrap.
image-check: models ## build both images on stand-ins for their bases, and run the CPU's
	@mkdir -p $(RESULTS)
	$(PY) tools/image.py --json $(RESULTS)/cases.jsonl $(ARGS)

docs: .venv-docs/installed ## build the site of the documents in build/site, check links
	.venv-docs/bin/python -m sphinx -q -W --keep-going -c docs -d build/docs . build/site
	cp build/site/README.html build/site/index.html

.venv-docs/installed: requirements/docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q -r $<
	touch $@

nvcc: setup ## install CUDA's compiler from the package index, where there is none
	$(PY) -m pip install -q --no-deps --upgrade --target $(NVCC) -r requirements/nvcc.txt
	ln -sfn lib $(NVCC)/nvidia/cu13/lib64

setup: ## make .venv and the native library, or bring them up to date
	@tools/setup/check_system.sh
	@$(PYTHON) tools/setup/setup_env.py
	@$(PY) tools/native.py

models: setup ## make the models that tests and benchmarks use
	@$(PY) tools/setup/make_models.py

lock: setup ## resolve requirements/cpu.txt anew
	@$(PYTHON) tools/setup/setup_env.py --lock

deps: ## install what the system lacks, and fetch Prometheus for the tests (apt-get)
	@tools/setup/check_system.sh --install
	@tools/monitoring/fetch_prometheus.sh

clean: ## remove what builds left, but not .venv, the models, nor what was measured
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache \
		.hypothesis vllm/v1/nwor/_nwor_C.so
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	rm -rf .venv .venv-*
