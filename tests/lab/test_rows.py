"""Rows survive their files, and say what they guarantee."""

import json
import math
from typing import Any

import pytest

from flwr_ppsgd.lab.rows import GridPoint, RunRow, SweepRow

POINT = GridPoint(1, math.inf, 0.1, 2.0, 5.0, "fine-tuned")
RECIPE = GridPoint(1, math.inf, 0.0, 3.0, 1.0, "auto", target_epsilon=math.inf)
LOCAL = GridPoint(2, 0.0, 0.1, None, None)
MEASURES = {"loss": 0.5, "accuracy": 0.25}
DIVERGED = SweepRow(POINT, 6, MEASURES, diverged=True, deployed_epsilon=2.5, paper_epsilon=1.5)


@pytest.mark.parametrize(
    "row",
    [
        DIVERGED,
        SweepRow(LOCAL, 0, {}),
        SweepRow(RECIPE, 4, {}),
        RunRow(3, math.inf, 1.5, {"loss": 0.5}),
    ],
)
def test_a_row_survives_json(row: Any) -> None:
    assert type(row).from_json(json.loads(json.dumps(row.to_json(), allow_nan=False))) == row


def test_a_simulation_guarantees_nothing_whatever_a_deployment_would_cost() -> None:
    flat = DIVERGED.to_json()
    assert (flat["epsilon"], flat["deployed_epsilon"]) == ("infinite", 2.5)
    costs_nothing = SweepRow(LOCAL, 3, {}, deployed_epsilon=0.0)
    assert costs_nothing.to_json()["epsilon"] == 0.0


def test_names_of_measures_never_replace_ours_in_a_row_of_a_run() -> None:
    flat = RunRow(3, math.inf, 1.5, {"epsilon": 0.01, "round": 9.0, "loss": 0.5}).to_json()
    assert (flat["round"], flat["epsilon"], flat["deployed_epsilon"]) == (3, "infinite", 1.5)
    assert flat["outside_the_guarantee"] == ["loss"]


@pytest.mark.parametrize("kind", [RunRow, SweepRow])
@pytest.mark.parametrize("flat", [{}, {"round": 1}, {"round": 1, "epsilon": None}])
def test_what_is_no_row_is_refused(kind: Any, flat: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        kind.from_json(flat)
