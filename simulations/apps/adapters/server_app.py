"""The server: it holds the adapter, or the whole network but the head."""

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from flwr_ppsgd import PPSGD, shared_arrays
from simulations.apps.adapters.task import adapted, whole
from simulations.apps.side_by_side import everyone

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """For ``flwr run`` and any other grid."""
    strategy, _ = train(grid, context.run_config)
    print(strategy.privacy_statement())


def train(grid: Grid, config: UserConfig) -> tuple[PPSGD, Result]:
    """The strategy, and what it brought."""
    network = whole() if config["share-all"] else adapted()
    strategy = everyone(config)
    initial = shared_arrays(network, "head.*")
    return strategy, strategy.start(grid, initial, num_rounds=int(config["rounds"]))
