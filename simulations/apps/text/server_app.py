"""The server: word weights are what it holds."""

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from flwr_ppsgd import PPSGD, shared_arrays
from simulations.apps.side_by_side import everyone
from simulations.apps.text.task import TagNet

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """For ``flwr run`` and any other grid."""
    strategy, _ = train(grid, context.run_config)
    print(strategy.privacy_statement())


def train(grid: Grid, config: UserConfig) -> tuple[PPSGD, Result]:
    """The strategy, and what it brought."""
    strategy = everyone(config)
    initial = shared_arrays(TagNet(), "head.*")
    return strategy, strategy.start(grid, initial, num_rounds=int(config["rounds"]))
