"""From a run's directory to predictions for users who took part, and for new ones."""

import csv
from pathlib import Path

import numpy as np
import pytest

from flwr_ppsgd.lab.experiments.outputs import read_model, save, write_predictions
from flwr_ppsgd.lab.experiments.predict import predict
from flwr_ppsgd.lab.experiments.run import run_as_cohort
from flwr_ppsgd.lab.experiments.settings import Experiment
from tests.support.own_data import FLAT

USERS = 12


def rows_of(user: int, count: int, seed: int) -> list[str]:
    """Points are 50 + 10·user, 3 for each 10 of iq, and 5 for kind a: nearly without noise."""
    draw = np.random.default_rng([user, seed])
    lines = []
    for _ in range(count):
        iq = draw.normal(100, 15)
        kind = "ab"[draw.integers(2)]
        points = 50 + 10 * user + 0.3 * (iq - 100) + 5 * (kind == "a") + 0.01 * draw.normal()
        lines.append(f"u{user},{iq:.4f},{kind},{points:.5f}")
    return lines


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    lines = [line for user in range(USERS) for line in rows_of(user, 30, 0)]
    (folder / "points.csv").write_text("user,iq,kind,y\n" + "\n".join(lines))
    flat = {
        **FLAT,
        "data": str(folder / "points.csv"),
        "categorical-columns": "kind",
        "scale": "auto",
        "bias": True,
        "rounds": 20,
    }
    outcome = run_as_cohort(Experiment.read(flat, where="here"))
    save(outcome, folder / "out")
    return folder


def test_w_has_a_name_and_a_shape(trained: Path) -> None:
    (name, w) = next(iter(read_model(trained / "out").items()))
    assert (name, w.shape) == ("w", (4, 1))  # iq, kind=a, kind=b and a constant


def new_file(folder: Path, lines: list[str]) -> Path:
    path = folder / "new.csv"
    path.write_text("person,iq,kind,y\n" + "\n".join(lines))
    return path


def errors(found: list[float], lines: list[str]) -> float:
    wanted = [float(line.split(",")[3]) for line in lines]
    return float(np.abs(np.array(found) - wanted).max())


def test_users_who_took_part_are_predicted_in_the_files_units(
    trained: Path, tmp_path: Path
) -> None:
    """The target of new rows is not looked at."""
    lines = [*rows_of(3, 5, 1), *rows_of(7, 5, 1)]
    hidden = [",".join([*line.split(",")[:3], ""]) for line in lines]
    found = predict(trained / "out", new_file(tmp_path, hidden), user="person")
    assert {one.model for one in found} == {"personal"}
    assert [one.row for one in found] == list(range(2, 12))
    assert errors([float(one.value) for one in found], lines) < 1.5


def test_a_new_user_is_personalized_from_known_rows(trained: Path, tmp_path: Path) -> None:
    lines = rows_of(40, 25, 1)
    hidden = [",".join([*line.split(",")[:3], ""]) for line in lines[20:]]
    found = predict(trained / "out", new_file(tmp_path, [*lines[:20], *hidden]), user="person")
    assert {one.model for one in found} == {"new user"}
    assert errors([float(one.value) for one in found[20:]], lines[20:]) < 1.5


def test_predictions_are_written_for_their_owner_alone(trained: Path, tmp_path: Path) -> None:
    found = predict(trained / "out", new_file(tmp_path, rows_of(3, 2, 1)), user="person")
    write_predictions(path := tmp_path / "predictions.csv", found)
    assert path.stat().st_mode & 0o077 == 0
    with path.open() as file:
        assert [row["user"] for row in csv.DictReader(file)] == ["u3", "u3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("u99,100,a,", "user 'u99' is new and has no row with a target"),
        ("u1,,a,3", "column 'iq' is not a finite number in line 2"),
        (",100,a,3", "column 'person' is empty in line 2"),
        ("u1,high,a,3", "column 'iq' is not numeric, 'high' in line 2"),
    ],
)
def test_rows_that_cannot_be_predicted_are_one_line(
    trained: Path, tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        predict(trained / "out", new_file(tmp_path, [line]), user="person")


def test_a_missing_column_is_named(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "short.csv").write_text("user,kind\nu1,a\n")
    with pytest.raises(ValueError, match="no column 'iq' among user, kind"):
        predict(trained / "out", tmp_path / "short.csv")
