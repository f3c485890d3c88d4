"""Small files of users' rows for tests: each user has an optimum near a common one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd.lab.find_schema import find_schema
from flwr_ppsgd.lab.loading import group_by_user, load
from flwr_ppsgd.lab.per_user import PerUser
from flwr_ppsgd.lab.problem import Problem
from flwr_ppsgd.lab.tables import RawTable
from tests.support.paths import SHARED

needs_real_data = pytest.mark.skipif(
    not SHARED.is_dir(),
    reason="real data, too large for the repository: they are looked for in ../shared/data",
)
USERS, FEATURES, CLASSES = 9, 4, 3
FLAT: dict[str, Any] = {
    "rate": 0.5,
    "clip-norm": 1.0,
    "noise-multiplier": 0.5,
    "delta": 1e-4,
    "step": 0.1,
    "alpha-q": 0.3,
    "rounds": 6,
    "evaluate-every": 3,
    "insecure-seed": 1,
    "batch-size": 3,
}


def arrays(task: str = "classification", seed: int = 0) -> dict[str, Any]:
    """user, x, y, test: 4 to 12 training rows and 0 to 3 test rows a user."""
    draw = np.random.default_rng(seed)
    trained, tested = 4 + np.arange(USERS), np.arange(USERS) % 4
    user = np.repeat(np.arange(USERS), trained + tested)
    test = np.concatenate([np.arange(n + t) >= n for n, t in zip(trained, tested, strict=True)])
    x = draw.normal(size=(len(user), FEATURES))
    optima = draw.normal(size=(FEATURES, CLASSES)) + 0.3 * draw.normal(
        size=(USERS, FEATURES, CLASSES)
    )
    scores = np.einsum("nd,ndk->nk", x, optima[user])
    y = {
        "classification": scores.argmax(axis=1),
        "regression": scores[:, 0],
        "multi-label": (scores > 0) * 1,
    }[task]
    return {"user": user, "x": x, "y": y, "test": test}


def write(directory: Path, task: str = "classification", **changes: Any) -> Path:
    path = directory / f"{task}.npz"
    np.savez(path, **{**arrays(task), **changes})
    return path


def load_file(path: Path | str, **settings: Any) -> PerUser:
    """Everyone's rows as they are in a file."""
    return load(Problem(data=str(path), **settings))


def per_user(columns: dict[str, Any], source: str = "table", **settings: Any) -> PerUser:
    """Everyone's rows from arrays, as if a file held them."""
    table = RawTable(source, columns)
    schema, _ = find_schema(table, Problem(**settings))
    return group_by_user(table, schema, impute="")
