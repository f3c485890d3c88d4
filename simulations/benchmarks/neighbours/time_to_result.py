"""CPU seconds to personal models at ε: ours, and pfl's central DP followed by fine-tuning.

    python -m simulations.benchmarks.neighbours.time_to_result --pfl PYTHON [--data FILE]

Both sides get the same rows of the same users. pfl's rounds, step and epochs are chosen on the test
rows, out of a grid, and only the chosen run is timed: that is in its favour. ``PPSGD.auto`` has
nothing to choose.
"""

import argparse
import json
import logging
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context

from flwr_ppsgd import PPSGD, AdditiveLinear, Minibatches, Poisson, calibrate_noise, client_app
from flwr_ppsgd.simulation import InProcessGrid
from simulations.benchmarks.neighbours.__main__ import PACKAGE, ROOT, SINGLE_THREAD
from simulations.benchmarks.neighbours.serving import Rows, read_rows

EPSILON = 1.0
DELTA = 1e-4
ROUNDS = (5, 20)  # of pfl, each with its own noise


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {PACKAGE}.time_to_result")
    parser.add_argument("--pfl", metavar="PYTHON", required=True, help="an interpreter with pfl")
    parser.add_argument("--data", type=Path, help="x, y, user and test; default: made-up users")
    asked = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.npz"
        if asked.data is None:
            write_made_up_rows(path)
        else:
            write_unit_rows(asked.data, path)
        rows = read_rows(path)
        ours, seconds = train_own(rows)
        cohort = Poisson(rows.users, rate=1.0)
        noise = {}
        for rounds in ROUNDS:
            noise[rounds] = calibrate_noise(
                epsilon=EPSILON, delta=DELTA, cohort=cohort, rounds=rounds
            )
        theirs = run_pfl(asked.pfl, path, noise)
    print(f"{rows.users} users, ε = {EPSILON:g}, δ = {DELTA:g}", end=" · ")
    print("accuracy on users' test rows, CPU seconds")
    print(f"ours, PPSGD.auto through Flower's messages    {ours:.4f} {seconds:8.1f}")
    print(f"pfl, {theirs['chosen']:41s}{theirs['accuracy']:.4f} {theirs['seconds']:8.1f}")


def write_made_up_rows(path: Path, users: int = 300, rows: int = 60, features: int = 40) -> None:
    """Half of the rows are for tests; each user's classes are partly everybody's."""
    source = np.random.default_rng(3)
    common = source.standard_normal((features, 5))
    own = 0.5 * source.standard_normal((users, features, 5))
    x = source.standard_normal((users, rows, features))
    y = (x @ (common + own)).argmax(axis=2)  # users × rows
    np.savez(
        path,
        x=x.reshape(-1, features) / np.sqrt(features),
        y=y.ravel(),
        user=np.repeat(np.arange(users), rows),
        test=np.tile(np.arange(rows) % 2 == 0, users),
    )


def write_unit_rows(source: Path, path: Path) -> None:
    """The file's rows at norm 1, as both sides get them."""
    with np.load(source) as data:
        x = data["x"].reshape(len(data["x"]), -1).astype(np.float64)
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        np.savez(path, x=x, y=data["y"], user=data["user"], test=data["test"])


def train_own(rows: Rows) -> tuple[float, float]:
    """Accuracy of the personal models, and the CPU seconds until they are there."""

    def learner_for(context: Context) -> AdditiveLinear:
        x, y, x_test, y_test = rows.of_user(int(context.node_config["partition-id"]))
        targets = np.eye(rows.classes)
        batches = Minibatches(x, targets[y], len(x), seed=0, user=0)
        test = (x_test, targets[y_test])
        return AdditiveLinear(batches, rows.features, num_outputs=rows.classes, test=test)

    start = time.process_time()
    strategy = PPSGD.auto(population=rows.users, epsilon=EPSILON, delta=DELTA, evaluate_every=100)
    grid = InProcessGrid(client_app(learner_for), rows.users)
    initial = ArrayRecord([np.zeros((rows.features, rows.classes))])
    result = strategy.start(grid, initial)
    seconds = time.process_time() - start
    *_, measures = result.evaluate_metrics_clientapp.values()
    accuracy = measures["accuracy"]
    assert isinstance(accuracy, float)
    return accuracy, seconds


def run_pfl(python: str, path: Path, noise: dict[int, float]) -> dict[str, float | str]:
    """What the other interpreter found."""
    command = [python, "-W", "ignore", "-m", f"{PACKAGE}.pfl_result", str(path), json.dumps(noise)]
    environment = {**os.environ, **SINGLE_THREAD, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
