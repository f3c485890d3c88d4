"""Rows in, figures and a table out: which setting is shown where."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from flwr_ppsgd.experiments.rows import CAVEAT, PPSGD, Point, SweepRow
from flwr_ppsgd.results.figures import draw_sweep, styles
from flwr_ppsgd.results.summary import best_curves, best_table, means, printed, spreads


def row(a: float, step: float, z: float | None, round_: int, value: float, **more: Any) -> SweepRow:
    """ε is 10·round/z."""
    clip_norm = None if z is None else 1.0
    point = Point(1, a, step, z, clip_norm)
    epsilon = 0.0
    if z is not None:
        epsilon = 10 * round_ / z if z else math.inf
    return SweepRow(point, round_, {"loss": value}, deployed_epsilon=epsilon, **more)


def reseeded(own: SweepRow, seed: int) -> SweepRow:
    return replace(own, point=replace(own.point, seed=seed))


def remeasured(own: SweepRow, **measures: float) -> SweepRow:
    return replace(own, measures=measures)


def curve(a: float, step: float, z: float | None, *values: float) -> list[SweepRow]:
    """At rounds 0, 5 and 9."""
    rounds = (0, 5, 9)
    return [row(a, step, z, t, value) for t, value in zip(rounds, values, strict=True)]


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


def test_the_step_is_chosen_anew_at_each_round() -> None:
    """Figure 1: at round 5 the larger step leads, at round 9 the smaller one; what diverged is
    never chosen."""
    curve = best_curves(means(ROWS, "loss"), "loss")[0.3, 1.0]
    assert [(mean.round, mean.point.step, mean.value) for mean in curve] == [
        (0, 0.1, 8.0),
        (5, 0.2, 2.0),
        (9, 0.1, 1.0),
    ]


def test_the_best_accuracy_is_the_highest() -> None:
    rows = [remeasured(r, accuracy=r.measures["loss"]) for r in ROWS]
    assert best_curves(means(rows, "accuracy"), "accuracy")[0.3, 1.0][2].point.step == 0.2


def test_seeds_are_averaged_before_anything_is_chosen() -> None:
    """A setting that is lucky once does not win; one that diverged for a seed is out."""
    lucky = [row(0.3, 0.1, 1.0, 9, 0.0), reseeded(row(0.3, 0.1, 1.0, 9, 10.0), 2)]
    steady = [reseeded(row(0.3, 0.2, 1.0, 9, 4.0), seed) for seed in (1, 2)]
    lost = [
        row(0.3, 0.3, 1.0, 5, 0.1),
        reseeded(row(0.3, 0.3, 1.0, 5, 0.1, diverged=True), 2),
        row(0.3, 0.3, 1.0, 9, 0),
    ]
    curve = best_curves(means([*lucky, *steady], "loss"), "loss")[0.3, 1.0]
    assert [(mean.point.step, mean.value, mean.seeds) for mean in curve] == [(0.2, 4.0, 2)]
    assert not [mean for mean in means(lost, "loss") if mean.round == 5]


def test_the_table_names_the_best_setting_for_each_epsilon() -> None:
    """At z = 5 local learning is best, at no cost; ε is that of the setting it is compared with."""
    table = [choice.cells() for choice in best_table(means(ROWS, "loss"), "loss")]
    assert [
        (r["noise-multiplier"], r["deployed_epsilon"], r["alpha-q"], r["loss"]) for r in table
    ] == [
        (1.0, 90.0, 0.3, 1.0),
        (5.0, 18.0, 0.0, 3.0),
    ]
    assert [(r["local"], r["global"]) for r in table] == [(3.0, 2.0), (3.0, 7.5)]


def test_every_figure_and_table_is_written_with_its_caveat(tmp_path: Path) -> None:
    text, written = draw_sweep(ROWS, tmp_path)
    assert {path.name for path in written} == {"figure-1.png", "figure-2.png", "best.csv"}
    assert CAVEAT in text
    assert "as if it alone had been run" in CAVEAT
    assert "choosing among settings is not covered" in CAVEAT
    for name in ("figure-1.png", "figure-2.png"):
        height, width, _ = imread(tmp_path / name).shape
        assert min(height, width) > 400
    lines = (tmp_path / "best.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == f"# {CAVEAT}"
    assert [r["alpha-q"] for r in csv.DictReader(lines[1:])] == ["0.3", "0.0"]


@pytest.mark.parametrize("kept", ["local", "no noise", "unfinished"])
def test_what_is_missing_is_left_out(tmp_path: Path, kept: str) -> None:
    """Local learning alone, z = 0 alone, and a sweep under way still make a picture."""
    rows = {
        "local": [r for r in ROWS if r.point.alpha_q == 0],
        "no noise": [row(0.3, 0.1, 0.0, t, 1.0 + t) for t in (0, 5)],
        "unfinished": ROWS[:5],
    }[kept]
    _, written = draw_sweep(rows, tmp_path)
    assert (tmp_path / "figure-1.png") in written
    assert all(path.exists() for path in written)


def test_a_sweep_in_which_all_diverged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every setting diverged"):
        draw_sweep([row(0.3, 0.1, 1.0, 5, 1.0, diverged=True)], tmp_path)


def test_no_two_curves_look_alike() -> None:
    values = [0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, math.inf]
    looks = {
        tuple(sorted((k, str(v)) for k, v in look.items())) for look in styles(values).values()
    }
    assert len(looks) == len(values)
    assert printed([]) == CAVEAT


def users_row(a: float, z: float | None, values: list[float], method: str = PPSGD) -> SweepRow:
    """A last row with each user's accuracy."""
    own = row(a, 0.1, z, 9, 0.0, by_user=tuple(values))
    mean = sum(values) / len(values)
    measures = {"loss": 1 - mean, "accuracy": mean}
    return replace(own, point=replace(own.point, method=method), measures=measures)


USERS = [
    users_row(0.0, None, [0.5, 0.6, 0.7, 0.9]),
    users_row(math.inf, 1.0, [0.8, 0.2, 0.7, 0.4]),
    users_row(0.3, 1.0, [0.9, 0.7, 0.7, 0.8]),
    users_row(math.inf, 1.0, [0.7] * 4, method="fine-tuned"),
    users_row(math.inf, 1.0, [0.6] * 4, method="fedavg"),
]


def test_users_better_off_than_both_ends_are_counted() -> None:
    """.9 > .8, .7 > .6, .7 = .7, .8 < .9: two of four are better off, three are not worse off."""
    (found,) = spreads(USERS, means(USERS, "accuracy"), "accuracy")
    assert (
        "better than both local and global learning for 50% of users, and at least as good for 75%"
        in found.words()
    )


def test_of_errors_the_smaller_is_better() -> None:
    rows = [remeasured(r, rmse=r.measures["accuracy"]) for r in USERS]
    (found,) = spreads(rows, means(rows, "rmse"), "rmse")
    assert found.share(np.less) == 0.0


def test_baselines_have_columns_of_their_own(tmp_path: Path) -> None:
    """They are neither global learning nor chosen as the best setting."""
    (choice,) = best_table(means(USERS, "accuracy"), "accuracy")
    best = choice.cells()
    assert {
        name: best[name] for name in ("local", "global", "personalized", "fine-tuned", "fedavg")
    } == pytest.approx(
        {"local": 0.675, "global": 0.525, "personalized": 0.775, "fine-tuned": 0.7, "fedavg": 0.6}
    )
    text, written = draw_sweep(USERS, tmp_path)
    assert "users.png" in {path.name for path in written}
    assert "50% of users" in text


def test_the_standard_error_is_over_seeds() -> None:
    """Values 1, 2, 3: standard deviation 1, over √3."""
    rows = [reseeded(row(0.3, 0.1, 1.0, 9, float(seed)), seed) for seed in (1, 2, 3)]
    (choice,) = best_table(means(rows, "loss"), "loss")
    assert choice.cells()["standard error"] == pytest.approx(1 / math.sqrt(3))


def test_the_papers_epsilon_is_named_as_no_guarantee(tmp_path: Path) -> None:
    text, _ = draw_sweep([replace(r, paper_epsilon=0.1) for r in USERS], tmp_path)
    assert "not a guarantee" in text
