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

from flwr_ppsgd import PPSGD, client_app
from flwr_ppsgd.datasets import Minibatches
from flwr_ppsgd.legacy import PPSGDClient, PPSGDStrategy
from flwr_ppsgd.models import AdditiveLinear


def learner_for(context: Context) -> AdditiveLinear:
    with np.load(str(context.node_config["data"])) as data:
        x, y, test = data["x"], data["y"], (data["x_test"], data["y_test"])
    size = int(context.run_config["batch-size"])
    return AdditiveLinear(Minibatches(x, y, size, seed=0, user=0), x.shape[1], y.shape[1], test=test)


def initial_w(context: Context) -> np.ndarray[Any, Any]:
    return np.zeros((int(context.run_config["features"]), int(context.run_config["outputs"])))


# --- Message API
client = client_app(learner_for)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = PPSGD.from_config(context.run_config)
    rounds = int(context.run_config["rounds"])
    result = strategy.start(grid, ArrayRecord([initial_w(context)]), num_rounds=rounds)
    out = Path(str(context.run_config["out"]))
    np.savez(out / "model.npz", *result.arrays.to_numpy_ndarrays())
    (out / "privacy.json").write_text(json.dumps(strategy.privacy_data(), indent=2))


# --- legacy API
def client_fn(context: Context) -> Client:
    return PPSGDClient(learner_for(context), context).to_client()


def server_fn(context: Context) -> ServerAppComponents:
    strategy = PPSGDStrategy.from_config(
        context.run_config, initial_parameters=ndarrays_to_parameters([initial_w(context)])
    )
    return ServerAppComponents(strategy=strategy, config=strategy.server_config(int(context.run_config["rounds"])))


legacy_client = ClientApp(client_fn=client_fn)
legacy_server = LegacyServerApp(server_fn=server_fn)
