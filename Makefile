# mlx-fleet: `make help` lists what there is.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# LiteLLM pins older versions of what we use, and is a client in tests.
LITELLM := .venv-litellm
ONCE ?=
PORT ?=
# Where it is set (containers), each of the hundreds of processes that tests start compiles everything anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo stop test unit test-full coverage lint format docs proto lock bench-apply bench-cli bench-start bench-gateway bench-gateway-faults bench-gateway-faults-real bench-gateway-hostile bench-gateway-peers bench-routing bench-store bench-placement bench-control-plane bench-manifests bench-engine bench-engine-start bench-shard bench-walks clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(READY) $(LITELLM)/.ready  ## make the virtual environments (once)

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $$($(PYTHON) --version) is too old; mlx-fleet needs Python 3.11 or newer. Try: make PYTHON=python3.12"; exit 1; }
	@echo "setting up $(VENV) (once, about a minute)"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "make: could not create $(VENV). On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(LITELLM)/.ready: requirements-litellm.txt
	@echo "setting up $(LITELLM) (once; a client for tests)"
	@$(PYTHON) -m venv $(LITELLM)
	@$(LITELLM)/bin/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements-litellm.txt
	@touch $@

demo: $(READY)  ## start a two-node fleet, deploy a model, chat with it (ONCE=1: and shut down; PORT=4010)
	@$(BIN)/fleetctl demo --data-dir .fleet $(if $(PORT),--port $(PORT)) $(if $(ONCE),--once)

stop: $(READY)  ## stop the fleet that `make demo` left running
	@$(BIN)/fleetctl down --data-dir .fleet

test: $(READY) $(LITELLM)/.ready  ## what CI runs: ruff, mypy, import-linter beside the default tier of tests
	@$(MAKE) --no-print-directory --jobs=2 lint unit

unit: $(READY) $(LITELLM)/.ready  ## the default tier of tests, without lint
	@OPENBLAS_NUM_THREADS=1 $(BIN)/pytest  # several processes share the cores already

test-full: lint $(LITELLM)/.ready  ## every tier: all whole fleets, full sampling sizes, soak (about an hour)
	@FLEET_TESTS=full OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -m "not mac"

coverage: $(READY) $(LITELLM)/.ready  ## branch coverage of production code by the default tier, child processes included
	@OPENBLAS_NUM_THREADS=1 $(BIN)/pytest --cov --cov-config=pyproject.toml --cov-report=term:skip-covered --timeout=400

lint: $(READY)  ## ruff, mypy and import-linter only
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(READY)  ## put the code in the house's format
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format --quiet .

docs: $(READY)  ## generate docs/reference and the pictures
	@$(BIN)/python -m docs.generate

proto: $(READY)  ## generate the messages of etcd's API from etcd.proto
	@$(BIN)/python -m grpc_tools.protoc -Istore/etcd/grpc/proto --python_out=store/etcd/grpc/proto \
	  --pyi_out=store/etcd/grpc/proto store/etcd/grpc/proto/etcd.proto

lock: $(READY)  ## renew requirements.txt and requirements-litellm.txt
	@$(PYTHON) -m venv $(VENV)/lock && $(VENV)/lock/bin/pip install --quiet uv
	@$(VENV)/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --extra dev pyproject.toml -o requirements.txt
	@$(VENV)/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header requirements-litellm.in -o requirements-litellm.txt

bench-apply: $(READY)  ## 1,000 ModelDeployments: apply, and apply again
	@$(BIN)/python -m bench.apply

bench-cli: $(READY)  ## how long fleetctl takes to start: get, --help, a typo, beside python and kubectl
	@$(BIN)/python -m bench.cli

bench-start: $(READY)  ## from apply returning to the engine process being started
	@$(BIN)/python -m bench.start

bench-gateway: $(READY)  ## our gateway beside nginx, haproxy, LiteLLM and routers of vLLM and SGLang, in five minutes
	@$(BIN)/python -m bench.gateway

bench-gateway-faults: $(READY)  ## engines killed, stopped, drained and gone mad under load, in five minutes
	@$(BIN)/python -m bench.gateway.faults

bench-gateway-faults-real: $(READY)  ## real engines of a real fleet killed, stopped, drained and replaced under load (SECONDS=60: longer, and more)
	@$(BIN)/python -m bench.gateway.real_faults

bench-gateway-hostile: $(READY)  ## hostile clients: the gateway's memory, and what others notice
	@$(BIN)/python -m bench.gateway.hostile

bench-gateway-peers: $(READY)  ## install the other gateways for it, into ~/.cache/mlx-fleet-bench or FLEET_BENCH_PEERS
	@$(BIN)/python -m bench.gateway.peers_install

bench-routing: $(READY)  ## what choosing an engine costs among 10 to 1,000, with up to a million sessions
	@$(BIN)/python -m bench.routing

bench-store: $(READY)  ## our etcd clients beside the other Python ones, in four minutes
	@$(BIN)/python -m bench.store

bench-placement: $(READY)  ## 10,000 replicas onto 5,000 Macs: decisions a second, without a store
	@$(BIN)/python -m bench.placement

bench-control-plane: $(READY)  ## 1,000 hollow Macs and 10,000 replicas on a real etcd, in five minutes
	@$(BIN)/python -m bench.control_plane

bench-manifests: $(READY)  ## 10,000 manifests: load, check, apply and diff, beside other YAML loaders
	@$(BIN)/python -m bench.manifests

bench-engine: $(READY)  ## our engine beside mlx_lm.server and beside raw MLX, in five minutes
	@$(BIN)/python -m bench.engine

bench-engine-start: $(READY)  ## from an engine's start to its first token, beside mlx_lm.server
	@$(BIN)/python -m bench.engine_start

bench-walks: $(READY)  ## files of code that run for an apply, a chat and a lost node, in a minute
	@$(BIN)/python -m bench.walks

bench-shard: $(READY)  ## groups of 1, 2 and 3 ranks beside mlx.launch with mlx_lm.server, in five minutes
	@$(BIN)/python -m bench.shard

clean:  ## remove the virtual environment and the caches
	@rm -rf $(VENV) $(LITELLM) $(SITE) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info build

# MkDocs Material builds the site, and is needed for nothing else.
SITE := .venv-docs
.PHONY: site lock-site
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
