PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/pytest
# Flower must not phone home, nor install the app's dependencies (torch!) a second time.
export FLWR_TELEMETRY_ENABLED := 0
export NO_MKDOCS_2_WARNING := 1
export FLWR_DISABLE_UPDATE_CHECK := 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1

.PHONY: help demo compare text adapters deployment test test-all test-adopters test-flower test-deployment fuzz check format bench bench-neighbours docs docs-serve lock sbom dist clean

help:                            ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/  /' | sort | awk '{printf "make %-16s", $$1; $$1 = ""; print}'

demo: $(BIN)/.installed          ## personal models of 500 synthetic people at an epsilon of at most 4: one picture, half a minute
	$(BIN)/python simulations/demo.py

compare: $(BIN)/.installed       ## accuracy against ε of the quickstart app under four strategies, one picture
	$(BIN)/python simulations/apps/compare.py simulations/apps/quickstart

text: $(BIN)/.installed          ## tags of short texts: word weights are shared, heads are personal
	$(BIN)/python -m simulations.apps.text

adapters: $(BIN)/.installed      ## a small adapter on a frozen public backbone is shared
	$(BIN)/python -m simulations.apps.adapters

deployment: $(BIN)/.installed    ## SuperLink and SuperNodes on this machine, killed and restarted in the middle
	$(BIN)/python -m simulations.deployment

test: check                      ## all checks, and all tests that need nothing but this machine: 8 minutes
	$(PYTEST) --durations=15

test-all: check                  ## test, and what needs real federations: about 40 minutes
	$(PYTEST) --durations=15
	$(PYTEST) -n 0 -m long tests
	$(MAKE) test-adopters
	$(MAKE) test-deployment

test-adopters: $(BIN)/.installed ## the real Hugging Face, PEFT, Lightning and scikit-learn, nothing downloaded but them
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[adopters]"
	$(PYTEST) -n 0 tests/test_adopters.py

test-flower: .venv-flower/.installed   ## what Flower sees of this, with the newest Flower that installs
	.venv-flower/bin/python -m pytest -n 0 --durations=5 tests/contract tests/simulation tests/test_quickstart.py

test-deployment: $(BIN)/.installed   ## all faults on real SuperLinks and SuperNodes: half an hour
	$(PYTEST) -n 0 -m "deployment or not deployment" tests/deployment

fuzz: $(BIN)/.installed          ## hostile bytes for minutes instead of seconds: 3 minutes on two quiet cores
	$(PYTEST) -m fuzz --hypothesis-profile=fuzz tests

check: $(BIN)/.installed         ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(BIN)/.installed        ## format the code and sort the imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BIN)/.installed         ## speeds, as ratios within one run
	$(BIN)/python -m simulations.benchmarks

NEIGHBOURS := simulations/benchmarks/neighbours
bench-neighbours: $(BIN)/.installed .venv-pfl/.installed .venv-fedjax/.installed   ## beside pfl and fedjax, as ratios within one run; DATA=FILE for the time to a result
	$(BIN)/python -m simulations.benchmarks.neighbours --pfl .venv-pfl/bin/python --fedjax .venv-fedjax/bin/python
	$(BIN)/python -m simulations.benchmarks.neighbours.time_to_result --pfl .venv-pfl/bin/python $(if $(DATA),--data $(DATA))

docs: $(BIN)/.docs               ## build the site in build/site; a warning is an error
	$(BIN)/mkdocs build --strict --quiet
	@echo "Site: build/site/index.html"

docs-serve: $(BIN)/.docs         ## the site at http://127.0.0.1:8000, built again at every change
	$(BIN)/mkdocs serve --strict

sbom: $(BIN)/.release            ## what this environment holds, as build/sbom.json (CycloneDX)
	mkdir -p build
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o build/sbom.json $(BIN)/python

dist: $(BIN)/.release            ## wheel and sdist in dist/, checked
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*

lock: $(BIN)/.installed          ## requirements.lock: the tested versions with their hashes
	$(BIN)/uv pip compile pyproject.toml --extra all -c constraints.txt --generate-hashes --python-version 3.11 \
		--no-header --no-annotate --quiet -o requirements.lock

$(BIN)/.docs: $(BIN)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

$(BIN)/.release: $(BIN)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[release]"
	touch $@

$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	touch $@

# Without constraints.txt: whatever is newest. FLOWER=1.41.0 takes that version instead.
.venv-flower/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-flower
	.venv-flower/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 "flwr[simulation]$(if $(FLOWER),==$(FLOWER),)" -e ".[all,dev]"
	.venv-flower/bin/pip list | grep -i '^flwr '
	touch $@

.venv-%/.installed: $(NEIGHBOURS)/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

clean:                           ## remove the environment and everything that was built
	rm -rf .venv .venv-flower .venv-pfl .venv-fedjax build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
