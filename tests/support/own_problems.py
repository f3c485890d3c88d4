"""Made-up users for tests of what a device solves."""

import numpy as np
from numpy.typing import NDArray

from flwr_ppsgd.models.solve import OwnProblem, PublicColumns
from flwr_ppsgd.recipe import Task

Floats = NDArray[np.float64]
NOISE = np.array([1e-3])
TASKS: list[Task] = ["regression", "classification"]


def plain_columns(task: Task, width: int, numbers: int = 0, sparse: int = 0) -> PublicColumns:
    """Numbers first, sparse columns last; three classes and ones in classification."""
    places = np.arange(width)
    classes = task == "classification"
    return PublicColumns(
        task, places < numbers, places >= width - sparse, 3 if classes else 1, ones=classes
    )


def data(task: Task, n: int, width: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Rows around 2, and targets that depend on them."""
    random = np.random.default_rng([seed, n, width])
    rows = random.normal(size=(n, width)) + 2
    signal = rows @ random.normal(size=(width, 3)) + random.normal(size=(n, 3))
    return rows, signal[:, 0] if task == "regression" else signal.argmax(axis=1)


def made(task: Task, n: int, width: int, seed: int = 0, **kinds: int) -> OwnProblem:
    rows, targets = data(task, n, width, seed)
    return OwnProblem.of(rows, targets, plain_columns(task, width, **kinds), 2.0)


def shared_model(columns: PublicColumns) -> Floats:
    return np.random.default_rng(0).normal(size=(columns.width, columns.outputs))


def whole_rows(problem: OwnProblem) -> Floats:
    """X with all columns of w."""
    rows = np.zeros((len(problem.rows), problem.columns.width))
    rows[:, problem.support] = problem.rows
    return rows
