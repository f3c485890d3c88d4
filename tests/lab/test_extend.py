"""A grid that grows where its best setting is at an end; rows that every sweep has."""

from pathlib import Path

from flwr_ppsgd.lab.outputs import read_config, read_rows, read_selection
from flwr_ppsgd.lab.rows import GridEdge, Point
from flwr_ppsgd.lab.sweep import Sweep
from flwr_ppsgd.lab.workers import run_sweep
from tests.support.own_data import FLAT, write


def sweep_of(path: Path) -> Sweep:
    flat = {**FLAT, "data": str(path), "step": [0.01, 0.1], "select-on": "validation"}
    return Sweep.read({**flat, "baselines": "fine-tuned"}, where="here")


def test_a_sweep_goes_on_with_a_wider_grid(tmp_path: Path) -> None:
    """What was run stays as it is, what was added is run, and the settings say so."""
    sweep = sweep_of(write(tmp_path))
    out = tmp_path / "out"
    count = run_sweep(sweep, out, jobs=1)
    before = (out / "rows.jsonl").read_text()
    wider = sweep.with_values_beyond([GridEdge("step", 0.1, 1.0), GridEdge("step", 0.01, 0.001)])
    assert run_sweep(wider, out, jobs=1, extend=True) == count
    after = (out / "rows.jsonl").read_text()
    assert after.startswith(before)
    steps = {row.point.step for row in read_rows(out) if row.point.method == "ppsgd"}
    assert steps == {0.001, 0.01, 0.1, 1.0}
    assert read_config(out)["step"] == [0.001, 0.01, 0.1, 1.0]
    assert sweep.with_values_of(read_config(out)).grid == wider.grid
    assert run_sweep(wider, out, jobs=1, extend=True) == 0


def test_every_sweep_that_validates_has_a_row_without_noise_and_trivial_answers(
    tmp_path: Path,
) -> None:
    sweep = sweep_of(write(tmp_path))
    assert {point.noise_multiplier for point in sweep.points()} == {0.0, 0.5}
    out = tmp_path / "out"
    run_sweep(sweep, out, jobs=1)
    trivial = {row.point: row.measures for row in read_rows(out) if not row.point.step}
    assert trivial.keys() == {
        Point(0, 0.0, 0.0, None, None, method) for method in ("trivial", "own-trivial")
    }
    for measures in trivial.values():
        assert measures.keys() == {"accuracy", "validation_accuracy"}
    (cost,) = read_selection(out)
    assert cost.settings == 2
    assert cost.selected > cost.epsilon
