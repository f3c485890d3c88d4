"""What all sides share: the users' rows, and a process that runs rounds when it is asked to.

This module needs numpy and nothing else, since every side's interpreter imports it.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

USERS = 1000
SAMPLES = 100  # per user
FEATURES = 784
CLASSES = 10
BATCH = 10
COHORT = 10  # users per round
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0
STEP = 0.1


def user_rows() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """x (users × samples × features) and the classes (users × samples)."""
    source = np.random.default_rng(2)
    x = source.standard_normal((USERS, SAMPLES, FEATURES), dtype=np.float32)
    classes = source.integers(CLASSES, size=(USERS, SAMPLES))
    return x, classes


@dataclass(frozen=True)
class Rows:
    """Rows of several users, sorted by user."""

    x: NDArray[np.float64]
    y: NDArray[np.int64]
    test: NDArray[np.bool_]
    starts: NDArray[np.int64]  # where each user's rows begin, and the end

    @property
    def users(self) -> int:
        return len(self.starts) - 1

    @property
    def features(self) -> int:
        return int(self.x.shape[1])

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    def of_user(self, user: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """x and y to learn from, x and y to test on."""
        own = slice(self.starts[user], self.starts[user + 1])
        x, y, test = self.x[own], self.y[own], self.test[own]
        return x[~test], y[~test], x[test], y[test]


def read_rows(path: Path) -> Rows:
    """From x, y, user and test in an .npz file."""
    with np.load(path) as data:
        order = np.argsort(data["user"], kind="stable")
        user = data["user"][order]
        _, first = np.unique(user, return_index=True)
        return Rows(
            x=data["x"][order],
            y=data["y"][order].astype(np.int64),
            test=data["test"][order],
            starts=np.append(first, len(user)),
        )


def serve(run: Callable[[int], Any], versions: str) -> None:
    """Say that this side is ready, by its versions. Then, for each line with a number of rounds on
    the standard input, run them and answer with the CPU seconds of all threads.

    What ``run`` itself prints is dropped.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    print(versions, file=answers, flush=True)
    for line in sys.stdin:
        rounds = int(line)
        start = time.process_time()
        run(rounds)
        print(time.process_time() - start, file=answers, flush=True)
