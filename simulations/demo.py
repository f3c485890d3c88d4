"""Figure 1a of the paper at one noise level, on its full-size synthetic problem: who learns best,
and for which ε?

A sweep of 36 settings side by side. Takes well under a minute.
"""

import logging
from pathlib import Path

from flwr_ppsgd.cli import SweepBar, console, progress_bar
from flwr_ppsgd.experiments.outputs import free_directory, read_rows
from flwr_ppsgd.experiments.sweep import Sweep
from flwr_ppsgd.experiments.workers import run_sweep
from flwr_ppsgd.promise import rounded_up
from flwr_ppsgd.results.figures import draw_sweep


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.WARNING)
    sweep = Sweep.load(None)
    out = free_directory("demo")
    out.parent.mkdir(exist_ok=True)
    with progress_bar("setting-rounds") as progress:
        run_sweep(sweep, out, SweepBar(progress, sweep.base.training.rounds))
    show(sweep, out)


def show(sweep: Sweep, out: Path) -> None:
    """The table, what each curve would promise to whom, and where the picture is."""
    rows = read_rows(out)
    table, written = draw_sweep(rows, out)
    console.print(table, highlight=False, markup=False, soft_wrap=True)
    spent = max(row.deployed_epsilon for row in rows if row.deployed_epsilon is not None)
    epsilon = rounded_up(spent)
    training = sweep.base.training
    console.print(
        "Every curve is a release of its own, simulated here. In a deployment each would promise "
        f"to each of the {training.population} users: everybody else together learns no more about "
        f"your data than ({epsilon}, {training.delta:g})-joint differential privacy allows; "
        "local learning releases nothing, its epsilon is 0.",
        highlight=False,
    )
    console.print(f"Picture: {written[0]}   epsilon = {epsilon}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
