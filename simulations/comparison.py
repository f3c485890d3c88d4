"""Speed on one workload: Flower's own strategies and the ways to run PPSGD, side by side.

    python simulations/comparison.py

200 users of the paper's synthetic problem (linear, 100 features, minibatches of 10), everyone in 20
rounds, on one thread. CPU seconds per 1,000 client visits, and each as a multiple of FedAvg's.
"""

import os

# read when numpy is imported
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that this runs as a file, too

import logging
import time
from collections.abc import Callable

from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg, Strategy

from flwr_ppsgd import PPSGD, client_app
from flwr_ppsgd.cli import console
from flwr_ppsgd.lab.experiment import Experiment
from flwr_ppsgd.lab.run import run_as_cohort
from flwr_ppsgd.lab.tasks import learner_for
from flwr_ppsgd.simulation import InProcessGrid

USERS = 200
ROUNDS = 20
REPETITIONS = 3  # the fastest counts: other work on the machine only adds


def workload() -> Experiment:
    changes = {"population": USERS, "rounds": ROUNDS, "rate": 1.0, "delta": 1e-4}
    return Experiment.load(overrides=changes)


def through_messages(strategy: Strategy, experiment: Experiment) -> None:
    """Train in this process, with Flower's messages around every visit."""
    app = client_app(learner_for, local_step=experiment.training.step)
    grid = InProcessGrid(app, USERS, experiment.to_flat())
    strategy.start(grid, experiment.task.initial_arrays(), num_rounds=ROUNDS)


def wrapped(experiment: Experiment) -> Strategy:
    release = experiment.training.release()
    return DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0),
        noise_multiplier=release.noise_multiplier,
        clipping_norm=release.clip_norm,
        num_sampled_clients=USERS,
    )


def ways(experiment: Experiment) -> dict[str, Callable[[], object]]:
    """Each way to train once, by name."""

    def plain() -> None:
        through_messages(FedAvg(fraction_evaluate=0.0), experiment)

    def in_wrapper() -> None:
        through_messages(wrapped(experiment), experiment)

    def ours() -> None:
        through_messages(PPSGD.from_config(experiment.training.to_flat()), experiment)

    return {
        "FedAvg, no privacy": plain,
        "FedAvg in Flower's DP wrapper": in_wrapper,
        "PPSGD, the paper's steps": ours,
        "PPSGD on the cohort engine": lambda: run_as_cohort(experiment),
    }


def seconds_of(train: Callable[[], object]) -> float:
    """CPU seconds per 1,000 visits of a client."""
    found = []
    for _ in range(REPETITIONS):
        before = time.process_time()
        train()
        found.append(time.process_time() - before)
    return 1000 * min(found) / (USERS * ROUNDS)


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    timed = {name: seconds_of(train) for name, train in ways(workload()).items()}
    unit = next(iter(timed.values()))
    for name, seconds in timed.items():
        console.print(f"{name:32} {seconds:7.3f} s   {seconds / unit:5.2f} ×", highlight=False)


if __name__ == "__main__":
    main()
