"""Rows survive their files, and say what they guarantee."""

import json
import math

import pytest

from flwr_ppsgd.lab.rows import Point, RunRow, SweepRow

POINT = Point(1, math.inf, 0.1, 2.0, 5.0, "fine-tuned")
WHOLE = SweepRow(
    POINT,
    6,
    {"loss": 0.5, "accuracy": 0.25},
    diverged=True,
    deployed_epsilon=2.5,
    paper_epsilon=1.5,
)


RECIPE = Point(1, math.inf, 0.0, 3.0, 1.0, "auto", target_epsilon=math.inf)
LOCAL = Point(2, 0.0, 0.1, None, None)


@pytest.mark.parametrize("row", [WHOLE, SweepRow(LOCAL, 0, {}), SweepRow(RECIPE, 4, {})])
def test_a_row_of_a_sweep_survives_json(row: SweepRow) -> None:
    assert SweepRow.from_json(json.loads(json.dumps(row.to_json(), allow_nan=False))) == row


def test_a_simulation_guarantees_nothing_whatever_a_deployment_would_cost() -> None:
    flat = WHOLE.to_json()
    assert (flat["epsilon"], flat["deployed_epsilon"]) == ("infinite", 2.5)


def test_local_learning_costs_nothing() -> None:
    row = SweepRow(LOCAL, 3, {}, deployed_epsilon=0.0)
    assert row.to_json()["epsilon"] == 0.0


def test_names_of_measures_never_replace_ours_in_a_row_of_a_run() -> None:
    row = RunRow(3, math.inf, 1.5, {"epsilon": 0.01, "round": 9.0, "loss": 0.5})
    flat = row.to_json()
    assert (flat["round"], flat["epsilon"], flat["deployed_epsilon"]) == (3, "infinite", 1.5)
    assert flat["outside_the_guarantee"] == ["loss"]


def test_a_row_of_a_run_survives_json() -> None:
    row = RunRow(3, math.inf, 1.5, {"loss": 0.5})
    assert RunRow.from_json(json.loads(json.dumps(row.to_json(), allow_nan=False))) == row


@pytest.mark.parametrize("flat", [{}, {"round": 1}, {"round": 1, "epsilon": None}])
def test_what_is_no_row_is_refused(flat: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        RunRow.from_json(flat)
    with pytest.raises((KeyError, TypeError, ValueError)):
        SweepRow.from_json(flat)
