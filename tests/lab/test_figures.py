"""Rows in, figures and a table out: which setting is shown where."""

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.image import imread

from flwr_ppsgd.lab.figures import CURVE_STYLES, curve_styles, draw_sweep, figure_1, figure_2
from flwr_ppsgd.lab.rows import CAVEAT, PPSGD, GridPoint, SweepRow
from flwr_ppsgd.lab.summary import best_rows, frame_of, means_over_seeds, summarise


def row(a: float, step: float, z: float | None, round_: int, value: float, **more: Any) -> SweepRow:
    """ε is 10·round/z."""
    point = GridPoint(1, a, step, z, None if z is None else 1.0)
    epsilon = 0.0
    if z is not None:
        epsilon = 10 * round_ / z if z else math.inf
    return replace(SweepRow(point, round_, {"loss": value}, deployed_epsilon=epsilon), **more)


def reseeded(own: SweepRow, seed: int) -> SweepRow:
    return replace(own, point=replace(own.point, seed=seed))


def curve(a: float, step: float, z: float | None, *values: float) -> list[SweepRow]:
    """At rounds 0, 5 and 9."""
    return [row(a, step, z, t, value) for t, value in zip((0, 5, 9), values, strict=True)]


def only(loss: float, step: float = 0.1, **measures: float) -> SweepRow:
    """The last row of αQ = .3 at z = 1, with these measures beside the loss."""
    return row(0.3, step, 1.0, 9, loss, measures={"loss": loss, **measures})


def lost(seed: int = 1, step: float = 0.9) -> SweepRow:
    return reseeded(row(0.3, step, 1.0, 5, 1.0, diverged=True), seed)


ROWS = [
    *curve(0.0, 0.1, None, 8.0, 4.0, 3.0),
    *curve(0.3, 0.1, 1.0, 8.0, 3.0, 1.0),
    *curve(0.3, 0.2, 1.0, 8.0, 2.0, 1.5),
    row(0.3, 0.9, 1.0, 0, 8.0),
    row(0.3, 0.9, 1.0, 5, 0.1, diverged=True),
    *curve(0.3, 0.1, 5.0, 8.0, 6.0, 7.0),
    *curve(math.inf, 0.1, 1.0, 8.0, 5.0, 2.0),
    *curve(math.inf, 0.1, 5.0, 8.0, 7.0, 7.5),
]


def best_of(rows: Sequence[SweepRow], measure: str = "loss") -> pd.DataFrame:
    """The best of αQ = .3 at z = 1, by round."""
    every = means_over_seeds(frame_of(rows), measure)
    return best_rows(every.query("`alpha-q` == 0.3 and level == 1"), measure, ["round"])


def test_the_step_is_chosen_anew_at_each_round() -> None:
    """Figure 1: at round 5 the larger step leads, at round 9 the smaller one; what diverged is
    never chosen."""
    found = best_of(ROWS)[["round", "step", "value"]]
    assert found.to_numpy().tolist() == [[0, 0.1, 8.0], [5, 0.2, 2.0], [9, 0.1, 1.0]]


def test_the_best_accuracy_is_the_highest() -> None:
    rows = [replace(r, measures={"accuracy": r.measures["loss"]}) for r in ROWS]
    assert best_of(rows, "accuracy").query("round == 9")["step"].item() == 0.2


def test_seeds_are_averaged_before_anything_is_chosen() -> None:
    """A setting that is lucky once does not win; one that diverged for a seed is out."""
    lucky = [only(0.0), reseeded(only(10.0), 2)]
    steady = [reseeded(only(4.0, step=0.2), seed) for seed in (1, 2)]
    found = best_of([*lucky, *steady])
    assert found[["step", "value", "seeds"]].to_numpy().tolist() == [[0.2, 4.0, 2]]
    once = [row(0.3, 0.3, 1.0, 5, 0.1), lost(2, step=0.3), only(0.0, step=0.3)]
    assert 5 not in means_over_seeds(frame_of(once), "loss")["round"].tolist()


def test_the_table_names_the_best_setting_for_each_epsilon() -> None:
    """At z = 5 local learning is best, at no cost; ε is that of the setting it is compared with."""
    table = summarise(ROWS).table
    names = ["noise-multiplier", "deployed_epsilon", "alpha-q", "loss", "local", "global"]
    rows = table[names].to_numpy().tolist()
    assert rows == [[1.0, 90.0, 0.3, 1.0, 3.0, 2.0], [5.0, 18.0, 0.0, 3.0, 3.0, 7.5]]


def table_in(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, which begins with the caveat."""
    caveat, *lines = path.read_text(encoding="utf-8").splitlines()
    assert caveat == f"# {CAVEAT}"
    return list(csv.DictReader(lines))


def test_every_figure_and_table_is_written_with_its_caveat(tmp_path: Path) -> None:
    text, written = draw_sweep(ROWS, tmp_path, ["png", "pdf", "svg"])
    pictures = {"figure-1", "figure-2", "methods"}
    expected = {f"{name}.{kind}" for name in pictures for kind in ("png", "pdf", "svg", "csv")}
    assert {path.name for path in written} == {*expected, "best.csv"}
    assert CAVEAT in text
    assert "as if it alone had been run" in CAVEAT
    assert "choosing among settings is not covered" in CAVEAT
    for name in pictures:
        assert min(imread(tmp_path / f"{name}.png").shape[:2]) > 400
    assert [r["alpha-q"] for r in table_in(tmp_path / "best.csv")] == ["0.3", "0.0"]
    first = table_in(tmp_path / "figure-1.csv")
    ours = [r for r in first if (r["curve"], r["noise-multiplier"]) == ("αQ = 0.3", "1.0")]
    found = [(r["round"], r["value"], r["step"]) for r in ours]
    assert found == [("0", "8.0", "0.1"), ("5", "2.0", "0.2"), ("9", "1.0", "0.1")]


ALONE = [r for r in ROWS if r.point.alpha_q == 0]
SILENT = [row(0.3, 0.1, 0.0, t, 1.0 + t) for t in (0, 5)]


@pytest.mark.parametrize("rows", [ALONE, SILENT, ROWS[:5]], ids=["local", "no noise", "under way"])
def test_what_is_missing_is_left_out(tmp_path: Path, rows: list[SweepRow]) -> None:
    """Local learning alone, z = 0 alone, and a sweep under way still make a picture."""
    _, written = draw_sweep(rows, tmp_path)
    assert (tmp_path / "figure-1.png") in written
    assert all(path.exists() for path in written)


def test_a_sweep_in_which_all_diverged_is_a_result_with_advice(tmp_path: Path) -> None:
    text, written = draw_sweep([lost(step=0.1)], tmp_path)
    assert "1 settings, 1 of them diverged: there is nothing to compare" in text
    assert "--set step=[0.00333333, 0.01]" in text
    assert [path.name for path in written] == ["best.csv"]


def test_diverged_settings_are_counted_once_whatever_their_seeds() -> None:
    assert "7 settings, 1 of them diverged." in summarise([*ROWS, lost(1), lost(2)]).text()


def drawn(figure: Any, rows: Sequence[SweepRow]) -> Any:
    """What ``figure_1`` or ``figure_2`` draws of these rows."""
    found = figure(summarise(rows))
    assert found is not None
    return found[0]


def test_the_ordinate_is_set_by_what_converged() -> None:
    """A setting that goes up to a million without being called diverged does not flatten all."""
    wild = curve(0.3, 0.1, 1.0, 8.0, 1e6, 1.0)
    low, high = drawn(figure_1, [*ROWS[:3], *wild, *ROWS[-6:]]).axes[0].get_ylim()
    assert low < 3 < high < 100


def test_a_best_setting_at_the_end_of_a_list_is_said_with_the_next_value() -> None:
    """0.1 of the steps 0.1, 0.2, 0.9 is the smallest: half of it is next. αQ has one value."""
    assert summarise(ROWS).edges.to_numpy().tolist() == [["step", 0.1, 0.05]]
    assert "--extend adds 0.05" in summarise(ROWS).text()


def test_settings_are_chosen_on_validation_rows_and_reported_on_test_rows() -> None:
    """Step 0.1 is better on validation rows, step 0.2 on test rows: 2.5 - 2 is the optimism."""
    found = summarise([only(2.5, validation_loss=1.0), only(2.0, step=0.2, validation_loss=1.5)])
    (cells,) = found.table.to_dict("records")
    assert (cells["step"], cells["validation_loss"], cells["loss"]) == (0.1, 1.0, 2.5)
    assert cells["if chosen on test"] == 2.0
    assert "would make loss look better by 0.5 on average" in found.text()
    assert "optimistic" in summarise(ROWS).text()


def test_what_beats_no_answer_without_features_is_said() -> None:
    trivial = [
        SweepRow(GridPoint(0, 0.0, 0.0, None, None, method), 9, {"rmse": value})
        for method, value in (("trivial", 3.0), ("own-trivial", 2.0))
    ]
    found = summarise([only(1.0, rmse=1.0), *trivial])
    assert found.table["trivial"].tolist() == [2.0]
    assert "Without features, with each user's own: 2." in found.text()
    assert "No setting beats" not in found.text()
    worse = summarise([only(1.0, rmse=2.5), *trivial])
    assert "No setting beats the better answer without features at noise z = 1:" in worse.text()


def test_bands_and_error_bars_are_one_standard_error_over_seeds() -> None:
    rows = [
        reseeded(replace(own, measures={"loss": own.measures["loss"] + seed}), seed)
        for own in ROWS[:6]
        for seed in (1, 2)
    ]
    assert drawn(figure_1, rows).axes[0].collections
    assert drawn(figure_2, rows).axes[0].containers


def test_no_two_curves_look_alike() -> None:
    values = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]
    looks = curve_styles([f"αQ = {a:g}" for a in values] + list(CURVE_STYLES)).values()
    assert len({look["color"] for look in list(looks)[: len(values)]}) == 10
    different = {tuple(sorted((k, str(v)) for k, v in look.items())) for look in looks}
    assert len(different) == len(looks) == len(values) + len(CURVE_STYLES)


def ending_row(a: float, z: float | None, accuracy: float, method: str = PPSGD) -> SweepRow:
    own = row(a, 0.1, z, 9, 0.0, measures={"loss": 1 - accuracy, "accuracy": accuracy})
    return replace(own, point=replace(own.point, method=method))


def test_baselines_have_columns_of_their_own() -> None:
    """They are neither global learning nor chosen as the best setting."""
    ends = {
        "local": ending_row(0.0, None, 0.675),
        "global": ending_row(math.inf, 1.0, 0.525),
        "personalized": ending_row(0.3, 1.0, 0.775),
        "fine-tuned": ending_row(math.inf, 1.0, 0.7, method="fine-tuned"),
        "fedavg": ending_row(math.inf, 1.0, 0.6, method="fedavg"),
    }
    (best_rows,) = summarise(list(ends.values())).table.to_dict("records")
    accuracies = {name: own.measures["accuracy"] for name, own in ends.items()}
    assert {name: best_rows[name] for name in ends} == pytest.approx(accuracies)


def test_the_standard_error_is_over_seeds() -> None:
    """Values 1, 2, 3: standard deviation 1, over √3."""
    rows = [reseeded(only(float(seed)), seed) for seed in (1, 2, 3)]
    assert summarise(rows).table["standard error"].tolist() == pytest.approx([1 / math.sqrt(3)])


def test_labels_are_not_wider_than_their_panels() -> None:
    """The longest one, of the paper's ε: drawn, it stays within the panels side by side."""
    rows = [replace(r, paper_epsilon=0.1) for r in ROWS]
    assert "not a guarantee" in summarise(rows).text()
    figure = drawn(figure_1, rows)
    figure.draw_without_rendering()
    for panel in figure.axes:
        width = panel.get_window_extent().width
        for top in panel.child_axes:
            label = top.xaxis.get_label()
            assert "not a guarantee" in label.get_text().replace("\n", " ")
            assert label.get_window_extent().width <= width
