PYTHON ?= python3
BIN := .venv/bin
# Flower must not phone home, nor install the app's dependencies (torch!) a second time.
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION := 1

.PHONY: demo swap deployment test test-deployment check bench clean

demo: $(BIN)/.installed          ## Figure 1a at one noise level: a sweep on the full-size synthetic problem
	$(BIN)/python simulations/demo.py

swap: $(BIN)/.installed          ## one ClientApp under FedAvg, Flower's DP wrapper and PPSGD, one picture
	$(BIN)/python simulations/swap.py

deployment: $(BIN)/.installed    ## SuperLink and SuperNodes on this machine, killed and restarted in the middle
	$(BIN)/python -m simulations.deployment

test: check                      ## all checks and tests
	$(BIN)/pytest

test-deployment: $(BIN)/.installed   ## all faults on real SuperLinks and SuperNodes; half an hour
	$(BIN)/pytest -n 0 -m "deployment or not deployment" tests/deployment tests/client/test_shelf.py

check: $(BIN)/.installed         ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(BIN)/.installed         ## speeds, as ratios within one run
	$(BIN)/python simulations/benchmark.py

$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[simulation,data,dev]"
	touch $@

clean:
	rm -rf .venv build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
