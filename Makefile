# Needs python3 (3.11 or later) and make; the rest is installed into a virtual environment of the project's own.
# PYTHON=python3.12 picks another interpreter, PINS=newest other versions (constraints/), ARGS="-k tag" goes to pytest.
PYTHON ?= python3
EXTRAS ?= test,experiments,deviceless,tpu
ARGS   ?=
# A process a core; ARGS="-n 0" is one process for all, which is what a debugger or a single file wants.
PYTEST  = $(PY) -m pytest -n auto --dist worksteal

# A pyenv shim of a version that is not selected fails: it is asked again under pyenv's newest of that version.
EXE := -c 'import sys; print(sys.executable)'
interpreter = $(shell $(1) $(EXE) 2>/dev/null || \
  PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | grep '^$(1:python%=%)\.' | tail -1) $(1) $(EXE) 2>/dev/null)
version = $(if $(1),$(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])'))

INTERPRETER  := $(call interpreter,$(PYTHON))
VERSION      := $(call version,$(INTERPRETER))
DEFAULT_PINS := $(or $(patsubst constraints/%.txt,%,$(wildcard constraints/py$(subst .,,$(VERSION)).txt)),newest)
PINS ?= $(DEFAULT_PINS)
# .venv for what plain `make` uses, another folder for each other interpreter and set of pins.
OTHER := $(filter-out python$(call version,$(call interpreter,python3)),$(if $(VERSION),python$(VERSION),$(notdir $(PYTHON))))
VENV ?= .venv$(OTHER:%=-%)$(patsubst %,-%,$(filter-out $(DEFAULT_PINS),$(PINS)))
PY    = $(VENV)/bin/python
INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check -c constraints/$(PINS).txt

# The deviceless wheels without a GPU make JAX print a traceback at start unless it is told to stay on the CPU.
JAX_PLATFORMS ?= $(if $(shell command -v nvidia-smi),,cpu)
export JAX_PLATFORMS
# REMAT3=1 runs JAX's next checkpoint and derivative rules, from JAX 0.12 on.
ifdef REMAT3
export JAX_REMAT3 = 1
export JAX_CUSTOM_VJP3 = 1
endif
# Where Python is told to keep no compiled files, each process of the tests would rewrite every assert again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run test test-core test-costly test-slow test-matrix stacks bench stale evidence lint format typecheck docs wheel present clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

setup: $(VENV)/.installed  ## create the virtual environment

run: $(VENV)/.installed  ## train gpt_nano under half of its unplanned bytes, into runs/gpt_nano/
	$(PY) -m experiments.train gpt_nano --out runs/gpt_nano $(ARGS)

test: $(VENV)/.installed  ## the tests, without the costly and the slow ones
	$(PYTEST) $(ARGS)

test-costly: $(VENV)/.installed  ## the tests that tests/costly.txt names
	$(PYTEST) -m "costly and not slow" $(ARGS)

# QUICK=1 leaves out the costly tests of the core. REMAT3=1 leaves out test_remat3*.py: the tests of these files
# turn the option on themselves, to compare the next checkpoint with today's, and run in the core without REMAT3.
test-core: $(VENV)/.installed
	$(PYTEST) -m "core and not slow$(if $(QUICK), and not costly)" $(if $(REMAT3),--ignore-glob="*/test_remat3*.py") $(ARGS)

test-slow: $(VENV)/.installed-docs  ## the slow tests alone
	XLA_FLAGS="$$XLA_FLAGS" $(PYTEST) -m slow $(ARGS)

# Libraries that train with JAX, as they are, in environments of their own: jaxmem at the pins, and then the
# libraries and what they import, without what they pin. Kauldron imports TensorFlow, which wants another protobuf.
STACKS = .venv-stacks
PIP = -m pip install --quiet --disable-pip-version-check
STACKS_ENV = JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1
stacks: $(STACKS)/.installed $(STACKS)-gemma/.installed  ## train with MaxText, Tunix, Levanter, equimo and gemma as they are
	$(foreach folder,$^,$(STACKS_ENV) $(dir $(folder))bin/python -m pytest -m slow -n 0 -s tests/stacks $(ARGS) &&) true

$(STACKS)/.installed $(STACKS)-gemma/.installed: constraints/py312.txt pyproject.toml
	$(call interpreter,python3.12) -m venv $(@D)
	$(@D)/bin/python $(PIP) -c constraints/py312.txt -e ".[$(EXTRAS)]"
	$(@D)/bin/python $(PIP) --no-deps -r constraints/$(patsubst .venv-%,%,$(@D)).txt
	rm -rf $(@D)/lib/python3.12/site-packages/tests  # draccus installs its tests by this name, which hides ours
	@touch $@
$(STACKS)/.installed: constraints/stacks.txt
$(STACKS)-gemma/.installed: constraints/stacks-gemma.txt

MATRIX = $(foreach python,python3.11 python3.12,$(if $(call interpreter,$(python)),$(python)))
test-matrix:  ## the core tests on python3.11 and python3.12 where present, and on 3.12 with the newest JAX
	$(if $(MATRIX),,$(error found neither python3.11 nor python3.12))
	$(foreach python,$(MATRIX),$(MAKE) PYTHON=$(python) test-core &&) true
	$(if $(filter python3.12,$(MATRIX)),$(MAKE) PYTHON=python3.12 PINS=newest test-core)

BENCH ?= $(patsubst benchmarks/%.py,%,$(shell grep -l "^if __name__" benchmarks/*.py))
bench: $(VENV)/.installed  ## every script of benchmarks/, or those named in BENCH="a b"
	$(foreach name,$(BENCH),$(PY) -m benchmarks.$(name) &&) true

stale: $(VENV)/.installed  ## the results whose sources changed since they were measured, and the time to measure again
	@$(PY) -m benchmarks.shared.stale

evidence: $(VENV)/.installed  ## docs/evidence.md: the claims of the papers beside the committed results
	@$(PY) -m benchmarks.shared.evidence

lint: $(VENV)/.installed-dev  ## ruff, without changing a file
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(VENV)/.installed-dev  ## ruff, fixing what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: $(VENV)/.installed-dev  ## pyright
	$(PY) -m pyright --pythonpath $(PY)

docs: $(VENV)/.installed-docs  ## the pages of docs/ and the API reference as an offline site, into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "site/index.html"

wheel: $(VENV)/.installed  ## build the wheel; import it with nothing else installed; run the core tests away from the sources
	rm -rf dist
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	set -e; there=$$(mktemp -d); chmod 755 "$$there"; trap 'rm -rf "$$there"' EXIT; wheel=$$(ls dist/*.whl); \
	$(INTERPRETER) -m venv "$$there/venv"; \
	install="$$there/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints/$(PINS).txt"; \
	$$install "$$wheel"; \
	(cd "$$there" && venv/bin/python -W error -c "import jaxmem, jaxmem_kernels; print(jaxmem.__file__)"); \
	$$install "$$wheel[$(EXTRAS)]"; \
	cp -r pyproject.toml README.md mkdocs.yml docs tests experiments benchmarks examples configs "$$there"; \
	rm "$$there"/tests/test_architecture.py "$$there"/tests/test_workarounds.py; \
	cd "$$there" && venv/bin/python -m pytest -n auto --dist worksteal -m "core and not slow" -o pythonpath=. $(ARGS)

# Does PYTHON name an interpreter of this machine?
present:
	@test -n "$(INTERPRETER)"

$(VENV)/.installed: pyproject.toml constraints/$(PINS).txt
	$(if $(INTERPRETER),,$(error PYTHON=$(PYTHON) is no interpreter of this machine; make PYTHON=... names another))
	@$(INTERPRETER) -c 'import sys; sys.exit("$(PYTHON) is %d.%d, jaxmem needs 3.11 or later: make PYTHON=..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(INTERPRETER) -m venv $(VENV)
	@echo "Installing into $(VENV): a minute or two"
	$(INSTALL) -e ".[$(EXTRAS)]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) -e ".[$(EXTRAS),dev]"
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(INSTALL) -e ".[$(EXTRAS),docs]"
	@touch $@

clean:  ## remove virtual environments, builds and caches (not runs/)
	rm -rf .venv* dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
