"""The recipes of docs/flower-apps.md on apps in the shape of Flower's quickstarts, as printed."""

import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context
from torch import nn

from flwr_ppsgd import PPSGD, PersonalModel, Poisson, Release, Steps, calibrate_noise, shared_arrays
from flwr_ppsgd.simulation import InProcessGrid
from tests.support import toy
from tests.support.recipes import DIFFS, FILES, PAGE, README, imported, python_block, write_app

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("file", FILES)
def test_a_recipe_changes_at_most_ten_lines_of_a_file(file: str) -> None:
    lines = DIFFS[file].splitlines()[2:]
    new = [line for line in lines if line.startswith("+") and line.strip("+ ")]
    assert 1 <= len(new) <= 10


@pytest.mark.parametrize(("users", "delta"), [(10, 1e-3), (100, 1e-3), (1000, 1e-4)])
def test_the_pages_table_of_signal_to_noise(users: int, delta: float) -> None:
    """qN·√T/(z·√d) for the quickstart's 62,006 parameters, everyone in every round."""
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| {users:,} (")]
    assert len(rows) == 1
    shown = [float(cell) for cell in rows[0].split("|")[2:6]]
    cohort = Poisson(users, 1.0)
    for epsilon, number in zip((1.0, 4.0, 8.0, 16.0), shown, strict=True):
        z = calibrate_noise(epsilon=epsilon, delta=delta, cohort=cohort, rounds=3)
        reached = math.sqrt(3) * Release(cohort, 1.0, z).signal_to_noise(62_006)
        assert number == pytest.approx(reached, abs=0.006, rel=0.005)


def test_readme_has_no_other_diffs_than_the_page() -> None:
    for block in re.findall(r"```diff\n(.*?)```", README, re.DOTALL):
        assert block in DIFFS.values()


def test_the_pages_code_for_the_whole_network(tmp_path: Path) -> None:
    task = vars(imported(write_app("message", tmp_path / "app"), "task"))
    page: dict[str, Any] = {**task, "torch": torch}
    exec(compile(python_block("The whole network"), "flower-apps.md", "exec"), page)
    arrays = ArrayRecord(task["Net"]().state_dict())
    assert set(page["global_evaluate"](1, arrays)) == {"accuracy", "loss"}
    page["save"](arrays, str(tmp_path / "again.pt"))
    loaded = page["load"](str(tmp_path / "again.pt"))
    size = sum(value.numel() for value in loaded.fc3.parameters())
    mine = page["my_own"](PersonalModel(arrays, np.full(size, 0.1)))
    torch.testing.assert_close(mine.conv1.weight, loaded.conv1.weight)
    torch.testing.assert_close(mine.fc3.weight, loaded.fc3.weight + 0.1)


def test_the_pages_options_of_a_torch_client(tmp_path: Path) -> None:
    app = write_app("message", tmp_path / "app")
    task = imported(app, "task")

    class Net(task.Net):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.fc2 = nn.Linear(2, 2)

    page: dict[str, Any] = {"Net": Net, "loaders": lambda _: task.load_data(0, 1, 10)}
    exec(compile(python_block("Any torch model"), "flower-apps.md", "exec"), page)
    release = Release(Poisson(3, 1.0), clip_norm=1.0, noise_multiplier=1.0)
    strategy = PPSGD(release=release, steps=Steps.from_ratio(0.1, 0.3), delta=1e-3)
    initial = shared_arrays(Net(), ["fc2.*", "fc3.*"])
    strategy.start(InProcessGrid(page["app"], 3), initial, num_rounds=1)


def test_the_page_s_random_convolutions_under_auto(tmp_path: Path) -> None:
    """The same lines on this app's smaller images and few users."""
    task = imported(write_app("message", tmp_path / "app"), "task")

    def loaders(context: Context) -> tuple[Any, Any]:
        loaded: tuple[Any, Any] = task.load_data(context.node_config["partition-id"], 6, 10)
        return loaded

    code = python_block("Nothing to tune")
    assert len(code.splitlines()) <= 15
    for before, after in (("(32, 32, 3)", "(12, 12, 3)"), ("=10)", "=3)"), ("=100,", "=6,")):
        assert code.count(before) == 1
        code = code.replace(before, after)
    page: dict[str, Any] = {"loaders": loaders}
    exec(compile(code, "flower-apps.md", "exec"), page)
    grid = InProcessGrid(page["app"], 6)
    result = page["strategy"].start(grid, page["initial_arrays"])
    rounds = max(result.evaluate_metrics_clientapp)
    assert rounds == 2
    measures = result.evaluate_metrics_clientapp[rounds]
    assert {"accuracy", "shared_accuracy", "local_accuracy"} <= set(measures)


def test_the_pages_curves_are_epsilon_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for TensorBoard, which need not be installed."""
    written: list[tuple[str, float, int]] = []
    writer = types.SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar))
    module = types.ModuleType("torch.utils.tensorboard")
    monkeypatch.setattr(module, "SummaryWriter", lambda _: writer, raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    page: dict[str, Any] = {}
    exec(compile(python_block("Curves in TensorBoard"), "flower-apps.md", "exec"), page)
    result = toy.strategy(release=toy.release(z=2.0)).start(
        toy.grid(), toy.w0(), num_rounds=3, on_round=page["on_round"]
    )
    epsilons = [metrics["epsilon"] for metrics in result.train_metrics_clientapp.values()]
    assert written == [("epsilon", epsilon, n) for n, epsilon in enumerate(epsilons, start=1)]
