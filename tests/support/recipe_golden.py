"""The recorded problems of the recipe, with every intermediate value; looked for in ../shared."""

import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_ppsgd.models.solve import OwnProblem, PublicColumns
from flwr_ppsgd.recipe import Task
from tests.support.paths import ROOT

FOLDER = ROOT.parent / "shared" / "golden"
NAMES = ("regression", "classes", "sparse")
RTOL = 1e-9

needs_golden = pytest.mark.skipif(
    not (FOLDER / "recipe_classes.npz").is_file(),
    reason="recorded problems of the recipe are looked for in ../shared/golden",
)


@functools.cache
def recorded(name: str) -> dict[str, Any]:
    """All arrays of one file; numbers as Python's own."""
    with np.load(FOLDER / f"recipe_{name}.npz") as file:
        arrays = dict(file)
    return {key: value.item() if value.ndim == 0 else value for key, value in arrays.items()}


def task_of(golden: dict[str, Any]) -> Task:
    return "regression" if golden["task"] == "regression" else "classification"


def columns_of(golden: dict[str, Any]) -> PublicColumns:
    task = task_of(golden)
    return PublicColumns(
        task, golden["numbers"], golden["sparse"], golden["outputs"], ones=task != "regression"
    )


def problems_of(golden: dict[str, Any]) -> list[OwnProblem]:
    """Each user's problem with the recorded unit."""
    columns = columns_of(golden)
    found = []
    for user in range(golden["users"]):
        own = golden["user"] == user
        rows, targets = golden["rows"][own], golden["targets"][own]
        found.append(OwnProblem.of(rows, targets, columns, golden["u"]))
    return found


def close(actual: Any, expected: NDArray[np.float64] | float) -> None:
    """Equal to 1e-9, and to 1e-13 around zero: sums of a few numbers of order one."""
    np.testing.assert_allclose(actual, expected, rtol=RTOL, atol=1e-13)
