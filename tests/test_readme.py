"""The README's code, pasted into a stock-shaped app."""

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
from torch import nn

from flwr_ppsgd import Poisson, Release, Steps
from flwr_ppsgd.client.legacy_api import PPSGDClient
from flwr_ppsgd.server.legacy_api import PPSGDStrategy
from flwr_ppsgd.simulation.grid import InProcessGrid
from tests.support.paths import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
SERVER, CLIENT, LEGACY = BLOCKS[:3]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 6)
        self.fc2 = nn.Linear(6, 6)
        self.fc3 = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))
        return out


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
