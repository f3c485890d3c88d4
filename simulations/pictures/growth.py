"""How the cost of a round grows: with the population, the cohort, the parameters and the settings.

    python simulations/pictures/growth.py docs/growth.png

CPU time on one thread, the shortest of several repetitions. The dashed lines are what this machine
could do at best: memory copied, or matrices multiplied, as fast as it can.
"""

import os

# read when numpy is imported
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that this runs as a file, too

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flwr_ppsgd import PPSGD, Poisson, Release, client_app
from flwr_ppsgd.lab.linear_engine import LinearEngine
from flwr_ppsgd.simulation import InProcessGrid
from simulations.benchmarks.measuring import seconds
from simulations.benchmarks.workload import (
    BATCH,
    CLASSES,
    FEATURES,
    REPLIES,
    USERS,
    constant_learner,
    fedavg,
    linear_learner,
    linear_table,
    several,
    strategy,
    train,
)
from simulations.benchmarks.yardsticks import settings, take

POPULATIONS = (10**3, 10**4, 10**5, 10**6)
COHORTS = (1, 3, 10, 30, 100, 300, 1000)
PARAMETERS = (10**3, 10**4, 10**5, 10**6, 10**7)
SETTINGS = (1, 3, 9, 27, 63, 99)
STEPS = tuple(1e-4 * 1.5**k for k in range(11))


@dataclass(frozen=True)
class Curve:
    """Milliseconds of CPU time for each value on the horizontal axis."""

    name: str
    at: Sequence[int]
    milliseconds: list[float]
    limit: bool = False


def per_round(turns: Iterator[float], rounds: int, repetitions: int = 5) -> float:
    """Milliseconds per round, after two that pay for what is kept."""
    take(2, turns)
    shortest = min(seconds(lambda: take(rounds, turns)) for _ in range(repetitions))
    return 1000 * shortest / rounds


def linear_round(server: PPSGD, nodes: int, rounds: int) -> float:
    grid = InProcessGrid(client_app(linear_learner), nodes)
    return per_round(train(server, grid, ArrayRecord([np.zeros((FEATURES, CLASSES))])), rounds)


def by_population() -> list[Curve]:
    found = []
    for nodes in POPULATIONS:
        found.append(linear_round(strategy(Poisson(nodes, REPLIES / nodes)), nodes, rounds=20))
    return [Curve("10 users per round", POPULATIONS, found)]


def by_cohort() -> list[Curve]:
    found = []
    for size in COHORTS:
        server = strategy(Poisson(USERS, size / USERS))
        found.append(linear_round(server, USERS, rounds=max(1, 200 // size)))
    product = 4 * BATCH * FEATURES * CLASSES  # floating-point operations of one user's gradient
    limit = [1000 * size * product / blas_speed() for size in COHORTS]
    return [
        Curve("1,000 users enrolled", COHORTS, found),
        Curve("the gradients alone, at the speed of BLAS", COHORTS, limit, limit=True),
    ]


def by_parameters() -> list[Curve]:
    ours = []
    theirs = []
    for size in PARAMETERS:
        rounds = max(1, 10**5 // size)
        w = ArrayRecord([np.zeros(size, np.float32)])
        server = strategy(Poisson(REPLIES, 1.0))
        grid = InProcessGrid(client_app(constant_learner), REPLIES)
        ours.append(per_round(train(server, grid, w), rounds, repetitions=3))
        theirs.append(per_round(fedavg(w), rounds, repetitions=3))
    bytes_read = [2 * 4 * size * REPLIES for size in PARAMETERS]  # w out, a gradient back
    limit = [1000 * moved / copy_speed() for moved in bytes_read]
    return [
        Curve("PPSGD, 10 users, float32", PARAMETERS, ours),
        Curve("FedAvg, the same", PARAMETERS, theirs),
        Curve("w and the replies copied once", PARAMETERS, limit, limit=True),
    ]


def by_settings() -> list[Curve]:
    """Per setting and round, on the cohort engine."""
    release = Release(Poisson(USERS, 0.01), clip_norm=10.0, noise_multiplier=1.0)
    grid = settings(release, STEPS)
    order = np.random.default_rng(0).permutation(len(grid))
    curves = []
    for dtype in (np.float64, np.float32):
        found = []
        for count in SETTINGS:
            chosen = [grid[place] for place in order[:count]]
            engine = LinearEngine(linear_table(), chosen, seed=1, dtype=dtype)
            several(engine, 200)
            shortest = min(seconds(lambda: several(engine, 20)) for _ in range(5))  # noqa: B023
            found.append(1000 * shortest / 20 / count)
        curves.append(Curve(np.dtype(dtype).name, SETTINGS, found))
    products = 4 * REPLIES * BATCH * FEATURES * CLASSES
    limit = [1000 * products / blas_speed()] * len(SETTINGS)
    return [*curves, Curve("scores and gradient of w, float64 BLAS", SETTINGS, limit, limit=True)]


def blas_speed(size: int = 800) -> float:
    """Floating-point operations per second in a product of large float64 matrices."""
    matrix = np.random.default_rng(0).normal(size=(size, size))
    shortest = min(seconds(lambda: matrix @ matrix) for _ in range(5))
    return 2 * size**3 / shortest


def copy_speed(size: int = 10**7) -> float:
    """Bytes per second, read and written again, of arrays that fit no cache."""
    source = np.ones(size)
    copy = np.empty_like(source)
    shortest = min(seconds(lambda: np.copyto(copy, source)) for _ in range(5))
    return 8 * size / shortest


def draw(axes: Axes, title: str, curves: Sequence[Curve]) -> None:
    for curve in curves:
        style = "--" if curve.limit else "o-"
        colour = "grey" if curve.limit else None
        axes.loglog(curve.at, curve.milliseconds, style, color=colour, ms=4, label=curve.name)
        pairs = zip(curve.at, curve.milliseconds, strict=True)
        values = "  ".join(f"{x:g}: {ms:.3g}" for x, ms in pairs)
        print(f"{title}, {curve.name}, in ms: {values}", flush=True)
    axes.set(xlabel=title, ylabel="CPU milliseconds")
    axes.set_ylim(bottom=min(1.0, axes.get_ylim()[0]))
    axes.grid(alpha=0.3, lw=0.5)
    axes.legend(fontsize=8)


PANELS: tuple[tuple[str, Callable[[], list[Curve]]], ...] = (
    ("users enrolled", by_population),
    ("users per round", by_cohort),
    ("parameters", by_parameters),
    ("settings side by side (per setting)", by_settings),
)


def main(out: str) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    figure = Figure(figsize=(9.6, 7.2), layout="constrained")
    places = figure.subplots(2, 2).flat
    for axes, (title, measure) in zip(places, PANELS, strict=True):
        draw(axes, title, measure())
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
