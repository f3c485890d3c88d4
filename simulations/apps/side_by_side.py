"""What the examples share: runs side by side in this process, a table of them and a picture."""

import argparse
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from torch import nn

from flwr_ppsgd import (
    PPSGD,
    Ledger,
    Poisson,
    Release,
    Steps,
    calibrate_noise,
    shared_arrays,
)
from flwr_ppsgd.cli import console
from flwr_ppsgd.lab.figures import learning_curves
from flwr_ppsgd.lab.rows import RunRow
from flwr_ppsgd.simulation import InProcessGrid
from flwr_ppsgd.statement import rounded_up

DELTA = 1e-4
CLIP_NORM = 0.1
MEASURE = "accuracy"
PERSONAL = "head.*"  # the user's own layers
FOOTNOTE = "Means over users' own test data: outside the guarantee."


@dataclass(frozen=True)
class Run:
    """One curve.

    Args:
        client: the clients.
        network: theirs, of which the server holds everything but ``PERSONAL``.
        config: of the run.
    """

    client: ClientApp
    network: Callable[[], nn.Module]
    config: UserConfig

    def train(self) -> tuple[PPSGD, Result]:
        """The strategy, and what it brought."""
        strategy = everyone(self.config)
        grid = InProcessGrid(self.client, int(self.config["population"]), self.config)
        initial = shared_arrays(self.network(), PERSONAL)
        rounds = int(self.config["rounds"])
        return strategy, strategy.start(grid, initial, num_rounds=rounds)


def everyone(config: Mapping[str, Any]) -> PPSGD:
    """PPSGD with all users in every round, at the ε of a run config.

    Args:
        config: has population, epsilon, rounds, and the step of w: 0 is learning alone.
    """
    rounds = int(config["rounds"])
    cohort = Poisson(int(config["population"]), rate=1.0)
    z = calibrate_noise(epsilon=float(config["epsilon"]), delta=DELTA, cohort=cohort, rounds=rounds)
    return PPSGD(
        release=Release(cohort, CLIP_NORM, z),
        steps=Steps(shared=float(config["step"]), personal=1.0),  # clients have their own rate
        delta=DELTA,
        evaluate_every=max(1, rounds // 8),
    )


def arguments(program: str, *, rounds: int, population: int) -> argparse.ArgumentParser:
    """The options of every example."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--epsilon", type=float, default=4.0, help="of the shared part")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--users", type=int, default=population)
    parser.add_argument("--picture", type=Path, default=Path("runs") / f"{program}.png")
    return parser


def show(runs: Mapping[str, Run], picture: Path, title: str) -> dict[str, float]:
    """Run everything, print how well users do at the end, draw the curves.

    Returns:
        the accuracy at the end, by label.
    """
    logging.getLogger("flwr").setLevel(logging.WARNING)
    curves = {}
    for label, run in runs.items():
        strategy, result = run.train()
        curves[label] = with_epsilon(rows_of(result, MEASURE), strategy)
        last = curves[label][-1]
        spent = rounded_up(last.epsilon)
        console.print(
            f"{label:32s} {MEASURE} {last.measures[MEASURE]:.3f}   epsilon {spent}", highlight=False
        )
    picture.parent.mkdir(parents=True, exist_ok=True)
    learning_curves(curves, MEASURE, picture, title, FOOTNOTE)
    console.print(f"Picture: {picture}", soft_wrap=True)
    return {label: rows[-1].measures[MEASURE] for label, rows in curves.items()}


def rows_of(result: Result, measure: str) -> list[RunRow]:
    """What the clients report after each round; without ε."""
    rows = []
    for round_, metrics in result.evaluate_metrics_clientapp.items():
        value: Any = metrics[measure]
        if round_ > 0:
            rows.append(RunRow(round_, 0.0, 0.0, {measure: float(value)}))
    return rows


def with_epsilon(rows: list[RunRow], strategy: PPSGD) -> list[RunRow]:
    """What PPSGD has spent after each round; nothing if it publishes nothing."""
    priced = []
    for row in rows:
        ledger = Ledger(strategy.training.delta)
        if strategy.steps.publishes:
            ledger = ledger.record(strategy.release, row.round)
        epsilon = ledger.epsilon()
        priced.append(RunRow(row.round, epsilon, epsilon, row.measures))
    return priced
