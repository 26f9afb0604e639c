# `make demo` and `make test` do everything on a fresh machine; the rest is for developers.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
STAMP := $(VENV)/.installed
SINCE ?= HEAD
SITES := $(VENV)/.installed-sites
LONG := $(VENV)/.installed-long
# Where this is set, each of the many processes of the tests compiles PyTorch and MONAI anew.
unexport PYTHONDONTWRITEBYTECODE

# Rewriting asserts takes each worker 10 s, so only what fails runs again with it, to say why.
tests = $(BIN)/python -m pytest -m 'not long' -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	--assert=plain $(1) || { $(BIN)/python -m pytest -m 'not long' --last-failed \
	--last-failed-no-failures none; exit 1; }

.PHONY: demo federation test test-rest test-all test-changed seconds test-long test-sites docs lint format setup clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "medfed needs Python 3.11 or newer; call make PYTHON=python3.12, for example."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	# Of medfed[resenc] alone: its U-Nets need neither timm nor torchvision, without which we test.
	$(BIN)/python -m pip install --quiet --no-compile --no-deps 'dynamic-network-architectures>=0.4.4,<0.5'
	touch $@

$(SITES): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[sites]'
	touch $@

$(LONG): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[mlflow]' 'nbclient>=0.10' 'ipykernel>=6.29'
	touch $@

demo: $(STAMP)
	rm -rf outputs/demo
	$(BIN)/medfed train -m experiment=brats_pfednet algorithm=pfednet,fedavg,local \
		hydra.sweep.dir=outputs/demo
	$(BIN)/medfed report runs=outputs/demo

# DATA=FOLDER with the four files of UCI Heart Disease: each hospital gets its own.
federation: $(SITES)
	$(BIN)/python scripts/federation.py $(if $(DATA),--data $(DATA))

# Nine of ten cases: those that are short, and one for each promise of the README (tests/tiers.py).
test: $(STAMP)
	$(call tests,--tier short)

# All others.
test-rest: $(STAMP)
	$(call tests,--tier rest)

test-all: $(LONG)
	$(call tests,--tier all)
	$(MAKE) test-long

# What a change since a commit can break, by the imports: make test-changed SINCE=main
test-changed: $(STAMP)
	$(call tests,--changed $(SINCE))

# Measures every case, and writes which are short.
seconds: $(STAMP)
	$(call tests,--seconds tests/seconds.json)

# The notebooks, each script in benchmarks/ at its smallest size, each model with each experiment,
# and mlflow.
test-long: $(LONG)
	$(BIN)/python -m pytest -m long
	$(BIN)/python -m pytest tests/integration/test_loggers.py -k mlflow

test-sites: $(SITES)
	$(BIN)/python -m pytest -m sites tests/sites

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --site-dir outputs/site
	@echo "Open outputs/site/index.html"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) outputs multirun build *.egg-info
