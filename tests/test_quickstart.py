"""The quickstart app: built, under every strategy, in both places; and the script that compares."""

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from simulations.apps import compare
from tests.support.paths import ROOT

QUICKSTART = ROOT / "simulations" / "apps" / "quickstart"
STRATEGIES = ["ppsgd", "ppsgd-alpha", "fedavg", "fedprox", "fedavg-dp"]
NODES = 6
FEW = {"population": NODES, "num-server-rounds": 2}


@pytest.fixture(scope="module")
def app() -> compare.App:
    return compare.App.load(QUICKSTART)


def test_flower_builds_it(tmp_path: Path) -> None:
    flwr = Path(sys.executable).parent / "flwr"
    subprocess.run([flwr, "build", "--app", QUICKSTART], cwd=tmp_path, check=True)
    (bundle,) = tmp_path.glob("*.fab")
    with zipfile.ZipFile(bundle) as files:
        names = set(files.namelist())
    assert {"LICENSE", "README.md", "quickstart/server_app.py", "quickstart/task.py"} <= names


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_the_same_client(strategy: str, app: compare.App) -> None:
    measures = app.measures(NODES, {**FEW, "strategy": strategy, "epsilon": 8.0})
    assert 0 < measures["accuracy"] <= 1
    assert ("local_accuracy" in measures) == (strategy == "ppsgd")


def test_an_unknown_strategy_is_named(app: compare.App) -> None:
    with pytest.raises(ValueError, match=r"strategy must be one of .*, got 'fedsgd'"):
        app.measures(NODES, {**FEW, "strategy": "fedsgd"})


def test_a_node_with_a_file_reads_it(app: compare.App, tmp_path: Path) -> None:
    from quickstart.client_app import loaders
    from quickstart.task import CLASSES, FEATURES

    x = np.ones((7, FEATURES))
    y = np.arange(7) % CLASSES
    np.savez(tmp_path / "rows.npz", x=x, y=y, x_test=x[:3], y_test=y[:3])
    node: dict[str, str | int] = {"data-path": str(tmp_path / "rows.npz"), "partition-id": 3}
    context = Context(1, 1, {**node}, RecordDict(), app.config)
    train, test = loaders(context)
    assert sum(len(y) for _, y in train) == 7
    assert sum(len(y) for _, y in test) == 3


def test_the_shared_network_is_saved(app: compare.App, tmp_path: Path) -> None:
    import torch
    from quickstart.task import Net

    path = tmp_path / "shared.pt"
    app.measures(NODES, {**FEW, "final-model": str(path)})
    network = Net()
    network.load_state_dict(torch.load(path), strict=True)


def test_a_directory_without_an_app_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path)])
    assert "has no pyproject.toml: give the directory of a Flower app" in capsys.readouterr().err
