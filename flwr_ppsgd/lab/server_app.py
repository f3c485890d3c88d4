"""The experiments as a Flower ServerApp: everything comes from the run config."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.outputs import save
from flwr_ppsgd.lab.run import run_on_grid

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train on the nodes that Flower provides, and write the output directory that the run
    config's ``out`` names, if it names one."""
    outcome = run_on_grid(grid, Experiment.from_run_config(context.run_config))
    out = str(context.run_config.get("out", ""))
    if out:
        save(outcome, Path(out))
