"""The README's recipes on apps in the shape of Flower's quickstarts, line by line as printed."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from flwr_ppsgd import Poisson, Release, calibrate_noise, whole_module
from flwr_ppsgd.client.personal import recall
from flwr_ppsgd.experiments import flwr_run
from flwr_ppsgd.simulation.grid import InProcessGrid
from tests.support.recipes import (
    CONFIG,
    DIFFS,
    FILES,
    README,
    apply_readme,
    change,
    imported,
    write_app,
)

KINDS = ("message", "legacy")
NODES = 100  # as in the recipe
STATEMENT = "To each of the 100 enrolled users"
FEDAVG = {
    "message": ("strategy = PPSGD(", "strategy = FedAvg(fraction_evaluate=fraction_evaluate)"),
    "legacy": (
        "return ServerAppComponents(strategy=private",
        "return ServerAppComponents(strategy=strategy, config=config)",
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small networks are several times slower on threads that share busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def server_context(directory: Path) -> Context:
    config = {**CONFIG, "final-model": str(directory / "final_model.pt")}
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)


def run(directory: Path, nodes: int) -> InProcessGrid:
    """The app in this process."""
    client = imported(directory, "client_app")
    server = imported(directory, "server_app")
    grid = InProcessGrid(client.app, nodes, CONFIG)
    server.app(grid, server_context(directory))
    return grid


def whole_state(directory: Path) -> dict[str, Any]:
    return dict(torch.load(directory / "final_model.pt"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_stock_apps_run_as_they_are(kind: str, tmp_path: Path) -> None:
    run(write_app(kind, tmp_path / "app"), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_trains_and_states_its_guarantee(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    app = write_app(kind, tmp_path / "app")
    apply_readme(kind, app)
    grid = run(app, NODES)
    assert STATEMENT in caplog.text
    kept = [recall(grid.context(node)) for node in grid.get_node_ids()]
    assert all(personal is not None and personal.visit == 2 for personal in kept)


def test_the_recipe_evaluates_centrally_and_its_model_loads_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stock ``evaluate_fn`` and the lines that save, untouched, with strict=True."""
    app = write_app("message", tmp_path / "app")
    apply_readme("message", app)
    grid = run(app, NODES)
    assert "Central: {'accuracy'" in capsys.readouterr().out
    net = imported(app, "task").Net()
    net.load_state_dict(whole_state(app), strict=True)
    node = next(iter(grid.get_node_ids()))
    personal = recall(grid.context(node))
    assert personal is not None
    values = [value.numpy() for value in whole_state(app).values()]
    mine = whole_module(net, values, "fc3.*", personal.theta)
    offset = mine.fc3.weight.detach() - net.fc3.weight.detach()  # type: ignore[union-attr, operator]
    assert np.linalg.norm(offset.numpy()) > 0
    torch.testing.assert_close(mine.conv1.weight, net.conv1.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_going_back_to_fedavg_is_one_line(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    app = write_app(kind, tmp_path / "app")
    apply_readme(kind, app)
    change(app, "server_app", *FEDAVG[kind])
    run(app, 5)
    assert STATEMENT not in caplog.text
    assert "accuracy" in caplog.text


@pytest.mark.parametrize("file", FILES)
def test_a_recipe_changes_at_most_ten_lines_of_a_file(file: str) -> None:
    lines = DIFFS[file].splitlines()[2:]
    new = [line for line in lines if line.startswith("+") and line.strip("+ ")]
    assert 1 <= len(new) <= 10


@pytest.mark.parametrize(("users", "delta"), [(10, 1e-3), (100, 1e-3), (1000, 1e-4)])
def test_the_readmes_table_of_signal_to_noise(users: int, delta: float) -> None:
    """qN·√T/(z·√d) for the quickstart's 62,006 parameters, everyone in every round."""
    rows = [line for line in README.splitlines() if line.startswith(f"| {users:,} (")]
    assert len(rows) == 1
    shown = [float(cell) for cell in rows[0].split("|")[2:6]]
    cohort = Poisson(users, 1.0)
    for epsilon, number in zip((1.0, 4.0, 8.0, 16.0), shown, strict=True):
        z = calibrate_noise(epsilon=epsilon, delta=delta, cohort=cohort, rounds=3)
        reached = math.sqrt(3) * Release(cohort, 1.0, z).signal_to_noise(62_006)
        assert number == pytest.approx(reached, abs=0.006, rel=0.005)


def test_the_recipe_in_a_real_flower_simulation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """``flwr run`` with Ray; the population is smaller than the recipe's, and nothing else."""
    app = write_app("message", tmp_path / "app")
    apply_readme("message", app)
    server = app / "pytorchexample" / "server_app.py"
    text = server.read_text(encoding="utf-8")
    assert text.count("population=100") == 1
    server.write_text(text.replace("population=100", "population=4"), encoding="utf-8")
    final = app / "saved.pt"
    flwr_run.run_app(app, nodes=4, changes=f"final-model='{final}'")
    shown = capfd.readouterr()
    assert "To each of the 4 enrolled users" in shown.out + shown.err
    imported(app, "task").Net().load_state_dict(torch.load(final), strict=True)
