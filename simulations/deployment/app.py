"""The Flower app of the deployment: each node reads one file, which never leaves it. Both APIs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp as LegacyServerApp
from flwr.server import ServerAppComponents
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from flwr_ppsgd import PPSGD, Order, client_app
from flwr_ppsgd.server.legacy_api import PPSGDClient, PPSGDStrategy

Floats = NDArray[np.float64]


class LeastSquares:
    """½·mean‖y − (w + θ)ᵀx‖² over the minibatch of a visit. In numpy alone: Flower starts a process for every message,
    and torch would take most of it."""

    def __init__(self, x: Floats, y: Floats, size: int, test: tuple[Floats, Floats]) -> None:
        self._x, self._y, self._size, self._test = x, y, size, test
        self.num_examples = len(x)

    def initial_theta(self) -> Floats:
        return np.zeros(self._x.shape[1] * self._y.shape[1])

    def gradients(self, w: Floats, theta: Floats, order: Order) -> tuple[Floats, Floats]:
        rows = np.arange((order.visit - 1) * self._size, order.visit * self._size) % len(self._x)
        x, y = self._x[rows], self._y[rows]
        gradient = (x.T @ (x @ (w + theta).reshape(-1, y.shape[1]) - y)).reshape(-1) / len(rows)
        return gradient, gradient

    def evaluate(self, w: Floats, theta: Floats) -> dict[str, float]:
        x, y = self._test
        return {"mse": float(np.mean((x @ (w + theta).reshape(-1, y.shape[1]) - y) ** 2))}


def learner_from(path: str, size: int) -> LeastSquares:
    with np.load(path) as data:
        return LeastSquares(data["x"], data["y"], size, (data["x_test"], data["y_test"]))


def learner_for(context: Context) -> LeastSquares:
    return learner_from(str(context.node_config["data"]), int(context.run_config["batch-size"]))


def initial_w(config: dict[str, Any]) -> Floats:
    return np.zeros((int(config["features"]), int(config["outputs"])))


# --- Message API
client = client_app(learner_for)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = PPSGD.from_config(context.run_config)
    initial = ArrayRecord([initial_w(context.run_config)])
    strategy.start(grid, initial, num_rounds=int(context.run_config["rounds"]))
    out = Path(str(context.run_config["checkpoint-dir"])) / "privacy.json"
    out.write_text(json.dumps(strategy.privacy_data(), indent=2))


# --- legacy API
def client_fn(context: Context) -> Client:
    return PPSGDClient(learner_for(context), context).to_client()


def server_fn(context: Context) -> ServerAppComponents:
    initial = ndarrays_to_parameters([initial_w(context.run_config)])
    strategy = PPSGDStrategy.from_config(context.run_config, initial_parameters=initial)
    return ServerAppComponents(strategy=strategy, config=strategy.server_config(int(context.run_config["rounds"])))


legacy_client = ClientApp(client_fn=client_fn)
legacy_server = LegacyServerApp(server_fn=server_fn)
