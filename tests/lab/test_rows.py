"""Rows survive their files, and the files keep their format."""

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
    personal_step=0.2,
    by_user=(0.1, 0.4),
    deployed_epsilon=2.5,
    paper_epsilon=1.5,
)


@pytest.mark.parametrize("row", [WHOLE, SweepRow(Point(2, 0.0, 0.1, None, None), 0, {})])
def test_a_row_of_a_sweep_survives_json(row: SweepRow) -> None:
    assert SweepRow.from_json(json.loads(json.dumps(row.to_json(), allow_nan=False))) == row


def test_a_row_of_a_sweep_has_its_keys_in_this_order() -> None:
    """A simulation guarantees nothing: epsilon is infinite, deployed_epsilon has its own name."""
    assert json.dumps(WHOLE.to_json()) == (
        '{"seed": 1, "alpha-q": "infinite", "step": 0.1, "noise-multiplier": 2.0, '
        '"clip-norm": 5.0, "method": "fine-tuned", "round": 6, "loss": 0.5, "accuracy": 0.25, '
        '"diverged": true, "personal-step": 0.2, "by_user": [0.1, 0.4], "epsilon": "infinite", '
        '"deployed_epsilon": 2.5, "paper_epsilon": 1.5}'
    )


def test_local_learning_costs_nothing() -> None:
    row = SweepRow(Point(2, 0.0, 0.1, None, None), 3, {}, deployed_epsilon=0.0)
    assert row.to_json()["epsilon"] == 0.0


def test_names_of_measures_never_replace_ours_in_a_row_of_a_run() -> None:
    row = RunRow(3, math.inf, 1.5, {"epsilon": 0.01, "round": 9.0, "loss": 0.5})
    flat = row.to_json()
    assert (flat["round"], flat["epsilon"], flat["deployed_epsilon"]) == (3, "infinite", 1.5)
    assert flat["outside_the_guarantee"] == ["loss"]


def test_a_row_of_a_run_names_what_is_outside_the_guarantee() -> None:
    row = RunRow(3, math.inf, 1.5, {"loss": 0.5})
    assert json.dumps(row.to_json()) == (
        '{"round": 3, "epsilon": "infinite", "deployed_epsilon": 1.5, "loss": 0.5, '
        '"outside_the_guarantee": ["loss"]}'
    )
    assert RunRow.from_json(row.to_json()) == row


@pytest.mark.parametrize("flat", [{}, {"round": 1}, {"round": 1, "epsilon": None}])
def test_what_is_no_row_is_refused(flat: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        RunRow.from_json(flat)
    with pytest.raises((KeyError, TypeError, ValueError)):
        SweepRow.from_json(flat)
