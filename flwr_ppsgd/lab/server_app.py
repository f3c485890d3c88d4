"""The experiments as a Flower ServerApp: everything comes from the run config."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.outputs import Draw, save
from flwr_ppsgd.lab.run import run_on


def server_app(draw: Draw | None = None) -> ServerApp:
    """A ServerApp that trains on the nodes that Flower provides.

    It writes the output directory that the run config's ``out`` names, if it names one.

    Args:
        draw: adds a picture to the output directory; None adds none.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        experiment = Experiment.from_run_config(context.run_config)
        outcome = run_on(grid, experiment)
        out = str(context.run_config.get("out", ""))
        if out:
            save(outcome, Path(out), draw)

    return app


server = server_app()
