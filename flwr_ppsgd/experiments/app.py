"""The experiments as a Flower app: everything comes from the run config, as ``flwr run`` hands it over."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_ppsgd.client.message_api import client_app
from flwr_ppsgd.experiments.run import Experiment, learner_for, run_on, save
from flwr_ppsgd.results.plots import draw_run

client = client_app(learner_for)
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train on the nodes that Flower provides and write the output directory that ``out`` names, if it does."""
    experiment = Experiment.from_run_config(context.run_config)
    outcome = run_on(grid, experiment)
    if out := str(context.run_config.get("out", "")):
        save(outcome, Path(out), draw_run)
