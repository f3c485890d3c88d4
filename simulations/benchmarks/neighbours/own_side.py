"""This package on the same sizes, and a plain loop in NumPy.

All of them have a personal part, which the neighbours have not. The engine and the loop have the
squared loss; messages have softmax, as the neighbours do. Both keep an account of ε.
"""

import itertools
import logging
import sys
from collections.abc import Callable

import numpy as np
from flwr.app import ArrayRecord

from flwr_ppsgd import Poisson, Release, Steps, client_app
from flwr_ppsgd.lab.engine import EngineSetting
from flwr_ppsgd.lab.linear_engine import LinearEngine
from flwr_ppsgd.simulation import InProcessGrid
from simulations.benchmarks.neighbours.serving import (
    CLASSES,
    CLIP_NORM,
    COHORT,
    FEATURES,
    NOISE_MULTIPLIER,
    USERS,
    serve,
)
from simulations.benchmarks.workload import (
    ledgers,
    linear_learner,
    linear_table,
    strategy,
    train,
    warmed,
)
from simulations.benchmarks.yardsticks import from_table, plain_loop, settings, take

PLANNED = 20_000
GRID_STEPS = (1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01)


def main(kind: str) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    serve(KINDS[kind](), f"flwr-ppsgd with numpy {np.__version__}")


def messages() -> Callable[[int], object]:
    """Real Flower messages in one process."""
    server = strategy(Poisson(USERS, rate=COHORT / USERS))
    grid = InProcessGrid(client_app(linear_learner), USERS)
    turns = train(server, grid, ArrayRecord([np.zeros((FEATURES, CLASSES))]))
    return lambda rounds: take(rounds, turns)


def loop() -> Callable[[int], object]:
    turns = plain_loop(from_table(linear_table()), (FEATURES, CLASSES), one_setting())
    return lambda rounds: take(rounds, turns)


def engine(grid: list[EngineSetting]) -> Callable[[int], object]:
    """Rounds of all settings at once, with ε after each."""
    cohort_engine = warmed(LinearEngine(linear_table(), grid, seed=1))
    growing = ledgers(release())

    def run(rounds: int) -> None:
        for ledger in itertools.islice(growing, rounds):
            cohort_engine.advance()
            ledger.quick_epsilon()

    return run


def release() -> Release:
    return Release(Poisson(USERS, rate=COHORT / USERS), CLIP_NORM, NOISE_MULTIPLIER)


def one_setting() -> EngineSetting:
    return EngineSetting(release(), Steps(0.001, 0.001))


KINDS: dict[str, Callable[[], Callable[[int], object]]] = {
    "messages": messages,
    "loop": loop,
    "one": lambda: engine([one_setting()]),
    "many": lambda: engine(settings(release(), GRID_STEPS)),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
