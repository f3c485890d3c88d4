"""Apps in the shape of Flower's quickstarts, with the page's diffs applied as printed."""

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from flwr_ppsgd.lab import flwr_run
from flwr_ppsgd.simulation import InProcessGrid
from tests.support.paths import ROOT
from tests.support.recipes import CONFIG, PACKAGE, apply_page, change, imported, write_app

KINDS = ("message", "legacy")
NODES = 20  # the page has 100
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
pytestmark = pytest.mark.usefixtures("one_thread")


def run(app: Path, nodes: int) -> None:
    """The app in this process, without Ray; its model is saved in its directory."""
    client = imported(app, "client_app")
    server = imported(app, "server_app")
    config: dict[str, Any] = {**CONFIG, "final-model": str(app / "final_model.pt")}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    server.app(InProcessGrid(client.app, nodes, config), context)


def apply_page_for(nodes: int, kind: str, app: Path) -> None:
    """The page's lines, for fewer users than it has."""
    apply_page(kind, app)
    server = app / PACKAGE / "server_app.py"
    text = server.read_text(encoding="utf-8")
    assert text.count("population=100") == 1
    server.write_text(text.replace("population=100", f"population={nodes}"), encoding="utf-8")


def last_measures(kind: str, caplog: pytest.LogCaptureFixture) -> dict[str, float]:
    """The accuracies that the log shows at the end: in the last round's line, or in History."""
    if kind == "legacy":
        found = re.findall(r"'(\w*accuracy)': \[.*?\(\d+, ([0-9.]+)\)\]", caplog.text)
    else:
        *_, line = [text for text in caplog.messages if text.startswith("[ROUND")]
        of_clients = line.partition("evaluate_fn")[0]
        found = re.findall(r"(\w*accuracy) ([0-9.]+)", of_clients)
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize("kind", KINDS)
def test_the_apps_run_as_they_are(kind: str, tmp_path: Path) -> None:
    run(write_app(kind, tmp_path / "app"), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_pages_lines_they_train_and_state_their_guarantee(
    kind: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing else changes: the app's own evaluation, and what it saves, which loads again."""
    caplog.set_level(logging.INFO, logger="flwr")
    app = write_app(kind, tmp_path / "app")
    apply_page_for(NODES, kind, app)
    run(app, NODES)
    assert caplog.text.count(STATEMENT) == 1
    assert set(last_measures(kind, caplog)) == {"accuracy", "local_accuracy", "shared_accuracy"}
    if kind == "message":
        assert "Central: {'accuracy'" in capsys.readouterr().out
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


@pytest.mark.long
def test_the_recipe_in_a_real_flower_simulation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """``flwr run`` with Ray, which ``test_four_ways`` tries with another app in every run."""
    app = write_app("message", tmp_path / "app")
    apply_page_for(4, "message", app)
    final = app / "saved.pt"
    flwr_run.run_app(app, nodes=4, changes=f"final-model='{final}'")
    shown = capfd.readouterr()
    assert STATEMENT in shown.out + shown.err
    imported(app, "task").Net().load_state_dict(torch.load(final), strict=True)


@pytest.mark.long
@pytest.mark.skipif(
    not QUICKSTARTS.is_dir(), reason="Flower's quickstarts are looked for in ../shared/apps"
)
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
    run(app, 100)
    assert STATEMENT in caplog.text
    reached = last_measures(kind, caplog)
    assert reached["accuracy"] >= max(0.9, reached["local_accuracy"], reached["shared_accuracy"])


MISTAKES = {
    "wrong loss": (
        'app = torch_client(Net, "fc3.*", loaders, additive=True, loss=torch.nn.BCELoss())'
    ),
    "three loaders": (
        'app = torch_client(Net, "fc3.*", lambda c: (*loaders(c), None), additive=True)'
    ),
    "failing mod": (
        'app = torch_client(Net, "fc3.*", loaders, additive=True, '
        'mods=[lambda message, *_: message.content["config"]["lr"] / 0])'
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_all_clients_ends_after_the_first_release_and_is_shown_once(
    mistake: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is told a code; here both share a process, and its log has the client's line."""
    app = write_app("message", tmp_path / "app")
    apply_page_for(NODES, "message", app)
    change(app, "client_app", "app = torch_client(", MISTAKES[mistake])
    said = r"learner-failed: \w+Error\)\. What was released is charged"
    with pytest.raises(RuntimeError, match=said):
        run(app, NODES)
    shown = [record for record in caplog.records if "the server is told" in record.getMessage()]
    assert len(shown) == 1
