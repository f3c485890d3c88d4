"""Looking first: trivial answers, leaks, scales."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd.lab.inspect import brief_report, data_report, suspected_leaks, trivial_answer
from flwr_ppsgd.lab.per_user import PerUser
from flwr_ppsgd.lab.scaling import scale_own_rows
from tests.support.own_data import load_file, per_user


def rows(**changes: Any) -> PerUser:
    """Two users; the second one's targets are 10 higher. The last row of each is for testing."""
    user, test = np.repeat([0, 1], 4), np.tile([False, False, False, True], 2)
    y = np.array([1.0, 2, 3, 4, 11, 12, 13, 14])
    return per_user({"user": user, "x": np.arange(8.0)[:, None], "y": y, "test": test, **changes})


def read_csv(path: Path, header: str, lines: Iterable[str], **options: Any) -> PerUser:
    path.write_text("\n".join([header, *lines]))
    return load_file(path, **options)


def test_trivial_rmse_is_pooled_over_test_rows() -> None:
    """Everyone's mean is 7 and misses by 3 and 7; the own means, 2 and 12, miss by 2 and 2."""
    expected: Any = ("rmse", pytest.approx(np.sqrt((3**2 + 7**2) / 2)), pytest.approx(2))
    assert trivial_answer(rows()) == expected
    assert trivial_answer(scale_own_rows(rows())) == expected  # in the units of the source


def test_trivial_accuracy_by_hand() -> None:
    """Everyone's most frequent class is 0, right for one test row of two; the own ones are right
    for both."""
    assert trivial_answer(rows(y=np.array([0, 0, 0, 0, 1, 1, 0, 1]))) == ("accuracy", 0.5, 1.0)


def test_without_test_rows_there_is_no_trivial_answer() -> None:
    data = rows(test=np.zeros(8, dtype=bool))
    assert trivial_answer(data) is None
    assert "there are no test rows: nothing can be measured" in "\n".join(brief_report(data))


def test_users_with_one_row_are_asked_about() -> None:
    """A wrong column of users is the usual reason, and no test fraction makes test rows of them."""
    data = rows(user=np.arange(8), test=np.zeros(8, dtype=bool))
    text = "\n".join(brief_report(data))
    assert "8 of 8 users have one row each, so there are no test rows: is 'user' the column" in text
    assert "test-fraction" not in text


def test_a_number_that_never_varies_within_a_user_is_named(tmp_path: Path) -> None:
    """Each user's numbers are scaled by the own mean: what is left of such a column is 0."""
    lines = [f"{row // 5},{row // 5 + 3},{row % 7},{row % 3 + 0.5}" for row in range(20)]
    data = read_csv(tmp_path / "schools.csv", "user,size,age,y", lines)
    text = "\n".join(brief_report(data))
    assert "the same in all rows of each user, so of no use as a number: size (--exclude" in text


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_a_feature_that_is_the_target_is_suspected(task: str) -> None:
    draw = np.random.default_rng(0)
    y = draw.integers(0, 3, 200) if task == "classification" else draw.normal(size=200)
    noise = draw.normal(size=200)
    x = np.stack([noise, 5 * y + 0.01 * noise, np.ones(200)], axis=1)
    data = rows(user=np.repeat([0, 1], 100), x=x, y=y, test=np.arange(200) % 10 == 0)
    assert suspected_leaks(data) == ["feature 1"]
    assert "suspected leak" in "\n".join(brief_report(data))


def test_a_class_without_rows_makes_no_leak() -> None:
    """Goals of 0, 1 and 5: classes 2 to 4 are counted too, and nobody has them."""
    draw = np.random.default_rng(0)
    year = 1980.0 + draw.integers(0, 9, 200)
    goals = draw.choice([0, 1, 5], 200)
    test = np.arange(200) % 10 == 0
    data = rows(user=np.repeat([0, 1], 100), x=year[:, None], y=goals, test=test)
    assert suspected_leaks(data) == []


def test_words_of_a_file_do_nothing_to_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "odd.csv"
    words = [f"{'p' if row % 5 else chr(27)}[2J\n{row % 2}" for row in range(20)]
    lines = [f'{row // 4},{row % 3},"{word}"' for row, word in enumerate(words)]
    data = read_csv(path, "user,a,y", lines)
    other = load_file(path, target_column="a", task="regression")
    text = "\n".join([data.describe(), *brief_report(data), other.describe(), *brief_report(other)])
    assert all(line.isprintable() for line in text.splitlines())
    assert "classification (?[2J 0, ?[2J 1, p[2J 0, p[2J 1)" in text


def test_a_leak_is_called_as_in_the_file(tmp_path: Path) -> None:
    """--exclude takes the name of a column, not of one of its words."""
    answers = [(row, "no" if row % 3 else "yes") for row in range(30)]
    lines = [f"{row // 6},{answer},{row % 7},{min(row % 3, 1)}" for row, answer in answers]
    data = read_csv(tmp_path / "answers.csv", "user,answer,age,y", lines)
    assert suspected_leaks(data) == ["column 'answer'"]


def test_a_report_names_features_scales_and_what_is_not_covered(tmp_path: Path) -> None:
    lines = [f"{row % 4},{row // 2},{1990 + row % 30},{row % 2},{row / 10}" for row in range(80)]
    path = tmp_path / "films.csv"
    data = read_csv(path, "user,filmId,year,seen,y", lines, categorical_columns="seen")
    text = data_report(data, replace(scale_own_rows(data), bias=True))
    for part in (
        "features: 'filmId', 'year', 'seen' in 2 columns (0, 1), a constant",
        "named like an id: filmId (--categorical",
        "suspected leak, predicts the target alone: column 'filmId'",
        "shared parameters",
        "chosen by looking at data: not covered",
        "--write schema.toml",
    ):
        assert part in text
    assert any(line.split()[:2] == ["year", "1990"] for line in text.splitlines())
