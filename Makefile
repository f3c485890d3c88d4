PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/pytest
# Flower must not phone home, nor install the app's dependencies (torch!) a second time.
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1

.PHONY: help demo swap text adapters deployment test test-all test-adopters test-deployment fuzz check format bench clean

help:                            ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/  /' | sort | awk '{printf "make %-16s", $$1; $$1 = ""; print}'

demo: $(BIN)/.installed          ## Figure 1a at one noise level: a sweep on the full-size synthetic problem
	$(BIN)/python simulations/demo.py

swap: $(BIN)/.installed          ## one ClientApp under FedAvg, Flower's DP wrapper and PPSGD.auto at one ε, one picture
	$(BIN)/python -m simulations.swap

text: $(BIN)/.installed          ## tags of short texts: word weights are shared, heads are personal
	$(BIN)/python -m simulations.text

adapters: $(BIN)/.installed      ## a small adapter on a frozen public backbone is shared
	$(BIN)/python -m simulations.adapters

deployment: $(BIN)/.installed    ## SuperLink and SuperNodes on this machine, killed and restarted in the middle
	$(BIN)/python -m simulations.deployment

test: check                      ## all checks, and all tests that need nothing but this machine: 8 minutes
	$(PYTEST) --durations=15

test-all: check                  ## test, and what needs real federations: about 40 minutes
	$(PYTEST) --durations=15
	$(MAKE) test-adopters
	$(MAKE) test-deployment

test-adopters: $(BIN)/.installed ## the real Hugging Face, PEFT, Lightning and scikit-learn, nothing downloaded but them
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[adopters]"
	$(PYTEST) -n 0 tests/test_adopters.py

test-deployment: $(BIN)/.installed   ## all faults on real SuperLinks and SuperNodes: half an hour
	$(PYTEST) -n 0 -m "deployment or not deployment" tests/deployment tests/client/test_shelf.py

fuzz: $(BIN)/.installed          ## hostile bytes for minutes instead of seconds
	$(PYTEST) -m fuzz --hypothesis-profile=fuzz tests

check: $(BIN)/.installed         ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(BIN)/.installed        ## format the code and sort the imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BIN)/.installed         ## speeds, as ratios within one run
	$(BIN)/python simulations/benchmark.py

$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	touch $@

clean:                           ## remove the environment and everything that was built
	rm -rf .venv build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
