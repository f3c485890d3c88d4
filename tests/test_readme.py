"""The README's code, pasted into a stock-shaped app."""

import importlib
import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp as LegacyServerApp
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp.strategy import FedAvg

from flwr_ppsgd import Poisson, Release, Steps
from flwr_ppsgd.client.legacy_api import PPSGDClient
from flwr_ppsgd.client.personal import recall
from flwr_ppsgd.server.legacy_api import PPSGDStrategy
from flwr_ppsgd.simulation.grid import InProcessGrid
from tests.support.paths import ROOT
from tests.support.stock.task import Net

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
SERVER, CLIENT, LEGACY = BLOCKS[:3]
STOCK = ROOT / "tests" / "support" / "stock"
DIFFS = dict(
    zip(
        ("message_client", "message_server", "numpy_client", "numpy_server"),
        re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL),
        strict=True,
    )
)


def load_data(user: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(user)
    x = torch.randn(40, 8, generator=source)
    return x[:30], x[:30, :3].argmax(dim=1), x[30:], x[30:, :3].argmax(dim=1)


def pasted(*blocks: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"Net": Net, "load_data": load_data}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    return namespace


def nowhere() -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def test_the_message_api_code_trains_and_states_its_guarantee(
    capsys: pytest.CaptureFixture[str],
) -> None:
    namespace = pasted(CLIENT)
    client = namespace["app"]
    exec(compile(SERVER, "README.md", "exec"), namespace)
    namespace["app"](InProcessGrid(client, 100), nowhere())
    assert "To each of the 100 enrolled users" in capsys.readouterr().out


def test_the_legacy_code_runs() -> None:
    namespace = pasted(CLIENT)
    arrays = namespace["model"]().initial_arrays().to_numpy_ndarrays()
    namespace |= {
        "PPSGDClient": PPSGDClient,
        "PPSGDStrategy": PPSGDStrategy,
        "ServerAppComponents": ServerAppComponents,
        "ServerConfig": ServerConfig,
        "ndarrays_to_parameters": ndarrays_to_parameters,
        "release": Release(Poisson(4, 1.0), 1.0, 1.0),
        "steps": Steps.from_ratio(0.1, 0.3),
        "initial_w": arrays,
    }
    exec(
        compile(LEGACY.replace("server_config(50)", "server_config(2)"), "README.md", "exec"),
        namespace,
    )
    grid = InProcessGrid(ClientApp(client_fn=namespace["client_fn"]), 4)
    LegacyServerApp(server_fn=namespace["server_fn"])(grid, nowhere())


def test_the_line_that_swaps_to_fedavg() -> None:
    line = next(block for block in BLOCKS if "local_step=0.1" in block).splitlines()[0]
    namespace = pasted(CLIENT)
    exec(line, namespace)
    result = FedAvg().start(
        InProcessGrid(namespace["app"], 5), namespace["model"]().initial_arrays(), num_rounds=2
    )
    assert all(np.isfinite(array).all() for array in result.arrays.to_numpy_ndarrays())
    assert result.evaluate_metrics_clientapp[2]["accuracy"] >= 0  # type: ignore[operator]


def changed(name: str) -> dict[str, Any]:
    """A stock app after the README's diff, each piece of which must fit in exactly one place."""
    source = (STOCK / f"{name}.py").read_text()
    for piece in DIFFS[name].split("...\n"):
        lines = piece.splitlines(keepends=True)
        before, after = (
            "".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +")
        )
        assert source.count(before) == 1, (name, before)
        source = source.replace(before, after)
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), namespace)
    return namespace


def touched(*names: str) -> int:
    """Lines that are new, blank ones aside: a line in place of another counts once."""
    return sum(
        line.startswith("+") and len(line.strip()) > 1
        for name in names
        for line in DIFFS[name].splitlines()
    )


STOCK_CONFIG: dict[str, Any] = {"batch-size": 10, "local-epochs": 1, "num-server-rounds": 2}


def stock_context() -> Context:
    return Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=STOCK_CONFIG)


def test_the_quickstart_becomes_ppsgd_in_fewer_than_ten_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Step by step as the README says, to an app in the shape of Flower's PyTorch quickstart."""
    caplog.set_level(logging.INFO, logger="flwr")
    client, server = changed("message_client"), changed("message_server")
    grid = InProcessGrid(client["app"], 10, STOCK_CONFIG)
    server["app"](grid, stock_context())
    assert "To each of the 10 enrolled users" in caplog.text
    assert all(recall(grid.context(node)) for node in grid.get_node_ids())
    assert touched("message_client", "message_server") < 10


def test_a_numpy_client_app_becomes_ppsgd_in_fewer_than_ten_lines() -> None:
    client, server = changed("numpy_client"), changed("numpy_server")
    grid = InProcessGrid(client["app"], 10, STOCK_CONFIG)
    server["app"](grid, stock_context())
    assert all(recall(grid.context(node)) for node in grid.get_node_ids())
    assert touched("numpy_client", "numpy_server") < 10


def test_the_stock_apps_run_as_they_are() -> None:
    for kind in ("message", "numpy"):
        app = importlib.import_module(f"tests.support.stock.{kind}_client").app
        importlib.import_module(f"tests.support.stock.{kind}_server").app(
            InProcessGrid(app, 3, STOCK_CONFIG), stock_context()
        )
