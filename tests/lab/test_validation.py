"""Rows that are set apart for choosing: never test rows, and the test part is opened once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_ppsgd.lab.block import run_block
from flwr_ppsgd.lab.measures import as_test_measure
from flwr_ppsgd.lab.rows import SweepRow
from flwr_ppsgd.lab.run import run, run_as_cohort
from flwr_ppsgd.lab.sweep import Sweep
from flwr_ppsgd.server.replies import mean_of
from tests.support.own_data import FLAT, arrays, load_file, write


def swept(path: Path, **changes: Any) -> list[SweepRow]:
    flat = {**FLAT, "data": str(path), "select-on": "validation", "alpha-q": [0.0, 0.3], **changes}
    sweep = Sweep.read(flat, where="here")
    rows = []
    for method in ("ppsgd", *sweep.base.baseline_names()):
        points = [point for point in sweep.points() if point.method == method]
        rows += run_block(sweep.base.to_flat(), points, lambda *_: None)
    return rows


def test_validation_rows_are_neither_trained_on_nor_tested(tmp_path: Path) -> None:
    before = load_file(write(tmp_path))
    data = before.with_validation(0.25, seed=0)
    assert data.validation is not None
    parts = np.stack([data.train_rows, data.validation, data.test])
    np.testing.assert_array_equal(parts.sum(axis=0), 1)
    np.testing.assert_array_equal(data.test, before.test)
    expected = np.minimum(np.maximum(1, np.rint(0.25 * before.train_sizes)), before.train_sizes - 1)
    np.testing.assert_array_equal(before.train_sizes - data.train_sizes, expected)
    start, stop = data.offsets[3:5]
    apart = start + np.flatnonzero(data.validation[start:stop])
    np.testing.assert_array_equal(data.validation_as_test().rows(3, test=True), apart)


def test_with_a_time_column_the_last_training_rows_are_set_apart(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    rows = [f"1,{time},{time},{time}.5" for time in (5, 3, 9, 1, 7, 2, 8, 4, 10, 6)]
    path.write_text("user,when,a,y\n" + "\n".join(rows))
    data = load_file(path, time_column="when").with_validation(0.25, seed=0)
    assert data.x[data.test, 0].tolist() == [9, 10]
    assert data.x[data.validation, 0].tolist() == [7, 8]


def test_the_test_part_is_opened_once_at_the_end(tmp_path: Path) -> None:
    rows = swept(write(tmp_path), baselines="fine-tuned, fedavg")
    last = max(row.round for row in rows)
    for row in rows:
        tested = [name for name in row.measures if as_test_measure(name) == name]
        assert bool(tested) == (row.round == last)
        assert "validation_accuracy" in row.measures
    assert {row.point.method for row in rows} == {"ppsgd", "fine-tuned", "fedavg"}


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_nothing_that_is_chosen_by_depends_on_test_rows(tmp_path: Path, task: str) -> None:
    """Other test rows change the measures of test rows, and nothing else."""
    whole = arrays(task)
    x = whole["x"].copy()
    x[whole["test"]] *= -3
    changed = tmp_path / "changed"
    changed.mkdir()
    honest = swept(write(tmp_path, task), baselines="fine-tuned")
    other = swept(write(changed, task, x=x), baselines="fine-tuned")
    for mine, theirs in zip(honest, other, strict=True):
        for name, value in mine.measures.items():
            if as_test_measure(name) != name:
                assert theirs.measures[name] == pytest.approx(value, rel=1e-12)
    assert honest[-1].measures["loss"] != other[-1].measures["loss"]


def test_a_network_measures_validation_rows_too(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    x = np.random.default_rng(0).normal(size=(18, 784))
    user, y, test = np.repeat(np.arange(3), 6), np.arange(18) % 2, np.arange(18) % 6 == 5
    np.savez(tmp_path / "images.npz", user=user, x=x, y=y, test=test)
    rows = swept(tmp_path / "images.npz", model="cnn", rounds=1, **{"evaluate-every": 1})
    assert "accuracy" not in rows[0].measures
    assert {"accuracy", "validation_accuracy"} <= rows[-1].measures.keys()


def test_a_single_run_sets_nothing_apart(tmp_path: Path) -> None:
    flat = {**FLAT, "data": str(write(tmp_path)), "select-on": "validation"}
    base = Sweep.read(flat, where="here").base
    for train in (run, run_as_cohort):
        with pytest.raises(ValueError, match="a run has one setting"):
            train(base)


def test_rmse_is_that_of_all_rows_together() -> None:
    """One row that misses by 3 and three that miss by 1: √((9 + 3)/4), not a mean of roots."""
    rows = [(3.0, 9.0, 1), (1.0, 1.0, 3)]
    found = mean_of([{"rmse": e, "loss": loss, "num-examples": n} for e, loss, n in rows])
    assert found["rmse"] == pytest.approx(np.sqrt(3))
    assert found["loss"] == pytest.approx(3)
