"""The server of the deployment, for both APIs: all settings come from the run config."""

import json
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, UserConfig
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp as LegacyServerApp
from flwr.server import ServerAppComponents
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from flwr_ppsgd import PPSGD
from flwr_ppsgd.legacy import PPSGDStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = PPSGD.from_config(config)
    initial = ArrayRecord([initial_w(config)])
    strategy.start(grid, initial, num_rounds=int(config["rounds"]))
    out = Path(str(config["checkpoint-dir"])) / "privacy.json"
    out.write_text(json.dumps(strategy.privacy_data(), indent=2))


def server_fn(context: Context) -> ServerAppComponents:
    config = context.run_config
    initial = ndarrays_to_parameters([initial_w(config)])
    strategy = PPSGDStrategy.from_config(config, initial_parameters=initial)
    rounds = strategy.server_config(int(config["rounds"]))
    return ServerAppComponents(strategy=strategy, config=rounds)


def initial_w(config: UserConfig) -> NDArray[np.float64]:
    """w before the first round."""
    return np.zeros((int(config["features"]), int(config["outputs"])))


legacy_app = LegacyServerApp(server_fn=server_fn)
