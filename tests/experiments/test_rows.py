"""Rows survive their files, and the files keep their format."""

import json
import math

import pytest

from flwr_ppsgd.experiments.rows import Point, RunRow, SweepRow

POINT = Point(1, math.inf, 0.1, 2.0, 5.0, "fine-tuned")
WHOLE = SweepRow(
    POINT,
    6,
    {"loss": 0.5, "accuracy": 0.25},
    diverged=True,
    personal_step=0.2,
    by_user=(0.1, 0.4),
    epsilon=math.inf,
    paper_epsilon=1.5,
)


@pytest.mark.parametrize("row", [WHOLE, SweepRow(Point(2, 0.0, 0.1, None, None), 0, {})])
def test_a_row_of_a_sweep_survives_json(row: SweepRow) -> None:
    assert SweepRow.from_json(json.loads(json.dumps(row.to_json(), allow_nan=False))) == row


def test_a_row_of_a_sweep_has_its_keys_in_this_order() -> None:
    """Sweeps that were begun by older versions go on with the same bytes."""
    assert json.dumps(WHOLE.to_json()) == (
        '{"seed": 1, "alpha-q": "infinite", "step": 0.1, "noise-multiplier": 2.0, '
        '"clip-norm": 5.0, "method": "fine-tuned", "round": 6, "loss": 0.5, "accuracy": 0.25, '
        '"diverged": true, "personal-step": 0.2, "by_user": [0.1, 0.4], "epsilon": "infinite", '
        '"paper_epsilon": 1.5}'
    )


def test_rows_without_a_method_are_of_the_algorithm_itself() -> None:
    flat = {key: value for key, value in WHOLE.to_json().items() if key != "method"}
    assert SweepRow.from_json(flat).point.method == "ppsgd"


def test_a_row_of_a_run_names_what_is_outside_the_guarantee() -> None:
    row = RunRow(3, math.inf, {"loss": 0.5})
    assert json.dumps(row.to_json()) == (
        '{"round": 3, "epsilon": "infinite", "loss": 0.5, "outside_the_guarantee": ["loss"]}'
    )
    assert RunRow.from_json(row.to_json()) == row


@pytest.mark.parametrize("flat", [{}, {"round": 1}, {"round": 1, "epsilon": None}])
def test_what_is_no_row_is_refused(flat: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        RunRow.from_json(flat)
    with pytest.raises((KeyError, TypeError, ValueError)):
        SweepRow.from_json(flat)
