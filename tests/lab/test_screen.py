"""The line of advice below a result."""

import pytest

from flwr_ppsgd.lab.screen import advice_on


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"personal": 5.0, "shared": 6.0, "alone": 7.0, "without features": 8.0}, ""),
        ({"personal": 5.0, "shared": 6.0, "alone": 7.0, "without features": 5.0}, "does not beat"),
        ({"personal": 7.8, "shared": 7.4, "alone": 8.0, "without features": 7.5}, "the shared"),
        ({"personal": 5.6, "shared": 5.7, "alone": 5.3, "without features": 5.4}, "own rows alone"),
        ({"personal": 5.0}, ""),
    ],
)
def test_the_best_of_the_simpler_answers_is_named(values: dict[str, float], part: str) -> None:
    """RMSE: what is lowest is best. With accuracy it is what is highest."""
    assert part in advice_on("rmse", values)
    assert bool(part) == bool(advice_on("rmse", values))
    flipped = {name: 1 / value for name, value in values.items()}
    assert advice_on("accuracy", flipped) == advice_on("rmse", values)
