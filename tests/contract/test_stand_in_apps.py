"""Apps in the shape of Flower's quickstarts, with the page's diffs applied as printed."""

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from flwr_ppsgd.simulation import InProcessGrid
from tests.support.paths import ROOT
from tests.support.recipes import CONFIG, apply_page, change, imported, write_app

KINDS = ("message", "legacy")
NODES = 100  # as in the recipe
STATEMENT = "user-level joint differential privacy"
BACK_TO_FEDAVG = {
    "message": ("strategy = PPSGD.auto(", "strategy = FedAvg(fraction_evaluate=fraction_evaluate)"),
    "legacy": (
        "return ServerAppComponents(strategy=private",
        "return ServerAppComponents(strategy=strategy, config=config)",
    ),
}
QUICKSTARTS = ROOT.parent / "shared" / "apps"
WRITERS = ROOT.parent / "shared" / "data" / "mnist_writer.npz"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small networks are several times slower on threads that share busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(app: Path, nodes: int) -> None:
    """The app in this process, without Ray; its model is saved in its directory."""
    client = imported(app, "client_app")
    server = imported(app, "server_app")
    config: dict[str, Any] = {**CONFIG, "final-model": str(app / "final_model.pt")}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    server.app(InProcessGrid(client.app, nodes, config), context)


@pytest.mark.parametrize("kind", KINDS)
def test_the_apps_run_as_they_are(kind: str, tmp_path: Path) -> None:
    run(write_app(kind, tmp_path / "app"), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_pages_lines_they_train_and_state_their_guarantee(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else changes: what the app saved before, it saves now, and it loads again."""
    caplog.set_level(logging.INFO, logger="flwr")
    app = write_app(kind, tmp_path / "app")
    apply_page(kind, app)
    run(app, NODES)
    assert STATEMENT in caplog.text
    assert "joint differential privacy" in caplog.text
    if kind == "message":
        net = imported(app, "task").Net()
        net.load_state_dict(torch.load(app / "final_model.pt"), strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_going_back_to_fedavg_is_one_line(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same client serves both."""
    caplog.set_level(logging.INFO, logger="flwr")
    app = write_app(kind, tmp_path / "app")
    apply_page(kind, app)
    change(app, "server_app", *BACK_TO_FEDAVG[kind])
    run(app, 5)
    assert STATEMENT not in caplog.text
    assert "accuracy" in caplog.text


@pytest.mark.skipif(not QUICKSTARTS.is_dir(), reason="Flower's quickstarts are not at hand")
@pytest.mark.parametrize("kind", KINDS)
def test_the_pages_lines_fit_flowers_own_quickstart(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="flwr")
    monkeypatch.setenv("MNIST_WRITER", os.fspath(WRITERS))
    monkeypatch.chdir(tmp_path)
    app = tmp_path / "app"
    shutil.copytree(QUICKSTARTS / f"quickstart-{kind}", app)
    apply_page(kind, app)
    run(app, NODES)
    assert STATEMENT in caplog.text
